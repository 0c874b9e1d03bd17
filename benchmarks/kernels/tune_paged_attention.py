"""Times launch parameters of paged attention on this GPU, each checked against the table's present ones.

    python -m benchmarks.kernels.tune_paged_attention [--dims 64 128 256] [--budget-s 60]

Prints, fastest first, what `SPLIT` of `kernels/_paged_ops.py` may take over for this architecture: the sum of
the times of a batch of sequences and of a single long one, of calls in a row; a single call's time stands
before each. A candidate costs seconds to compile; the likeliest come first.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from advisor.kernels import _paged_ops as ops
from advisor.kernels._device import architecture
from advisor.kernels._launch import next_power_of_2
from advisor.kernels.bench.paged_attention import Shape, inputs
from advisor.kernels.bench.timing import both_clocks_ms
from advisor.kernels.paged_attention import paged_attention

#: Tokens a tile: as many bytes as the present tile has, half and twice as many.
FACTORS = (1.0, 0.5, 2.0)
#: Warps, stages, and programs that a multiprocessor is to run; registers are held to what those get.
WAYS = [(4, 5, 3), (4, 7, 2), (2, 5, 4), (4, 5, 2), (4, 3, 4), (8, 5, 2), (2, 7, 3), (1, 5, 6), (4, 9, 2)]


def shapes(dim: int) -> list[Shape]:
    """A batch that fills the device, and one sequence that must be cut."""
    return [Shape([8192] * 16, 32, 8, dim, 16), Shape([32768], 32, 8, dim, 16)]


def candidates(now: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Rows of the table, those like the present one first."""
    for factor, (warps, stages, per_sm) in itertools.product(FACTORS, WAYS):
        registers = 65536 // (32 * warps * per_sm) // 8 * 8
        row = {"BLOCK_N": int(now["BLOCK_N"] * factor), "num_warps": warps, "num_stages": stages}
        if row["BLOCK_N"] >= 16:
            yield row | {"per_sm": per_sm, "maxnreg": min(registers, 255)}


def checked_ms(shape: Shape, sets: list[Any], expected: list[torch.Tensor]) -> tuple[float, float]:
    """Median time of a single call and of one in a row; raises where the result is another."""
    longest = max(shape.lens)
    calls = [lambda given=given: paged_attention(*given, max_context_len=longest) for given in sets]
    for call, right in zip(calls, expected, strict=True):
        torch.testing.assert_close(call(), right, atol=2e-2, rtol=2e-2)
    return both_clocks_ms({"ours": calls}, 12)["ours"]


def tune(dim: int, budget_s: float) -> list[tuple[float, dict[str, int]]]:
    """Candidates that ran, fastest first."""
    device = torch.device("cuda", 0)
    arch, before = architecture(device), dict(ops.SPLIT.rows)
    now = ops.SPLIT.pick(next_power_of_2(dim), device)
    given = [(shape, [inputs(shape)() for _ in range(3)]) for shape in shapes(dim)]
    expected = [[paged_attention(*x) for x in sets] for _, sets in given]
    found, start = [], time.monotonic()
    for row in [dict(now), *candidates(now)]:
        if time.monotonic() - start > budget_s:
            break
        ops.SPLIT.rows = {**before, arch: ((None, row),)}
        try:
            times = [checked_ms(*pair, right) for pair, right in zip(given, expected, strict=True)]
        except Exception as error:  # noqa: BLE001
            print(f"  {row}: {type(error).__name__}", flush=True)
            continue
        found.append((sum(in_a_row for _, in_a_row in times), row))
        cells = (f"{single:.4f}, in a row {in_a_row:.4f}" for single, in_a_row in times)
        print(f"  {row}: {' + '.join(cells)} ms", flush=True)
    ops.SPLIT.rows = before
    return sorted(found, key=lambda pair: pair[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="*", default=[128, 64, 256], help="head dimensions")
    parser.add_argument("--budget-s", type=float, default=60.0, help="for all dimensions together")
    args = parser.parse_args()
    for dim in args.dims:
        print(f"dimension {dim}", flush=True)
        for ms, row in tune(dim, args.budget_s / len(args.dims))[:3]:
            print(f"  {ms:.4f} ms  ({next_power_of_2(dim)}, {row})", flush=True)


if __name__ == "__main__":
    main()
