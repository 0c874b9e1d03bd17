"""A finding: what a rule has found in one loop, with the change that it proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from advisor.advice.edits import Edit

if TYPE_CHECKING:
    from advisor.advice.replay import Replay

#: A saving below this share of the step is not worth a reader's time.
NEGLIGIBLE = 0.003
#: At most so many findings are played together for the combined saving.
TOGETHER = 5


@dataclass(frozen=True, eq=False)
class Finding:
    """What a rule says of one loop. The saving is not the rule's to tell: the replay of `edits` gives it.

    Attributes:
        title: one line with the loop's own figures: "explicit attention: 96 softmax kernels take
            31 % of the step".
        evidence: kernels, operators, modules and figures that it rests on, a line each, worst first.
        edits: the change as the replay plays it; empty where no saving can be told.
        fix: the exact change in Lightning's terms, as code.
        fix_torch: the same for a plain PyTorch loop; empty where it is the same.
        risk: what may change besides the speed; empty for nothing.
        confidence: ``measured`` (from figures of this very run), ``modelled`` (a formula with a source) or
            ``heuristic``.
        swap: kind of `advisor.swap` that makes the change by itself, or None.
        note: what a reader should know of the saving: why it is nothing, say.
        wrong: what the loop computes is not what it is meant to; such findings come before all others.
    """

    title: str
    evidence: Sequence[str]
    edits: Sequence[Edit]
    fix: str
    fix_torch: str = ""
    risk: str = ""
    confidence: str = "modelled"
    swap: str | None = None
    note: str = ""
    wrong: bool = False


@dataclass(frozen=True)
class Saving:
    """Step time saved, in ns a step.

    `low_ns` and `high_ns` bound what will be measured, by the finding's pessimistic and optimistic cases, by
    what is known of the host's speed, and by what two measurements of one loop differ by. So `low_ns` of a
    small saving is below zero.
    """

    low_ns: float
    likely_ns: float
    high_ns: float


@dataclass(frozen=True, eq=False)
class Advice:
    """A finding with the rule it is of and its saving; None where none can be told."""

    rule: str
    finding: Finding
    saving: Saving | None


@dataclass(frozen=True, eq=False)
class Advised:
    """All that the rules say of one loop.

    Attributes:
        advice: findings, those of wrong results first, then the largest likely saving.
        together: what the top findings save when all are done, with their rules; None without any.
        passed: rules that looked and found nothing to say.
        not_applicable: rules whose subject the loop does not have, or the trace does not tell.
        failed: rules that broke on this trace, with the error's text.
        replay: the steps that savings were played on; None where there was nothing to play.
    """

    advice: list[Advice] = field(default_factory=list)
    together: tuple[Saving, list[str]] | None = None
    passed: list[str] = field(default_factory=list)
    not_applicable: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    replay: Replay | None = None
