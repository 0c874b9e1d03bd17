"""Bounds, efficiencies and flags of hand-made launches on a device with round figures."""

import dataclasses
import time

import numpy as np
import pytest

from advisor.roofline.bound import BOUNDS, Bound, classify, classify_many
from advisor.roofline.costs.model import Cost
from advisor.roofline.devices import Device
from advisor.trace.events import KERNEL, MEMCPY, MEMSET

#: Ridge points: 100 FLOP/byte on the tensor pipe, 10 on the plain one.
DEVICE = Device(
    name="round",
    matched="round",
    roofs="user",
    peaks={"tensor_bf16": 100e12, "vector_fp32": 10e12},
    bandwidth_bytes_per_s=1e12,
    l2_bytes=10_000_000,
    sms=100,
    link_bytes_per_s=20e9,
    peer_bytes_per_s=200e9,
)


def kernel(flops: float, nbytes: float, us: float, pipe: str = "tensor_bf16", **more) -> Bound:
    return classify(Cost(flops, nbytes, 0, pipe), round(us * 1000), KERNEL, DEVICE, **more)


def test_below_the_ridge_is_memory_and_above_is_compute() -> None:
    below, above = kernel(99e8, 1e8, 200), kernel(101e8, 1e8, 200)
    assert (below.bound, below.intensity, below.ridge) == ("memory", 99, 100)
    assert (above.bound, above.intensity) == ("compute", 101)
    # The same intensity lies on the other side of the plain pipe's ridge.
    assert kernel(99e8, 1e8, 2000, "vector_fp32").bound == "compute"


def test_efficiency_is_achieved_over_attainable_on_both_sides() -> None:
    memory = kernel(1e9, 1e9, 1250)
    assert memory.attainable_flops_per_s == 1e12
    assert memory.roof_ns == pytest.approx(1e6)
    assert memory.efficiency == pytest.approx(0.8)
    compute = kernel(1e12, 1e9, 20_000)
    assert compute.attainable_flops_per_s == 100e12
    assert compute.efficiency == pytest.approx((1e12 / 0.02) / 100e12) == pytest.approx(0.5)


def test_work_without_flops_is_memory_bound_by_its_bytes() -> None:
    for pipe in ("none", "vector_fp32", "tensor_fp8"):
        moved = kernel(0, 1e9, 2000, pipe)
        assert (moved.bound, moved.intensity) == ("memory", 0)
        assert moved.efficiency == pytest.approx(0.5)


def test_without_a_cost_nothing_is_said() -> None:
    assert classify(None, 100_000, KERNEL, DEVICE, name="mystery") == Bound("unknown")


def test_a_cost_without_a_roof_is_unknown_and_says_why() -> None:
    no_pipe = kernel(1e9, 1e6, 100, "tensor_fp8")
    assert (no_pipe.bound, no_pipe.efficiency, no_pipe.flags) == ("unknown", None, ("no_roof",))
    assert no_pipe.intensity == 1000
    no_device = classify(Cost(1e9, 1e6, 0), 100_000, KERNEL, Device.unknown("?"))
    assert (no_device.bound, no_device.flags) == ("unknown", ("no_roof",))


@pytest.mark.parametrize("name", ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                                  "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)",
                                  "void rcclGenericKernel<1, false>(ncclDevKernelArgs)"])  # fmt: skip
def test_a_collective_is_communication_whatever_it_costs(name: str) -> None:
    found = classify(Cost(1e9, 1e9, 0), 100_000, KERNEL, DEVICE, name=name)
    assert (found.bound, found.efficiency) == ("communication", None)


@pytest.mark.parametrize(
    ("name", "roof_ns", "flags"),
    [
        ("Memcpy HtoD (Pinned -> Device)", 50_000, ()),
        ("Memcpy DtoH (Device -> Pinned)", 50_000, ()),
        ("Memcpy HtoD (Pageable -> Device)", 50_000, ("pageable",)),
        ("Memcpy DtoH (Device -> Pageable)", 50_000, ("pageable",)),
        ("Memcpy HtoD (Host -> Device)", 50_000, ()),
        ("CopyHostToDevice", 50_000, ()),
        ("MEMORY_COPY_DEVICE_TO_HOST", 50_000, ()),
        ("Memcpy PtoP (Device -> Device)", 5_000, ()),
    ],
)
def test_a_transfer_is_set_against_its_link(name: str, roof_ns: float, flags: tuple) -> None:
    found = classify(None, 100_000, MEMCPY, DEVICE, name=name, copy_bytes=1_000_000)
    assert found.bound == "copy"
    assert found.roof_ns == pytest.approx(roof_ns)
    assert found.efficiency == pytest.approx(roof_ns / 100_000)
    assert found.flags == flags


def test_a_transfer_of_unknown_size_or_over_an_unknown_link_has_no_efficiency() -> None:
    name = "Memcpy HtoD (Pinned -> Device)"
    assert classify(None, 1000, MEMCPY, DEVICE, name=name) == Bound("copy")
    slow = dataclasses.replace(DEVICE, link_bytes_per_s=None)
    assert classify(None, 1000, MEMCPY, slow, name=name, copy_bytes=10) == Bound("copy")


def test_copies_within_the_device_and_memsets_are_memory_traffic() -> None:
    # A copy moves its size twice, a memset once.
    copy = classify(None, 4000, MEMCPY, DEVICE, name="Memcpy DtoD (Device -> Device)", copy_bytes=1_000_000)
    fill = classify(None, 4000, MEMSET, DEVICE, name="Memset (Device)", copy_bytes=1_000_000)
    assert (copy.bound, copy.roof_ns) == ("memory", pytest.approx(2000))
    assert (fill.bound, fill.roof_ns) == ("memory", pytest.approx(1000))


def test_small_and_slow_is_latency_and_large_and_slow_is_inefficient() -> None:
    assert kernel(0, 1e6, 3).flags == ("latency",)
    assert kernel(0, 10e6, 100).flags == ("inefficient",)
    # Little to do but long at it: no launch overhead explains that.
    assert kernel(0, 1e6, 100).flags == ("inefficient",)
    assert kernel(0, 1e6, 1.5).flags == ()
    assert kernel(0, 60e6, 100).flags == ()


def test_too_few_blocks_for_the_device_are_told_and_excuse_small_work_only() -> None:
    assert kernel(0, 10e6, 100, grid_blocks=16).flags == ("inefficient", "few_blocks")
    assert kernel(0, 1e6, 100, grid_blocks=16).flags == ("latency", "few_blocks")
    assert kernel(0, 10e6, 100, grid_blocks=64).flags == ("inefficient",)
    assert kernel(0, 90e6, 100, grid_blocks=16).flags == ()


def test_above_the_memory_roof_is_cached_only_as_far_as_the_cache_reaches() -> None:
    # 15 MB, of which the 10 MB cache may hold 10 on either side.
    inside = kernel(0, 15e6, 5)
    assert inside.efficiency == pytest.approx(3)
    assert inside.flags == ("cached",)
    # 100 MB: even if 20 MB never reach the memory, the other 80 take 80 µs.
    assert kernel(0, 100e6, 85).flags == ("cached",)
    assert kernel(0, 100e6, 50).flags == ("above_roof",)
    assert kernel(2e9, 1e6, 10).flags == ("above_roof",)
    # A few percent over the roof is on the roof.
    assert kernel(0, 100e6, 97).flags == ()


def test_wasted_work_decides_the_bound_but_earns_no_efficiency() -> None:
    # GIVEN 2 GFLOP of which half are padding, on 10 MB: 200 FLOP/byte, 20 us of work at the peak
    padded = classify(Cost(2e9, 10e6, 0, "tensor_bf16", flops_padding=1e9), 25_000, KERNEL, DEVICE)
    # THEN the hardware is compute bound, but only the useful half counts against the roof
    assert (padded.bound, padded.intensity) == ("compute", 200)
    assert (padded.roof_ns, padded.efficiency) == (pytest.approx(10_000), pytest.approx(0.4))
    assert "padded" in padded.flags
    # AND GIVEN 10 GFLOP on 200 MB of which 150 MB are read again: 50 FLOP/byte
    again = classify(Cost(10e9, 200e6, 0, "tensor_bf16", bytes_reread=150e6), 200_000, KERNEL, DEVICE)
    assert (again.bound, again.intensity) == ("memory", 50)
    assert again.roof_ns == pytest.approx(100_000)


def test_padding_of_small_launches_or_of_little_weight_is_not_flagged() -> None:
    little = Cost(2e9, 10e6, 0, "tensor_bf16", flops_padding=0.39e9)
    much = Cost(2e9, 10e6, 0, "tensor_bf16", flops_padding=0.41e9)
    assert "padded" not in classify(little, 25_000, KERNEL, DEVICE).flags
    assert "padded" in classify(much, 25_000, KERNEL, DEVICE).flags
    assert "padded" not in classify(much, 19_000, KERNEL, DEVICE).flags


def test_a_launch_of_no_duration_has_a_bound_but_no_efficiency() -> None:
    found = kernel(0, 1e6, 0)
    assert (found.bound, found.efficiency, found.flags) == ("memory", None, ())


def test_many_at_once_agree_with_one_by_one_and_take_milliseconds() -> None:
    rng = np.random.default_rng(0)
    n = 200_000
    names = ["a_kernel", "ncclDevKernel_X", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)"]
    name = rng.integers(0, len(names), n)
    kind = np.array([KERNEL, KERNEL, MEMCPY, MEMSET], np.uint8)[name]
    flops, nbytes = rng.random(n) * 1e10, rng.random(n) * 1e8
    pipe = rng.integers(-1, 2, n)
    flops[pipe < 0] = nbytes[pipe < 0] = np.nan
    dur_ns, size = rng.integers(0, 100_000, n), rng.integers(-1, 10**7, n)
    columns = {
        "flops": flops,
        "bytes_moved": nbytes,
        "pipe": pipe,
        "dur_ns": dur_ns,
        "kind": kind,
        "name": name,
    }
    start = time.process_time()
    found = classify_many(
        **columns, pipes=["tensor_bf16", "vector_fp32"], names=names, device=DEVICE, copy_bytes=size
    )
    assert time.process_time() - start < 2
    assert len(found) == n
    for i in range(200):
        cost = None if pipe[i] < 0 else Cost(flops[i], nbytes[i], 0, ["tensor_bf16", "vector_fp32"][pipe[i]])
        single = classify(
            cost, int(dur_ns[i]), int(kind[i]), DEVICE, name=names[name[i]], copy_bytes=int(size[i])
        )
        assert found[i] == single
        assert found.is_bound(single.bound)[i]
        assert all(found.has_flag(flag)[i] for flag in single.flags)
    assert set(np.unique(found.bound)) == set(range(len(BOUNDS)))


def test_no_launches_give_no_bounds() -> None:
    none = np.zeros(0)
    found = classify_many(
        flops=none, bytes_moved=none, pipe=none.astype(int), pipes=[], dur_ns=none.astype(int),
        kind=none.astype(np.uint8), name=none.astype(int), names=[], device=DEVICE,
    )  # fmt: skip
    assert len(found) == 0
