"""What a run tells of its swaps: one line on the terminal, and the report's part."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from msgspec.structs import replace

from advisor.report import format as fmt
from advisor.report.model import Swaps, SwapSite, SwapSteps

#: Ways out of what a step's graph is given up for, by a word of how that is told.
_WAYS_OUT = (
    ("keep changing", "What differs from step to step, such as a list that grows, is for on_train_batch_end"),
    ("slow unless compiled", "torch.compile(model) is for such a step"),
    ("replayed, its", "ADVISOR_SWAP_REPLAY=0 in the environment leaves steps unreplayed"),
    ("gradients of gradients", 'swap=["optimizer"] leaves the step alone'),
    ("", "swap=None trains without swaps"),
)


def told(
    asked: Sequence[str],
    sites: Sequence[SwapSite],
    steps: SwapSteps | None,
    *,
    kept: bool,
    why: str,
    against: Sequence[str] = (),
    pause_s: float | None,
    remarks: Sequence[str],
) -> Swaps:
    """The report's part on swaps.

    Args:
        asked: kinds.
        sites: as they were decided, each by itself.
        steps: whole steps without and with; None where they were not compared.
        kept: whether what was chosen stays in force.
        why: where it does not, why.
        against: what stood against more of it, comparison by comparison.
        pause_s: for how long training was held.
        remarks: what else there is to say.
    """
    step_ms = steps.eager_p50_ms if steps else None
    verdict = why if why.startswith("nothing ") else f"nothing was swapped: {why}"
    if kept:
        verdict = f"{sum(site.chosen is not None for site in sites)} of {counted(len(sites))} swapped"
        if steps is not None:
            verdict += (
                f": a step takes {fmt.duration(steps.swapped_p50_ms)} instead of {fmt.duration(step_ms)}"
            )
        if against:
            verdict += f" ({against[-1]})"
    return Swaps(
        asked=list(asked),
        verdict=verdict,
        kept=kept,
        sites=[_share(site if kept else _unkept(site, why), step_ms) for site in sites],
        steps=steps,
        pause_s=pause_s,
        remarks=[*(f"whole steps were compared anew: {why}" for why in against), *remarks],
    )


def _unkept(site: SwapSite, why: str) -> SwapSite:
    """A site whose candidate won by itself and lost the step."""
    if site.chosen is None:
        return site
    by_itself = "" if site.kind == "replay" else f"{site.chosen} is {site.reason} by itself, "
    reason = f"{by_itself}not kept: {why}"
    return replace(site, chosen=None, swapped_ms_per_step=None, permanent="", reason=reason)


def left_out(site: SwapSite, why: str) -> SwapSite:
    """A site that whole steps were compared without."""
    return _unkept(site, why)


def given_up(site: SwapSite, why: str) -> SwapSite:
    """A site of the step's graph, where that was given up; others as they are."""
    return _unkept(site, why) if site.mechanism == "pattern" else site


def left_as_it_is(why: str, then: str) -> str:
    """The one warning of a step whose graph is given up: where, why, what becomes of the rest, a way out."""
    way_out = next(way for word, way in _WAYS_OUT if word in why)
    return f"swap: training_step runs as it is written, since {why}; {then}. {way_out}"


def _share(site: SwapSite, step_ms: float | None) -> SwapSite:
    known = site.eager_ms_per_step is not None and step_ms
    return replace(site, step_fraction=site.eager_ms_per_step / step_ms if known else None)  # type: ignore[operator]


def counted(count: int, what: str = "site") -> str:
    """``1 site``, ``7 sites``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def progress(done: int, count: int, what: str) -> None:
    """One line that writes over itself, on a terminal only."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            line = fmt.shorten(fmt.one_line(f"advisor: swap: {done + 1} of {count}: {what}"), 78)
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def progress_over() -> None:
    """Clear the line of `progress`."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
