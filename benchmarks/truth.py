"""Modelled costs against hardware counters: how much of the time agrees, and where it does not.

    python benchmarks/truth.py                                    the project's own captures
    python benchmarks/truth.py TRACE COUNTERS.csv.gz --worst 30
    python benchmarks/truth.py --by-op                            the worst operators, time-weighted

Captures are made by `benchmarks/counters/capture.py`. Returns 1 if a figure is below its goal.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from advisor.report.counters import join_counters, modelled
from advisor.roofline.agreement import Agreement, agreement
from advisor.roofline.analysis import analyse_timeline
from advisor.roofline.counters import base_name, read_counters
from advisor.trace.events import KERNEL
from advisor.trace.link import load

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"


@dataclass(frozen=True)
class Goal:
    """A figure and the least share of the time that it should reach."""

    name: str
    attribute: str
    least: float


GOALS = (
    Goal("kernel time with a cost", "costed", 0.99),
    Goal("tensor-core FLOPs within 2 %", "flops", 0.98),
    Goal("bytes read within 1.25x, kernels over 64 MB", "read_within_1_25", 0.90),
    Goal("bytes read within 1.5x, kernels over 64 MB", "read_within_1_5", 0.97),
    Goal("bound as the counters' intensity says", "bound", 0.97),
)


@dataclass(frozen=True)
class Outcome:
    """A capture judged.

    Attributes:
        agreement: the figures.
        labels: by pair, operator and kernel.
        kernels, joined: kernels in the trace, and those that have counters.
    """

    agreement: Agreement
    labels: list[tuple[str, str]]
    kernels: int
    joined: int

    def short_of(self) -> list[Goal]:
        """Goals that are not reached; a figure without anything to judge reaches none."""
        return [goal for goal in GOALS if (getattr(self.agreement, goal.attribute) or 0.0) < goal.least]


def judge(trace: Path, counters: Path) -> Outcome:
    """Analyse a trace against the datasheet's roofs and compare each launch with its counters."""
    analysis = analyse_timeline(load(str(trace)), roofs="datasheet")
    joined = join_counters(analysis, read_counters(counters)).counted
    rows, names = analysis.timeline.launches, analysis.timeline.trace.names
    order = sorted(joined)
    labels = [
        (analysis.timeline.op_name(int(rows.op[i])) or "no operator", base_name(names[rows.name[i]]))
        for i in order
    ]
    pairs = [(modelled(analysis, i), joined[i]) for i in order]
    return Outcome(agreement(pairs, analysis.device), labels, int((rows.kind == KERNEL).sum()), len(order))


def own_captures() -> Iterator[tuple[Path, Path]]:
    """Traces that ship with the project and have counters beside them."""
    for counters in sorted(DATA.glob("*_counters.csv.gz")):
        yield counters.with_name(counters.name.replace("_counters.csv.gz", ".json.gz")), counters


def show(trace: Path, outcome: Outcome, worst: int, by_op: bool) -> None:
    found = outcome.agreement
    print(f"{trace.name}: {outcome.joined} of {outcome.kernels} kernels with counters")
    for goal in GOALS:
        share = getattr(found, goal.attribute)
        verdict = "" if share is not None and share >= goal.least else "   short of the goal"
        print(f"  {goal.name:46} {'-' if share is None else f'{share:7.2%}'} ({goal.least:.0%}){verdict}")
    if found.read_ratios:
        low, median, high = found.read_ratios
        print(f"  modelled over counted bytes read: median {median:.3f}, 5-95 % {low:.2f}-{high:.2f}")
    if by_op:
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for one in found.disagreements:
            sums[(outcome.labels[one.index][0], one.what)] += one.time_ns
        for (op, what), time_ns in sorted(sums.items(), key=lambda item: -item[1])[: worst or 30]:
            print(f"    {time_ns / 1e3:9.1f} us  {what:10}  {op}")
        return
    for one in found.disagreements[:worst]:
        op, kernel = outcome.labels[one.index]
        figures = f"{_text(one.modelled)} for {_text(one.counted)}"
        print(f"    {one.time_ns / 1e3:9.1f} us  {one.what:10}  {figures:24}  {op}  {kernel[:60]}")


def _text(figure: float | str | None) -> str:
    return f"{figure:.4g}" if isinstance(figure, float) else str(figure)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("trace", nargs="?", type=Path)
    options.add_argument("counters", nargs="?", type=Path)
    options.add_argument("--worst", type=int, default=0, help="list this many disagreements")
    options.add_argument("--by-op", action="store_true", help="add disagreements up by operator")
    args = options.parse_args()
    if (args.trace is None) != (args.counters is None):
        options.error("give a trace and its counters, or neither")
    captures = [(args.trace, args.counters)] if args.trace else list(own_captures())
    if not captures:
        options.error(f"no *_counters.csv.gz in {DATA}: give a trace and its counters")
    short = False
    for trace, counters in captures:
        outcome = judge(trace, counters)
        show(trace, outcome, args.worst, args.by_op)
        short = short or bool(outcome.short_of())
    sys.exit(short)


if __name__ == "__main__":
    main()
