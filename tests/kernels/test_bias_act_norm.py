"""Bias, activation and LayerNorm in one pass."""

import pytest
import torch
from advisor.kernels import bias_act_norm as family
from advisor.kernels._device import UnsupportedError
from advisor.kernels._math import ACTIVATIONS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.kernels.checks import check, skip_unless_runnable

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def made(device, dtype, *shape, names="xbws"):
    skip_unless_runnable(device, dtype)
    sizes = {"x": shape, "b": shape[-1:], "w": shape[-1:], "s": shape[-1:]}
    return {name: torch.randn(sizes[name], device=device).to(dtype) for name in names}


def ours(activation="gelu", eps=1e-5):
    return lambda x, b=None, w=None, s=None: family.bias_act_norm(x, b, activation, w, s, eps)


def reference(activation="gelu", eps=1e-5):
    return lambda x, b=None, w=None, s=None: family.bias_act_norm_reference(x, b, activation, w, s, eps)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(5, 200), (2, 3, 333)])
def test_every_activation_is_as_exact_as_eager(device, dtype, activation, shape, poisoned):
    check(ours(activation), reference(activation), made(device, dtype, *shape))


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(600, 4096), (1000, 1024), (300, 8192), (70, 3000), (40, 16384)])
def test_sizes_of_real_models_are_as_exact_as_eager(device, activation, shape):
    if device.type == "cpu":
        pytest.skip("a size for the GPU")
    check(ours(activation), reference(activation), made(device, torch.bfloat16, *shape))


@pytest.mark.parametrize("names", ["x", "xb", "xw", "xs", "xbw", "xws", "xbs"])
def test_any_part_may_be_left_out(device, names, poisoned):
    check(ours(), reference(), made(device, torch.float32, 5, 96, names=names))


@pytest.mark.parametrize("trained", ["x", "b", "w", "s"])
def test_only_the_gradients_that_are_asked_for_come(device, trained):
    tensors = made(device, torch.float32, 5, 96)
    held = {name: t for name, t in tensors.items() if name != trained}

    def expected(**one):
        (leaf,) = one.values()
        return reference()(**one, **{name: t.to(leaf.dtype) for name, t in held.items()})

    check(lambda **one: ours()(**one, **held), expected, {trained: tensors[trained]})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1e4, -1e4, 0.0, 6e4])
def test_extreme_rows_are_as_exact_as_eager(device, dtype, value):
    tensors = made(device, dtype, 4, 128, names="xw")
    tensors["x"][:, 17] = value
    check(ours("gelu_tanh"), reference("gelu_tanh"), tensors, gradient_ulps=16)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1024, 300])
@pytest.mark.parametrize("rows", [1, 2])
def test_warps_that_wait_for_each_other_once_are_as_exact_as_eager(
    device, dtype, cols, rows, monkeypatch, poisoned
):
    # GIVEN a row whose results differ from warp to warp, and a last tile that rows do not fill
    row = {"ROWS": rows, "num_warps": 4, "JOIN": 1}
    monkeypatch.setattr(family.FORWARD, "rows", {"default": ((None, row),)})
    tensors = made(device, dtype, 7, cols)
    tensors["x"][2, cols // 4 :] *= 3
    check(ours("gelu_tanh"), reference("gelu_tanh"), tensors)


def test_rows_too_wide_for_one_pass_take_two_steps(device, monkeypatch):
    monkeypatch.setattr(family, "MAX_BLOCK", 64)
    tensors = made(device, torch.float32, 4, 96)
    check(ours("silu"), reference("silu"), tensors)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 9), cols=st.integers(1, 70), gap=st.integers(0, 3))
def test_any_shape_and_row_stride(device, rows, cols, gap):
    torch.manual_seed(rows * 1000 + cols)
    x = torch.randn(rows, cols + gap, device=device)[:, :cols]
    b, w, s = torch.randn(3, cols, device=device)
    inputs = {"x": x, "b": b, "w": w, "s": s}
    check(ours("silu", 1.0), reference("silu", 1.0), inputs, repeat=False, gradient_ulps=32)


def test_empty_inputs_give_empty_outputs_and_zero_gradients(device):
    x = torch.randn(0, 8, device=device, requires_grad=True)
    b = torch.ones(8, device=device, requires_grad=True)
    y = ours()(x, b)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape
    assert b.grad.tolist() == [0.0] * 8


def test_torch_finds_nothing_wrong_with_the_operator(device):
    tensors = [t.requires_grad_() for t in made(device, torch.float32, 3, 40).values()]
    operator = torch.ops.advisor_kernels.bias_act_norm.default
    torch.library.opcheck(operator, (*tensors, 1e-5, "gelu", torch.float32))


@pytest.mark.quick
def test_compiled_without_graph_breaks_it_gives_the_same(device):
    compiled = torch.compile(ours("gelu"), fullgraph=True, backend="aot_eager")
    check(compiled, reference("gelu"), made(device, torch.float32, 4, 64))


def test_a_second_derivative_is_refused(device):
    x = torch.randn(3, 16, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(ours()(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_autocast_gives_the_dtype_that_eager_gives(device):
    low = torch.bfloat16 if device.type == "cpu" else torch.float16
    x, b = torch.randn(3, 16, device=device).to(torch.float16), torch.randn(16, device=device)
    with torch.autocast(device.type, low):
        assert ours()(x).dtype == reference()(x).dtype
    assert ours()(x).dtype == torch.float16
    assert ours()(x, b).dtype == torch.float32


def test_the_module_is_the_chain_of_torchs(device):
    module = family.BiasActivationLayerNorm(24, "gelu").to(device)
    nn.init.normal_(module.input_bias)
    x = torch.randn(5, 24, device=device)
    chain = nn.functional.layer_norm(
        nn.functional.gelu(x + module.input_bias), (24,), module.weight, module.bias
    )
    torch.testing.assert_close(module(x), chain)
    assert set(module.state_dict()) == {"weight", "bias", "input_bias"}


def test_what_is_not_supported_is_said(device):
    x = torch.randn(4, 32, device=device)
    with pytest.raises(ValueError, match="activation 'mish'"):
        family.bias_act_norm(x, None, "mish")
    with pytest.raises(UnsupportedError, match=r"shape \[16\] for rows of 32"):
        family.bias_act_norm(x, x[0, :16])
    with pytest.raises(UnsupportedError, match="float64"):
        family.bias_act_norm(x.double())
