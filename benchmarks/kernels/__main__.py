"""Run families of cases, print a table, write ``benchmarks/results/kernels_<family>.json``."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import pkgutil
import platform
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import benchmarks.kernels as here
from benchmarks.kernels.harness import Result, copy_bandwidth, matmul_rate, measure

RESULTS = Path(__file__).resolve().parents[1] / "results"
TOOLS = ("harness", "aot", "tune", "__main__")


def families() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(here.__path__) if m.name not in TOOLS)


def row(result: Result, bytes_per_s: float, flops_per_s: float) -> dict[str, Any]:
    """A result as it is written: times, and the share of the measured roofs that each variant reaches."""
    case = result.case
    floor_ms = max(case.bytes / bytes_per_s, case.flops / flops_per_s) * 1e3
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "dtype": case.dtype,
        "direction": case.direction,
        "bytes": case.bytes,
        "flops": case.flops,
        "floor_ms": floor_ms,
        "ms": result.ms,
        "spread_ms": result.spread_ms,
        "share_of_roof": {name: floor_ms / ms for name, ms in result.ms.items()},
        "peak_bytes": result.peak_bytes,
        "failures": result.failures,
    }


def line(entry: dict[str, Any]) -> str:
    """A row for a reader: time in ms and share of the roof of each variant."""
    cells = [f"{name} {ms:.4f} ({entry['share_of_roof'][name]:4.0%})" for name, ms in entry["ms"].items()]
    cells += [f"{name} failed: {why[:60]}" for name, why in entry["failures"].items()]
    head = f"{entry['kernel']:24} {entry['shape']:>18} {entry['dtype']:5} {entry['direction']:16}"
    return f"{head} floor {entry['floor_ms']:.4f} | " + " | ".join(cells)


def environment() -> dict[str, Any]:
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.kernels", *sys.argv[1:]]),
    }


def chosen(family: str, quick: bool, only: str) -> Iterator[Any]:
    module = importlib.import_module(f"benchmarks.kernels.{family}")
    return (case for case in module.cases(quick) if only in f"{case.kernel} {case.shape} {case.direction}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(families())}")
    parser.add_argument("--quick", action="store_true", help="one or two sizes a kernel")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--repeats", type=int, default=40, help="timed calls of each variant")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER", help="for the results")
    args = parser.parse_args()
    unknown = set(args.families) - set(families())
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}: there are {', '.join(families())}")

    bytes_per_s, flops_per_s = copy_bandwidth(), matmul_rate()
    print(f"copy {bytes_per_s / 1e12:.2f} TB/s, bf16 matmul {flops_per_s / 1e12:.0f} TFLOP/s", flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    for family in args.families or families():
        rows = []
        for case in chosen(family, args.quick, args.only):
            rows.append(row(measure(case, repeats=args.repeats), bytes_per_s, flops_per_s))
            print(line(rows[-1]), flush=True)
        result = {
            **environment(),
            "copy_bytes_per_s": bytes_per_s,
            "matmul_flops_per_s": flops_per_s,
            "rows": rows,
        }
        name = f"kernels_{family}{'_quick' * args.quick}.json"
        (args.output / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
