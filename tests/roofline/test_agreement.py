"""Shares of agreement, worked out by hand."""

import pytest

from advisor.roofline.agreement import Modelled, agreement, counted_bound
from advisor.roofline.counters import Counted
from advisor.roofline.devices import Device

#: Ridges at 100 FLOP/byte for bf16 and 10 for fp32.
DEVICE = Device(
    "toy", peaks={"tensor_bf16": 100e12, "vector_fp32": 10e12}, bandwidth_bytes_per_s=1e12, roofs="datasheet"
)


def counted(time_ns, *, read=100e6, written=0.0, tensor=0.0, ffma=0.0, **more):
    return Counted(
        "kernel",
        time_ns=time_ns,
        bytes_read=read,
        bytes_written=written,
        instructions={"ffma": ffma},
        tensor_flops={"bf16": tensor},
        **more,
    )


def test_each_share_is_weighted_by_the_counters_time():
    pairs = [
        (Modelled(flops=2e10, bytes_read=100e6, bound="compute"), counted(60.0, tensor=2e10)),
        (Modelled(flops=3e10, bytes_read=140e6, bound="memory"), counted(30.0, tensor=2e10)),
        (Modelled(flops=None, bytes_read=None, bound="unknown"), counted(10.0, ffma=5e6)),
    ]

    found = agreement(pairs, DEVICE)

    assert found.costed == pytest.approx(0.9)
    assert found.flops == pytest.approx(60 / 90)
    assert found.read_within_1_25 == pytest.approx(60 / 90)
    assert found.read_within_1_5 == pytest.approx(1.0)
    assert found.bound == pytest.approx(60 / 90)
    assert [(d.index, d.what) for d in found.disagreements] == [
        (1, "flops"),
        (1, "bytes read"),
        (1, "bound"),
        (2, "uncosted"),
    ]


def test_where_nothing_is_to_be_judged_the_share_is_none():
    small = (Modelled(flops=0.0, bytes_read=9e9, bound="memory"), counted(5.0, read=1e6))

    found = agreement([small], DEVICE)

    assert found.costed == 1.0
    assert (found.flops, found.read_within_1_25, found.bound, found.read_ratios) == (None,) * 4


def test_ratios_are_percentiles_by_time():
    pairs = [
        (Modelled(0.0, ratio * 100e6, "memory"), counted(time))
        for ratio, time in ((0.5, 4.0), (1.0, 90.0), (3.0, 6.0))
    ]

    assert agreement(pairs, DEVICE).read_ratios == pytest.approx((1.0, 1.0, 3.0))


@pytest.mark.parametrize(
    ("of", "bound"),
    [
        (counted(1.0, tensor=2e10), "compute"),
        (counted(1.0, tensor=2e10, written=150e6), "memory"),
        (counted(1.0, ffma=1e9), "compute"),
        (counted(1.0, ffma=1e8), "memory"),
        (counted(1.0, read=3e6, ffma=1e9), None),
        (Counted("f", bytes_read=1e8, bytes_written=0.0), None),
        (counted(1.0, tensor=0.0, ffma=1.0, tensor_instructions=1e6), "memory"),
    ],
)
def test_the_bound_is_that_of_the_counted_intensity(of, bound):
    assert counted_bound(of, DEVICE) == bound


def test_a_pipe_without_a_roof_has_no_bound():
    fp64 = Counted("f", bytes_read=1e8, bytes_written=0.0, instructions={"dfma": 1e9})

    assert counted_bound(fp64, DEVICE) is None
