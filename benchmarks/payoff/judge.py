"""Hold what the advisor predicts from a trace against what the fix brought. Needs no torch and no GPU."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: Points of step time: the median and worst error that are aimed at, and what may be promised for nothing.
MEDIAN_POINTS, WORST_POINTS, NOTHING_POINTS = 8.0, 20.0, 5.0
INSIDE_SHARE = 0.8
#: A well-tuned loop may have so many findings above so much of the step.
FALSE_ALARMS, ALARM_POINTS = 1, 3.0
PAIRS, RULES, WITHOUT_GAIN = 16, 10, 4


def analyze(trace: Path, baseline_ms: float) -> dict[str, Any]:
    """The advisor's report on a trace, as its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "advisor.cli", "analyze", str(trace), "--quiet", "--force"]
        command += ["-o", f"{folder}/report.html", "--json", f"{folder}/report.json"]
        command += ["--baseline-step-ms", str(baseline_ms)]
        # Roofs that were measured on the machine that judges may be another machine's.
        environment = {**os.environ, "TRAINING_ADVISOR_CACHE": folder}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            raise RuntimeError(f"{trace.name}: {done.stderr.strip()[-2000:]}")
        return json.loads(Path(folder, "report.json").read_text())


def verdict(case: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """Prediction beside outcome, in points of step time.

    The prediction is that of the rule that the case names, by its largest finding. A rule that says nothing
    predicts nothing: right where the fix is not expected to gain, and what came is within `NOTHING_POINTS`.

    Args:
        case: an entry of ``payoff.json``.
        report: the advisor's, told with the case's ``before_ms`` as baseline.
    """
    findings = report["findings"]
    if not case["rule"]:
        alarms = [f for f in findings if _points(f) > ALARM_POINTS]
        return {"alarms": [{"rule": f["rule"], "points": round(_points(f), 1)} for f in alarms]}
    before, after = case["before_ms"], case["after_ms"]
    realised = (before - after) / before * 100
    own = [f for f in findings if f["rule"] == case["rule"] and f["saving_ms"]]
    best = max(own, key=_points, default=None)
    predicted = _points(best) if best else 0.0
    low, high = _range(best, before) if best else (-NOTHING_POINTS, NOTHING_POINTS)
    found: dict[str, Any] = {
        "realised": round(realised, 1),
        "predicted": round(predicted, 1),
        "low": round(low, 1),
        "high": round(high, 1),
        "error": round(predicted - realised, 1),
        "inside": low <= realised <= high and (best is not None or not case["gains"]),
        "silent": best is None,
    }
    if case["nothing_from"]:
        empty = [f for f in findings if _is_of(f["rule"], case["nothing_from"])]
        worst = max(empty, key=_points, default=None)
        found["promised"] = round(_points(worst), 1) if worst else 0.0
        found["promised_by"] = worst["rule"] if worst and _points(worst) > 0 else None
    return found


class Figure(NamedTuple):
    """A figure, what it should be, and whether it is."""

    name: str
    value: float
    goal: str
    reached: bool


def figures(cases: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """The benchmark's figures over all judged cases.

    Args:
        cases: entries of ``payoff.json``, each with its ``verdict``.
    """
    pairs = [case for case in cases.values() if case["rule"]]
    verdicts = [case["verdict"] for case in pairs]
    errors = [abs(case["verdict"]["error"]) for case in pairs if not case["range_only"]]
    promised = [found["promised"] for found in verdicts if "promised" in found]
    alarms = [len(case["verdict"]["alarms"]) for case in cases.values() if not case["rule"]]
    rules, idle = len({case["rule"] for case in pairs}), sum(not case["gains"] for case in pairs)
    found = [
        Figure("pairs", len(pairs), f"≥ {PAIRS}", len(pairs) >= PAIRS),
        Figure("rules", rules, f"≥ {RULES}", rules >= RULES),
        Figure("pairs without gain", idle, f"≥ {WITHOUT_GAIN}", idle >= WITHOUT_GAIN),
    ]
    if errors:
        median, worst = statistics.median(errors), max(errors)
        inside = statistics.mean(one["inside"] for one in verdicts)
        found += [
            Figure("median error, points", round(median, 1), f"≤ {MEDIAN_POINTS:g}", median <= MEDIAN_POINTS),
            Figure("worst error, points", round(worst, 1), f"≤ {WORST_POINTS:g}", worst <= WORST_POINTS),
            Figure("inside the range", round(inside, 2), f"≥ {INSIDE_SHARE:g}", inside >= INSIDE_SHARE),
        ]
    if promised:
        most = max(promised)
        goal = f"≤ {NOTHING_POINTS:g}"
        found.append(Figure("most promised for nothing, points", most, goal, most <= NOTHING_POINTS))
    if alarms:
        most_alarms = max(alarms)
        name = f"most findings above {ALARM_POINTS:g} % in a well-tuned loop"
        found.append(Figure(name, most_alarms, f"≤ {FALSE_ALARMS}", most_alarms <= FALSE_ALARMS))
    return found


def line(name: str, case: Mapping[str, Any]) -> str:
    """A case and its verdict, for the terminal."""
    found = case["verdict"]
    if not case["rule"]:
        alarms = ", ".join(f"{one['rule']} {one['points']:.1f} %" for one in found["alarms"]) or "nothing"
        return f"{name:28} {case['before_ms']:8.2f} ms  above {ALARM_POINTS:g} %: {alarms}"
    where = "inside " if found["inside"] else "OUTSIDE"
    rule = f"{case['rule']}{' is silent' if found['silent'] else ''}"
    promise = f"  for nothing {found['promised']:.1f} ({found['promised_by']})" if "promised" in found else ""
    return (
        f"{name:28} {case['before_ms']:8.2f} -> {case['after_ms']:8.2f} ms"
        f"  realised {found['realised']:6.1f} %"
        f"  predicted {found['predicted']:6.1f} % ({found['low']:.1f} to {found['high']:.1f})"
        f"  error {found['error']:+6.1f}  {where}  {rule}{promise}"
    )


def _points(finding: Mapping[str, Any]) -> float:
    return (finding["saving_fraction"] or 0.0) * 100


def _range(finding: Mapping[str, Any], before_ms: float) -> tuple[float, float]:
    saving = finding["saving_ms"]
    return saving["low"] / before_ms * 100, saving["high"] / before_ms * 100


def _is_of(rule: str, names: Iterable[str]) -> bool:
    return any(rule == name or rule.partition(".")[0] == name for name in names)
