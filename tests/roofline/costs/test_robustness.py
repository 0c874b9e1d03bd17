"""No formula raises, and none guesses, whatever a trace says."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.roofline.costs import Cost, Launch, OpCall, launch_costs, op_cost, parse_inputs
from advisor.roofline.costs import registry as registry_module

registry_module.knows("load")
NAMES = sorted(registry_module._exact) + [f"{prefix}x" for prefix in registry_module._prefixes]

_SIZES = st.one_of(st.integers(-2, 9), st.integers(2**31, 2**70))
_SHAPES = st.one_of(st.lists(_SIZES, max_size=5), st.lists(st.integers(1, 8), max_size=5))
_ARGS = st.tuples(
    st.one_of(_SHAPES, st.lists(_SHAPES, max_size=3), st.none(), st.text(max_size=3)),
    st.sampled_from(
        ["float", "c10::BFloat16", "long int", "bool", "TensorList", "Scalar", "", "weird::Type"]
    ),
    st.one_of(_SHAPES, st.none()),
    st.sampled_from(
        ["", "1", "-1", "True", "[1, 1]", "[True, False]", "nan", "[x]", "99999999999999999999", "0.5"]
    ),
)
_KERNEL_NAMES = [
    "Memset (Device)", "nvjet_tst_64x64", "splitKreduce_kernel", "multi_tensor_apply_kernel<float>", "dgrad",
    "cudnn::nchwToNhwcKernel<float>", "DeviceRadixSort", "", "convert_dq", "wgrad",
]  # fmt: skip
_KERNELS = st.lists(
    st.builds(
        Launch,
        st.sampled_from(_KERNEL_NAMES),
        st.one_of(st.none(), st.integers(-1, 2**40)),
        st.one_of(st.none(), st.integers(-5, 2**70)),
    ),
    max_size=4,
)


def _is_plausible(cost):
    return cost is None or all(
        math.isfinite(n) and n >= 0 for n in (cost.flops, cost.bytes_read, cost.bytes_written)
    )


@pytest.mark.parametrize("start", range(0, len(NAMES), 60))
@given(data=st.data(), args=st.lists(_ARGS, max_size=11), kernels=_KERNELS)
def test_any_arguments_give_plausible_costs_or_none(start, data, args, kernels):
    name = data.draw(st.sampled_from(NAMES[start : start + 60]))
    columns = [list(column) for column in zip(*args, strict=True)] or [[], [], [], []]
    inputs, concrete = parse_inputs(*columns)
    call = OpCall(name, inputs, concrete, tuple(kernels), settings={"l2_bytes": 60e6, "sm_count": 132})
    found = launch_costs(call)
    assert len(found) == len(kernels)
    assert all(_is_plausible(cost) for cost in (*found, op_cost(call)))


def test_without_recorded_arguments_there_is_no_cost():
    costed = {
        name
        for name in NAMES
        if launch_costs(OpCall(name, launches=(Launch("some_kernel", 100),))) != (None,)
    }
    # A scaler's state is a few scalars, whatever was recorded.
    assert costed == {"aten::_amp_update_scale_"}


@pytest.mark.parametrize("size", [0, 2**62])
def test_zero_sized_and_overflowing_tensors_have_no_cost(size):
    inputs, concrete = parse_inputs([[size, size]] * 6, ["float"] * 6, [[1, 1]] * 6, ["0"] * 6)
    costed = {name for name in NAMES if op_cost(OpCall(name, inputs, concrete)) is not None}
    # These two take their size from no tensor.
    assert costed == {"aten::_amp_update_scale_", "aten::randperm"}


def test_a_formulas_impossible_numbers_are_dropped(monkeypatch):
    for impossible in (Cost(math.nan, 1, 1), Cost(-1, 1, 1), Cost(1, math.inf, 1)):
        monkeypatch.setitem(registry_module._exact, "aten::mm", lambda call, cost=impossible: cost)
        registry_module.formula_of.cache_clear()
        assert launch_costs(OpCall("aten::mm", launches=(Launch("k"),))) == (None,)
    registry_module.formula_of.cache_clear()


def test_a_formula_that_returns_too_few_costs_is_dropped(monkeypatch):
    monkeypatch.setitem(registry_module._exact, "aten::mm", lambda call: (Cost(1, 1, 1),))
    registry_module.formula_of.cache_clear()
    assert launch_costs(OpCall("aten::mm", launches=(Launch("k"), Launch("l")))) == (None, None)
    registry_module.formula_of.cache_clear()
