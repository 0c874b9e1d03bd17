"""Run families of cases, print a table, write ``benchmarks/results/kernels_<family>.json`` row by row."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from advisor.kernels.bench.run import document, line, measured_roofs, rows, timed_families

from benchmarks.kernels.record import write as replace

RESULTS = Path(__file__).resolve().parents[1] / "results"


def write(folder: Path, result: dict[str, Any]) -> None:
    """Replace the family's file."""
    replace(folder / f"kernels_{result['family']}{'_quick' * result['quick']}.json", result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(timed_families())}")
    parser.add_argument("--quick", action="store_true", help="one or two sizes a kernel")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--repeats", type=int, default=40, help="timed calls of each variant")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER", help="for the results")
    args = parser.parse_args()
    unknown = set(args.families) - set(timed_families())
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}: there are {', '.join(timed_families())}")

    roofs = measured_roofs()
    print(
        f"copy {roofs.bytes_per_s / 1e12:.2f} TB/s, bf16 matmul {roofs.flops_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    args.output.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "benchmarks.kernels", *sys.argv[1:]])
    failed = False
    for family in args.families or timed_families():
        result = document(family, args.quick, roofs, command)
        for entry in rows(family, args.quick, roofs, only=args.only, repeats=args.repeats):
            result["rows"].append(entry)
            failed |= "ours" in entry["failures"]
            write(args.output, result)
            print(line(entry), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
