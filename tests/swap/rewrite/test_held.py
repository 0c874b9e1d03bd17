"""Numbers that are put on the device once, and those that something may write into."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from advisor.swap.rewrite.edit import copy_of
from advisor.swap.rewrite.held import hold
from tests.swap.rewrite.support import traced


def masked(x: Tensor, y: Tensor) -> Tensor:
    zero = torch.tensor(0.0, dtype=torch.float32, device=x.device)
    return torch.where(x > y, zero, -1.5)


def shifted(x: Tensor, y: Tensor) -> Tensor:
    return (x + torch.tensor([1.0, 2.0])) * y


def made_by(fn: Callable[..., Tensor], x: Tensor, y: Tensor) -> tuple[Callable[..., Tensor], list[int]]:
    """The held graph of a function as a function, and a list that grows with each tensor it makes."""
    gm = copy_of(traced(fn, x, y)[0])[0]
    made: list[int] = []

    def counting(*args, **kwargs) -> Tensor:
        made.append(1)
        return torch.tensor(*args, **kwargs)

    for node in hold(gm).graph.nodes:
        for cell in getattr(node.target, "__closure__", None) or ():
            if cell.cell_contents is torch.tensor:
                cell.cell_contents = counting
    taken = sum(node.op == "placeholder" for node in gm.graph.nodes)
    return lambda *args: gm(*args[:taken])[0], made


@pytest.mark.parametrize("fn", [masked, shifted])
def test_a_number_is_made_once_and_results_are_the_same(fn) -> None:
    x, y = torch.randn(2), torch.randn(2)
    held, made = made_by(fn, x, y)
    assert torch.equal(held(x, y), fn(x, y))
    assert torch.equal(held(y, x), fn(y, x))
    assert made == [1]


def test_a_number_that_is_kept_serves_training_though_it_was_made_in_inference() -> None:
    x, y = torch.randn(2), torch.randn(2, requires_grad=True)
    held, _ = made_by(shifted, x, y)
    with torch.inference_mode():
        held(x, y)
    held(x, y).sum().backward()
    assert torch.equal(y.grad, x + torch.tensor([1.0, 2.0]))


def written(x: Tensor, y: Tensor) -> Tensor:
    total = torch.tensor([0.0, 0.0])
    total += x
    return total * y


def handed_out(x: Tensor, y: Tensor) -> Tensor:
    return torch.tensor([0.0, 1.0])


def seen_through(x: Tensor, y: Tensor) -> Tensor:
    view = torch.tensor([0.0, 1.0]).view(2, 1)
    view.add_(1.0)
    return x * view * y


@pytest.mark.parametrize("fn", [written, handed_out, seen_through])
def test_a_tensor_that_something_may_write_into_is_made_anew(fn) -> None:
    x, y = torch.randn(2), torch.randn(2)
    held, made = made_by(fn, x, y)
    assert torch.equal(held(x, y), fn(x, y))
    assert torch.equal(held(x, y), fn(x, y))
    assert made == []
