"""Attention with gradients as exact as written-out attention's, whatever keys and values have in common."""

import pytest
import torch
from advisor.kernels import _attention_ops as ops
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
    assert share(lambda q, k, v: attention(q, k, v, precise_gradient=False)) > 3.0


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
@pytest.mark.parametrize("dtype", HALVES)
def test_with_dropout_what_values_have_in_common_costs_no_accuracy(device, dtype):
    skip_unless_runnable(device, dtype)
    # GIVEN dropout, and its mask as the kernel draws it, read off the weights of one-hot values
    inputs = _inputs(device, dtype, dim=64, common=8.0)
    grad = torch.randn_like(inputs["q"])

    def ours(q: Tensor, k: Tensor, v: Tensor, precise: bool = True) -> Tensor:
        torch.manual_seed(3)
        return attention(q, k, v, dropout_p=0.3, precise_gradient=precise)

    one_hot = torch.eye(48, 64, device=device, dtype=dtype).expand_as(inputs["v"])
    kept = (ours(inputs["q"], inputs["k"], one_hot)[..., :48] != 0) / 0.7

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(q, k, v, weights_kept=kept.to(q.dtype))

    exact = _query_gradient(theirs, inputs, grad, torch.float64)

    def error(precise: bool) -> float:
        mine = _query_gradient(lambda q, k, v: ours(q, k, v, precise), inputs, grad, dtype)
        return float((mine.double() - exact).norm() / exact.norm())

    # THEN the gradient is right, and several times as exact as without
    assert error(True) < 16 * torch.finfo(dtype).eps
    assert error(True) < error(False) / 2.0


@pytest.mark.quick
def test_nothing_is_kept_for_a_backward_that_cannot_come(device, monkeypatch):
    kept = []
    wanted = ops.attention_op

    def watched(*args):
        found = wanted(*args)
        kept.append(found[2].numel())
        return found

    monkeypatch.setattr("advisor.kernels.attention.attention_op", watched)
    inputs = _inputs(device, torch.float16)
    attention(**inputs)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    with torch.no_grad():
        attention(**leaves)
    attention(**leaves)
    attention(**leaves, precise_gradient=False)
    attention(**{name: x.detach().float().requires_grad_() for name, x in leaves.items()})
    assert kept == [0, 0, leaves["q"].numel(), 0, 0]


@pytest.mark.quick
def test_the_module_hands_it_on(device):
    inputs = _inputs(device, torch.float16, common=8.0)
    grad = torch.randn_like(inputs["q"])
    module = FlashAttention(causal=True, precise_gradient=False)
    mine = _query_gradient(module, inputs, grad, torch.float16)
    as_function = _query_gradient(
        lambda q, k, v: attention(q, k, v, causal=True, precise_gradient=False), inputs, grad, torch.float16
    )
    assert torch.equal(mine, as_function)
    assert "precise_gradient=False" in repr(module)
