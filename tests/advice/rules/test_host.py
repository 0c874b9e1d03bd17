"""What keeps the host from launching."""

from __future__ import annotations

import pytest

from tests.advice.rules.steps import Step, applies, audit, loop_of, saving, training


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


def test_gradscaler_has_a_cure_of_its_own():
    def script(step: Step) -> None:
        host_us = training(step)
        step.run("aten::_amp_foreach_non_finite_check_and_unscale_", host_us, on_device=0, dur=5)
        back = reading(step, host_us + 20)
        step.run("aten::_amp_update_scale_", back, on_device=0, dur=2)

    (found,) = audit("host.sync", loop_of(script))

    assert "GradScaler" in found.title
    assert "bf16-mixed" in found.fix
    assert "fused=True" in found.fix


# launch-bound


def launching(kernels: int, host_us: float, kernel_us: float):
    def script(step: Step) -> None:
        for i in range(kernels):
            at = 5 + i * host_us
            name = "aten::mul" if i % 2 else "aten::mm"
            step.run(name, at, on_device=at + 7, dur=kernel_us, dims=[[64, 64], [64, 64]])

    return script


def test_kernels_shorter_than_their_launches_make_the_loop_launch_bound():
    # GIVEN 100 kernels of 3 µs, each 30 µs of host time
    loop = loop_of(launching(100, 30, 3), step_us=3_010)

    (found,) = audit("host.launch_bound", loop)

    assert found.title.startswith("launch-bound: the device idles 90 % of the step")
    assert "reduce-overhead" in found.fix
    assert found.confidence == "modelled"
    # THEN one replay of 400 µs of host time and 300 µs of kernels is what is left
    assert 2_000 < saving(found, loop).likely_ns < 2_900
    assert saving(found, loop).low_ns < saving(found, loop).likely_ns < saving(found, loop).high_ns


def test_kernels_longer_than_their_launches_do_not():
    assert audit("host.launch_bound", loop_of(launching(100, 30, 29), step_us=3_010)) == []


def test_idle_time_under_the_profiler_alone_proves_little():
    # GIVEN 30 % of idle time and no step time without the profiler
    loop = loop_of(launching(100, 30, 20), step_us=3_010, baseline=False)
    assert audit("host.launch_bound", loop) == []

    # WHEN it is half THEN it is told as an upper bound
    (found,) = audit("host.launch_bound", loop_of(launching(100, 30, 12), step_us=3_010, baseline=False))
    assert "upper bound" in found.note
    assert found.confidence == "heuristic"


def test_a_device_that_idles_during_the_fetch_alone_is_not_launch_bound():
    def script(step: Step) -> None:
        step.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 2_000)
        launching(50, 20, 19)(_after(step, 2_000))

    assert audit("host.launch_bound", loop_of(script, step_us=3_010)) == []


def test_a_device_that_idles_during_one_long_stretch_of_python_is_not_launch_bound():
    def script(step: Step) -> None:
        launching(50, 10, 4)(_after(step, 2_500))

    assert audit("host.launch_bound", loop_of(script, step_us=3_010)) == []


# allocator, collector, hooks


def test_allocations_from_the_driver_in_steady_steps_are_told():
    def script(step: Step) -> None:
        step.op("aten::empty", 0, 350)
        step.call("cudaFree", 10, 200)
        step.call("cudaMalloc", 220, 100)
        training(step, at=400)

    loop = loop_of(script)
    (found,) = audit("host.allocator", loop)

    assert "0.30 ms" in found.title
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

    assert any("95 %" in line for line in audit("host.allocator", loop)[0].evidence)


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


# zero_grad, compiled code


def test_filling_gradients_with_zeros_is_told_with_the_additions_that_follow():
    def script(step: Step) -> None:
        host_us = training(step)
        step.op("torch::autograd::AccumulateGrad", host_us, 18, dims=[[64, 64]])
        step.run("aten::add_", host_us + 2, on_device=0, dur=30)
        step.range("Optimizer.zero_grad#AdamW.zero_grad", host_us + 30, 100)
        for i in range(4):
            step.run("aten::zero_", host_us + 32 + i * 20, on_device=0, dur=20, kernel="fill")

    loop = loop_of(script, step_us=400)
    (found,) = audit("host.zero_grad", loop)

    assert "4 kernels, 80.0 µs" in found.title
    assert "1 kernel, 30.0 µs" in found.evidence[1]
    assert "set_to_none=True" in found.fix_torch
    assert saving(found, loop).likely_ns == pytest.approx(110, abs=25)


def test_dropping_gradients_launches_nothing_and_passes():
    def script(step: Step) -> None:
        step.range("Optimizer.zero_grad#AdamW.zero_grad", training(step), 100)

    assert audit("host.zero_grad", loop_of(script)) == []


def test_additions_stay_where_gradients_are_accumulated_over_batches():
    def script(step: Step) -> None:
        host_us = training(step)
        step.op("torch::autograd::AccumulateGrad", host_us, 18, dims=[[64, 64]])
        step.run("aten::add_", host_us + 2, on_device=0, dur=30)
        step.range("Optimizer.zero_grad#AdamW.zero_grad", host_us + 30, 30)
        step.run("aten::zero_", host_us + 32, on_device=0, dur=20, kernel="fill")

    loop = loop_of(script, accumulate_grad_batches=2)
    (found,) = audit("host.zero_grad", loop)

    assert len(found.edits[0].rows) == loop.steps


def test_compilation_in_steady_steps_is_told_with_what_it_takes():
    def script(step: Step) -> None:
        step.op("Torch-Compiled Region: 0/3", 0, 900)
        step.range("_compile.compile_inner (dynamo_timed)", 10, 500)
        training(step, at=520)

    loop = loop_of(script)
    (found,) = audit("host.recompile", loop)

    assert "0.50 ms a step" in found.title
    assert any("0/3" in line for line in found.evidence)
    assert "dynamic=True" in found.fix


def test_compiled_code_that_stays_compiled_passes():
    def script(step: Step) -> None:
        step.op("Torch-Compiled Region: 0/0", 0, 300)
        training(step, at=10)

    assert audit("host.recompile", loop_of(script)) == []
    assert not applies("host.recompile", loop_of(training))


def test_many_compiled_regions_in_an_idle_loop_are_graph_breaks():
    def script(step: Step) -> None:
        for i in range(6):
            step.op(f"Torch-Compiled Region: {i}/0", 100 * i, 90)
            step.run("aten::mm", 100 * i + 5, on_device=0, dur=10)

    (found,) = audit("host.recompile", loop_of(script))

    assert found.edits == []
    assert "6 compiled regions a step" in found.title


def _after(step: Step, us: float) -> Step:
    later = Step(step.builder, step.start + us, step.number)
    later._correlation = step._correlation + 50_000
    return later
