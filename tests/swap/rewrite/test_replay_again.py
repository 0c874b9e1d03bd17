"""A replayed step that its loop differentiates again, or twice over: what comes out is what eager gives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advisor.swap.rewrite.replay import Replayer
from tests.swap.rewrite.recorder import OnCpu

#: From this step on the loop does something else.
TURN = 7


def plain(w1: Tensor, w2: Tensor, x: Tensor, mean: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    hidden = (x @ w1).tanh()
    return (hidden @ w2).square().mean(), hidden


def dropping(w1: Tensor, w2: Tensor, x: Tensor, mean: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return plain(w1, w2, nn.functional.dropout(x, 0.4), mean, count)


def counting(w1: Tensor, w2: Tensor, x: Tensor, mean: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Whose loss hangs on what it writes."""
    count.add_(1)
    mean.mul_(0.9).add_(0.1 * x.mean(0))
    return plain(w1, w2, x + mean / count, mean, count)


class Loop:
    """Trains, and does as `last` says with the loss from some step on."""

    def __init__(
        self, call: Any, last: Callable[[Loop, Tensor, Tensor], None], replay: bool, autocast: bool = False
    ) -> None:
        self.autocast = autocast
        torch.manual_seed(3)
        self.leaves = [torch.randn(4, 6).requires_grad_(), torch.randn(6, 3).requires_grad_()]
        self.mean, self.count = torch.zeros(4), torch.zeros((), dtype=torch.long)
        # A step between another and its last backward adds up gradients, which a loop is asked about.
        self.recorder, self.last = OnCpu(adds_up=last is with_another_between), last
        self.call = Replayer(call, self.recorder) if replay else call
        self.sums: list[float] = []
        for i in range(TURN + 6):
            self.step(i)

    def forward(self, i: int) -> tuple[Tensor, Tensor]:
        return self.on(torch.randn(5, 4, generator=torch.Generator().manual_seed(i)))

    def on(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            return self.call(*self.leaves, x, self.mean, self.count)

    def step(self, i: int) -> None:
        loss, hidden = self.forward(i)
        self.zero_grad()
        if i < TURN:
            loss.backward()
        else:
            self.last(self, loss, hidden)
        with torch.no_grad():
            for leaf in self.leaves:
                assert leaf.grad is not None
                leaf.sub_(0.1 * leaf.grad)
        self.sums.append(loss.item())

    def zero_grad(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def twice(loop: Loop, loss: Tensor, hidden: Tensor) -> None:
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


def three_times(loop: Loop, loss: Tensor, hidden: Tensor) -> None:
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()


def two_losses(loop: Loop, loss: Tensor, hidden: Tensor) -> None:
    loss.backward(retain_graph=True)
    hidden.square().mean().backward()


def gradients_first(loop: Loop, loss: Tensor, hidden: Tensor) -> None:
    (g,) = torch.autograd.grad(loss, loop.leaves[:1], retain_graph=True)
    (loss * (1 + g.norm())).backward()


def with_another_between(loop: Loop, loss: Tensor, hidden: Tensor) -> None:
    loss.backward(retain_graph=True)
    loop.forward(100)[0].backward()
    loss.backward()


def gradients_of_gradients(loop: Loop, loss: Tensor, hidden: Tensor) -> None:
    found = torch.autograd.grad(loss, loop.leaves, create_graph=True)
    (loss + 0.3 * sum(g.square().sum() for g in found)).backward()


@pytest.mark.parametrize("call", [plain, dropping, counting])
@pytest.mark.parametrize(
    "last",
    [twice, three_times, two_losses, gradients_first, with_another_between, gradients_of_gradients],
    ids=lambda last: last.__name__,
)
def test_gradients_are_those_of_eager_and_the_step_is_not_replayed_any_more(call, last) -> None:
    loop, expected = Loop(call, last, replay=True), Loop(call, last, replay=False)
    words = "gradients of its gradients" if last is gradients_of_gradients else "more than one backward"
    assert words in loop.call.refused
    assert loop.recorder.closed
    assert 2 * TURN > loop.recorder.replays > TURN - 3
    # Gradients of gradients are summed in another order.
    close = {"rtol": 1e-5, "atol": 1e-7} if last is gradients_of_gradients else {"rtol": 0, "atol": 0}
    for mine, theirs in zip(loop.leaves, expected.leaves, strict=True):
        torch.testing.assert_close(mine, theirs, **close)
    torch.testing.assert_close(loop.sums, expected.sums, **close)
    assert torch.equal(loop.mean, expected.mean)
    assert torch.equal(loop.count, expected.count)


def once_retained(loop: Loop, loss: Tensor, hidden: Tensor) -> None:
    loss.backward(retain_graph=True)


def test_a_graph_that_is_kept_for_nothing_is_replayed_on() -> None:
    loop, expected = Loop(plain, once_retained, replay=True), Loop(plain, once_retained, replay=False)
    assert loop.call.refused == ""
    assert loop.sums == expected.sums


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda loop, x: None, "through the graph a second time"),
        (lambda loop, x: loop.leaves[1].add_(1.0), "modified by an inplace operation"),
        (lambda loop, x: x.add_(1.0), "modified by an inplace operation"),
    ],
)
def test_what_is_an_error_in_eager_is_the_same_error(between, words: str) -> None:
    raised = []
    for replay in (True, False):
        loop = Loop(plain, once_retained, replay)
        x = torch.randn(5, 4)
        loop.zero_grad()
        loss = loop.on(x)[0]
        loss.backward(retain_graph="graph" not in words)
        with torch.no_grad():
            between(loop, x)
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        raised.append(str(error.value))
    assert all(words in text for text in raised)


def test_a_step_in_autocast_is_computed_again_in_it() -> None:
    loop, expected = Loop(plain, twice, replay=True, autocast=True), Loop(plain, twice, False, autocast=True)
    assert "more than one backward" in loop.call.refused
    assert loop.sums == expected.sums


def test_an_argument_that_hangs_on_another_gets_what_comes_through_itself_alone() -> None:
    # GIVEN a step in two parts, of which the second is given what the first made and what that was made of
    def second(w: Tensor, hidden: Tensor) -> tuple[Tensor]:
        return ((hidden * w).square().mean(),)

    def train(replay: bool) -> list[Tensor]:
        torch.manual_seed(1)
        w = torch.randn(4).requires_grad_()
        call = Replayer(second, OnCpu()) if replay else second
        found = []
        for i in range(TURN):
            w.grad = None
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i))
            loss = call(w, (x * w).sin())[0]
            loss.backward(retain_graph=True)
            if i == TURN - 1:
                loss.backward()
            found.append(w.grad.clone())
        return found

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_what_is_kept_for_another_backward_is_let_go_of_with_the_graph() -> None:
    loop = Loop(plain, once_retained, replay=True)
    replays = loop.recorder.replays
    x = torch.randn(5, 4)
    held = weakref.ref(x)
    loop.zero_grad()
    loss = loop.on(x)[0]
    del x
    assert loop.recorder.replays == replays + 1
    assert held() is not None
    loss.backward()
    assert held() is None
