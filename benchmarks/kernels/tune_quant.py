"""Times ways and launch parameters of the weight-only products on this GPU, in both clocks.

    python -m benchmarks.kernels.tune_quant [--rows 1 16] [--budget-s 90] [--output FILE]

For each weight: every candidate row of the split kernel's table and, for one row of x, of the stream kernel's
(`kernels/_quant_launch.py`), beside bf16's `F.linear` and PyTorch's packed product, all in turns. A
candidate's result is held to the reference first. The fastest come first, with their shares of the copy
bandwidth and bf16's time over theirs; what wins may go into the table under the architecture's name. A weight
of one block a row, or an empty launch, tells what a call costs that has next to nothing to do. Candidates are
compiled side by side.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from advisor.kernels import _quant_launch as launches
from advisor.kernels._device import architecture
from advisor.kernels._launch import LaunchTable
from advisor.kernels.bench.quant_matmul import random_weight, rivals
from advisor.kernels.bench.timing import Call, both_clocks_ms, copy_bandwidth
from advisor.kernels.quant_matmul import QuantizedWeight, weight_only_linear_reference

from benchmarks.kernels.record import record, write

Row = dict[str, int]

#: Rows of W a program, warps, blocks a warp and step, stages; one row of x, and more.
SPLIT = (
    [(32, 4, 1, 5), (32, 8, 1, 4), (64, 8, 1, 3), (32, 8, 1, 3), (16, 4, 1, 5), (16, 8, 1, 4), (16, 4, 2, 3)],
    [
        (64, 4, 1, 4),
        (64, 8, 1, 4),
        (64, 4, 2, 3),
        (64, 8, 1, 3),
        (32, 8, 1, 3),
        (64, 4, 1, 5),
        (128, 4, 1, 4),
    ],
)
SPLIT_INT8 = (
    [(32, 4, 1, 4), (32, 8, 1, 3), (64, 8, 1, 2), (32, 8, 1, 2), (16, 4, 1, 4), (16, 8, 1, 3), (16, 4, 2, 2)],
    [
        (64, 4, 1, 4),
        (64, 8, 1, 3),
        (64, 4, 2, 2),
        (64, 8, 1, 2),
        (32, 8, 1, 2),
        (64, 4, 1, 3),
        (128, 4, 1, 3),
    ],
)
#: Rows of W a program, blocks a warp and step, those of them that are loaded together, warps, and a limit on
#: registers or none.
STREAM = [
    (16, 4, 2, 4, 128), (32, 2, 2, 8, 128), (16, 2, 2, 8, 64), (32, 2, 1, 8, 128), (32, 1, 1, 8),
    (16, 4, 2, 8, 128), (16, 4, 4, 8, 128), (16, 1, 1, 8, 64), (16, 2, 2, 16, 64), (32, 2, 2, 4, 128),
    (32, 4, 2, 8), (32, 4, 4, 8), (16, 2, 2, 4), (32, 4, 2, 4),
]  # fmt: skip
#: Out, columns and bits; the last for the cost of a call with next to nothing to do.
WEIGHTS = [
    (8192, 8192, 4), (4096, 14336, 4), (4096, 4096, 4), (28672, 8192, 4), (8192, 8192, 8), (8192, 128, 4)
]  # fmt: skip
#: Enough sets that the cache holds none when its turn comes again.
SETS = 7
#: Of the norm of the difference to the reference over that of the reference: bf16's rounding is 2e-3.
MOST_APART = 4e-3


@dataclass(frozen=True)
class Trial:
    """A row of a launch table to try; hashable, so that it names a variant."""

    table: str
    row: tuple[tuple[str, int], ...]

    @property
    def launch(self) -> Callable[..., None]:
        """What launches with that table."""
        return launches.launch_split if "split" in self.table else launches.launch_stream

    def __str__(self) -> str:
        return f"{self.table.removeprefix('quant_')} { {k: v for k, v in self.row if v} }"


@dataclass
class Timed:
    """One variant at one weight: both clocks in ms, and their shares of the copy bandwidth."""

    weight: tuple[int, int, int]
    rows: int
    name: str
    ms: float
    in_a_row_ms: float
    share: float
    in_a_row_share: float


@dataclass
class Given:
    """Input sets of one weight's shape, and what the first of them must give."""

    weights: list[QuantizedWeight]
    xs: list[torch.Tensor]
    expected: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.expected = weight_only_linear_reference(self.xs[0].float(), self.weights[0])

    @property
    def bytes(self) -> int:
        """Compulsory: the weight, x and y."""
        return self.weights[0].nbytes + 2 * (self.xs[0].numel() + self.expected.numel())


def trials(rows: int, bits: int) -> list[Trial]:
    """The candidates for so many rows of x and bits of W."""
    table, ways = ("quant_split_int8", SPLIT_INT8) if bits == 8 else ("quant_split", SPLIT)
    found = [_trial(table, "ROWS WARPS BLOCKS STAGES", each) for each in ways[rows > 1]]
    if rows == 1 and bits == 4:
        found += [_trial("quant_stream", "ROWS AHEAD TOGETHER num_warps maxnreg", each) for each in STREAM]
    return found


def _trial(table: str, keys: str, values: Sequence[int]) -> Trial:
    return Trial(table, tuple(zip(keys.split(), values, strict=False)))


@contextmanager
def chosen(trial: Trial) -> Iterator[None]:
    """The trial's row is the only one of its table, for this GPU."""
    table = LaunchTable.known[trial.table]
    before = table.rows
    table.rows = {**before, architecture(torch.device("cuda", 0)): ((None, dict(trial.row)),)}
    try:
        yield
    finally:
        table.rows = before


def launched(trial: Trial, x: torch.Tensor, weight: QuantizedWeight, y: torch.Tensor) -> None:
    """The product into y, with the trial's row."""
    with chosen(trial):
        trial.launch(x, weight.packed, weight.scale.t(), None, None, y, weight.bits)


def given(out: int, columns: int, bits: int, rows: int, sets: int = SETS) -> Given:
    """Random inputs on the GPU."""
    weights = [random_weight(out, columns, bits) for _ in range(sets)]
    return Given(weights, [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(sets)])


def apart(trial: Trial, inputs: Given) -> float:
    """How far the first set's result is from the reference; NaN, which is no less than any limit, too."""
    x, weight = inputs.xs[0], inputs.weights[0]
    y = x.new_full((x.shape[0], weight.out_features), torch.nan)
    launched(trial, x, weight, y)
    return float((y.float() - inputs.expected).norm() / inputs.expected.norm())


def compiled(task: tuple[Trial, int, tuple[int, int, int]]) -> str:
    """Launch once, which leaves the kernel in Triton's cache on disk: what went wrong, or nothing."""
    trial, rows, weight = task
    try:
        inputs = given(*weight, rows, sets=1)
        y = inputs.xs[0].new_empty(rows, weight[0])
        launched(trial, inputs.xs[0], inputs.weights[0], y)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        return f"{trial} at {weight}: {type(error).__name__}: {error}".splitlines()[0][:160]
    return ""


def right(candidates: Sequence[Trial], inputs: Given) -> Iterator[Trial]:
    """Those of them that give the reference's result; the others are named."""
    for trial in candidates:
        try:
            error = apart(trial, inputs)
        except Exception as failure:  # noqa: BLE001
            print(f"  {trial}: {type(failure).__name__} {failure}".splitlines()[0][:160], flush=True)
            continue
        if error < MOST_APART:
            yield trial
        else:
            print(f"  {trial}: WRONG by {error:.1e} of the result", flush=True)


def timed(
    weight: tuple[int, int, int], rows: int, bytes_per_s: float, candidates: Sequence[Trial], now: Trial
) -> list[Timed]:
    """All that compete at one weight, the fastest in a row first; `now` on one set of inputs, too."""
    inputs = given(*weight, rows)
    pairs = list(zip(inputs.xs, inputs.weights, strict=True))
    y = torch.empty_like(inputs.expected, dtype=torch.bfloat16)
    calls: dict[str, list[Call]] = {
        str(trial): [partial(launched, trial, x, w, y) for x, w in pairs]
        for trial in right(candidates, inputs)
    }
    if str(now) in calls:
        # What the cache may hold takes no time of memory: what is left is the kernel's own.
        calls[f"in a row from the cache: {now}"] = calls[str(now)][:1] * len(pairs)
    calls["empty launch"] = [partial(torch.cuda._sleep, 0)] * len(pairs)
    for name, prepare in rivals(weight[2]).items():
        try:
            calls[name] = [prepare([x, w.packed]) for x, w in pairs]
            calls[name][0]()
        except Exception as failure:  # noqa: BLE001
            calls.pop(name, None)
            print(f"  {name}: {type(failure).__name__} {failure}".splitlines()[0][:160], flush=True)
    return ranked(weight, rows, both_clocks_ms(calls, 3 * SETS), inputs.bytes / bytes_per_s * 1e3)


def ranked(
    weight: tuple[int, int, int], rows: int, ms: Mapping[str, tuple[float, float]], floor_ms: float
) -> list[Timed]:
    """Variants with the floor's share of their times, by their time in a row."""
    found = [
        Timed(weight, rows, name, single, row, floor_ms / single, floor_ms / row)
        for name, (single, row) in ms.items()
    ]
    return sorted(found, key=lambda entry: entry.in_a_row_ms)


def worth_a_line(found: Sequence[Timed], now: str, most: int = 8) -> list[Timed]:
    """The fastest by either clock, what is there now and what is no candidate."""
    best = {entry.name for entry in found[:most]}
    best |= {entry.name for entry in sorted(found, key=lambda entry: entry.ms)[:most]}
    return [e for e in found if e.name in best or e.name == now or not e.name.startswith(("stream", "split"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16], help="of x, 16 at most")
    parser.add_argument("--budget-s", type=float, default=90.0, help="no weight begins after this")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--output", type=Path, help="for the times, as JSON")
    args = parser.parse_args()
    start = time.monotonic()
    asked = [(rows, weight, trials(rows, weight[2])) for rows in args.rows for weight in WEIGHTS]
    # By columns, since how many rows W has calls for no other compilation.
    tasks = {(trial, rows, *w[1:]): (trial, rows, w) for rows, w, candidates in asked for trial in candidates}
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for failure in filter(None, pool.imap_unordered(compiled, tasks.values())):
            print(f"  {failure}", flush=True)
    roof = copy_bandwidth()
    print(f"compiled after {time.monotonic() - start:.0f} s; copy {roof / 1e12:.2f} TB/s", flush=True)
    results: list[dict[str, Any]] = []
    for rows, weight, candidates in asked:
        if time.monotonic() - start > args.budget_s:
            print(f"{rows} x {weight}: no time left", flush=True)
            continue
        print(f"{rows} row(s) of x, out, columns, bits {weight}: single, in a row", flush=True)
        now = next((c for c in candidates if c.table == "quant_stream"), candidates[0])
        found = timed(weight, rows, roof, candidates, now)
        bf16 = next((entry for entry in found if entry.name == "eager_bf16"), None)
        results += map(asdict, found)
        for entry in worth_a_line(found, str(now)):
            single, row = f"{entry.ms:.4f} ({entry.share:4.0%})", f"{entry.in_a_row_ms:.4f}"
            ratios = f"{bf16.ms / entry.ms:.2f}x {bf16.in_a_row_ms / entry.in_a_row_ms:.2f}x" if bf16 else ""
            print(f"  {single}  {row} ({entry.in_a_row_share:4.0%})  {ratios}  {entry.name}", flush=True)
        torch.cuda.empty_cache()
        if args.output:
            write(args.output, record(__spec__.name, results, roof))
    print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
