"""Run the rules over a loop, and tell what each finding saves by playing the step with its edits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from advisor.advice.edits import Edit
from advisor.advice.finding import NEGLIGIBLE, TOGETHER, Advice, Advised, Finding, Saving
from advisor.advice.loop import Loop
from advisor.advice.replay import Outcome, Replay
from advisor.advice.rule import NotApplicable, Rule, all_rules
from advisor.advice.wording import duration
from advisor.roofline.analysis import Analysis


def advise(analysis: Analysis, rules: Sequence[Rule] | None = None) -> Advised:
    """All that the rules say of one loop.

    Without steps or without device work there is nothing to play, and the result is empty.

    Args:
        analysis: the joined trace with costs and bounds.
        rules: those to ask; all by default.
    """
    if analysis.timeline.cpu_only or not analysis.step_count or not len(analysis.timeline.launches):
        return Advised()
    loop = Loop(analysis, Replay(analysis))
    found = Advised(replay=loop.replay)
    for one in all_rules() if rules is None else rules:
        try:
            kept = [advice for finding in one.audit(loop) if (advice := _weigh(one, finding, loop))]
        except NotApplicable:
            found.not_applicable.append(one.id)
            continue
        except Exception as error:  # noqa: BLE001  one rule that an odd trace breaks must not cost the report
            found.failed.append((one.id, f"{type(error).__name__}: {error}"))
            continue
        found.advice.extend(kept)
        if not kept:
            found.passed.append(one.id)
    found.advice.sort(key=_rank)
    return replace(found, together=_together(found.advice, loop))


def _rank(advice: Advice) -> tuple[bool, float, str]:
    """What comes first: wrong results, then the largest likely saving."""
    return (not advice.finding.wrong, -(advice.saving.likely_ns if advice.saving else 0.0), advice.rule)


def saving_of(edits: Sequence[Edit], replay: Replay) -> Saving:
    """What a change saves, by playing the step with it; what two measurements differ by is in the range."""
    return _saving(replay.outcome(edits), replay)


def _saving(found: Outcome, replay: Replay) -> Saving:
    before = replay.step_ns()
    return Saving(
        low_ns=before - found.longest_ns - found.noise_ns,
        likely_ns=before - found.likely_ns,
        # No noise makes a step shorter than nothing.
        high_ns=min(before - found.shortest_ns + found.noise_ns, before),
    )


def _weigh(one: Rule, finding: Finding, loop: Loop) -> Advice | None:
    if not finding.edits:
        return Advice(one.id, finding, None)
    found = loop.replay.outcome(finding.edits)
    worth = NEGLIGIBLE * loop.step_ns
    at_best, likely = loop.step_ns - found.shortest_ns, loop.step_ns - found.likely_ns
    # A change that likely costs time is no advice.
    if (at_best < worth or likely < -worth) and not finding.note:
        return None
    return Advice(one.id, _with_noise(finding, found.noise_ns, likely, worth), _saving(found, loop.replay))


def _with_noise(finding: Finding, noise_ns: float, likely_ns: float, worth_ns: float) -> Finding:
    """The finding, which says so where two runs of the loop may differ by more than it likely saves."""
    if not worth_ns < likely_ns < noise_ns:
        return finding
    told = f"within this loop's noise: two runs of it may differ by {duration(noise_ns)}"
    return replace(finding, note=f"{told}; {finding.note}" if finding.note else told)


def _together(advice: Sequence[Advice], loop: Loop) -> tuple[Saving, list[str]] | None:
    """What the top findings save when all are done, without those that add nothing to the ones before."""
    worth = NEGLIGIBLE * loop.step_ns
    edits: list[Edit] = []
    rules: list[str] = []
    step_ns = loop.step_ns
    for one in advice:
        if one.finding.wrong:
            continue
        if len(rules) == TOGETHER or one.saving is None or one.saving.likely_ns <= worth:
            break
        with_it = [*edits, *one.finding.edits]
        played_ns = loop.replay.step_ns(with_it)
        if rules and played_ns > step_ns - worth:
            continue
        edits, step_ns = with_it, played_ns
        rules.append(one.rule)
    return (saving_of(edits, loop.replay), rules) if rules else None
