"""Calls are noted as the loop makes them; the loop's numbers stay the same, to the bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from advisor.swap.examples import Watch
from advisor.swap.find import configuration
from tests.swap.networks import LlamaNorm, Net

SIZE = 16


def step(net: nn.Module, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    net.zero_grad()
    loss = net(torch.randn(4, SIZE)).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters()), torch.get_rng_state()]


def test_a_watched_step_is_the_same_to_the_bit_and_leaves_no_hook() -> None:
    net = nn.Sequential(Net(), nn.Dropout(0.5))
    expected = step(net)
    with Watch(net.modules()):
        watched = step(net)
    assert all(torch.equal(a, b) for a, b in zip(watched, expected, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_hooks_are_gone_after_an_interruption_too() -> None:
    net = Net()

    def interrupted() -> None:
        with Watch(net.modules()):
            net(torch.randn(2, SIZE))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_an_example_is_a_copy_with_strides_flags_and_autocast() -> None:
    module = nn.Linear(SIZE, 4)
    x = torch.randn(SIZE, 3, requires_grad=True)
    with Watch([module]) as watch, torch.autocast("cpu", dtype=torch.bfloat16):
        module(x.t())
    (example,) = watch.records[module].examples.values()
    (noted,) = example.args
    assert noted.stride() == x.t().stride()
    assert noted.requires_grad
    assert noted.is_leaf
    assert example.autocast == torch.bfloat16
    assert example.grad
    assert not example.rng
    with torch.no_grad():
        x.zero_()
    assert noted.detach().abs().sum() > 0


def test_drawing_random_numbers_is_seen() -> None:
    drop, plain = nn.Dropout(0.5), nn.ReLU()
    with Watch([drop, plain]) as watch:
        plain(drop(torch.randn(4)))
    assert [e.rng for e in watch.records[drop].examples.values()] == [True]
    assert [e.rng for e in watch.records[plain].examples.values()] == [False]


def test_calls_of_one_signature_are_counted_and_copied_once() -> None:
    a, b = LlamaNorm(SIZE), LlamaNorm(SIZE)
    x = torch.randn(4, SIZE)
    with Watch([a, b], configuration) as watch:
        for _ in range(3):
            a(x)
        b(x)
        a(x[:2])
    assert watch.records[a].calls == 4
    assert len(watch.records[a].examples) == 2
    (shared,) = watch.records[b].examples.values()
    assert any(shared is e for e in watch.records[a].examples.values())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_checkpointing_a_call_that_autograd_records_is_among_the_examples(use_reentrant) -> None:
    module = LlamaNorm(SIZE)
    x = torch.randn(4, SIZE, requires_grad=True)
    with Watch([module]) as watch:
        checkpoint(module, x, use_reentrant=use_reentrant).sum().backward()
    examples = list(watch.records[module].examples.values())
    assert any(e.grad and e.args[0].requires_grad for e in examples)
    assert watch.records[module].calls == 2


def test_beyond_the_cap_calls_are_counted_and_the_module_left_alone() -> None:
    module = LlamaNorm(SIZE)
    with Watch([module], cap_bytes=100) as watch:
        module(torch.randn(4, SIZE))
    record = watch.records[module]
    assert record.calls == 1
    assert record.examples == {}
    assert record.reasons == ["copies of what it is called with would need too much memory"]


def test_a_gradient_that_is_differentiated_again_is_seen() -> None:
    module = LlamaNorm(SIZE)
    x = torch.randn(4, SIZE, requires_grad=True)
    with Watch([module]) as watch:
        (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        g.square().sum().backward()
    assert watch.records[module].reasons == ["its gradient is differentiated again"]


def test_parameters_that_exist_only_during_the_call_are_copied_then() -> None:
    # GIVEN a wrapper that gathers a weight before the call and drops it afterwards
    module = LlamaNorm(SIZE)
    module.weight.data = torch.empty(0)

    def gather(m: nn.Module, args: tuple) -> None:
        m.weight.data = torch.full((SIZE,), 2.0)

    def drop(m: nn.Module, args: tuple, out: Tensor) -> None:
        m.weight.data = torch.empty(0)

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(drop)
    # WHEN it is watched
    with Watch([module]) as watch:
        module(torch.randn(4, SIZE))
    # THEN a stand-in has the gathered weight
    twin = watch.records[module].fleeting
    assert twin is not None
    assert torch.equal(twin.weight, torch.full((SIZE,), 2.0))
    assert module.weight.numel() == 0


def test_a_call_that_raises_is_no_example_and_does_not_disturb_those_around_it() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails = Fails()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.fails(x)
            except ValueError:
                return F.relu(x)

    outer = Outer()
    with Watch(outer.modules()) as watch:
        outer(torch.randn(3))
    assert len(watch.records[outer].examples) == 1
    assert watch.records[outer.fails].examples == {}


def test_tensors_of_other_kinds_are_left_alone() -> None:
    module = nn.ReLU()
    with Watch([module]) as watch:
        module(torch.randn(3).as_subclass(Wrapped))
    assert watch.records[module].reasons == ["is called with a Wrapped"]


class Wrapped(Tensor):
    pass
