"""Whether two ways to compute with random numbers follow the same law."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from advisor.kernels.verify.judge import Wrong
from advisor.swap.adversaries import changed
from advisor.swap.guard import seed
from advisor.swap.play import Played, play, wanted
from advisor.swap.site import Example
from advisor.swap.tensors import named_tensors, same_values

RUNS = 32
#: Standard deviations that a mean may be off; chance reaches it once in 10^9.
_SIGMAS = 6.0
#: What the mean of squared z may be above 1: results of one draw depend on each other.
_SLACK = 0.3
#: By what share spreads may differ beyond chance.
_SPREAD = 0.05
#: Results that are next to each other, or so far apart, are summed up in so many groups.
_GROUPS = 64
#: Of draws, how many have their gradients held against differences of outputs, and how far inputs are moved.
_PROBES, _STEP = 6, 0.1
#: By what share of gradients' size the two may differ; a mask of its own is off by the root of 2 p.
_OFF = 0.05
#: By what share results may differ that nothing was dropped from: a draw of 16 bits is as exact.
_EXACT = 2.0**-15


def alike(
    original: Callable[..., Any], ours: Callable[..., Any], example: Example, devices: set[torch.device]
) -> None:
    """Draw both often, and compare means and spreads of every output and gradient.

    Raises:
        Wrong: they differ by more than chance explains; or a run with the same seed is not the same; or runs
            with different seeds are; or gradients are not those of the outputs with the same random numbers.
    """
    rough = _roughness(example)
    first = play(original, example)
    given = first.output_gradients
    moved = _Moved(example, given, devices)
    theirs, mine = _Sums(), _Sums()
    for i in range(RUNS):
        seed(devices, i + 1)
        theirs.add(play(original, example, output_gradients=given))
        seed(devices, i + 1)
        mine.add(_ours(ours, example, given))
        if i < _PROBES:
            moved.probe(original, theirs, i + 1)
            moved.probe(ours, mine, i + 1)
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
    _one_draw(mine, theirs)


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
        #: By how much differences of outputs are off from what gradients say, and the size of those.
        self.off: list[tuple[float, float]] = []

    def add(self, played: Played) -> None:
        self.last = _floating(played)
        for name, t in self.last.items():
            self.runs.setdefault(name, []).append(t.detach().float())

    def stacked(self, name: str) -> Tensor:
        """Of each run, in a row."""
        return torch.stack(self.runs[name]).flatten().reshape(len(self.runs[name]), -1)


class _Moved:
    """The call with inputs a little larger, and a little smaller: there outputs differ by the gradients.

    Args:
        example: the call.
        given: the outputs' gradients.
        devices: whose random numbers are seeded.
    """

    def __init__(self, example: Example, given: Sequence[Tensor | None], devices: set[torch.device]) -> None:
        self._given, self._devices = given, devices
        self._calls = []
        for step in (_STEP, -_STEP):
            seed(devices, 0)
            self._calls.append(changed(example, partial(_moved, step), parameters=True))
        larger, smaller = map(wanted, self._calls)
        self._steps = {n: larger[n].detach().double() - smaller[n].detach().double() for n in larger}

    def probe(self, call: Callable[..., Any], sums: _Sums, draw: int) -> None:
        """Hold the gradients of the last run against the outputs for the same random numbers."""
        if not self._steps:
            return
        sides = []
        for example in self._calls:
            seed(self._devices, draw)
            sides.append(play(call, example, output_gradients=self._given).outputs)
        found = [
            float(((a.double() - b.double()) * g).sum())
            for a, b, g in zip(*sides, self._given, strict=False)
            if g is not None and a.shape == g.shape
        ]
        slopes = [sums.last[f"gradient of {n}"].double() * step for n, step in self._steps.items()
                  if f"gradient of {n}" in sums.last]  # fmt: skip
        size = math.sqrt(sum(float(slope.square().sum()) for slope in slopes))
        sums.off.append((sum(found) - sum(float(slope.sum()) for slope in slopes), size))


def _moved(step: float, t: Tensor) -> Tensor:
    wide = t.double()
    return (wide + step * wide.square().mean().sqrt() * torch.randn_like(wide)).to(t.dtype)


def _one_draw(mine: _Sums, theirs: _Sums) -> None:
    """Gradients are of the same draw as outputs."""

    def root(numbers: Sequence[float]) -> float:
        return math.sqrt(sum(x * x for x in numbers) / len(numbers))

    if not theirs.off:
        return
    off, usual = root([off for off, _ in mine.off]), root([off for off, _ in theirs.off])
    size = max(root([size for _, size in theirs.off]), 1e-30)
    if math.isfinite(usual) and not off <= 4 * usual + _OFF * size:
        raise Wrong(
            f"gradients are not of the outputs' draws: off by {off / size:.2f} of their size, the "
            f"original's by {usual / size:.2f}"
        )


def _roughness(example: Example) -> float:
    """What rounding may make of a number on the way, though it ends in one of more digits."""
    tensors = [t for _, t in named_tensors(example.args, example.kwargs)]
    dtypes = [t.dtype for t in tensors if t.is_floating_point()]
    dtypes += [example.autocast] if example.autocast is not None else []
    return max([_EXACT, *(torch.finfo(dtype).eps for dtype in dtypes)])


def _same_law(name: str, mine: _Sums, theirs: _Sums, rough: float) -> None:
    eps = torch.finfo(theirs.last[name].dtype).eps
    ours, original = mine.stacked(name), theirs.stacked(name)
    mean, their_mean = (runs.mean(0, dtype=torch.float64) for runs in (ours, original))
    variance, their_variance = ours.var(0).double(), original.var(0).double()
    if not bool(mean.isfinite().all()) or not bool(their_mean.isfinite().all()):
        raise Wrong(f"{name}: not finite")
    if not mean.numel():
        return
    typical = float((their_mean.square() + their_variance).mean().sqrt())
    # Of few draws some drop nothing of an element: then rounding alone tells the two apart.
    rounding = (4 * eps + 2 * rough) * their_mean.abs().clamp(min=max(typical, 1e-30))
    noise = (variance + their_variance) / RUNS + rounding.square()
    z = (mean - their_mean) / noise.sqrt()
    squared = float(z.square().mean())
    limit = 1 + _SLACK + _SIGMAS * math.sqrt(2 / z.numel())
    if not squared <= limit:
        raise Wrong(
            f"{name}: means of {RUNS} draws differ: squared z is {squared:.2f}, {limit:.2f} by chance"
        )
    along = mean + their_mean
    floor = ours.shape[1] * (2 * max(eps, rough) * typical) ** 2
    for what, spreads in _spreads(along.sign().float()):
        a, b = spreads(ours - mean.float()), spreads(original - their_mean.float())
        spread, theirs_spread = float(a.mean()), float(b.mean())
        chance = _SIGMAS * math.sqrt((float(a.var()) + float(b.var())) / RUNS)
        if not abs(spread - theirs_spread) <= chance + _SPREAD * max(spread, theirs_spread) + floor:
            size = ours.shape[1] / RUNS * (RUNS - 1)
            raise Wrong(
                f"{name}: variance {spread / size:.3g}{what} over {RUNS} draws, the original's "
                f"{theirs_spread / size:.3g}"
            )
    _same_size(name, ours, original, along, eps, rough)


def _spreads(signs: Tensor) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """Ways to sum up squares of distances from the mean: results that are drawn together stand out.

    Args:
        signs: of the means, so that what is dropped together adds up.
    """
    count = signs.numel()
    groups = min(_GROUPS, count)
    padding = -count % groups

    def grouped(off: Tensor) -> Tensor:
        return torch.nn.functional.pad(off * signs, (0, padding))

    def squared(summed: Tensor) -> Tensor:
        return summed.square_().sum(1, dtype=torch.float64)

    return [
        ("", lambda off: squared(off)),
        (" of neighbours together", lambda off: squared(grouped(off).unflatten(1, (groups, -1)).sum(2))),
        (" of rows together", lambda off: squared(grouped(off).unflatten(1, (-1, groups)).sum(1))),
    ]


def _same_size(name: str, ours: Tensor, original: Tensor, along: Tensor, eps: float, rough: float) -> None:
    """A wrong factor shows in the sum over all elements long before it shows in one."""
    norm = float(along.square().sum())
    if not norm:
        return
    a, b = (torch.stack([2 * (run.double() @ along) / norm for run in runs]) for runs in (ours, original))
    noise = math.sqrt((float(a.var()) + float(b.var())) / RUNS)
    # The roundings of many numbers cancel, but not those of one that is there many times, or outweighs all.
    many = min(norm**2 / float(along.pow(4).sum()), float(original[-1].abs().unique().numel()))
    rounding = min(_SIGMAS * (4 * eps + rough) / math.sqrt(many), 3 * max(eps, rough))
    if not abs(float(a.mean() - b.mean())) <= _SIGMAS * noise + rounding:
        raise Wrong(f"{name}: {float(a.mean() / b.mean()):.4f} times the original's, over {RUNS} draws")


def _floating(played: Played) -> dict[str, Tensor]:
    return {name: t for name, t in played.results.items() if t.is_floating_point() or t.is_complex()}
