"""Activations with bias, and gated activations: as accurate as eager PyTorch, whatever the layout."""

import pytest
import torch
from advisor.kernels import activations as act
from advisor.kernels._device import UnsupportedError
from advisor.kernels._math import ACTIVATIONS
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.checks import assert_as_accurate, cases, check, skip_unless_runnable

DTYPES = cases([torch.float32, torch.bfloat16], [torch.float16])
GATES = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")


def _x(device, dtype, *shape):
    return torch.randn(*shape, device=device, dtype=torch.float32).mul(3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n != "none"])
def test_bias_and_activation_match_eager(device, dtype, name, poisoned):
    skip_unless_runnable(device, dtype)
    check(
        lambda x, bias: act.bias_activation(x, bias, name),
        lambda x, bias: act.bias_activation_reference(x, bias, name),
        {"x": _x(device, dtype, 2, 9, 77), "bias": _x(device, dtype, 77)},
    )


@pytest.mark.parametrize("shape", cases([(7, 4097)], [(5,), (3, 1), (2, 3, 4, 5), (1, 1)]))
def test_an_activation_without_bias_takes_any_shape(device, shape):
    check(
        lambda x: act.bias_gelu(x, approximate="tanh"),
        lambda x: act.bias_activation_reference(x, None, "gelu_tanh"),
        {"x": _x(device, torch.float16, *shape)},
    )


@pytest.mark.quick
def test_relu_squared_is_relu_squared(device):
    check(act.relu_squared, lambda x: torch.relu(x).square(), {"x": _x(device, torch.float32, 4, 33)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATES)
def test_a_gated_activation_matches_eager(device, dtype, name, poisoned):
    skip_unless_runnable(device, dtype)
    check(
        lambda gate, up: act.gated_activation(gate, up, name),
        lambda gate, up: act.gated_activation_reference(gate, up, name),
        {"gate": _x(device, dtype, 3, 5, 131), "up": _x(device, dtype, 3, 5, 131)},
    )


@pytest.mark.parametrize("gate_first", cases([True, False]))
@pytest.mark.parametrize("columns", [16, 70])
def test_a_packed_gate_matches_eager(device, gate_first, columns, poisoned):
    def reference(packed):
        a, b = packed.chunk(2, dim=-1)
        return act.gated_activation_reference(a, b) if gate_first else act.gated_activation_reference(b, a)

    check(
        lambda packed: act.gated_activation_packed(packed, "silu", gate_first),
        reference,
        {"packed": _x(device, torch.float16, 2, 3, columns)},
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_stay_as_finite_as_eagers(device, dtype):
    skip_unless_runnable(device, dtype)
    x = torch.tensor([0.0, -0.0, 1e4, -1e4, 6e4, -6e4, 1e-7, -1e-7, 200.0, -200.0], device=device).to(dtype)
    for name in GATES:
        # relu squared of 1e4 overflows fp16 in eager, and so it must here; its slope at 6e4, in eager alone
        overflows = name == "relu_squared" and dtype == torch.float16
        check(
            lambda x, name=name: act.bias_activation(x, None, name),
            lambda x, name=name: act.bias_activation_reference(x, None, name),
            {"x": x[x.abs() < 5e4] if overflows else x},
        )


@pytest.mark.quick
def test_infinity_and_nan_pass_through(device):
    # Eager's own GELU of infinity is NaN on some CPUs.
    x = torch.tensor([torch.inf, torch.nan, 1.0], device=device)
    for name in GATES:
        y = act.bias_activation(x, None, name)
        assert y.isinf().tolist() == [True, False, False]
        assert y.isnan().tolist() == [False, True, False]


@pytest.mark.quick
def test_slices_of_a_wider_tensor_are_read_in_place(device):
    wide = _x(device, torch.float32, 4, 3, 40)
    check(act.swiglu, act.gated_activation_reference, {"gate": wide[..., :13], "up": wide[..., 20:33]})


@pytest.mark.quick
def test_transposed_and_expanded_inputs_match_eager(device):
    a, b = _x(device, torch.float32, 17, 6), _x(device, torch.float32, 1, 6)
    check(
        lambda gate, up: act.geglu(gate, up),
        lambda gate, up: act.gated_activation_reference(gate, up, "gelu"),
        {"gate": a.t(), "up": b.expand(17, 6).t()},
    )
    check(
        lambda x, bias: act.bias_gelu(x, bias),
        lambda x, bias: act.bias_activation_reference(x, bias, "gelu"),
        {"x": a.t(), "bias": _x(device, torch.float32, 34)[::2]},
    )


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)])
def test_empty_tensors_give_empty_results_and_zero_bias_gradients(device, shape):
    x = torch.empty(shape, device=device, requires_grad=True)
    bias = torch.ones(shape[-1], device=device, requires_grad=True)
    (act.bias_gelu(x, bias).sum() + act.swiglu(x, x).sum()).backward()
    assert x.grad.shape == shape
    assert bias.grad.equal(torch.zeros_like(bias))


@pytest.mark.quick
def test_mixed_dtypes_promote_and_each_gradient_has_its_inputs_dtype(device):
    x = _x(device, torch.float16, 3, 8).requires_grad_()
    bias = _x(device, torch.float32, 8).requires_grad_()
    y = act.bias_gelu(x, bias)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, bias.grad.dtype) == (torch.float32, torch.float16, torch.float32)


@pytest.mark.quick
def test_autocast_leaves_the_dtype_alone_as_it_does_eagers(device):
    x = _x(device, torch.float32, 2, 8)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert act.swiglu(x, x).dtype == act.gated_activation_reference(x, x).dtype == torch.float32


def test_the_bias_gradient_is_summed_in_fp32(device):
    # GIVEN ones whose running sum leaves fp16's integers at 2048
    x = torch.zeros(5000, 8, device=device, dtype=torch.float16)
    bias = torch.ones(8, device=device, dtype=torch.float16, requires_grad=True)
    # WHEN each of 5000 rows adds one
    act.bias_activation(x, bias, "relu").backward(torch.ones_like(x))
    # THEN none is lost
    assert bias.grad.equal(torch.full_like(bias, 5000))


def test_first_derivatives_match_finite_differences(device):
    # Kernels compute in fp32: coarse steps and tolerances.
    x = torch.randn(2, 3, device=device).requires_grad_()
    up = torch.randn(2, 3, device=device).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: act.gated_activation(a, b, "gelu_tanh"),
        (x, up), eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0,
    )  # fmt: skip


def test_a_second_derivative_is_refused(device):
    x = torch.randn(2, 4, device=device, requires_grad=True)
    (g,) = torch.autograd.grad(act.swiglu(x, x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        g.sum().backward()


def test_the_operators_pass_torchs_own_checks(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    bias = torch.randn(8, device=device, requires_grad=True)
    torch.library.opcheck(act.bias_activation_op, (x, bias, "gelu"))
    torch.library.opcheck(act.bias_activation_op, (x, None, "silu"))
    torch.library.opcheck(act.gated_op, (x, x.detach().clone().requires_grad_(), "silu"))
    torch.library.opcheck(act.packed_op, (x, "silu", True))


@pytest.mark.quick
def test_it_compiles_without_graph_breaks(device):
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    x = torch.randn(3, 8, device=device, requires_grad=True)

    def step(x):
        return act.swiglu(x * 2, x).sum()

    torch.compile(step, fullgraph=True, backend=backend)(x).backward()
    compiled, x.grad = x.grad, None
    step(x).backward()
    assert torch.allclose(compiled, x.grad)


def test_what_cannot_be_taken_is_said(device):
    x = torch.randn(2, 4, device=device)
    with pytest.raises(UnsupportedError, match="float64"):
        act.swiglu(x.double(), x.double())
    with pytest.raises(UnsupportedError, match="mish"):
        act.bias_activation(x, None, "mish")
    with pytest.raises(UnsupportedError, match="differ in shape"):
        act.swiglu(x, x[0])
    with pytest.raises(UnsupportedError, match="halves"):
        act.gated_activation_packed(x[:, :3])
    with pytest.raises(UnsupportedError, match="neither"):
        act.bias_activation(x, x[0, :3])


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 70), step=st.integers(1, 3), name=st.sampled_from(GATES)
)
def test_any_shape_and_stride_matches_float64(rows, columns, step, name):
    if torch.cuda.is_available():
        pytest.skip("the interpreter's own search; the GPU runs the grid")
    gate = torch.randn(rows, columns * step)[:, ::step]
    up = torch.randn(columns, rows).t()
    out = act.gated_activation(gate, up, name)
    assert_as_accurate(
        out,
        act.gated_activation_reference(gate, up, name),
        act.gated_activation_reference(gate.double(), up.double(), name),
    )


@pytest.mark.parametrize("module", [act.SwiGLU, act.GeGLU])
def test_a_module_has_llamas_parameter_names_and_result(device, module):
    mlp = module(8, 12, device=device)
    assert {n for n, _ in mlp.named_parameters()} == {
        "gate_proj.weight", "up_proj.weight", "down_proj.weight",
    }  # fmt: skip
    x = torch.randn(3, 8, device=device)
    eager = mlp.down_proj(act.gated_activation_reference(mlp.gate_proj(x), mlp.up_proj(x), mlp.activation))
    assert torch.allclose(mlp(x), eager, atol=1e-6)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(device):
    if device.type != "cuda" or torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    x = torch.ones(2**31 + 4096, device=device, dtype=torch.bfloat16)
    x[-1] = 2.0
    y = act.bias_activation(x, None, "relu_squared")
    assert y[-1] == 4
    assert y[:-1].eq(1).all()
