"""One call of a site with its backward, on copies, outside the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from advisor.swap.site import Candidate, Example
from advisor.swap.tensors import cast, devices_of, named_tensors, remade, same_values
from advisor.swap.wide import Widened


@dataclass(frozen=True)
class Played:
    """What a call gave.

    Attributes:
        outputs: its tensors, detached, in order.
        differentiable: whether autograd goes through each.
        rest: the structure of the result and what of it is no tensor, to compare.
        gradients: by name of the input or parameter.
        output_gradients: that the backward began with; None for outputs without one.
        written: names of inputs and parameters that the call wrote to.
    """

    outputs: list[Tensor]
    differentiable: list[bool]
    rest: Any
    gradients: dict[str, Tensor] = field(default_factory=dict)
    output_gradients: list[Tensor | None] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    @property
    def results(self) -> dict[str, Tensor]:
        """Outputs and gradients, by a reader's name."""
        outputs = {f"output {i}": t for i, t in enumerate(self.outputs)}
        return {**outputs, **{f"gradient of {name}": t for name, t in self.gradients.items()}}


@contextmanager
def as_called(example: Example, wide: torch.dtype | None = None) -> Iterator[None]:
    """Autocast and grad mode as the example was called; in a wide dtype, no autocast and no narrow casts."""
    kinds = {d.type for d in devices_of((example.args, example.kwargs))} or {"cpu"}
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(example.grad))
        for kind in kinds:
            on = example.autocast is not None and wide is None
            # Named even where it is off: the loop may hold a region open around us.
            dtype = example.autocast if on else torch.get_autocast_dtype(kind)
            # Without its cache, which would keep copies alive as long as a region of the loop's is open.
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=False))
        if wide is not None:
            stack.enter_context(Widened(wide))
        yield


def reasons(candidate: Candidate, example: Example) -> list[str]:
    """Why a candidate cannot serve a call, asked as the call is made; empty if it can.

    What a kernel takes may hang on autocast, which each thread has of its own.
    """
    with as_called(example):
        return list(candidate.unsupported(example))


def parts(result: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a result, and the rest."""
    leaves, spec = tree_flatten(result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, (spec, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def wanted(example: Example) -> dict[str, Tensor]:
    """The tensors of a call that get gradients, by name."""
    if not example.grad:
        return {}
    return {n: t for n, t in named_tensors(example.args, example.kwargs) if t.requires_grad}


def play(
    call: Callable[..., Any],
    example: Example,
    *,
    output_gradients: Sequence[Tensor | None] | None = None,
    wide: torch.dtype | None = None,
) -> Played:
    """Call it on copies of the example's tensors, and run its backward; no gradient is accumulated anywhere.

    Args:
        call: takes the example's arguments.
        example: stays as it is.
        output_gradients: random ones of the outputs' dtypes, laid out as the loop's, unless given.
        wide: run in this dtype.
    """
    args, kwargs = remade((example.args, dict(example.kwargs)), lambda t: cast(t, wide))
    versions = {name: (t, t._version) for name, t in named_tensors(args, kwargs)}
    with as_called(example, wide):
        tensors, rest = parts(call(*args, **kwargs))
        differentiable = [t.requires_grad for t in tensors]
        found, given = _gradients(tensors, replace(example, args=args, kwargs=kwargs), output_gradients)
    written = [] if wide is not None else _written(versions, example)
    return Played([t.detach() for t in tensors], differentiable, rest, found, given, written)


def _gradients(
    tensors: list[Tensor], example: Example, given: Sequence[Tensor | None] | None
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    leaves = wanted(example)
    used = random_gradients(tensors, example) if given is None else list(given)
    if [t.shape for t, g in zip(tensors, used, strict=False) if g is not None] != [
        g.shape for g in used if g is not None
    ]:
        return {}, used  # not the original's outputs: whoever compares says so
    pairs = [
        (t, g.to(t.dtype)) for t, g in zip(tensors, used, strict=True) if g is not None and t.requires_grad
    ]
    if not pairs or not leaves:
        return {}, used
    outputs, gradients = [t for t, _ in pairs], [g for _, g in pairs]
    found = differentiated(outputs, list(leaves.values()), gradients)
    return {n: g for n, g in zip(leaves, found, strict=True) if g is not None}, used


def differentiated(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of `leaves`, outside autocast, as a loop runs its backward; accumulated nowhere."""
    with torch.autocast(outputs[0].device.type, enabled=False):
        return list(torch.autograd.grad(outputs, leaves, gradients, allow_unused=True))


def random_gradients(outputs: Sequence[Tensor], example: Example) -> list[Tensor | None]:
    """For the backward of a call to begin with, laid out as in the loop: 1 for a scalar, as in training."""
    return [_random_gradient(t, example.gradient_strides.get(i)) for i, t in enumerate(outputs)]


def _random_gradient(output: Tensor, strides: tuple[int, ...] | None) -> Tensor | None:
    if not output.is_floating_point() or not output.requires_grad:
        return None
    if output.dim() == 0:
        return torch.ones_like(output)
    if strides is None or len(strides) != output.dim():
        return torch.randn_like(output)
    # Rows may be fewer than in the loop: the order of dimensions stays, and which of them are expanded.
    order = sorted(range(output.dim()), key=lambda i: -strides[i])
    sizes = [1 if strides[i] == 0 else output.shape[i] for i in order]
    made = torch.randn(sizes, dtype=output.dtype, device=output.device)
    return made.permute([order.index(i) for i in range(output.dim())]).expand(output.shape)


def note_gradient_strides(output: Tensor, index: int, example: Example) -> Any:
    """Have the loop's backward tell how the gradient of an output is laid out; gives the hook's handle."""

    def note(gradient: Tensor) -> None:
        example.gradient_strides.setdefault(index, tuple(gradient.stride()))

    return output.register_hook(note)


def _written(versions: dict[str, tuple[Tensor, int]], example: Example) -> list[str]:
    pristine = dict(named_tensors(example.args, example.kwargs))
    found = []
    for name, (now, version) in versions.items():
        before = pristine[name]
        same = now._version == version and same_values(now, before)
        if not same:
            found.append(name)
    return found
