"""Attention with gradients as exact as written-out attention's, whatever keys and values have in common."""

import pytest
import torch
from advisor.kernels.attention import FlashAttention, attention, attention_reference
from advisor.kernels.verify.judge import errors
from torch import Tensor

from tests.kernels.checks import cases, check, skip_unless_runnable

HALVES = cases([torch.float16, torch.bfloat16])


def _inputs(device, dtype, n=48, m=48, dim=16, common=0.0) -> dict[str, Tensor]:
    rows = {name: torch.randn(1, 2 if name == "q" else 1, n if name == "q" else m, dim) for name in "qkv"}
    rows["k"] += common * torch.randn(1, 1, 1, dim)
    rows["v"] += common * torch.randn(1, 1, 1, dim)
    return {name: x.to(device, dtype) for name, x in rows.items()}


@pytest.mark.parametrize("dtype", cases([torch.float32, torch.float16], [torch.bfloat16]))
@pytest.mark.parametrize(
    "options",
    cases(
        [{}, {"window": (20, 4)}],
        [{"softcap": 2.0}, {"causal": True, "align": "lower_right"}, {"mask": True}],
    ),
    ids=str,
)
def test_precise_gradients_match_eager(device, dtype, options, poisoned):
    skip_unless_runnable(device, dtype)
    options = dict(options)
    mask = torch.rand(33, 50, device=device) > 0.3 if options.pop("mask", False) else None
    check(
        lambda q, k, v: attention(q, k, v, mask, precise_gradient=True, **options),
        lambda q, k, v: attention_reference(q, k, v, mask, **options),
        _inputs(device, dtype, 33, 50),
    )


def _query_gradient(function, inputs: dict[str, Tensor], grad: Tensor, dtype: torch.dtype) -> Tensor:
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    return torch.autograd.grad(function(**leaves), leaves["q"], grad.to(dtype))[0]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", HALVES)
def test_what_keys_and_values_have_in_common_costs_no_accuracy(device, dtype):
    skip_unless_runnable(device, dtype)
    # GIVEN keys and values that are alike, as a trained model's often are, and written-out attention's error
    inputs = _inputs(device, dtype, common=8.0)
    grad = torch.randn_like(inputs["q"])
    exact = _query_gradient(attention_reference, inputs, grad, torch.float64)

    def share(function) -> float:
        """Of the root-mean-square error that written-out attention, with fp32 softmax, has."""

        def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
            return scores.float().softmax(-1).to(v.dtype) @ v

        eager = _query_gradient(written_out, inputs, grad, dtype)
        mine = _query_gradient(function, inputs, grad, dtype)
        _, rms = errors(mine, eager, exact, factor=1.0, ulps=0.0, what="dq")
        return rms.got / rms.eager

    # THEN the precise gradient is as exact, and the other one is not, which shows what it is for
    assert share(lambda q, k, v: attention(q, k, v, precise_gradient=True)) < 1.5
    assert share(attention) > 3.0


# Sizes that the kernels with roles take, where there are such. Not in the quick subset, as theirs.
@pytest.mark.gpu
@pytest.mark.parametrize("common", [0.0, 4.0])
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((2, 4, 4, 1024, 64), torch.bfloat16, {"causal": True}),
        ((2, 4, 2, 650, 64), torch.float16, {}),
        ((2, 4, 1, 515, 64), torch.bfloat16, {"mask": True}),
        ((2, 4, 4, 1024, 128), torch.bfloat16, {}),
        ((2, 4, 2, 650, 128), torch.bfloat16, {"causal": True}),
        ((2, 4, 1, 515, 128), torch.float16, {"mask": True, "causal": True}),
    ],
    ids=str,
)
def test_precise_gradients_match_eager_at_the_sizes_of_models(shape, dtype, options, common, poisoned):
    if not torch.cuda.is_available():
        pytest.skip("these sizes are for a GPU")
    batch, heads, heads_k, n, dim = shape
    options = dict(options)
    mask = torch.rand(n, n, device="cuda") > 0.3 if options.pop("mask", False) else None
    inputs = {
        name: torch.randn(batch, n, h, dim, device="cuda")
        for name, h in (("q", heads), ("k", heads_k), ("v", heads_k))
    }
    for name in "kv":
        inputs[name] += common * torch.randn(1, 1, 1, dim, device="cuda")
    check(
        lambda q, k, v: attention(q, k, v, mask, precise_gradient=True, **options),
        lambda q, k, v: attention_reference(q, k, v, mask, **options),
        {name: x.to(dtype).transpose(1, 2) for name, x in inputs.items()},
    )


@pytest.mark.quick
def test_dropout_drops_the_same_weights_in_both_sweeps(device):
    inputs = _inputs(device, torch.float32)
    grad = torch.randn_like(inputs["q"])

    def gradient(precise: bool) -> Tensor:
        torch.manual_seed(3)
        return _query_gradient(
            lambda q, k, v: attention(q, k, v, dropout_p=0.3, precise_gradient=precise),
            inputs, grad, torch.float32,
        )  # fmt: skip

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-4, atol=1e-5)


@pytest.mark.quick
def test_the_module_hands_it_on(device):
    inputs = _inputs(device, torch.float16, common=8.0)
    grad = torch.randn_like(inputs["q"])
    module = FlashAttention(causal=True, precise_gradient=True)
    mine = _query_gradient(module, inputs, grad, torch.float16)
    as_function = _query_gradient(
        lambda q, k, v: attention(q, k, v, causal=True, precise_gradient=True), inputs, grad, torch.float16
    )
    assert torch.equal(mine, as_function)
    assert "precise_gradient=True" in repr(module)
