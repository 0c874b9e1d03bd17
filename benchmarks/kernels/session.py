"""All that needs a GPU, in order of worth, within a budget: to be cut off at any time and lose nothing.

    python -m benchmarks.kernels.session --budget-s 900 --out DIR

Each step writes its log, and results as it goes, under DIR; ``session.json`` there says what became of each.
``--only TEXT`` runs the steps with TEXT in their names, ``--list`` shows them. What a table runs is compiled
just before by all processors side by side. The full tables come last and take what time is left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Those first whose times were furthest from their goals, or were never measured.
FIRST = (
    "attention", "cross_entropy", "bias_act_norm", "norm", "paged_attention", "quant_matmul",
    "linear_cross_entropy", "softmax",
)  # fmt: skip
#: A step that has less time than this is not begun.
LEAST_S = 10.0
#: What compiling ahead takes beside its budget: to begin, and to end its processes.
ENDING_S = 15.0


@dataclass(frozen=True)
class Step:
    """One command and the longest that it may take, in seconds."""

    name: str
    command: tuple[str, ...]
    limit_s: float


def steps(out: Path, families: Sequence[str]) -> list[Step]:
    """Everything there is to do for these families, most valuable first."""
    ordered = [name for name in FIRST if name in families]
    ordered += [name for name in families if name not in FIRST]

    def bench(kind: str, ahead_s: float, limit_s: float, *options: str) -> list[Step]:
        ahead = ("benchmarks.kernels.ahead", *ordered, *options, "--budget-s", f"{ahead_s:.0f}")
        return [
            _step(f"ahead {kind}", ahead_s + ENDING_S, *ahead),
            *(
                _step(
                    f"{kind} {name}", limit_s,
                    "benchmarks.kernels", name, *options, "--jobs", "0", "--output", str(out),
                )
                for name in ordered
            ),
        ]  # fmt: skip

    return [
        _step("tests", 180, "pytest", "tests/kernels", "-m", "gpu and quick", "-q", "-n", "8"),
        _step("check", 120, "benchmarks.kernels.check", "--output", str(out / "check.json")),
        *bench("quick", 80, 30, "--quick"),
        _step(
            "grid", 205, "benchmarks.kernels", "--grid", "--budget-s", "200", "--output", str(out)
        ),
        _step("tune attention", 100, "benchmarks.kernels.tune_attention", "--budget-s", "75"),
        _step(
            "tune rows", 140, "benchmarks.kernels.tune_rows", "--budget-s", "110",
            "--output", str(out / "tune_rows.json"),
        ),
        _step(
            "tune paged_attention", 60, "benchmarks.kernels.tune_paged_attention", "--budget-s", "40",
            "--output", str(out / "tune_paged_attention.json"),
        ),
        _step(
            "tune quant", 80, "benchmarks.kernels.tune_quant", "--budget-s", "60",
            "--output", str(out / "tune_quant.json"),
        ),
        _step(
            "sanitize", 150, "benchmarks.kernels.sanitize", "--budget-s", "140",
            "--output", str(out / "sanitizer"),
        ),
        *bench("full", 150, 150),
    ]  # fmt: skip


def _step(name: str, limit_s: float, module: str, *arguments: str) -> Step:
    return Step(name, (sys.executable, "-m", module, *arguments), limit_s)


def run(plan: Sequence[Step], budget_s: float, out: Path) -> list[dict[str, Any]]:
    """Run the steps one after another; what became of each, as it is written to ``session.json``."""
    out.mkdir(parents=True, exist_ok=True)
    stop = time.monotonic() + budget_s
    done: list[dict[str, Any]] = []
    for step in plan:
        left_s = stop - time.monotonic()
        entry: dict[str, Any] = {"step": step.name, "command": step.command, "outcome": "no time left"}
        if left_s >= min(LEAST_S, step.limit_s):
            entry |= _run(step, min(step.limit_s, left_s), out / f"{step.name.replace(' ', '_')}.log")
        done.append(entry)
        (out / "session.json").write_text(json.dumps(done, indent=1))
        print(f"{entry['outcome']:12} {entry.get('seconds', 0):5.0f} s  {step.name}", flush=True)
        if entry["outcome"].startswith("failed"):
            print("".join(f"    {line}\n" for line in entry["tail"]), end="", flush=True)
    return done


def _run(step: Step, limit_s: float, log: Path) -> dict[str, Any]:
    start = time.monotonic()
    with log.open("w") as said:
        # A group of its own, so that what the step started goes with it.
        process = subprocess.Popen(
            step.command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
            outcome = "done" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            outcome = "cut off"
    tail = log.read_text(errors="replace").splitlines()[-12:]
    return {"outcome": outcome, "seconds": time.monotonic() - start, "tail": tail}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=900.0, help="for all steps together")
    parser.add_argument("--out", type=Path, default=Path("session"), help="folder for logs and results")
    parser.add_argument("--only", default="", metavar="TEXT", help="steps whose name holds TEXT")
    parser.add_argument("--list", action="store_true", help="show the steps and run none")
    args = parser.parse_args()
    from advisor.kernels.bench.run import timed_families

    plan = [step for step in steps(args.out, timed_families()) if args.only in step.name]
    if args.list:
        for step in plan:
            print(f"{step.limit_s:4.0f} s at most  {step.name:28} {' '.join(step.command[1:])}")
        return
    done = run(plan, args.budget_s, args.out)
    sys.exit(any(entry["outcome"].startswith("failed") for entry in done))


if __name__ == "__main__":
    main()
