"""Code with narrow casts inside gives exact results within `Widened`."""

import torch
import torch.nn.functional as F

from advisor.swap.wide import Widened


def test_casts_within_are_passed_over() -> None:
    x = torch.randn(5, 7, dtype=torch.float64)

    def narrow(x: torch.Tensor) -> torch.Tensor:
        h = x.to(torch.float32)
        h = h.float().type_as(x).to(dtype=torch.bfloat16)
        return torch.softmax(h, -1, dtype=torch.float32).half()

    with Widened():
        assert torch.equal(narrow(x), torch.softmax(x, -1))
    assert narrow(x).dtype == torch.float16


def test_integers_and_factories_keep_their_meaning() -> None:
    with Widened():
        assert torch.arange(3).dtype == torch.int64
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float64
        assert torch.tensor([1, 2]).to(torch.int32).dtype == torch.int32


def test_gradients_are_exact_too() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with Widened():
        y = F.gelu(x.to(torch.bfloat16)).float()
    (got,) = torch.autograd.grad(y.sum(), x)
    (exact,) = torch.autograd.grad(F.gelu(x).sum(), x)
    assert torch.equal(got, exact)
