"""Whether two ways to compute with random numbers follow the same law."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from advisor.kernels.verify.judge import Wrong
from advisor.swap.guard import seed
from advisor.swap.play import Played, play
from advisor.swap.site import Example
from advisor.swap.tensors import named_tensors, same_values

RUNS = 32
#: Standard deviations that a mean may be off; chance reaches it once in 10^9.
_SIGMAS = 6.0
#: What the mean of squared z may be above 1: results of one draw depend on each other.
_SLACK = 0.3
#: By what share results may differ that nothing was dropped from: a draw of 16 bits is as exact.
_EXACT = 2.0**-15


def alike(
    original: Callable[..., Any], ours: Callable[..., Any], example: Example, devices: set[torch.device]
) -> None:
    """Draw both often, and compare means and spreads of every output and gradient.

    Raises:
        Wrong: they differ by more than chance explains; or a run with the same seed is not the same; or runs
            with different seeds are.
    """
    rough = _roughness(example)
    first = play(original, example)
    given = first.output_gradients
    theirs, mine = _Sums(), _Sums()
    for i in range(RUNS):
        seed(devices, i + 1)
        theirs.add(play(original, example, output_gradients=given))
        seed(devices, i + 1)
        mine.add(_ours(ours, example, given))
    seed(devices, RUNS)
    again = _ours(ours, example, given)
    if any(not same_values(t, mine.last[name]) for name, t in _floating(again).items()):
        raise Wrong("two runs with the same random numbers differ")
    if mine.last.keys() != theirs.last.keys():
        raise Wrong("outputs or gradients are not of the same inputs")
    for name in theirs.last:
        a, b = mine.last[name], theirs.last[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Wrong(f"{name}: {tuple(a.shape)} {a.dtype}, the original's {tuple(b.shape)} {b.dtype}")
        _same_law(name, mine, theirs, rough)


def _ours(call: Callable[..., Any], example: Example, given: Any) -> Played:
    played = play(call, example, output_gradients=given)
    if played.written:
        raise Wrong(f"writes to its {played.written[0]}")
    return played


class _Sums:
    """Sums over runs, and the sizes of each run along the direction of the first runs' mean."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Tensor]] = {}
        self.last: dict[str, Tensor] = {}

    def add(self, played: Played) -> None:
        self.last = _floating(played)
        for name, t in self.last.items():
            self.runs.setdefault(name, []).append(t.detach().float())

    def mean(self, name: str) -> Tensor:
        return torch.stack(self.runs[name]).double().mean(0)

    def variance(self, name: str) -> Tensor:
        return torch.stack(self.runs[name]).double().var(0)


def _roughness(example: Example) -> float:
    """What rounding may make of a number on the way, though it ends in one of more digits."""
    tensors = [t for _, t in named_tensors(example.args, example.kwargs)]
    dtypes = [t.dtype for t in tensors if t.is_floating_point()]
    dtypes += [example.autocast] if example.autocast is not None else []
    return max([_EXACT, *(torch.finfo(dtype).eps for dtype in dtypes)])


def _same_law(name: str, mine: _Sums, theirs: _Sums, rough: float) -> None:
    eps = torch.finfo(theirs.last[name].dtype).eps
    mean, their_mean = mine.mean(name), theirs.mean(name)
    variance, their_variance = mine.variance(name), theirs.variance(name)
    if not bool(mean.isfinite().all()) or not bool(their_mean.isfinite().all()):
        raise Wrong(f"{name}: not finite")
    size = max(float(their_mean.abs().amax()), float(their_variance.amax().sqrt()), 1e-30)
    typical = (their_mean.square() + their_variance).mean().sqrt()
    # Of few draws some drop nothing of an element: then rounding alone tells the two apart.
    rounding = (4 * eps * size) ** 2 + (2 * rough * their_mean.abs().maximum(typical)).square()
    noise = (variance + their_variance) / RUNS + rounding
    z = (mean - their_mean) / noise.sqrt()
    squared = float(z.square().mean())
    limit = 1 + _SLACK + _SIGMAS * math.sqrt(2 / z.numel())
    if not squared <= limit:
        raise Wrong(
            f"{name}: means of {RUNS} draws differ: squared z is {squared:.2f}, {limit:.2f} by chance"
        )
    spread, theirs_spread = float(variance.mean()), float(their_variance.mean())
    if not abs(spread - theirs_spread) <= 0.25 * max(spread, theirs_spread) + (4 * eps * size) ** 2:
        raise Wrong(f"{name}: variance {spread:.3g} over {RUNS} draws, the original's {theirs_spread:.3g}")
    _same_size(name, mine, theirs, mean + their_mean, 4 * eps + rough / math.sqrt(mean.numel()))


def _same_size(name: str, mine: _Sums, theirs: _Sums, along: Tensor, rounding: float) -> None:
    """A wrong factor shows in the sum over all elements long before it shows in one."""
    norm = float(along.square().sum())
    if not norm:
        return

    def sizes(sums: _Sums) -> Tensor:
        return torch.stack([2 * (run.double() * along).sum() / norm for run in sums.runs[name]])

    a, b = sizes(mine), sizes(theirs)
    noise = math.sqrt((float(a.var()) + float(b.var())) / RUNS) + rounding
    if not abs(float(a.mean() - b.mean())) <= _SIGMAS * noise:
        raise Wrong(f"{name}: {float(a.mean() / b.mean()):.4f} times the original's, over {RUNS} draws")


def _floating(played: Played) -> dict[str, Tensor]:
    return {name: t for name, t in played.results.items() if t.is_floating_point() or t.is_complex()}
