"""How long a site takes, forward and backward, with the original and with each candidate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from advisor.swap.clocks import Call, Clock, clock_for
from advisor.swap.guard import kept_state, unwarned
from advisor.swap.play import as_called, differentiated, parts, random_gradients, wanted
from advisor.swap.site import Candidate, Example, Site
from advisor.swap.tensors import copied, devices_of, remade
from advisor.swap.verify import OutOfMemory, said

#: The name under which the original is timed.
ORIGINAL = "original"


@dataclass(frozen=True)
class Timed:
    """What one variant took.

    Attributes:
        median_ns: of a forward and backward; on a GPU the device's time.
        low_ns, high_ns: between which the true median lies (95 %).
        peak_bytes: see `Trial.memory_bytes`.
        failure: why there is no time, in one line.
        host_ns: that the host takes to enqueue it, where that is not the time itself.
    """

    median_ns: float = math.nan
    low_ns: float = math.nan
    high_ns: float = math.nan
    peak_bytes: int | None = None
    failure: str = ""
    host_ns: float | None = None


def measure(
    site: Site,
    candidates: Sequence[Candidate] | None = None,
    *,
    clock: Clock | None = None,
    budget_s: float = 0.5,
) -> dict[str, Timed]:
    """Time a site's original and candidates in turns, on copies of a call that the loop made.

    Args:
        site: its first call that has a backward is timed.
        candidates: which; the site's own unless given.
        clock: the device's unless given.
        budget_s: about what it may take.

    Returns:
        By name, `ORIGINAL` first.
    """
    chosen = site.candidates if candidates is None else candidates
    if site.ready is not None:
        calls = site.ready(chosen)
        devices = {p.device for place in site.places for p in _parameters(place)}
    else:
        example = next((e for e in site.examples if e.grad), site.examples[0])
        devices = devices_of((example.args, dict(example.kwargs)))
        variants = {ORIGINAL: site.original, **{c.name: c.call for c in chosen}}
        given: list[torch.Tensor | None] = []
        args, kwargs = remade((example.args, dict(example.kwargs)), copied)
        own = replace(example, args=args, kwargs=kwargs)
        calls = {name: prepared(call, own, given) for name, call in variants.items()}
    with kept_state(devices), unwarned(), nullcontext() if site.ready else as_called(own):
        return timed(calls, clock or clock_for(devices), budget_s)


def _parameters(place: Any) -> list[torch.Tensor]:
    return [p for group in getattr(place, "param_groups", ()) for p in group["params"]]


def timed(calls: dict[str, Call], clock: Clock, budget_s: float) -> dict[str, Timed]:
    """Time calls in turns; one that fails is left out, and says why."""
    found: dict[str, Timed] = {}
    peaks: dict[str, int | None] = {}
    for name, call in calls.items():
        try:
            call()  # compiles, picks algorithms, fills caches
            peaks[name] = clock.peak_bytes(call)
        except OutOfMemory:
            found[name] = Timed(failure="ran out of memory")
        except Exception as error:  # noqa: BLE001
            found[name] = Timed(failure=said(error))
    running = {name: call for name, call in calls.items() if name in peaks}
    try:
        times = clock.times(running, budget_s)
    except Exception as error:  # noqa: BLE001
        return {name: found.get(name, Timed(failure=said(error))) for name in calls}
    for name, values in times.items():
        low, high = interval(values)
        host_ns = clock.host_ns.get(name)
        found[name] = Timed(statistics.median(values), low, high, peaks[name], host_ns=host_ns)
    return {name: found[name] for name in calls if name in found}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which order statistics the true median lies with 95 % confidence."""
    ordered = sorted(values)
    n = len(ordered)
    # Binomial(n, 1/2): its mean and two standard deviations.
    reach = 0.98 * math.sqrt(n)
    low, high = math.floor(n / 2 - reach), math.ceil(n / 2 + reach)
    return ordered[max(low, 0)], ordered[min(high, n - 1)]


def prepared(call: Callable[..., Any], example: Example, given: list[torch.Tensor | None]) -> Call:
    """A call with its backward, to be repeated within `as_called`; gradients are not accumulated.

    Args:
        call: takes the example's arguments.
        example: of copies, which all variants share.
        given: what the backward begins with; drawn by the first variant that runs.
    """
    leaves = list(wanted(example).values())

    def run() -> None:
        tensors, _ = parts(call(*example.args, **example.kwargs))
        if not given:
            given.extend(random_gradients(tensors, example))
        pairs = [(t, g) for t, g in zip(tensors, given, strict=True) if g is not None]
        if pairs and leaves:
            differentiated([t for t, _ in pairs], leaves, [g for _, g in pairs])

    return run
