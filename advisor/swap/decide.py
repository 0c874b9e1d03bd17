"""Which candidate each site gets, if any."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from advisor.swap.ahead import Ahead
from advisor.swap.clocks import Clock
from advisor.swap.covers import settled
from advisor.swap.measure import ORIGINAL, Timed, measure
from advisor.swap.site import Candidate, Outcome, Site, Trial
from advisor.swap.tensors import size_bytes
from advisor.swap.verify import Known, said, verify

log = logging.getLogger(__name__)

#: Of the time for trying, what the compiler may take before the first site is tried.
COMPILING_SHARE = 0.6

#: Why a candidate is out whose kernels came too late.
LATE = "not compiled within the time for trying; Triton keeps its kernels, so the next run has them"

#: Of the device's saving, what a candidate may cost the host: a host that runs ahead has time to spare.
MAX_HOST_SHARE = 3.0

#: Of the run's peak, what a site may add to it: whole steps are held to the limit, and allow noise of 1 %.
PEAK_SHARE = 0.005

#: An optimizer is tried fast and may be a tenth of the step; the loss and attention hold the most memory.
_ORDER = ("optimizer", "loss", "attention")

#: Sites done, sites in all, what is being tried.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Terms:
    """On what terms a candidate is taken.

    Attributes:
        deterministic: only what gives the same bits in every run.
        allow_memory: take what needs more memory too.
        min_gain: share of the original's time that must be saved, beyond the noise of both.
        min_saving_ns: time of a step that a site must save at all.
        host_counts: whether the host's time is the loop's, as it may be unless whole steps are replayed.
        memory_slack_bytes: growth of the peak that does not count, such as a norm's statistics.
        run_peak_bytes: of the loop's memory, of which a site may add `PEAK_SHARE`; None if it is not known.
        budget_s: for trying all sites, from when their kernels are compiled or `COMPILING_SHARE` of it has
            been waited for that; those left over are left as they are.
        measure_s: for timing one site.
        clock: the device's unless given.
        now_s: reads the budget's clock.
    """

    deterministic: bool = False
    allow_memory: bool = False
    min_gain: float = 0.02
    min_saving_ns: float = 2_000.0
    host_counts: bool = True
    memory_slack_bytes: int = 2**20
    run_peak_bytes: int | None = None
    budget_s: float = 10.0
    measure_s: float = 0.2
    clock: Clock | None = None
    now_s: Callable[[], float] = time.monotonic


def decide(
    sites: Sequence[Site], terms: Terms | None = None, progress: Progress | None = None
) -> list[Outcome]:
    """Prove and time every site's candidates and choose among them; nothing is changed.

    What takes how long is logged for debugging, as the attribute `swap` of the records.

    Args:
        sites: in the order of `most_worthwhile_first`, for when the time runs out.
        terms: on which a candidate is taken.
        progress: told before each site.

    Returns:
        One outcome a site, in their order.
    """
    terms = terms or Terms()
    found: dict[int, Outcome] = {}
    with Ahead(sites) as ahead:
        if ahead.begun:
            start_s = time.monotonic()
            ahead.wait(COMPILING_SHARE * terms.budget_s)
            spent = {"compiling_s": time.monotonic() - start_s}
            log.debug("compiled ahead: %s", spent, extra={"swap": spent})
        # Once all is at hand: on a machine that has run none of it yet, that alone takes seconds.
        end = terms.now_s() + terms.budget_s
        # Those that are still being compiled come last.
        for i in sorted(range(len(sites)), key=lambda i: bool(ahead.late(sites[i]))):
            if progress is not None:
                progress(len(found), len(sites), f"{sites[i].kind}: {sites[i].what}")
            found[i] = _tried(sites[i], ahead, terms, end)
    gc.collect()  # what an exception, say, has kept alive of the device's memory
    return settled([found[i] for i in range(len(sites))])


def _tried(site: Site, ahead: Ahead, terms: Terms, end: float) -> Outcome:
    if terms.now_s() > end:
        return Outcome(site, None, f"not tried: the {terms.budget_s:g} s for trying were used up")
    try:
        if ahead.late(site):
            ahead.wait((end - terms.now_s()) / 2)
        late = {c.name: Trial(c.name, refused=LATE) for c in ahead.late(site)}
        return decide_one(site, terms, late)
    except Exception as error:  # noqa: BLE001
        return Outcome(site, None, f"could not be tried: {said(error)}")


def most_worthwhile_first(sites: Sequence[Site]) -> list[Site]:
    """Sites in the order in which to try them: kinds that gain much for little trying, then by size."""

    def order(site: Site) -> tuple[int, int]:
        first = _ORDER.index(site.kind) if site.kind in _ORDER else len(_ORDER)
        inputs = [size_bytes((example.args, dict(example.kwargs))) for example in site.examples[:1]]
        return first, -sum(inputs) * site.calls_per_step

    return sorted(sites, key=order)


def decide_one(site: Site, terms: Terms, known_trials: Mapping[str, Trial] | None = None) -> Outcome:
    """Try one site's candidates; those of `known_trials`, by name, are not tried again."""
    if not site.candidates:
        return Outcome(site, None, "no candidate serves it")
    known = Known(site)
    prove = site.prove or (
        lambda candidate: verify(site, candidate, deterministic=terms.deterministic, known=known)
    )
    start_s = time.monotonic()
    given = known_trials or {}
    trials = {c.name: given.get(c.name) or prove(c) for c in site.candidates}
    known.let_go()
    proven_s = time.monotonic()
    left = [c for c in site.candidates if not trials[c.name].refused]
    times = measure(site, left, clock=terms.clock, budget_s=terms.measure_s) if left else {}
    spent = {"proving_s": proven_s - start_s, "timing_s": time.monotonic() - proven_s}
    log.debug("%s: %s", site.what, spent, extra={"swap": {"kind": site.kind, "what": site.what, **spent}})
    return _chosen(site, trials, left, times, terms)


def _chosen(
    site: Site, trials: dict[str, Trial], left: list[Candidate], times: dict[str, Timed], terms: Terms
) -> Outcome:
    for candidate in left:
        _note(trials[candidate.name], times[ORIGINAL], times[candidate.name], site, terms)
    left = [c for c in left if not trials[c.name].refused]
    done = list(trials.values())
    if not left:
        return Outcome(site, None, _why_none(done), done)
    best = min(left, key=lambda c: _cost_ns(times[c.name], terms))
    trial = trials[best.name]
    gain = (trial.original_ns or 0.0) / (trial.time_ns or 1.0)
    return Outcome(site, best, f"{gain:.2f} times as fast", done)


def _note(trial: Trial, original: Timed, ours: Timed, site: Site, terms: Terms) -> None:
    """Enter times and memory into a trial, and refuse it if they are no gain."""
    trial.memory_bytes, trial.original_memory_bytes = ours.peak_bytes, original.peak_bytes
    if original.failure or ours.failure:
        trial.refused = ours.failure or f"the original could not be timed: {original.failure}"
        return
    trial.time_ns, trial.original_ns = ours.median_ns, original.median_ns
    trial.refused = (
        slower(ours, original, site.calls_per_step, terms)
        or busier(ours, original, terms)
        or fatter(ours, original, site.calls_per_step, terms)
    )


def _cost_ns(ours: Timed, terms: Terms) -> float:
    """What ranks those that are a gain: the device's time, and of the host's as much as may show."""
    host_ns = ours.host_ns or 0.0
    return ours.median_ns + (host_ns / MAX_HOST_SHARE if terms.host_counts else 0.0)


def busier(ours: Timed, original: Timed, terms: Terms) -> str:
    """Why what the device saves costs the host too much; empty if it does not, or does not count."""
    if not terms.host_counts or ours.host_ns is None or original.host_ns is None:
        return ""
    more, saved = ours.host_ns - original.host_ns, original.median_ns - ours.median_ns
    if more <= MAX_HOST_SHARE * saved:
        return ""
    return f"saves the device {saved / 1e3:.0f} µs and costs the host {more / 1e3:.0f} µs more to launch"


def slower(ours: Timed, original: Timed, calls: int, terms: Terms) -> str:
    """Why a time is no gain; empty if it is."""
    saved = original.median_ns - ours.median_ns
    if saved <= 0:
        return f"slower: takes {ours.median_ns / original.median_ns:.2f} times as long"
    if ours.high_ns >= original.low_ns or saved < terms.min_gain * original.median_ns:
        return f"no faster beyond the noise: {saved / original.median_ns:.1%} less time"
    if saved * calls < terms.min_saving_ns:
        return f"saves {saved * calls / 1e3:.1f} µs a step, too little to be worth a change"
    return ""


def fatter(ours: Timed, original: Timed, calls: int, terms: Terms) -> str:
    """Why a peak of memory is too high; empty if it is not, or not known."""
    if ours.peak_bytes is None or original.peak_bytes is None or terms.allow_memory:
        return ""
    more = ours.peak_bytes - original.peak_bytes
    if more <= max(terms.memory_slack_bytes, original.peak_bytes // 50):
        return ""
    # All of a step's calls may be held on to until the backward.
    if more * calls <= PEAK_SHARE * (terms.run_peak_bytes or 0):
        return ""
    return f"needs {more / 2**20:.1f} MiB more memory than the original"


def _why_none(trials: list[Trial]) -> str:
    if len(trials) == 1:
        return trials[0].refused
    return "; ".join(f"{t.candidate}: {t.refused}" for t in trials)
