"""Room in the device's memory, and forward work done twice."""

from __future__ import annotations

import pytest

from tests.advice.rules.steps import Step, applies, audit, loop_of, saving, training

GB = 10**9


def memory(peak: int) -> dict[str, object]:
    return {
        "peak_memory_bytes": {"before": peak, "in_window": peak},
        "device": {"total_memory_bytes": 80 * GB},
    }


def test_an_idle_device_with_room_is_told_of_a_larger_batch():
    loop = loop_of(training, loader={"batch_size": 16}, **memory(10 * GB))

    (found,) = audit("memory.room", loop)

    # THEN 68 GB hold six times as much, and a power of two of that is 4
    assert "batch_size=64)     # was 16" in found.fix
    assert "10.0 GB of 80.0 GB" in found.title
    assert found.edits == []


def test_a_batch_size_that_was_not_recorded_is_said_to_be_so():
    (found,) = audit("memory.room", loop_of(training, **memory(10 * GB)))

    assert "batch size not recorded: 4 times as much should fit" in found.evidence
    assert found.fix.startswith("DataLoader(..., batch_size=4 * batch_size)\n")


def test_an_idle_device_without_room_is_not():
    assert audit("memory.room", loop_of(training, **memory(60 * GB))) == []


def test_a_device_that_idles_for_want_of_batches_is_not():
    def script(step: Step) -> None:
        step.range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 5_000)
        training(step, at=5_010)

    assert audit("memory.room", loop_of(script, step_us=5_200, **memory(10 * GB))) == []


def test_a_busy_device_with_room_is_not():
    def script(step: Step) -> None:
        step.wait(training(step, kernel_us=150))

    assert audit("memory.room", loop_of(script, step_us=920, **memory(10 * GB))) == []


def test_without_the_captures_figures_nothing_is_said_of_memory():
    assert not applies("memory.room", loop_of(training))


def checkpointed(step: Step, *, recompute: bool = True) -> None:
    at = training(step, kernel_us=50)
    step.op("autograd::engine::evaluate_function: MulBackward0", at, 58)
    for i in range(2):
        # Only under recorded gradients does an operator get a number.
        numbered = {"sequence": 7 + i} if recompute else {}
        step.run("aten::mm", at + 5 + i * 20, on_device=0, dur=50, kernel="gemm", **numbered)
    step.wait(at + 60)


def test_forward_work_inside_backward_is_checkpointing():
    loop = loop_of(checkpointed, step_us=420, **memory(20 * GB))

    (found,) = audit("memory.checkpointing", loop)

    assert "100 µs of forward twice" in found.title
    assert "2 kernels" in found.evidence[0]
    assert found.confidence == "modelled"
    assert saving(found, loop).likely_ns == pytest.approx(102, abs=15)


def test_where_the_host_sets_the_pace_its_time_to_launch_the_forward_again_is_told_too():
    # GIVEN 20 µs on the host for each kernel of 2, and two of them again in backward
    def script(step: Step) -> None:
        at = training(step, kernel_us=2)
        step.op("autograd::engine::evaluate_function: MulBackward0", at, 58)
        for i in range(2):
            step.run("aten::mm", at + 5 + i * 20, on_device=0, dur=2, kernel="gemm", sequence=7 + i)

    loop = loop_of(script, step_us=200, **memory(20 * GB))

    (found,) = audit("memory.checkpointing", loop)

    saved_us = saving(found, loop).likely_ns
    assert 40 < saved_us < 80
    assert f"4.00 µs of forward twice in each step, which the host takes {saved_us:.1f} µs" in found.title


def test_backwards_own_products_are_not():
    loop = loop_of(lambda step: checkpointed(step, recompute=False), step_us=420, **memory(20 * GB))

    assert audit("memory.checkpointing", loop) == []


def test_checkpointing_on_a_full_device_is_left_alone():
    assert audit("memory.checkpointing", loop_of(checkpointed, step_us=420, **memory(70 * GB))) == []


def test_whether_activations_fit_is_said_to_be_unknown_where_it_is():
    (found,) = audit("memory.checkpointing", loop_of(checkpointed, step_us=420))

    assert found.confidence == "heuristic"
    assert "not known" in found.note


def test_a_backward_that_records_its_own_graph_is_not_checkpointing():
    def script(step: Step) -> None:
        at = training(step, forward=1)
        step.op("autograd::engine::evaluate_function: MulBackward0", at, 200)
        for i in range(8):
            step.run("aten::mm", at + 5 + i * 20, on_device=0, dur=50, sequence=7 + i)

    assert audit("memory.checkpointing", loop_of(script)) == []


def test_a_loop_without_backward_has_nothing_to_checkpoint():
    assert not applies(
        "memory.checkpointing", loop_of(lambda step: step.run("aten::mm", 0, on_device=5, dur=9))
    )
