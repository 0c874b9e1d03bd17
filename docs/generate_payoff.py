"""Write the table of predicted and realised savings into ``docs/advice.md``.

Run ``python docs/generate_payoff.py`` after `python -m benchmarks.payoff` has written
``benchmarks/results/payoff.json``. Without that file the page says that nothing was measured yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marked import between

TARGET = Path(__file__).with_name("advice.md")
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "payoff.json"
BEGIN, END = "<!-- payoff: from here -->", "<!-- payoff: to here -->"
_ABSENT = "Not yet measured: `benchmarks/results/payoff.json` does not exist."


def render(page: str, results: Mapping[str, Any] | None) -> str:
    """The page with the part between its two marks made anew.

    Args:
        page: its present text.
        results: the content of ``payoff.json``; None where there is none.

    Raises:
        ValueError: the page lacks a mark.
    """
    return between(page, BEGIN, END, _ABSENT if results is None else _table(results))


def load() -> dict[str, Any] | None:
    """The results, if there are any."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None


def _table(results: Mapping[str, Any]) -> str:
    cases = results["cases"]
    pairs = {name: case for name, case in cases.items() if case["rule"]}
    tuned = {name: case for name, case in cases.items() if not case["rule"]}
    versions = results["versions"]
    parts = [
        f"Measured on {results['date']} on {results['device']} with torch {versions['torch']}, "
        f"Lightning {versions['lightning']}, by `{results['command']}`. Savings are in percent of the step.",
        "",
        "| figure | measured | aim | |",
        "|---|---|---|---|",
        *(
            f"| {figure['name']} | {figure['value']:g} | {figure['goal']} | "
            f"{'reached' if figure['reached'] else '**not reached**'} |"
            for figure in results["figures"]
        ),
        "",
        "| pair | the fault | the fix | rule | step, ms | realised | predicted | range | |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(name, case) for name, case in pairs.items()),
    ]
    remarks = {case["range_only"] for case in pairs.values() if case["range_only"]}
    if remarks:
        parts += ["", *(f"Range only: {remark}." for remark in sorted(remarks))]
    if tuned:
        parts += ["", "| well-tuned loop | step, ms | findings above the limit |", "|---|---|---|"]
        parts += [
            f"| {case['title']} | {case['before_ms']:.2f} | {_alarms(case)} |" for case in tuned.values()
        ]
    return "\n".join(parts)


def _row(name: str, case: Mapping[str, Any]) -> str:
    found = case["verdict"]
    rule = f"[`{case['rule']}`](rules.md#{case['rule'].replace('.', '')})"
    predicted = "silent" if found["silent"] else f"{found['predicted']:.1f}"
    span = "" if found["silent"] else f"{found['low']:.1f} to {found['high']:.1f}"
    step = f"{case['before_ms']:.2f} → {case['after_ms']:.2f}"
    fix = case["fix"].replace("|", r"\|")
    remark = "" if found["inside"] else "outside"
    if case["range_only"]:
        remark = f"range only{', outside' if remark else ''}"
    return (
        f"| `{name}` | {case['title']} | {fix} | {rule} | {step} | {found['realised']:.1f} | {predicted} "
        f"| {span} | {remark} |"
    )


def _alarms(case: Mapping[str, Any]) -> str:
    return ", ".join(f"`{one['rule']}` {one['points']:.1f}" for one in case["verdict"]["alarms"]) or "none"


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8"), load()), encoding="utf-8")
