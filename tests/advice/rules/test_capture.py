"""What would make the figures of the next capture mean more."""

from __future__ import annotations

from tests.advice.rules.steps import START_US, Step, applies, audit, loop_of, training
from tests.trace.builder import Builder


def stacked(step: Step) -> None:
    step.builder.python("train.py(3): fit", step.start, 900)
    training(step, at=10)


def test_stacks_are_advised_against_where_the_real_step_time_is_not_known():
    (found,) = audit("capture.stacks", loop_of(stacked, baseline=False))

    assert found.edits == []
    assert "1.00 ms under the profiler, usually 2.1 to 2.7 times the real one" in found.title
    assert "with_stack=False" in found.fix_torch


def test_stacks_that_cost_little_pass():
    assert audit("capture.stacks", loop_of(stacked)) == []
    assert not applies("capture.stacks", loop_of(training))


def test_a_single_steady_step_is_too_few():
    (found,) = audit("capture.steps", loop_of(training, count=2))

    assert found.title == "1 steady step captured"
    assert "capture_steps=3" in found.fix


def test_three_alike_steps_are_enough():
    assert audit("capture.steps", loop_of(training, count=4)) == []


def test_steps_that_differ_are_told():
    builder = Builder()
    at = START_US
    for number, us in enumerate((1_000, 1_000, 2_000, 1_000)):
        builder.step(90 + number, at - 100_000, us)
        training(Step(builder, at - 100_000, 90 + number), at=us - 500)
        at += us
    # The last steps of the trace, after a gap, are left out of this loop's own
    loop = loop_of(lambda step: None, count=0, builder=builder)

    (found,) = audit("capture.steps", loop)

    assert "differ by" in found.title
    assert "capture_steps=10" in found.fix


def test_operators_without_shapes_are_told():
    (found,) = audit("capture.shapes", loop_of(training))

    assert "record_shapes=True" in found.fix_torch


def test_operators_with_shapes_pass():
    def script(step: Step) -> None:
        step.run("aten::mm", 0, on_device=10, dur=20, dims=[[64, 64], [64, 64]])

    assert audit("capture.shapes", loop_of(script)) == []
