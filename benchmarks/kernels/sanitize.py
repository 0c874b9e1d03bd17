"""The kernels under NVIDIA's compute-sanitizer: accesses out of bounds, and races in shared memory.

    python -m benchmarks.kernels.sanitize [--families norm softmax] [--budget-s 240] [--output FILE]

Each tool runs the checks of `advisor kernels check` in a process of its own, PyTorch's memory cache off, so
that every tensor has bounds. Only kernels named as the bundled ones are instrumented. First a kernel that
writes out of bounds is run: a tool that does not see it proves nothing, and the outcome says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("memcheck", "racecheck")
#: Triton names a kernel as its function, and all of ours end so; PyTorch's are mangled C++ names.
FILTER = "kns=^_?[a-z][a-z0-9_]*_kernel$"
_SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) errors?"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed"),
}
_FINDING = re.compile(r"=+ ((?:Invalid|Error|Warning|Potential|Program hit|Misaligned|Address)[^\n]*)")
_UNUSABLE = re.compile(r"Device not supported|not supported on this|Unable to (?:find|initialize)[^\n]*")


@dataclass(frozen=True)
class Outcome:
    """What a tool said of one run.

    Attributes:
        tool: of `TOOLS`, or ``canary``.
        verdict: ``clean``, ``found`` (see `findings`), ``cut off`` or ``unusable``.
        errors: how many the tool counts; None where it came to no summary.
        findings: the first lines of its reports.
        seconds: how long it took.
    """

    tool: str
    verdict: str
    errors: int | None
    findings: tuple[str, ...]
    seconds: float


def parse(tool: str, said: str, seconds: float) -> Outcome:
    """The outcome of a tool's output. Without a summary the run was cut off, or the device is not taken."""
    summary = _SUMMARIES[tool].findall(said)
    findings = tuple(dict.fromkeys(_FINDING.findall(said)))[:20]
    unusable = _UNUSABLE.search(said)
    if unusable:
        return Outcome(tool, "unusable", None, (unusable.group(0),), seconds)
    if not summary:
        return Outcome(tool, "cut off", None, findings, seconds)
    errors = sum(map(int, summary))
    return Outcome(tool, "found" if errors else "clean", errors, findings, seconds)


def run(tool: str, command: Sequence[str], limit_s: float, log: Path | None = None) -> Outcome:
    """Run a command under a tool, for so long at most."""
    start = time.monotonic()
    process = subprocess.Popen(
        ["compute-sanitizer", "--tool", tool, "--kernel-regex", FILTER, "--print-limit", "50", *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    if log:
        log.write_text(said)
    return parse(tool, said, time.monotonic() - start)


def canary() -> None:
    """Write one element past a tensor of 4 KiB, 64 KiB further on."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def _out_of_bounds_kernel(x_ptr, BLOCK: tl.constexpr):
        tl.store(x_ptr + 16384 + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32))

    x = torch.zeros(1024, device="cuda")
    _out_of_bounds_kernel[(1,)](x, BLOCK=128)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--families", nargs="*", default=[], help="all that have checks, unless given")
    parser.add_argument("--tools", nargs="*", default=TOOLS, choices=TOOLS)
    parser.add_argument("--budget-s", type=float, default=240.0, help="for all together")
    parser.add_argument("--output", type=Path, help="a folder for logs and sanitizer.json")
    parser.add_argument("--canary", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.canary:
        canary()
        return
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the PATH; it comes with NVIDIA's CUDA toolkit")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
    stop = time.monotonic() + args.budget_s
    outcomes = []

    def add(name: str, outcome: Outcome) -> None:
        outcomes.append({"run": name, **dataclasses.asdict(outcome)})
        print(f"{name}: {outcome.verdict}, {outcome.errors} errors ({outcome.seconds:.0f} s)", flush=True)
        for finding in outcome.findings:
            print(f"  {finding}", flush=True)
        if args.output:
            (args.output / "sanitizer.json").write_text(json.dumps(outcomes, indent=1))

    def log(name: str) -> Path | None:
        return args.output / f"{name}.log" if args.output else None

    python = [sys.executable, "-m"]
    bad = run("memcheck", [*python, "benchmarks.kernels.sanitize", "--canary"], 60, log("canary"))
    add("canary", bad)
    if bad.verdict != "found":
        sys.exit("memcheck did not see the write out of bounds: it proves nothing here")
    for i, tool in enumerate(args.tools):
        limit_s = max((stop - time.monotonic()) / (len(args.tools) - i), 10)
        add(tool, run(tool, [*python, "benchmarks.kernels.check", *args.families], limit_s, log(tool)))
    sys.exit(any(o["verdict"] != "clean" for o in outcomes[1:]))


if __name__ == "__main__":
    main()
