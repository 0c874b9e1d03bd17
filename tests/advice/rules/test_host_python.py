"""Python beside the model."""

from __future__ import annotations

import pytest

from tests.advice.rules.steps import Step, applies, audit, loop_of, saving, training


def test_a_garbage_collection_inside_the_step_is_told():
    def script(step: Step) -> None:
        step.builder.python("train.py(3): fit", step.start, 900)
        step.builder.python("<built-in function collect>", step.start + 10, 400)
        training(step, at=420)

    loop = loop_of(script, step_us=900)
    (found,) = audit("host.gc", loop)

    assert "400 µs a step" in found.title
    assert "gc.freeze()" in found.fix
    assert saving(found, loop).likely_ns == pytest.approx(400, abs=60)


def test_python_frames_without_a_collection_pass():
    def script(step: Step) -> None:
        step.builder.python("train.py(3): fit", step.start, 900)
        training(step)

    assert audit("host.gc", loop_of(script)) == []
    assert not applies("host.gc", loop_of(training))


def test_a_callback_that_takes_a_third_of_the_step_is_named():
    def script(step: Step) -> None:
        host_us = training(step)
        step.range("[pl][profile][Callback]Drawing.on_train_batch_end", host_us, 300)
        for at in range(0, 300, 10):
            step.op("aten::detach", host_us + at, 9)

    loop = loop_of(script, step_us=440)
    found = audit("host.hooks", loop)[0]

    assert "[Callback]Drawing.on_train_batch_end: 300 µs a step" in found.evidence[0]
    assert saving(found, loop).likely_ns > 100


def test_our_own_callback_is_not_counted_among_the_hooks():
    def script(step: Step) -> None:
        host_us = training(step)
        step.range("[pl][profile][Callback]TrainingAdvisor.on_train_batch_end", host_us, 300)
        for at in range(0, 300, 10):
            step.op("aten::detach", host_us + at, 9)

    assert audit("host.hooks", loop_of(script, step_us=440)) == []


def test_a_long_stretch_of_python_is_told_without_a_saving_where_nothing_says_what_it_is():
    def script(step: Step) -> None:
        training(step, at=600)

    (found,) = audit("host.hooks", loop_of(script, step_us=900))

    assert found.edits == []
    assert "not in the trace" in found.note
    assert "aten::mm" in found.evidence[0]


def sleeping(step: Step, us: float, number: int | None = None) -> None:
    """A step with a stretch of nothing behind its launches; if numbered, in that step alone."""
    host_us = training(step)
    idle = us if number in (None, step.number) else 0
    step.op("aten::detach", host_us + idle, us - idle + 9)


def test_python_at_the_same_place_in_each_step_is_told_with_what_it_may_save():
    # GIVEN 8 ms of nothing before each step's last operator
    loop = loop_of(lambda step: sleeping(step, 8_000), step_us=8_200)

    (found,) = audit("host.hooks", loop)

    assert "plain Python holds the host for 8.00 ms a step, at the same place in each" in found.title
    told = saving(found, loop)
    # THEN all but what any loop does there, at best all of it, and at worst half is needed
    assert told.likely_ns == pytest.approx(7_500, rel=0.05)
    assert told.low_ns < 0.55 * 8_000
    assert told.high_ns >= 7_950
    assert found.confidence == "heuristic"
    assert "not in the trace" in found.note


def test_python_in_some_of_the_steps_is_told_without_a_saving():
    loop = loop_of(lambda step: sleeping(step, 8_000, number=2), step_us=8_200)

    (found,) = audit("host.hooks", loop)

    assert found.edits == []
    assert "in each" not in found.title


def test_python_behind_which_the_device_works_on_is_not_told():
    # GIVEN kernels that outlast the stretch
    def script(step: Step) -> None:
        host_us = training(step, kernel_us=1_600)
        step.op("aten::detach", host_us + 8_000, 9)

    assert audit("host.hooks", loop_of(script, step_us=9_700)) == []


def test_the_freeing_of_a_large_batch_is_no_hook():
    # GIVEN 5 ms of nothing behind each step's copy of 38 MB from pageable memory
    def script(step: Step) -> None:
        step.copy_in(0, nbytes=38_000_000, dur=4_000)
        step.op("aten::detach", 9_100, 9)
        training(step, at=9_120)

    loop = loop_of(script, step_us=9_400)

    assert all(found.edits == [] for found in audit("host.hooks", loop))
