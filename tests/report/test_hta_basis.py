"""Our split of the device's time on HTA's basis, on timelines worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.report.hta_basis import DeviceTime, device_time, on_hta_basis
from tests.trace.builder import Builder


def _split(*work: tuple[int, int, str]) -> DeviceTime | None:
    """Of work given as (start, end, "compute" | "communication" | "copy")."""
    kinds = [kind for _, _, kind in work]
    return device_time(
        np.array([start for start, _, _ in work], np.int64),
        np.array([end for _, end, _ in work], np.int64),
        np.array([kind == "compute" for kind in kinds], bool),
        np.array([kind == "communication" for kind in kinds], bool),
    )


def test_a_gap_is_idle_and_the_parts_add_up_to_the_span():
    # GIVEN a kernel, a gap of 5 ns and a copy
    split = _split((10, 20, "compute"), (25, 28, "copy"))

    # THEN each ns of the span is in one part
    assert split == DeviceTime(span_ns=18, idle_ns=5, compute_ns=10, non_compute_ns=3, overlap_fraction=None)


def test_overlapping_kernels_count_once():
    # GIVEN two streams at work at the same time for 5 ns
    split = _split((0, 10, "compute"), (5, 15, "compute"))

    # THEN busy time is that of the union
    assert split is not None
    assert (split.compute_ns, split.idle_ns) == (15, 0)


def test_communication_under_compute_is_no_time_of_its_own():
    # GIVEN a collective of 10 ns, 4 ns of it under a kernel
    split = _split((0, 10, "communication"), (6, 20, "compute"))

    # THEN 4 of 10 are overlapped, and the 6 exposed ones are not compute
    assert split is not None
    assert split.overlap_fraction == pytest.approx(0.4)
    assert split.non_compute_ns == 6


def test_a_copy_does_not_hide_communication():
    # GIVEN a copy all through a collective
    split = _split((0, 10, "communication"), (0, 10, "copy"))

    # THEN nothing of it is overlapped by compute
    assert split is not None
    assert split.overlap_fraction == 0.0


def test_two_collectives_at_once_count_their_union():
    # GIVEN collectives at 0-10 and 5-15, a kernel at 10-15
    split = _split((0, 10, "communication"), (5, 15, "communication"), (10, 15, "compute"))

    # THEN a third of the 15 ns is overlapped
    assert split is not None
    assert split.overlap_fraction == pytest.approx(1 / 3)


def test_no_device_work_gives_no_figures():
    assert _split() is None


def test_work_without_a_launch_is_left_out_where_steps_are_marked():
    # GIVEN two steps, a kernel of 30 us launched in them, and one of 50 us from before the trace
    trace = Builder().step(1, 1000, 100).step(2, 1100, 100)
    trace.work("gemm", 900, 50, correlation=99).launch("gemm", 1010, at=1020, dur=30)

    # WHEN on HTA's basis
    split = on_hta_basis(trace.join())

    # THEN the span is that of the launched one
    assert split is not None
    assert split.span_ns == 30_000


def test_work_without_a_launch_counts_where_there_is_one_step():
    # GIVEN the same with a single step, where HTA filters nothing
    trace = Builder().step(1, 1000, 100)
    trace.work("gemm", 900, 50, correlation=99).launch("gemm", 1010, at=1020, dur=30)

    split = on_hta_basis(trace.join())

    assert split is not None
    assert (split.span_ns, split.idle_ns) == (150_000, 70_000)


def test_kernels_are_told_by_kind_and_name():
    # GIVEN a kernel, a collective under it and a copy after both
    trace = Builder().step(1, 0, 1000)
    trace.launch("gemm", 10, at=100, dur=100)
    trace.launch(
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20, at=150, dur=100
    )
    trace.launch("Memcpy HtoD (Pinned -> Device)", 30, at=250, dur=10, cat="gpu_memcpy")

    split = on_hta_basis(trace.join())

    assert split == DeviceTime(
        span_ns=160_000, idle_ns=0, compute_ns=100_000, non_compute_ns=60_000, overlap_fraction=0.5
    )


def test_collectives_that_hta_does_not_know_are_compute_on_its_basis():
    # GIVEN an all-reduce of torch's symmetric memory, which HTA counts with the kernels
    trace = Builder().step(1, 0, 1000)
    trace.launch(
        "void (anonymous namespace)::multimem_all_reduce_kernel<float, 16, 8>()", 10, at=100, dur=100
    )

    split = on_hta_basis(trace.join())

    assert split is not None
    assert (split.compute_ns, split.overlap_fraction) == (100_000, None)


def test_a_run_on_the_cpu_has_no_device_time():
    assert on_hta_basis(Builder(device=None).op("aten::mm", 0, 10).join()) is None
