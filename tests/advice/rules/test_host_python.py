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

    assert "0.40 ms a step" in found.title
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

    assert "[Callback]Drawing.on_train_batch_end: 0.30 ms a step" in found.evidence[0]
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
