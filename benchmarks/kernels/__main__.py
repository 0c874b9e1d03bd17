"""Run families of cases, print a table, write ``benchmarks/results/kernels_<family>.json`` row by row.

    python -m benchmarks.kernels norm --quick               one or two sizes a kernel
    python -m benchmarks.kernels --grid --budget-s 200      twelve sizes a kernel, forward and with backward
    python -m benchmarks.kernels --grid --plan              how many cases that is, and the time to expect

What is run is compiled ahead by ``--jobs`` processes side by side. With a budget, the sizes that each family
names first come first, and what is left out is named in the results.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.kernels.bench.in_a_row import SHORT_S
from advisor.kernels.bench.run import (
    document,
    floor_s,
    gridded_families,
    line,
    measured,
    measured_roofs,
    row,
    timed_families,
)  # fmt: skip

from benchmarks.kernels import ahead
from benchmarks.kernels.record import write as replace

if TYPE_CHECKING:
    from advisor.kernels.bench.run import Roofs
    from advisor.kernels.bench.timing import Case

RESULTS = Path(__file__).resolve().parents[1] / "results"
#: Of a budget, for compiling ahead.
AHEAD_SHARE = 0.45
#: No case is begun with less time left.
LEAST_S = 3.0

# What a plan counts with, in seconds: a process that comes up, one compilation by torch.compile and one by
# Triton alone, Python and the roofs before the first case; a case's own work, and a variant's in it.
START_S, INDUCTOR_S, TRITON_S, BEGIN_S, CASE_S, VARIANT_S = 15.0, 3.5, 1.0, 10.0, 0.25, 0.08


def write(folder: Path, result: dict[str, Any]) -> None:
    """Replace the family's file."""
    name = f"kernels_{result['family']}{'_quick' * result['quick']}{'_grid' * result.get('grid', False)}.json"
    replace(folder / name, result)


def plan(found: Sequence[tuple[str, Case]], processes: int, repeats: int) -> str:
    """How many cases, variants and calls there are, and about how long they take."""
    variants = [name for _, case in found for name in case.variants]
    inductor = variants.count("compile")
    triton = sum(not name.startswith("eager") for name in variants) - inductor
    compiling_s = INDUCTOR_S * inductor + TRITON_S * triton
    ahead_s = START_S + compiling_s / processes if processes else compiling_s
    timing_s = BEGIN_S + CASE_S * len(found) + VARIANT_S * len(variants)
    return (
        f"{len(found)} cases, {len(variants)} variants, {inductor} of them for torch.compile, "
        f"up to {repeats} calls of each; about {ahead_s:.0f} s to compile, {timing_s:.0f} s to time"
    )


def run(
    found: Iterable[tuple[str, Case]],
    results: dict[str, dict[str, Any]],
    roofs: Roofs,
    *,
    repeats: int,
    stop: float,
    output: Path,
) -> bool:
    """Time the cases into their families' results until the clock says `stop`: whether a kernel failed."""
    failed = False
    cases = iter(found)
    for family, case in cases:
        if time.monotonic() + LEAST_S > stop:
            _leave_out([(family, case), *cases], results, output)
            break
        in_a_row = not results[family].get("grid") and floor_s(case, roofs) < SHORT_S
        entry = row(measured(case, repeats, in_a_row=in_a_row), roofs)
        results[family]["rows"].append(entry)
        failed |= "ours" in entry["failures"]
        write(output, results[family])
        print(line(entry), flush=True)
    return failed


def _freeze_imports() -> None:
    """What is imported stays: a collection between two cases need not look at it, Inductor above all."""
    importlib.import_module("torch._inductor.compile_fx")
    gc.collect()
    gc.freeze()


def _leave_out(cases: Sequence[tuple[str, Case]], results: dict[str, dict[str, Any]], output: Path) -> None:
    """Name them in their families' results."""
    for family, case in cases:
        name = f"{case.kernel} {case.shape} {case.direction}"
        results[family].setdefault("left_out", []).append(name)
    for family in dict.fromkeys(family for family, _ in cases):
        write(output, results[family])
    print(f"no time for {len(cases)} cases", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(timed_families())}")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="one or two sizes a kernel")
    which.add_argument("--grid", action="store_true", help="the grid of sizes of each family that has one")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--repeats", type=int, default=40, help="timed calls of each variant at most")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="no case begins after this")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER", help="for the results")
    parser.add_argument("--plan", action="store_true", help="count and expect, run nothing")
    ahead.add_options(parser)
    args = parser.parse_args(arguments)
    there = gridded_families() if args.grid else timed_families()
    unknown = set(args.families) - set(there)
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}: there are {', '.join(there)}")

    ahead.settle_caches()
    families = args.families or there
    sizes = "grid" if args.grid else "quick" if args.quick else "full"
    listed = list(ahead.found(families, sizes, args.only))
    print(plan(listed, args.jobs, args.repeats), flush=True)
    if args.plan:
        return
    if args.jobs:
        limit_s = min(AHEAD_SHARE * args.budget_s, 600.0)
        ahead.compile_ahead(ahead.jobs_of(listed, sizes), args.jobs, limit_s)
    # Some cases hold masks: they are made one by one from here on.
    del listed

    roofs = measured_roofs()
    print(
        f"copy {roofs.bytes_per_s / 1e12:.2f} TB/s, bf16 matmul {roofs.flops_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    args.output.mkdir(parents=True, exist_ok=True)
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "benchmarks.kernels", *words])
    results = {family: document(family, args.quick, roofs, command) for family in families}
    for result in results.values():
        result["grid"] = args.grid
    _freeze_imports()
    stop = began + args.budget_s
    found = ahead.found(families, sizes, args.only)
    failed = run(found, results, roofs, repeats=args.repeats, stop=stop, output=args.output)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
