"""No formula raises, and none guesses, whatever a trace says."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.roofline.costs import Cost, Launch, OpCall, Tensor, launch_costs, op_cost, parse_inputs
from advisor.roofline.costs import registry as registry_module
from advisor.roofline.device_table import PIPES

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
    "flash_bwd_kernel<Flash_bwd_kernel_traits<64, 64, 128, 8>>", "cast_transpose", "rmsnorm_fwd",
    "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256_swiGlu", "vector_fft", "liger_cross_entropy_kernel",
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


_SETTINGS = {"l2_bytes": 60e6, "sm_count": 132}


def _is_plausible(cost):
    if cost is None:
        return True
    figures = (cost.flops, cost.bytes_read, cost.bytes_written, cost.bytes_reread, cost.flops_padding)
    return (
        all(math.isfinite(figure) and figure >= 0 for figure in figures)
        and cost.bytes_reread <= cost.bytes_read
        and cost.flops_padding <= cost.flops
        and cost.pipe in (*PIPES, "none")
    )


@pytest.mark.parametrize("start", range(0, len(NAMES), 60))
@given(data=st.data(), args=st.lists(_ARGS, max_size=11), kernels=_KERNELS)
def test_any_arguments_give_plausible_costs_or_none(start, data, args, kernels):
    name = data.draw(st.sampled_from(NAMES[start : start + 60]))
    columns = [list(column) for column in zip(*args, strict=True)] or [[], [], [], []]
    inputs, concrete = parse_inputs(*columns)
    _check(OpCall(name, inputs, concrete, tuple(kernels), settings=_SETTINGS, partner=inputs[::-1]))


#: Arguments that often fit each other, so that formulas get past their first questions.
_LIKELY = st.tuples(
    st.sampled_from(
        [[4, 4], [4, 4, 4], [4, 4, 4, 4], [4], [1], [3], [], [4, 2], [8, 4], [0, 4], [[4, 4], [4]]]
    ),
    st.sampled_from(["float", "c10::BFloat16", "long int", "bool", "weird::Type", "Scalar"]),
    st.none(),
    st.sampled_from(
        ["", "0", "1", "2", "4", "-1", "True", "False", "[1, 1]", "[4, 4]", "[True, True]", "relu"]
    ),
)


@pytest.mark.parametrize("start", range(0, len(NAMES), 80))
@given(data=st.data(), args=st.lists(_LIKELY, min_size=3, max_size=28), kernels=_KERNELS)
def test_arguments_that_nearly_fit_give_plausible_costs_or_none(start, data, args, kernels):
    name = data.draw(st.sampled_from(NAMES[start : start + 80]))
    inputs, concrete = parse_inputs(*(list(column) for column in zip(*args, strict=True)))
    partner = tuple(data.draw(st.permutations(inputs)))
    parameters = tuple(item for item in inputs if isinstance(item, Tensor))
    _check(
        OpCall(
            name,
            inputs,
            concrete,
            tuple(kernels),
            parameters,
            _SETTINGS,
            next(iter(parameters), None),
            partner,
        )
    )


def _check(call):
    found = launch_costs(call)
    assert len(found) == len(call.launches)
    assert all(_is_plausible(cost) for cost in (*found, op_cost(call)))


_UNHEARD_OF = [
    Tensor((4, 4), "weird::Type"), Tensor((4, 4), "unknown"), Tensor((0, 4), "fp32"),
    Tensor((2**40, 2**40), "fp32"), Tensor((-1, 4), "fp32"), Tensor((4, 4), "fp32", (1,)),
    Tensor((4, 4), "fp32", (-4, 1)),
]  # fmt: skip


@pytest.mark.parametrize("broken", _UNHEARD_OF, ids=str)
@pytest.mark.parametrize(
    "name", ["aten::mm", "aten::add", "aten::sum", "aten::copy_", "aten::native_layer_norm"]
)
def test_a_tensor_that_cannot_be_leaves_its_operator_without_a_cost(name, broken):
    arguments = (broken, broken, broken)
    assert op_cost(OpCall(name, arguments, ("", "0", "False"))) is None


@pytest.mark.parametrize("name", ["", "vendor::gemm", "aten::", "aten::mm_of_tomorrow", "triton_", "\0", "*"])
def test_operators_of_unknown_libraries_have_no_cost(name):
    square = Tensor((4, 4), "fp32")
    assert launch_costs(OpCall(name, (square,) * 3, launches=(Launch("gemm", 1),))) == (None,)


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
