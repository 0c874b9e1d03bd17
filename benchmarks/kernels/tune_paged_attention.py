"""Times launch parameters of paged attention on this GPU, each held to the table's present ones first.

    python -m benchmarks.kernels.tune_paged_attention [--dims 128 64 256] [--budget-s 60] [--output FILE]

For a single long sequence and for a batch of them, every candidate row of `SPLIT` (`kernels/_paged_ops.py`),
all in turns, in both clocks; and an empty launch, for what the clocks themselves take. Printed are the
fastest and the present one. The rows with the least times of calls in a row, over their floors, come last,
as the table may take them over for this architecture. Candidates are compiled side by side.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from advisor.kernels import _paged_ops as ops
from advisor.kernels._device import architecture
from advisor.kernels._launch import next_power_of_2
from advisor.kernels.bench.paged_attention import Shape, inputs
from advisor.kernels.bench.timing import Call, both_clocks_ms, copy_bandwidth
from advisor.kernels.paged_attention import paged_attention

from benchmarks.kernels.record import record, write

Row = tuple[tuple[str, int], ...]

#: Tokens a tile: as many bytes as the present tile has, half and twice as many.
FACTORS = (1.0, 0.5, 2.0)
#: Warps, stages, and programs that a multiprocessor is to run; registers are held to what those get.
WAYS = [
    (4, 5, 3), (4, 7, 2), (4, 7, 4), (4, 5, 4), (4, 5, 2), (2, 5, 6), (2, 5, 3), (8, 5, 2), (4, 9, 3),
    (2, 7, 4), (4, 3, 4), (8, 7, 2), (4, 9, 1), (8, 9, 1), (8, 5, 1),
]  # fmt: skip
#: Shared memory of a multiprocessor, and what a program takes beside its tiles.
SHARED_BYTES, BESIDE_BYTES = 227 << 10, 8 << 10
#: Enough sets that the cache holds none when its turn comes again.
SETS = 3


def shapes(dim: int) -> list[Shape]:
    """One sequence that must be cut, and a batch that fills the device."""
    return [Shape([32768], 32, 8, dim, 16), Shape([8192] * 16, 32, 8, dim, 16)]


def candidates(now: Mapping[str, int], dim: int) -> list[Row]:
    """Rows of the table, the present one first, then those like it, with overlapping launches and without."""
    rows = [dict(now) | {"OVERLAP": 1}]
    for factor, (warps, stages, per_sm) in itertools.product(FACTORS, WAYS):
        tokens = int(now["BLOCK_N"] * factor)
        # Keys and values of 16 bits, in half of the stages.
        held = (stages - 1) // 2 * tokens * 4 * next_power_of_2(dim) + BESIDE_BYTES
        if tokens >= 16 and per_sm * held <= SHARED_BYTES:
            registers = min(65536 // (32 * warps * per_sm) // 8 * 8, 255)
            row = {"BLOCK_N": tokens, "num_warps": warps, "num_stages": stages, "per_sm": per_sm}
            row |= {"maxnreg": registers}
            rows += [row | {"OVERLAP": 1}, row] if factor == 1.0 else [row | {"OVERLAP": 1}]
    return list(dict.fromkeys(tuple(row.items()) for row in [dict(now), *rows]))


def attended(row: Row, shape: Shape, given: Sequence[torch.Tensor]) -> Any:
    """The output, with that row alone in the table."""
    before = ops.SPLIT.rows
    ops.SPLIT.rows = {**before, architecture(torch.device("cuda", 0)): ((None, dict(row)),)}
    try:
        return paged_attention(*given, max_context_len=max(shape.lens))
    finally:
        ops.SPLIT.rows = before


def compiled(task: tuple[int, Row]) -> str:
    """Launch once, which leaves the kernels in Triton's cache on disk: what went wrong, or nothing."""
    dim, row = task
    try:
        for shape in shapes(dim):
            attended(row, shape, inputs(shape)())
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        return f"{dict(row)}: {type(error).__name__}: {error}".splitlines()[0][:160]
    finally:
        torch.cuda.empty_cache()
    return ""


def right(rows: Sequence[Row], shape: Shape, sets: Sequence[Any]) -> Iterator[Row]:
    """Those that give what the first of them does; the others are named."""
    expected = attended(rows[0], shape, sets[0])
    for row in rows:
        try:
            torch.testing.assert_close(attended(row, shape, sets[0]), expected, atol=2e-2, rtol=2e-2)
        except Exception as error:  # noqa: BLE001
            print(f"  {dict(row)}: {type(error).__name__} {error}".splitlines()[0][:160], flush=True)
        else:
            yield row


def timed(rows: Sequence[Row], shape: Shape) -> dict[str, tuple[float, float]]:
    """Median times of a single call and of one in a row, in ms, by row."""
    sets = [inputs(shape)() for _ in range(SETS)]
    calls: dict[str, list[Call]] = {
        str(dict(row)): [partial(attended, row, shape, given) for given in sets]
        for row in right(rows, shape, sets)
    }
    calls["empty launch"] = [partial(torch.cuda._sleep, 0)] * SETS
    return both_clocks_ms(calls, 15)


def floor_ms(shape: Shape, bytes_per_s: float) -> float:
    """Keys and values of all tokens, queries and outputs, at the copy's rate."""
    return 4 * shape.dim * (shape.kv_heads * shape.seen + shape.heads * len(shape.lens)) / bytes_per_s * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="*", default=[128], help="head dimensions")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--budget-s", type=float, default=60.0, help="no shape begins after this")
    parser.add_argument("--output", type=Path, help="for the times, as JSON")
    args = parser.parse_args()
    start = time.monotonic()
    device = torch.device("cuda", 0)
    asked = {dim: candidates(ops.SPLIT.pick(next_power_of_2(dim), device), dim) for dim in args.dims}
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        tasks = [(dim, row) for dim, rows in asked.items() for row in rows]
        for failure in filter(None, pool.imap_unordered(compiled, tasks)):
            print(f"  {failure}", flush=True)
    roof = copy_bandwidth()
    print(f"compiled after {time.monotonic() - start:.0f} s; copy {roof / 1e12:.2f} TB/s", flush=True)
    found: list[dict[str, Any]] = []
    for dim, rows in asked.items():
        sums: dict[str, float] = {}
        for shape in shapes(dim):
            if time.monotonic() - start > args.budget_s:
                print(f"{shape}: no time left", flush=True)
                break
            floor = floor_ms(shape, roof)
            print(f"{shape}, floor {floor:.4f} ms: single, in a row", flush=True)
            times = timed(rows, shape)
            for place, (name, (single, row)) in enumerate(sorted(times.items(), key=lambda e: e[1][0])):
                sums[name] = sums.get(name, 0.0) + row / floor
                if place < 14 or name in ("empty launch", str(dict(rows[0]))):
                    print(f"  {single:.4f} ({floor / single:4.0%})  {row:.4f} ({floor / row:4.0%})  {name}")
                found.append({"shape": str(shape), "row": name, "ms": single, "in_a_row_ms": row})
            torch.cuda.empty_cache()
            if args.output:
                write(args.output, record(__spec__.name, found, roof))
        for name in sorted(sums, key=lambda name: sums[name])[1:4]:
            print(f"  ({next_power_of_2(dim)}, {name}),", flush=True)
    print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
