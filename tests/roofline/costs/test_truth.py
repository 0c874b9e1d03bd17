"""Costs against an H200's hardware counters, launch by launch."""

import csv
import gzip

import pytest

from advisor.roofline.costs import Launch, OpCall, knows, launch_costs, parse_inputs
from tests.roofline.costs.calls import H200


def _blocks(event):
    grid = event["args"].get("grid")
    return grid and grid[0] * grid[1] * grid[2]


@pytest.fixture(scope="module")
def pairs(counted, shared):
    """``(cost or None, counters)`` of every kernel."""
    found = {}
    for op, kernels in counted:
        args = op["args"]
        inputs, concrete = parse_inputs(
            *(args.get(key) for key in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs"))
        )
        launches = tuple(Launch(k["name"], _blocks(k), k["args"].get("bytes")) for k in kernels)
        costs = (
            launch_costs(OpCall(op["name"], inputs, concrete, launches, settings=H200))
            if knows(op["name"])
            else [None] * len(kernels)
        )
        found.update(
            {
                (k["ts"], k["name"]): cost
                for k, cost in zip(kernels, costs, strict=True)
                if k["cat"] == "kernel"
            }
        )
    with gzip.open(shared / "truth/ops_h200_counters.csv.gz", "rt") as file:
        counters = list(csv.DictReader(file))
    ordered = [found[key] for key in sorted(found)]
    assert len(ordered) == len(counters)
    return list(zip(ordered, counters, strict=True))


def _number(row, column):
    return float(row.get(column) or 0)


def _share(pairs, good):
    """Time-weighted share of pairs for which `good` holds."""
    time = [_number(row, "time_ns") for _, row in pairs]
    return sum(t for t, (cost, row) in zip(time, pairs, strict=True) if good(cost, row)) / sum(time)


def test_nearly_all_kernel_time_has_a_cost(pairs):
    assert _share(pairs, lambda cost, row: cost is not None) >= 0.99


def test_tensor_core_flops_are_within_2_percent(pairs):
    tensor = [(cost, row) for cost, row in pairs if _number(row, "tensor_flops_bf16") > 1e9]
    assert tensor
    assert (
        _share(
            tensor, lambda c, row: c and c.flops == pytest.approx(_number(row, "tensor_flops_bf16"), rel=0.02)
        )
        >= 0.98
    )


@pytest.mark.parametrize(("factor", "share"), [(1.25, 0.90), (1.5, 0.97)])
def test_bytes_read_are_those_that_were_counted(pairs, factor, share):
    large = [(cost, row) for cost, row in pairs if _number(row, "dram_read_bytes") > 64e6]

    def is_close(cost, row):
        ratio = cost.bytes_read / _number(row, "dram_read_bytes") if cost else 0
        return 1 / factor <= ratio <= factor

    assert _share(large, is_close) >= share


def test_vector_flops_are_within_a_factor_of_two(pairs):
    def counted_flops(row):
        return 2 * _number(row, "ffma") + _number(row, "fadd") + _number(row, "fmul")

    vector = [
        (cost, row)
        for cost, row in pairs
        if cost
        and cost.pipe == "vector_fp32"
        and counted_flops(row) > 1e7
        and not _number(row, "tensor_flops_bf16")
    ]
    assert _share(vector, lambda cost, row: 0.5 <= cost.flops / counted_flops(row) <= 2) >= 0.9
