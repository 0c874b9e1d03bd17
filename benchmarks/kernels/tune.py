"""Launch parameters by measurement: tries candidates for one table on this GPU and prints the best by size.

    python -m benchmarks.kernels.tune norm norm_backward --direction backward --quick

For each case of the family in that direction every combination of the values below is compiled and timed,
but for those with too few or too many elements a thread. What it prints goes into the family's table
under the architecture's name.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Iterator, Mapping

import torch
from advisor.kernels._device import architecture
from advisor.kernels._launch import LaunchTable, next_power_of_2
from advisor.kernels.bench.timing import Case, median_ms

VALUES: dict[str, tuple[int, ...]] = {
    "num_warps": (1, 2, 4, 8, 16, 32),
    "ROWS": (1, 2, 4, 8, 16, 32),
    "STAGES": (2, 3),
    "programs_per_sm": (1, 2, 3, 4, 6),
}
ELEMENTS_A_THREAD = (8, 32)


def candidates(now: Mapping[str, int], block: int) -> Iterator[dict[str, int]]:
    """Combinations of those parameters that the table has, with a sensible number of elements a thread.

    Args:
        now: a row of the table; what `VALUES` does not name stays as it is.
        block: columns that a program holds.
    """
    keys = [key for key in now if key in VALUES]
    for values in itertools.product(*(VALUES[key] for key in keys)):
        params = {**now, **dict(zip(keys, values, strict=True))}
        each = block * params.get("ROWS", 1) / (32 * params.get("num_warps", 4))
        if ELEMENTS_A_THREAD[0] <= each <= ELEMENTS_A_THREAD[1]:
            yield params


def tune(case: Case, table: LaunchTable, cols: int, repeats: int) -> list[tuple[float, dict[str, int]]]:
    """Median time in ms of each candidate that runs, fastest first."""
    calls = [case.variants["ours"](case.inputs()) for _ in range(3)]
    device = torch.device("cuda", 0)
    arch, before = architecture(device), dict(table.rows)
    found = []
    for params in list(candidates(table.pick(next_power_of_2(cols), device), next_power_of_2(cols))):
        table.rows = {**before, arch: ((None, params),)}
        try:
            found.append((median_ms(calls, repeats), params))
        except (RuntimeError, ValueError) as error:
            print(f"  {params}: {type(error).__name__}", flush=True)
    table.rows = before
    return sorted(found, key=lambda entry: entry[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", help="a family of kernels")
    parser.add_argument("table", help="name of a launch table")
    parser.add_argument("--direction", default="forward", choices=("forward", "backward"))
    parser.add_argument("--quick", action="store_true", help="the family's short list of sizes")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each candidate")
    args = parser.parse_args()
    module = importlib.import_module(f"advisor.kernels.bench.{args.family}")
    for case in module.cases(args.quick):
        if case.direction != args.direction:
            continue
        cols = int(case.shape.split("x")[1])
        print(f"{case.kernel} {case.shape}", flush=True)
        for ms, params in tune(case, LaunchTable.known[args.table], cols, args.repeats)[:5]:
            print(f"  {ms:.4f} ms  ({next_power_of_2(cols)}, {params})", flush=True)


if __name__ == "__main__":
    main()
