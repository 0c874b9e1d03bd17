"""Launches and their costs: which operator's formula, shared among which launches, and never twice."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.roofline import costs
from advisor.roofline.attach import LaunchCosts, attach_costs, gather_host_operators
from advisor.roofline.devices import Device
from tests.trace.builder import BACKWARD, Builder

A, B = [64, 128], [128, 32]
MM_FLOPS = 2 * 64 * 128 * 32
MM_BYTES = 4 * (64 * 128 + 128 * 32 + 64 * 32)


def flops_of(builder: Builder) -> dict[str, float]:
    timeline = builder.join()
    names = [timeline.trace.names[i] for i in timeline.launches.name.tolist()]
    return dict(zip(names, attach_costs(timeline).flops.tolist(), strict=True))


def test_a_kernel_has_the_cost_of_the_operator_that_launched_it() -> None:
    timeline = Builder().op("aten::mm", 0, 50, dims=[A, B]).launch("gemm", 10, at=100, dur=9).join()
    found = attach_costs(timeline)
    assert found.flops.tolist() == [MM_FLOPS]
    assert (found.bytes_read + found.bytes_written).tolist() == [MM_BYTES]
    assert found.pipes[found.pipe[0]] == "vector_fp32"


def test_an_operator_without_a_formula_lends_its_launch_to_the_one_around_it() -> None:
    builder = Builder().op("aten::mm", 0, 50, dims=[A, B]).op("vendor::gemm_impl", 5, 20)
    assert flops_of(builder.launch("gemm", 10, at=100, dur=9)) == {"gemm": MM_FLOPS}


def test_where_a_formula_cannot_tell_the_operator_around_it_is_asked() -> None:
    # GIVEN an inner operator whose shapes were not recorded
    builder = Builder().op("aten::matmul", 0, 50, dims=[A, B]).op("aten::mm", 5, 20)
    assert flops_of(builder.launch("gemm", 10, at=100, dur=9)) == {"gemm": MM_FLOPS}


def test_launches_that_an_inner_formula_cannot_tell_share_with_those_of_the_operator_itself() -> None:
    # GIVEN a product of two kernels, one launched by an inner operator of unknown shapes
    builder = Builder().op("aten::matmul", 0, 50, dims=[A, B]).launch("gemm_a", 40, at=200, dur=9)
    builder.op("aten::mm", 5, 20).launch("gemm_b", 10, at=100, dur=9)
    assert sum(flops_of(builder).values()) == pytest.approx(MM_FLOPS)


def test_a_composite_whose_inner_operators_are_costed_is_not_counted_again() -> None:
    # GIVEN a linear whose product is costed, and a kernel of unknown purpose beside it
    builder = Builder().op("aten::linear", 0, 90, dims=[A, [32, 128], []])
    builder.op("aten::mm", 5, 20, dims=[A, B]).launch("gemm", 10, at=100, dur=9)
    builder.op("vendor::extra", 40, 20).launch("extra", 45, at=120, dur=9)
    found = flops_of(builder)
    assert found["gemm"] == MM_FLOPS
    assert math.isnan(found["extra"])


def test_a_copy_inside_an_operator_does_not_take_its_cost_away() -> None:
    shape = [256, 1024]
    builder = Builder().op("aten::native_layer_norm", 0, 90, dims=[shape, [], [1024], [1024], []])
    builder.op("aten::copy_", 5, 20, dims=[shape, shape, []]).launch("elementwise_kernel", 10, at=100, dur=9)
    builder.launch("vectorized_layer_norm_kernel", 50, at=120, dur=9)
    assert flops_of(builder)["vectorized_layer_norm_kernel"] > 0


def test_what_an_operator_launched_itself_is_its_own_whatever_is_inside_it() -> None:
    # GIVEN squares of differences, and inside the same operator the mean of them
    shape = [64, 128]
    builder = Builder().op("aten::mse_loss", 0, 90, dims=[shape, shape, []])
    builder.launch("mse_kernel", 5, at=100, dur=9)
    builder.op("aten::mean", 20, 20, dims=[shape]).launch("reduce_kernel", 30, at=120, dur=9)
    assert flops_of(builder) == {"mse_kernel": 2 * 64 * 128, "reduce_kernel": 64 * 128}


def test_a_memset_does_not_keep_the_kernel_beside_it_from_the_operator_around() -> None:
    builder = Builder().op("aten::matmul", 0, 50, dims=[A, B]).op("aten::mm", 5, 20)
    builder.launch("Memset (Device)", 7, at=90, dur=1, cat="gpu_memset", bytes=4)
    builder.launch("gemm", 10, at=100, dur=9)
    assert flops_of(builder) == {"Memset (Device)": 0, "gemm": MM_FLOPS}


def test_a_convolution_without_values_looks_at_what_follows_it() -> None:
    # GIVEN the operators of an old trace: shapes, but neither stride nor padding; a counter between
    x, w, y = [32, 64, 56, 56], [64, 64, 1, 1], [32, 64, 28, 28]
    old = {"Input Dims": [x, w], "Input type": ["float", "float"]}
    builder = Builder().op("aten::conv2d", 0, 60, **old).op("aten::cudnn_convolution", 5, 50, **old)
    builder.launch("implicit_convolve_sgemm", 10, at=100, dur=9)
    builder.op("aten::add", 62, 3, dims=[[], []])
    assert math.isnan(flops_of(builder)["implicit_convolve_sgemm"])
    builder.op("aten::batch_norm", 70, 20, dims=[y, [64]])
    assert flops_of(builder) == {"implicit_convolve_sgemm": 2 * 32 * 64 * 28 * 28 * 64}


def test_a_launch_outside_any_operator_has_no_cost() -> None:
    timeline = Builder().launch("k", 10, at=100, dur=9).join()
    found = attach_costs(timeline)
    assert not found.known.any()
    assert np.isnan(found.flops).all()


def test_arguments_that_contradict_each_other_have_no_cost() -> None:
    assert math.isnan(
        flops_of(Builder().op("aten::mm", 0, 50, dims=[A, [7]]).launch("g", 10, at=99, dur=9))["g"]
    )
    broken = Builder().op("aten::mm", 0, 50, **{"Input Dims": "none"}).launch("g", 10, at=99, dur=9)
    assert math.isnan(flops_of(broken)["g"])


def test_equal_calls_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder()
    for i in range(5):
        builder.op("aten::mm", 100 * i, 50, dims=[A, B]).launch(
            "gemm", 100 * i + 10, at=1000 + 100 * i, dur=9
        )
    asked = []
    original = costs.launch_costs
    monkeypatch.setattr(costs, "launch_costs", lambda call: asked.append(call) or original(call))
    found = attach_costs(builder.join())
    assert found.flops.tolist() == [MM_FLOPS] * 5
    assert len(asked) == 1


def settings_seen(monkeypatch: pytest.MonkeyPatch, builder: Builder, device: Device | None):
    seen = []
    monkeypatch.setattr(costs, "launch_costs", lambda call: seen.append(call) or (None,) * len(call.launches))
    attach_costs(builder.op("aten::mm", 0, 50, dims=[A, B]).launch("g", 10, at=99, dur=9).join(), device)
    return seen[0]


def test_formulas_learn_the_captures_flags_and_the_devices_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder().context(flags={"allow_tf32_matmul": True})
    call = settings_seen(monkeypatch, builder, Device("x", l2_bytes=1000, sms=10))
    assert call.settings == {"allow_tf32_matmul": True, "l2_bytes": 1000, "sm_count": 10}


def test_what_is_not_known_of_the_device_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_seen(monkeypatch, Builder().context(flags="odd"), Device.unknown("x")).settings == {}


def test_parameters_come_from_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"shape": [4, 4], "dtype": "fp32", "count": 2}, {"shape": [8], "dtype": "bf16"}, "odd"]
    call = settings_seen(monkeypatch, Builder().context(parameters=entries), None)
    assert [(p.shape, p.dtype) for p in call.parameter_shapes] == [
        ((4, 4), "fp32"), ((4, 4), "fp32"), ((8,), "bf16"),
    ]  # fmt: skip


def test_without_the_capture_parameters_are_the_gradients_of_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN three steps that accumulate the same two gradients
    builder = Builder()
    for i in range(3):
        builder.on(1).step(i, 1000 * i, 1000).on(BACKWARD)
        for k, shape in enumerate(([4, 4], [8])):
            at = 1000 * i + 100 + 50 * k
            builder.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", at, 40)
            builder.op("torch::autograd::AccumulateGrad", at + 5, 30, dims=[shape])
            builder.launch("k", at + 10, at=at + 20, dur=1)
    call = settings_seen(monkeypatch, builder.on(1), None)
    assert [p.shape for p in call.parameter_shapes] == [(4, 4), (8,)]


def test_stated_traffic_replaces_a_cost_only_where_it_is_known() -> None:
    found = LaunchCosts.unknown(3)
    found.put([0, 1], [costs.Cost(5, 6, 7, "vector_fp32"), costs.Cost(5, 6, 7, "vector_fp32")])
    found.put_traffic(np.array([np.nan, 10.0, 0.0]), np.array([np.nan, 20.0, 30.0]))
    assert found.flops.tolist() == [5, 0, 0]
    assert found.bytes_written.tolist() == [7, 20, 30]
    assert [found.pipes[i] for i in found.pipe.tolist()] == ["vector_fp32", "none", "none"]


def test_on_the_cpu_an_operator_with_a_formula_is_one_row_with_all_inside_it() -> None:
    # GIVEN linear(10 own) > mm(20 own) > helper(10), and a stranger
    builder = Builder(device=None)
    builder.op("aten::linear", 0, 40, dims=[A, [32, 128], []]).op("aten::mm", 5, 30, dims=[A, B])
    builder.op("vendor::helper", 10, 10).op("vendor::stranger", 100, 7)
    timeline = gather_host_operators(builder.join())
    names = [timeline.trace.names[i] for i in timeline.launches.name.tolist()]
    assert dict(zip(names, timeline.launches.dur_ns.tolist(), strict=True)) == {
        "aten::linear": 10_000, "aten::mm": 30_000, "vendor::stranger": 7_000,
    }  # fmt: skip
    # AND the product is counted once
    assert np.nansum(attach_costs(timeline).flops) == MM_FLOPS


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["aten::mm", "aten::linear", "aten::copy_", "vendor::a", "vendor::b"]),
            st.integers(0, 200),
            st.integers(0, 60),
            st.integers(1, 2),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_on_the_cpu_times_add_up_to_those_of_the_outermost_operators(intervals) -> None:
    # GIVEN operators that nest: any that cuts into another's time is left out
    kept: list[tuple[str, int, int, int]] = []
    for name, ts, dur, tid in intervals:
        if all(
            other != tid or ts + dur <= start or start + length <= ts
            or (start <= ts and ts + dur <= start + length) or (ts <= start and start + length <= ts + dur)
            for _, start, length, other in kept
        ):  # fmt: skip
            kept.append((name, ts, dur, tid))
    builder = Builder(device=None)
    for name, ts, dur, tid in kept:
        builder.on(tid).op(name, ts, dur, dims=[A, B])
    covered = {(tid, moment) for _, ts, dur, tid in kept for moment in range(ts, ts + dur)}
    timeline = gather_host_operators(builder.join())
    assert timeline.launches.dur_ns.sum() == 1000 * len(covered)


def test_on_the_cpu_what_may_hand_back_its_argument_copies_nothing_itself() -> None:
    # GIVEN a conversion that had nothing to convert, and one with its copy inside
    builder = Builder(device=None).op("aten::resolve_conj", 0, 1, dims=[A])
    builder.op("aten::to", 10, 50, dims=[A]).op("aten::copy_", 20, 30, dims=[A, A])
    timeline = gather_host_operators(builder.join())
    found = attach_costs(timeline)
    # THEN bytes are those of the copy alone
    costed = [timeline.trace.names[i] for i in timeline.launches.name[found.known].tolist()]
    assert costed == ["aten::copy_"]


def test_on_the_cpu_flags_of_the_gpu_change_no_pipe() -> None:
    builder = Builder().context(flags={"allow_tf32_matmul": True}).op("aten::mm", 0, 50, dims=[A, B])
    timeline = builder.join()
    assert timeline.cpu_only
    found = attach_costs(timeline)
    assert [found.pipes[i] for i in found.pipe.tolist()] == ["vector_fp32"]


def test_operators_nested_without_end_take_no_longer_than_as_many_side_by_side() -> None:
    # GIVEN thirty thousand products, one inside the other, each with a launch, every other with shapes
    builder, n = Builder(), 30_000
    for i in range(n):
        dims = {"dims": [A, B]} if i % 2 else {}
        builder.op("aten::mm", 1000 + i, 4 * n - 2 * i, **dims).launch(
            "gemm", 1000.5 + i, at=9 * n + i, dur=1
        )
    timeline = builder.join()
    begun = time.process_time()
    found = attach_costs(timeline)
    # THEN it ends, where a climb through all levels from each would not for minutes
    assert time.process_time() - begun < 20
    assert np.nansum(found.flops) >= MM_FLOPS


@pytest.mark.parametrize("count", [10**9, 10**30])
def test_a_count_of_parameters_beyond_all_reason_is_not_believed(count: int) -> None:
    builder = Builder().context(parameters=[{"shape": [4, 4], "dtype": "fp32", "count": count}])
    builder.op("aten::_fused_adamw_", 0, 50, dims=[[], []]).launch("adam", 10, at=100, dur=9)
    assert np.isnan(attach_costs(builder.join()).flops).all()


def _apex_step(builder: Builder, start: int, *blocks: int) -> Builder:
    """Launches of one optimizer step, outside any operator, after a kernel of something else."""
    builder.launch("other", start, at=start + 50, dur=1)
    for at, count in enumerate(blocks, start=start + 3):
        kernel = "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float>"
        builder.launch(kernel, at, at=at + 60, dur=9, grid=[count, 1, 1])
    return builder


def test_apex_kernels_outside_any_operator_take_the_parameters_sizes() -> None:
    builder = Builder().context(parameters=[{"shape": [1000, 65536], "dtype": "fp32"}])
    timeline = _apex_step(_apex_step(builder, 0, 320, 320, 320, 40), 100, 320, 320, 320, 40).join()
    found = attach_costs(timeline)
    assert np.nansum(found.flops) == pytest.approx(2 * 40 * 65_536_000)
    assert np.nansum(found.bytes_written) == pytest.approx(2 * 3 * 4 * 65_536_000)


def test_apex_kernels_that_do_not_fit_the_parameters_stay_unknown() -> None:
    builder = Builder().context(parameters=[{"shape": [1000, 65536], "dtype": "fp32"}])
    assert all(math.isnan(flops) for flops in flops_of(_apex_step(builder, 0, 320, 320)).values())
