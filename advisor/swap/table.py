"""What became of each site, as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from advisor.report.format import few
from advisor.swap.find import Skipped
from advisor.swap.site import Outcome, Trial


def table(outcomes: Sequence[Outcome], skipped: Iterable[Skipped] = ()) -> str:
    """One line a site, what was kept first, then what was left alone and why."""
    kept = [o for o in outcomes if o.chosen is not None]
    left = [o for o in outcomes if o.chosen is None]
    lines = [f"swapped: {_counted(kept)}" if kept else "swapped: nothing"]
    lines += [f"  {_site(o)} -> {o.chosen.name if o.chosen else ''}: {o.reason}{_figures(o)}" for o in kept]
    if left:
        lines += ["left as it is:", *(f"  {_site(o)}: {o.reason}" for o in left)]
    passed = list(skipped)
    if passed:
        lines += ["passed over:", *(f"  {s.where or 'the model'} ({s.what}): {s.reason}" for s in passed)]
    return "\n".join(lines)


def places(where: Sequence[str]) -> str:
    """The first places, and how many more there are."""
    return few([path or "the model" for path in where])


def _counted(kept: Sequence[Outcome]) -> str:
    count = sum(len(o.site.where) for o in kept)
    return f"{count} place{'s' if count > 1 else ''}"


def _site(outcome: Outcome) -> str:
    return f"{outcome.site.kind} {places(outcome.site.where)} ({outcome.site.what})"


def _figures(outcome: Outcome) -> str:
    parts = _parts(outcome.trial) if outcome.trial is not None else []
    return f" ({'; '.join(parts)})" if parts else ""


def _parts(trial: Trial) -> list[str]:
    parts = []
    if trial.time_ns is not None and trial.original_ns is not None:
        parts.append(f"{trial.original_ns / 1e3:.1f} -> {trial.time_ns / 1e3:.1f} µs")
    if trial.error is not None and trial.eager_error is not None:
        parts.append(f"error {trial.error:.1e}, before {trial.eager_error:.1e}")
    if trial.memory_bytes is not None and trial.original_memory_bytes is not None:
        parts.append(f"{trial.original_memory_bytes / 2**20:.1f} -> {trial.memory_bytes / 2**20:.1f} MiB")
    return parts
