"""What is replayed shares no memory that the eager step does not share, and writes over none that is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from advisor.swap.rewrite.replay import Replayer
from tests.swap.rewrite.recorder import OnCpu


class Shared(OnCpu):
    """Gradients stay where autograd has put them, as in a graph's pool of memory."""

    def record(self, forward, backward, replaced_bytes=0):
        found: list[Tensor | None] = []

        def noted(outputs: Any) -> list[Tensor | None]:
            gradients = backward(outputs)
            found[:] = gradients
            return gradients

        recorded = super().record(forward, noted, replaced_bytes)
        for mine, g in zip(recorded.gradients, found, strict=True):
            if mine is not None and g is not None:
                mine.set_(g.detach())
        found.clear()
        return recorded


def parameters(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def batch(i: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(i))


def trained(call: Callable[..., Any], leaves: list[Tensor], replay: bool) -> Replayer | None:
    """Steps whose gradients are scaled in place, as by clipping."""
    replayer = Replayer(call, Shared()) if replay else None
    for i in range(10):
        loss = (replayer or call)(*leaves, batch(i))[0]
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        with torch.no_grad():
            for leaf in leaves:
                assert leaf.grad is not None
                leaf.grad.mul_(0.5)
            for leaf in leaves:
                leaf.sub_(0.1 * leaf.grad)
    return replayer


class ItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, q: Tensor) -> Tensor:
        ctx.save_for_backward(q)
        return (p * q.detach()).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.saved_tensors[0], None


def summed(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor]:
    return ((x @ (a + b)).tanh().square().mean(),)


def given_back(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor]:
    return (ItsInput.apply(a, b) + (x @ b).square().mean(),)


def in_a_row(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor]:
    return (torch.nn.functional.linear(x, torch.cat([a, b])).tanh().square().mean(),)


@pytest.mark.parametrize("call", [summed, given_back, in_a_row])
def test_gradients_that_autograd_hands_to_two_are_scaled_in_place_as_ever(call) -> None:
    shape = (3, 4) if call is in_a_row else (4, 3)
    plain, replayed = parameters(shape, shape), parameters(shape, shape)
    trained(call, plain, replay=False)
    replayer = trained(call, replayed, replay=True)
    assert replayer is not None
    assert replayer.refused == ""
    assert replayer.proven
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))


@pytest.mark.parametrize(
    ("keep", "since"),
    [(lambda g: g, 0), (lambda g: g[:2], 0), (lambda g: g[:2], 6), (Tensor.detach, 6)],
    ids=["it", "a view", "a view, later", "detached, later"],
)
def test_gradients_that_the_loop_keeps_beyond_a_step_are_not_written_over(keep, since: int) -> None:
    def train(call: Callable[..., Any]) -> list[float]:
        leaves = parameters((4, 3), (4, 3))
        kept: list[Tensor] = []
        sums = []
        for i in range(12):
            loss = call(*leaves, batch(i))[0]
            for leaf in leaves:
                leaf.grad = None
            loss.backward()
            sums += [float(g.sum()) for g in kept]
            if i >= since:
                kept = [keep(leaf.grad) for leaf in leaves]
            with torch.no_grad():
                for leaf in leaves:
                    assert leaf.grad is not None
                    leaf.sub_(0.1 * leaf.grad)
        return sums

    recorder = OnCpu()
    replayer = Replayer(summed, recorder)
    assert train(replayer) == train(summed)
    assert replayer.refused == "gradients are kept beyond the step"
    assert recorder.replays > 1


def two_views(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = 2 * (x @ w)
    return hidden, hidden[:, :1]


@pytest.mark.parametrize("write", [False, True])
def test_outputs_that_share_memory_are_copied_unless_the_loop_writes_to_them(write: bool) -> None:
    def train(call: Callable[..., Any]) -> list[float]:
        (w,) = parameters((4, 3))
        losses = []
        for i in range(8):
            w.grad = None
            hidden, first = call(w, batch(i))
            if write:
                first.mul_(0.5)
            loss = hidden.square().mean()
            loss.backward()
            with torch.no_grad():
                w.sub_(0.1 * w.grad)
            losses.append(loss.item())
        return losses

    replayer = Replayer(two_views, OnCpu())
    assert train(replayer) == train(two_views)
    words = "shares memory, and is written to afterwards"
    assert (words in replayer.refused) is write
    assert replayer.proven is not write


def test_a_call_that_is_given_a_gradient_of_the_recording_runs_as_it_is() -> None:
    def step(w: Tensor, past: Tensor, x: Tensor) -> tuple[Tensor]:
        return ((x @ w).square().mean() + 0.1 * past.norm() * w.square().sum(),)

    def train(call: Callable[..., Any]) -> list[float]:
        (w,) = parameters((4, 3))
        w.grad = torch.zeros_like(w)
        losses = []
        for i in range(30):
            past, w.grad = w.grad, None
            loss = call(w, past, batch(i))[0]
            loss.backward()
            with torch.no_grad():
                w.sub_(0.01 * w.grad)
            losses.append(loss.item())
        return losses

    assert train(Replayer(step, OnCpu())) == train(step)
