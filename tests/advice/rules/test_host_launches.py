"""Launches that cost more than they start, and compiled code."""

from __future__ import annotations

import pytest

from advisor.advice.edits import LaunchAsGraph
from tests.advice.rules.steps import Step, applies, audit, loop_of, saving, training

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

    assert found.title.startswith("launch-bound: the device idles 90% of the step")
    assert "reduce-overhead" in found.fix
    assert "100 kernels of the forward would go" in found.evidence[2]
    assert found.confidence == "modelled"
    # THEN one replay of 400 µs of host time and 300 µs of kernels is what is left
    assert 2_000 < saving(found, loop).likely_ns < 2_900
    assert saving(found, loop).low_ns < saving(found, loop).likely_ns < saving(found, loop).high_ns


def test_what_a_graph_would_take_is_counted_by_kind():
    # GIVEN memsets among the kernels that the title counts
    def script(step: Step) -> None:
        launching(100, 30, 3)(step)
        for i in range(8):
            step.run("aten::zero_", 3_005 + i * 30, on_device=0, dur=2, kernel="Memset", cat="gpu_memset")

    (found,) = audit("host.launch_bound", loop_of(script, step_us=3_250))

    assert "launches 100 kernels" in found.title
    assert any("100 kernels and 8 memsets" in line for line in found.evidence)


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


def test_one_slow_call_is_not_launching():
    # GIVEN 60 kernels of 3 µs, 20 µs of host time each, and a call that loads a module for 1.5 ms
    def script(step: Step) -> None:
        step.run("aten::add_", 0, on_device=1_510, dur=3, call_us=1_500)
        launching(60, 20, 3)(_after(step, 1_520))

    assert audit("host.launch_bound", loop_of(script, step_us=2_800)) == []


def test_a_device_that_stalls_by_itself_is_not_launch_bound():
    # GIVEN a host that is through after 1 ms of 3, and a device that stalls for two before its last kernel
    def script(step: Step) -> None:
        launching(40, 10, 4)(step)
        step.run("aten::mul", 420, on_device=2_900, dur=4)
        step.call("cudaDeviceSynchronize", 450, 2_470)

    assert audit("host.launch_bound", loop_of(script, step_us=3_000)) == []


def test_beside_slow_batches_the_idle_share_is_that_of_the_rest():
    def script(step: Step) -> None:
        step.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10_000)
        launching(100, 30, 6)(_after(step, 10_000))

    (found,) = audit("host.launch_bound", loop_of(script, step_us=13_010))

    assert found.title.startswith("launch-bound: the device idles 80% of 3.01 ms outside batch fetches")
    assert "30.1 µs a launch" in found.evidence[1]


def test_kernels_that_come_from_graphs_are_not_captured_again():
    def script(step: Step) -> None:
        step.launch("in_graph", 2, on_device=10, dur=3, call="cudaGraphLaunch")
        launching(100, 30, 3)(_after(step, 20))

    loop = loop_of(script, step_us=3_030)
    (found,) = audit("host.launch_bound", loop)

    captured = [row for edit in found.edits if isinstance(edit, LaunchAsGraph) for row in edit.rows.tolist()]
    assert len(captured) == 100 * loop.steps
    assert not loop.analysis.replayed[captured].any()


def test_waits_among_the_launches_cut_the_graph_into_pieces():
    def script(step: Step, waits: int) -> None:
        for i in range(100):
            at = 5 + i * 30
            step.run("aten::mm", at, on_device=at + 7, dur=3, dims=[[64, 64], [64, 64]])
            if waits and i % (100 // waits) == 50 // waits:
                step.op("aten::item", at + 12, 16)
                step.call("cudaStreamSynchronize", at + 13, 12)

    def found(waits: int):
        loop = loop_of(lambda step: script(step, waits), step_us=3_010)
        (finding,) = audit("host.launch_bound", loop)
        return finding, saving(finding, loop).likely_ns

    without, ten = found(0), found(10)

    assert any("10 waits a step" in line for line in ten[0].evidence)
    assert ten[1] < without[1] - 1_000


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
    assert found.title.endswith("adding to them takes 30.0 µs")
    assert "1 kernel, 30.0 µs" in found.evidence[1]
    assert "set_to_none=True" in found.fix_torch
    assert saving(found, loop).likely_ns == pytest.approx(110, abs=25)


def test_what_the_host_takes_to_fill_gradients_is_told_where_it_sets_the_pace():
    # GIVEN ten fills of 2 µs, 20 on the host for each
    def script(step: Step) -> None:
        host_us = training(step, kernel_us=2)
        step.range("Optimizer.zero_grad#AdamW.zero_grad", host_us, 205)
        for i in range(10):
            step.run("aten::zero_", host_us + 2 + i * 20, on_device=0, dur=2, kernel="fill")

    loop = loop_of(script, step_us=330)
    (found,) = audit("host.zero_grad", loop)

    told_us = float(found.title.rpartition(" and the host takes ")[2].partition(" µs")[0])
    assert told_us == pytest.approx(200, abs=15)
    assert told_us == pytest.approx(saving(found, loop).likely_ns, rel=0.25)


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

    assert "500 µs a step" in found.title
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
