"""Calls in which the host stands still."""

from __future__ import annotations

import pytest

from advisor.advice.loop import Loop
from advisor.advice.replay import Replay
from advisor.roofline.analysis import analyse_timeline
from tests.advice.rules.steps import Step, audit, loop_of, saving, training
from tests.trace.builder import Builder


def reading(
    step: Step, at: float, *, around: tuple[str, ...] = ("aten::item", "aten::_local_scalar_dense")
) -> float:
    """An operator that reads a value: a copy to the host and a wait for it; returns when it is back."""
    end = max(step.free_at(), at + 10) + 8
    for depth, name in enumerate(around):
        step.op(name, at + depth * 0.5, end - at - depth)
    step.launch("Memcpy DtoH (Device -> Pinned)", at + 3, on_device=at + 8, dur=1, cat="gpu_memcpy", bytes=4)
    step.call("cudaStreamSynchronize", at + 6, end - at - 8)
    return end + 2


# sync


def test_an_item_in_the_middle_of_the_step_is_a_sync_with_its_cost():
    def script(step: Step) -> None:
        back = reading(step, training(step, kernel_us=50))
        training(step, at=back, kernel_us=50)

    loop = loop_of(script, step_us=680)
    (found,) = audit("host.sync", loop)

    assert "1 sync a step" in found.title
    assert ".item()" in found.title
    assert "self.log" in found.fix
    assert ".item()" in found.fix_torch
    # THEN the device no longer waits for the launches after it
    assert 15 < saving(found, loop).likely_ns < 80


def test_an_item_in_a_loop_that_the_device_paces_saves_next_to_nothing():
    # GIVEN a host that is through in 240 µs and waits for 600 at the very end
    def script(step: Step) -> None:
        reading(step, training(step, kernel_us=100))

    loop = loop_of(script, step_us=620)

    assert saving(audit("host.sync", loop)[0], loop).likely_ns < 0.05 * 620


def test_a_check_of_a_tensor_goes_with_the_condition_that_it_is_for():
    # GIVEN isfinite and all, 20 µs on the device and 40 of the host, before each of four conditions
    def script(step: Step, checks: tuple[str, ...] = ("aten::isfinite", "aten::all")) -> None:
        at = training(step, kernel_us=50)
        for _ in range(4):
            for name in checks:
                step.run(name, at, on_device=at + 8, dur=10, kernel="check")
                at += 20
            at = reading(step, at, around=("aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"))

    def others(step: Step) -> None:
        script(step, ("aten::mul", "aten::add"))

    checked, computed = loop_of(script, step_us=700), loop_of(others, step_us=700)

    (found,), (kept,) = audit("host.sync", checked), audit("host.sync", computed)

    # THEN the operators of the check go, and such as may be needed elsewhere do not
    assert saving(found, checked).likely_ns > saving(kept, computed).likely_ns + 4 * 2 * 7
    assert saving(found, checked).low_ns < saving(found, checked).likely_ns - 4 * 20


def test_a_loop_without_a_wait_has_no_sync_to_tell_of():
    assert audit("host.sync", loop_of(training)) == []


def test_a_wait_for_a_pageable_copy_is_left_to_the_copy():
    def script(step: Step) -> None:
        step.op("aten::copy_", 0, 90)
        step.copy_in(1, nbytes=8_000_000, dur=50)
        step.call("cudaStreamSynchronize", 70, 10)
        training(step, at=100)

    assert audit("host.sync", loop_of(script)) == []


def test_a_wait_inside_a_fetch_is_left_to_the_loader():
    def script(step: Step) -> None:
        step.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 90)
        step.call("cudaStreamSynchronize", 70, 10)
        training(step, at=100)

    assert audit("host.sync", loop_of(script)) == []


@pytest.mark.parametrize(
    ("around", "cause", "cure"),
    [
        (("aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"), "condition", "torch.where(bad"),
        (("aten::index", "aten::nonzero"), "boolean index", "torch.where(mask"),
        (("aten::to", "aten::_to_copy", "aten::copy_"), ".cpu()", ".detach()"),
    ],
)
def test_a_wait_is_told_by_what_asks_for_it(around, cause, cure):
    def script(step: Step) -> None:
        training(step, at=reading(step, training(step), around=around))

    (found,) = audit("host.sync", loop_of(script))

    assert cause in found.title
    assert cure in found.fix


def test_a_bare_synchronisation_is_told_as_one():
    def script(step: Step) -> None:
        step.call("cudaDeviceSynchronize", training(step), 200)

    assert "torch.cuda.synchronize()" in audit("host.sync", loop_of(script))[0].title


def test_the_python_frame_of_a_wait_is_named_where_the_trace_has_stacks():
    def script(step: Step) -> None:
        step.builder.python("train.py(12): training_step", step.start, 900)
        step.builder.python("torch/_tensor.py(40): __float__", step.start + 50, 800)
        reading(step, training(step))

    (found,) = audit("host.sync", loop_of(script))

    assert "train.py(12): training_step" in found.evidence[0]


def scaling(step: Step) -> None:
    host_us = training(step)
    step.run("aten::_amp_foreach_non_finite_check_and_unscale_", host_us, on_device=0, dur=5)
    back = reading(step, host_us + 20)
    step.run("aten::_amp_update_scale_", back, on_device=0, dur=2)


def test_gradscaler_has_a_cure_of_its_own_where_the_device_has_no_bf16():
    (found,) = audit("host.sync", loop_of(scaling, builder=Builder(device="Tesla T4")))

    assert "GradScaler" in found.title
    assert "fused=True" in found.fix
    assert "bf16" not in found.fix


def test_one_wait_of_the_gradscaler_is_promised_once():
    loop = loop_of(scaling)

    assert audit("host.sync", loop) == []
    (found,) = audit("precision.grad_scaler", loop)
    assert "bf16-mixed" in found.fix
    assert "fused=True" in found.fix


def test_the_profilers_own_synchronisation_after_the_last_launch_is_no_sync_of_the_loop():
    # GIVEN a trace without steps that ends in the profiler's stop
    builder = Builder()
    step = Step(builder, 10_000, 0)
    training(step)
    step.wait(step.free_at() - 50)

    analysis = analyse_timeline(builder.join())
    assert audit("host.sync", Loop(analysis, Replay(analysis))) == []

    # WHEN a launch follows THEN it is the loop's
    training(step, at=step.free_at() + 20)
    analysis = analyse_timeline(builder.join())
    assert len(audit("host.sync", Loop(analysis, Replay(analysis)))) == 1


# allocator


def test_allocations_from_the_driver_in_steady_steps_are_told():
    def script(step: Step) -> None:
        step.op("aten::empty", 0, 350)
        step.call("cudaFree", 10, 200)
        step.call("cudaMalloc", 220, 100)
        training(step, at=400)

    loop = loop_of(script)
    (found,) = audit("host.allocator", loop)

    assert "300 µs" in found.title
    assert any("aten::empty" in line for line in found.evidence)
    assert "expandable_segments" in found.fix


def test_one_allocation_in_the_whole_capture_is_left_alone():
    def script(step: Step) -> None:
        if step.number == 2:
            step.call("cudaMalloc", 10, 100)
        training(step, at=120)

    assert audit("host.allocator", loop_of(script, count=6)) == []


def test_a_full_device_is_told_as_the_cause_of_allocations():
    def script(step: Step) -> None:
        step.call("cudaFree", 10, 200)
        training(step, at=220)

    loop = loop_of(script, peak_memory_bytes={"in_window": 95}, device={"total_memory_bytes": 100})

    assert any("95%" in line for line in audit("host.allocator", loop)[0].evidence)


def test_what_only_fetches_a_value_goes_with_the_wait():
    # GIVEN a host that sets the pace, and 20 items of 12 µs that hardly wait
    def script(step: Step) -> None:
        at = 0.0
        for _ in range(20):
            step.run("aten::mm", at, on_device=at + 5, dur=2)
            at = reading(step, at + 10)
        step.run("aten::mm", at, on_device=at + 5, dur=2)

    loop = loop_of(script, step_us=760)
    (told,) = audit("host.sync", loop)
    found = saving(told, loop)

    assert 100 < found.likely_ns < 400
    # AND the title names the host's time beside the waits, since that is what is saved
    assert f"wait 200 µs for the device, and {found.likely_ns:.0f} µs of its own time to fetch" in told.title
    # AND at worst another operator takes its place
    assert found.low_ns < 0.3 * found.likely_ns


def test_long_waits_behind_a_device_that_sets_the_pace_are_said_to_cost_nothing_yet():
    def script(step: Step) -> None:
        host_us = training(step, kernel_us=150)
        # The wait is for the first kernels alone: a copy on another stream.
        step.op("aten::item", host_us, 300)
        step.call("cudaEventSynchronize", host_us + 2, 296)
        back = host_us + 310
        training(step, at=back, kernel_us=150)

    (found,) = audit("host.sync", loop_of(script, step_us=1_810))

    assert "only once it is faster" in found.note


def test_an_operators_name_stays_in_the_comment_of_a_fix():
    def script(step: Step) -> None:
        training(step, at=reading(step, training(step), around=("mine::read\nimport os",)))

    (found,) = audit("host.sync", loop_of(script, step_us=680))

    assert "# mine::read import os: every n-th step only" in found.fix
    assert "\n" not in found.title
    assert not [line for line in found.evidence if "\n" in line]
    assert "\nimport os" not in found.fix + found.fix_torch


def test_a_wait_between_the_marked_phases_is_placed_outside_them():
    def script(step: Step) -> None:
        at = training(step)
        step.range("Optimizer.step#AdamW.step", at, 100)
        step.run("aten::_fused_adamw_", at + 5, on_device=0, dur=50)
        reading(step, at + 120)

    (found,) = audit("host.sync", loop_of(script))

    assert "in code outside the marked phases" in found.evidence[0]
