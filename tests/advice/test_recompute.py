"""What checkpointing costs the host: the forward's Python in backward, and the start of each region."""

from __future__ import annotations

import numpy as np

from advisor.advice.recompute import host_of_checkpoints, recomputed_ops
from tests.advice.rules.steps import START_US, Step, audit, loop_of, saving

NODE = "autograd::engine::evaluate_function: MulBackward0"


def stretches(script, step_us: float = 1000) -> list[tuple[float, float]]:
    """Host time of the first step that goes with checkpointing, in µs from its start."""
    loop = loop_of(script, step_us=step_us)
    edit = host_of_checkpoints(loop, recomputed_ops(loop))
    if edit is None:
        return []
    pairs = np.stack([edit.start_ns, edit.end_ns], axis=1) / 1e3 - START_US
    return [(start, end) for start, end in pairs.tolist() if start < step_us]


def recompute(step: Step, at: float, *, own_first: bool = False, own_last: bool = True) -> None:
    """A gradient of 200 µs whose activations are computed again by two operators, 60 µs apart."""
    step.op(NODE, at, 200).op("MulBackward0", at + 5, 190)
    if own_first:
        step.run("aten::mm", at + 10, on_device=0, dur=5)
    step.run("aten::mm", at + 40, on_device=0, dur=5, sequence=7)
    step.run("aten::mm", at + 100, on_device=0, dur=5, sequence=8)
    if own_last:
        step.run("aten::mm", at + 150, on_device=0, dur=5)


def test_a_recompute_is_all_that_its_gradient_does_before_its_own_next_operator():
    assert stretches(lambda step: recompute(step, 300)) == [(305, 450)]


def test_what_the_gradient_launched_before_stays():
    # WHEN it launched at 310 to 320, before the activations were missed
    assert stretches(lambda step: recompute(step, 300, own_first=True)) == [(320, 450)]


def test_a_gradient_that_launches_nothing_itself_is_all_recompute():
    assert stretches(lambda step: recompute(step, 300, own_last=False)) == [(305, 495)]


def test_a_region_begins_after_the_operator_before_it():
    def script(step: Step) -> None:
        step.run("aten::mm", 100, on_device=0, dur=5)
        # GIVEN that the state of the generators is noted for 40 µs, then autograd's marks are made
        step.op("aten::empty", 150, 2).op("_NoopSaveInputs", 160, 10)
        step.run("aten::mm", 190, on_device=0, dur=5)

    assert stretches(script) == [(110, 170)]


def test_a_reentrant_region_notes_its_state_before_its_first_operator():
    def script(step: Step) -> None:
        step.op("CheckpointFunction", 100, 100)
        step.run("aten::mm", 140, on_device=0, dur=5)
        step.run("aten::mm", 160, on_device=0, dur=5)

    assert stretches(script) == [(100, 140)]


def test_a_reentrant_recompute_ends_where_its_own_backward_begins():
    def script(step: Step) -> None:
        step.op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 300, 200)
        step.op("CheckpointFunctionBackward", 305, 190).op("aten::detach", 310, 2)
        step.run("aten::mm", 340, on_device=0, dur=5, sequence=7)
        step.op("autograd::engine::evaluate_function: MmBackward0", 380, 40)
        step.run("aten::mm", 385, on_device=0, dur=5)

    assert stretches(script) == [(305, 380)]


def test_a_plain_backward_has_neither():
    def script(step: Step) -> None:
        step.op(NODE, 300, 200).op("MulBackward0", 305, 190)
        step.run("aten::mm", 340, on_device=0, dur=5)

    assert stretches(script) == []


def test_a_host_bound_loop_gains_the_python_of_its_recompute():
    def script(step: Step) -> None:
        at = 0.0
        for _ in range(12):
            step.run("aten::mm", at, on_device=at + 5, dur=20)
            at += 25
        for name in ("aten::mm",) * 12:
            step.op(NODE, at, 22)
            step.run(name, at + 2, on_device=at + 7, dur=20)
            at += 25
        recompute(step, at)
        step.wait(at + 205)

    loop = loop_of(script, step_us=820)

    (found,) = audit("memory.checkpointing", loop)

    # THEN 145 µs go, though the two kernels of the recompute take 10
    assert saving(found, loop).likely_ns > 100
