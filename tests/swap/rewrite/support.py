"""Graphs as Dynamo makes them, and the comparison of a rewritten one with the original."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from advisor.swap.play import play
from advisor.swap.rewrite.edit import replaced
from advisor.swap.rewrite.facts import Facts
from advisor.swap.rewrite.match import Found, find
from advisor.swap.site import Candidate, Example


def traced(fn: Callable[..., Any], *args: Any) -> tuple[GraphModule, list[Any]]:
    """The one graph of a call, and what stands for its placeholders."""
    graphs: list[tuple[GraphModule, list[Any]]] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    with torch.random.fork_rng([]):
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*args)
    (graph,) = graphs
    return graph


def found_in(fn: Callable[..., Any], *args: Any) -> tuple[list[Found], Facts]:
    """All matches in a function, and what else is known of its graph."""
    gm, inputs = traced(fn, *args)
    facts = Facts(gm, inputs)
    return find(facts), facts


def names(found: list[Found]) -> list[str]:
    """The patterns that matched."""
    return [f.match.pattern for f in found]


def one(pattern: str, fn: Callable[..., Any], *args: Any) -> Found:
    """The one match of a pattern; the graph's facts come with it as `facts`."""
    found, facts = found_in(fn, *args)
    mine = [f for f in found if f.match.pattern == pattern]
    assert len(mine) == 1, (names(found), [(r.pattern, r.why) for r in facts.refusals], str(facts.gm.graph))
    return mine[0]


def misses(pattern: str, fn: Callable[..., Any], *args: Any) -> str:
    """That a pattern does not match; the reasons that were noted."""
    found, facts = found_in(fn, *args)
    assert pattern not in names(found), [f.match.attributes for f in found]
    return "; ".join(r.why for r in facts.refusals if r.pattern == pattern)


def replacement_equals_original(
    pattern: str,
    fn: Callable[..., Any],
    *args: Any,
    autocast: torch.dtype | None = None,
    only: str = "",
) -> Found:
    """Every candidate of the one match of a pattern, put into the graph, does what the original does.

    Outputs and gradients of the whole function are compared with its run in float64: the error may be twice
    eager's own (gradients three times), and a few roundings more.

    Args:
        pattern: its name.
        fn: the function; of a module, its bound method.
        args: of the function; of tensors that require gradients, those are compared.
        autocast: its dtype, or None.
        only: candidates whose name holds it.
    """
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        gm, inputs = traced(fn, *args)
        facts = Facts(gm, inputs)
        found = find(facts)
    mine = [f for f in found if f.match.pattern == pattern]
    reasons = [(r.pattern, r.why) for r in facts.refusals]
    assert len(mine) == 1, (names(found), reasons, str(gm.graph))
    (match,) = mine
    example = Example(
        tuple(
            i.detach().clone().requires_grad_(i.requires_grad) if isinstance(i, Tensor) else i for i in inputs
        ),
        {},
        autocast,
    )
    served = 0
    truth = play(gm, example, wide=torch.float64)
    eager = play(gm, example, output_gradients=truth.output_gradients)
    for candidate in match.match.candidates:
        if only not in candidate.name:
            continue
        if candidate.unsupported(Example(_inputs_of(gm, match, example))):
            continue
        served += 1
        new = replaced(gm, [(match, candidate.call)])
        assert len(list(new.graph.nodes)) < len(list(gm.graph.nodes)) + 4
        ours = play(new, example, output_gradients=truth.output_gradients)
        _same(candidate, ours.outputs, eager.outputs, truth.outputs, 2.0)
        assert ours.gradients.keys() == eager.gradients.keys(), candidate.name
        for name in truth.gradients:
            _same(
                candidate, [ours.gradients[name]], [eager.gradients[name]], [truth.gradients[name]], 3.0, name
            )
    assert served, [c.unsupported(Example(_inputs_of(gm, match, example))) for c in match.match.candidates]
    return match


def _inputs_of(gm: GraphModule, found: Found, example: Example) -> tuple[Any, ...]:
    """The values that a match takes when the graph is run on an example."""
    values: dict[Any, Any] = {}

    class Keep(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    kind = example.autocast
    with torch.no_grad(), torch.autocast("cpu", dtype=kind or torch.bfloat16, enabled=kind is not None):
        Keep(gm).run(*example.args)
    return tuple(values[n] for n in found.match.inputs)


def _same(
    candidate: Candidate, ours: Any, eager: Any, truth: Any, ratio: float, name: str = "output"
) -> None:
    assert len(ours) == len(truth)
    for mine, theirs, exact in zip(ours, eager, truth, strict=True):
        assert mine.dtype == theirs.dtype, (candidate.name, name, mine.dtype, theirs.dtype)
        assert mine.shape == theirs.shape, (candidate.name, name)
        if not mine.is_floating_point():
            continue
        size = exact.abs().max().item() + 1e-30
        floor = 8 * torch.finfo(mine.dtype).eps * size if mine.dtype != torch.float32 else 2e-6 * size
        error = (mine.double() - exact.double()).abs().max().item()
        allowed = ratio * (theirs.double() - exact.double()).abs().max().item() + floor
        assert error <= allowed, f"{candidate.name}: {name} is off by {error:.3g}, allowed {allowed:.3g}"


def rand(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    """Random numbers that want a gradient."""
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


class Holder(nn.Module):
    """A module with tensors as buffers and a function of them and its inputs."""

    def __init__(self, fn: Callable[..., Any], **buffers: Tensor) -> None:
        super().__init__()
        self.fn = fn
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *args: Any) -> Any:
        return self.fn(self, *args)
