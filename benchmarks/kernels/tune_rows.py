"""Tries launch parameters of the memory-bound kernels, on this GPU, in about a minute.

    python -m benchmarks.kernels.tune_rows [--budget-s 110] [--only TEXT] [--output FILE]

Each trial is one case of a family and one launch table, with the row that it has for Hopper first. Trials are
compiled side by side; a trial's rows are held to eager PyTorch's results and timed in turns with Liger's
kernel where it has one, in several orders, since a kernel pays for what the one before it left in the cache.
At the end stand the rows that beat those of the tables, which may go there under the architecture's name.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from advisor.kernels._device import architecture
from advisor.kernels._launch import LaunchTable, next_power_of_2
from advisor.kernels.bench import run
from advisor.kernels.bench.timing import Call, Case, copy_bandwidth, rotated_ms
from torch import Tensor

from benchmarks.kernels.record import record, write

Row = dict[str, int]
#: Of the norm of the difference to eager's result over that of the result: its roundings may make 2e-2.
MOST_APART = 5e-2
SETS = 3
ORDERS = 5
#: Whose kernel is timed beside ours.
BESIDE = "liger"
#: A row that is faster by less stays out of the table.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Trial:
    """Rows of `table` to try on the family's case whose kernel, shape and direction are `case`."""

    family: str
    table: str
    case: str
    rows: Sequence[Row]

    def find(self) -> Case:
        both = (case for quick in (True, False) for case in run.cases(self.family, quick, self.case))
        return next(case for case in both if _name(case) == self.case)

    def size(self, case: Case) -> int:
        """What the table goes by: columns, of rope a token's queries."""
        *_, heads, last = case.shape.split("x")
        return next_power_of_2(int(last) * (int(heads.split("/")[0]) if self.family == "rope" else 1))


def _rows(keys: str, *values: tuple[int, ...]) -> list[Row]:
    """Rows of these keys; a value that is not there leaves its key out, as 0 does."""
    rows = [dict(zip(keys.split(), row, strict=False)) for row in values]
    return [{k: v for k, v in row.items() if v} for row in rows]


STREAMED = "num_warps STAGES programs_per_sm maxnreg"
BACKWARD = "ROWS num_warps STAGES programs_per_sm CHAIN maxnreg"
FORWARD = "ROWS num_warps JOIN EARLY maxnreg"
SOFTMAX = "TILE num_warps JOIN maxnreg"
LOSS = _rows(
    "BLOCK num_warps maxnreg KEPT", (4096, 4, 64, 1), (4096, 4, 64), (4096, 8), (4096, 8, 0, 1), (8192, 8, 64)
)
GATED = _rows("BLOCK num_warps", (2048, 8), (2048, 4), (1024, 4), (4096, 8), (1024, 2))
NOT_SO: Row = {"num_warps": 0}
LONG = [*_rows(STREAMED, (32, 3, 1)), NOT_SO, *_rows(STREAMED, (16, 3, 1), (16, 2, 1), (8, 3, 1))]
MIDDLE = [NOT_SO, *_rows(STREAMED, (8, 3, 2, 128), (16, 3, 1))]
FUSED = [*_rows(STREAMED, (16, 2, 1, 128)), NOT_SO, *_rows(STREAMED, (16, 3, 1, 128), (32, 3, 1))]
ERF = _rows(BACKWARD, (2, 8, 3, 1, 1), (2, 8, 3, 1), (2, 16, 3, 1), (2, 16, 3, 1, 1), (1, 16, 3, 1, 1))
SHORT = _rows(FORWARD, (1, 8, 0, 1), (1, 8), (1, 4, 0, 1), (1, 16, 0, 1))
LONG_FORWARD = _rows(
    FORWARD, (1, 16, 1, 1, 64), (1, 16, 1, 0, 64), (1, 8, 1), (1, 8, 1, 1), (1, 32, 1, 1, 32)
)

#: Of few columns, as a mixer has them; 32 elements a thread in flight, and more.
FEW = "bias_gelu_layer_norm 262144x256"
FEW_BACKWARD = _rows(
    BACKWARD, (4, 4, 2, 4), (8, 4, 2, 4), (8, 4, 3, 4), (16, 4, 2, 4), (16, 4, 2, 2), (16, 8, 2, 3),
    (4, 4, 3, 8), (8, 2, 3, 8), (4, 1, 3, 12),
)  # fmt: skip

TRIALS = [
    Trial("bias_act_norm", "bias_act_norm_backward", f"{FEW} backward", FEW_BACKWARD),
    Trial(
        "bias_act_norm", "bias_act_norm_forward", f"{FEW} forward",
        _rows("ROWS num_warps", (4, 1), (8, 1), (8, 2), (16, 4), (4, 2), (2, 1)),
    ),
    Trial(
        "activations", "activations_elementwise", "bias_gelu_tanh 262144x256 forward",
        _rows("BLOCK num_warps", (2048, 4), (1024, 4), (4096, 8), (4096, 4)),
    ),
    Trial("norm", "norm_backward_stream", "layer_norm 4096x16384 backward", LONG),
    Trial("norm", "norm_backward_stream", "rms_norm 4096x16384 backward", LONG),
    Trial(
        "softmax", "softmax_backward", "softmax 8192x16384 forward+backward",
        _rows("TILE num_warps maxnreg", (1, 16, 64), (1, 32), (1, 8, 128)),
    ),
    Trial("bias_act_norm", "bias_act_norm_backward", "bias_gelu_layer_norm 16384x4096 backward", ERF),
    Trial(
        "bias_act_norm", "bias_act_norm_backward_stream", "bias_gelu_tanh_layer_norm 8192x8192 backward",
        FUSED,
    ),
    Trial("norm", "norm_forward", "rms_norm 16384x4096 forward", SHORT),
    Trial(
        "softmax", "softmax_forward", "softmax 16384x4096 forward",
        _rows(SOFTMAX, (4096, 4, 1), (4096, 8), (4096, 16)),
    ),
    Trial("norm", "norm_forward", "rms_norm 4096x16384 forward", LONG_FORWARD),
    Trial(
        "softmax", "softmax_backward", "softmax 16384x4096 forward+backward",
        _rows("TILE num_warps maxnreg", (4096, 8), (4096, 4), (4096, 16)),
    ),
    Trial("cross_entropy", "cross_entropy_loss", "cross_entropy 8192x50257 forward", LOSS),
    Trial("cross_entropy", "cross_entropy_loss", "cross_entropy 8192x50304 forward", LOSS),
    Trial(
        "bias_act_norm", "bias_act_norm_forward", "bias_gelu_layer_norm 16384x4096 forward",
        _rows(
            "ROWS num_warps JOIN STREAM maxnreg", (1, 4, 1, 1), (1, 4, 1), (1, 4, 1, 1, 64), (1, 4, 1, 1, 80)
        ),
    ),
    Trial("norm", "norm_backward_stream", "layer_norm 16384x8192 backward", MIDDLE),
    Trial("norm", "norm_backward_stream", "rms_norm 16384x8192 backward", MIDDLE),
    Trial("activations", "activations_gated", "swiglu 16384x11008 forward", GATED),
    Trial("activations", "activations_gated", "swiglu 16384x11008 forward+backward", GATED),
]  # fmt: skip


def _name(case: Case) -> str:
    return f"{case.kernel} {case.shape} {case.direction}"


def _with_row(table: LaunchTable, row: Row, call: Call) -> Call:
    arch = architecture(torch.device("cuda", 0))
    before = dict(table.rows)

    def chosen() -> object:
        table.rows = {**before, arch: ((None, row),)}
        try:
            return call()
        finally:
            table.rows = before

    return chosen


def compile_row(trial: Trial, row: Row | None) -> bool:
    """Run one row, or the kernel beside ours for None, which leaves it in Triton's cache: whether it ran."""
    case = trial.find()
    given = case.inputs()
    try:
        if row is None:
            case.variants[BESIDE](given)()
        else:
            _with_row(LaunchTable.known[trial.table], row, case.variants["ours"](given))()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        print(f"  {trial.case}: {row}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
        return False
    return True


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for t in result if isinstance(t, Tensor)]


def _apart(result: Any, expected: Any) -> float:
    pairs = zip(_tensors(result), _tensors(expected), strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)) for a, b in pairs)


def measured(
    trial: Trial, rows: Sequence[Row], repeats: int
) -> tuple[Case, list[tuple[float, float, Row]], float | None]:
    """Time in ms, distance from eager's result, and row of each, fastest first; and Liger's time."""
    case = trial.find()
    table = LaunchTable.known[trial.table]
    sets = [case.inputs() for _ in range(SETS)]
    calls = [case.variants["ours"](given) for given in sets]
    apart = []
    expected = _expected(case, sets[0])
    for row in rows:
        apart.append(_apart(_with_row(table, row, _ours(case, sets[0], calls[0]))(), expected))
    variants = {str(i): [_with_row(table, row, call) for call in calls] for i, row in enumerate(rows)}
    if BESIDE in case.variants:
        variants[BESIDE] = [case.variants[BESIDE](given) for given in sets]
    times = _in_orders(variants, repeats)
    beside = times.pop(BESIDE, None)
    return case, sorted(zip(times.values(), apart, rows, strict=True), key=lambda entry: entry[0]), beside


def _in_orders(variants: Mapping[str, Sequence[Call]], repeats: int) -> dict[str, float]:
    """Median over orders of each variant's median time."""
    shuffle = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ORDERS):
        order = shuffle.sample(list(variants), len(variants))
        for name, ms in rotated_ms({n: variants[n] for n in order}, max(repeats // ORDERS, 3)).items():
            times[name].append(ms)
    return {name: statistics.median(ms) for name, ms in times.items()}


def _expected(case: Case, given: Sequence[Any]) -> Any:
    # A backward has random output gradients: the same seed for both.
    torch.manual_seed(0)
    return case.variants["eager"](given)()


def _ours(case: Case, given: Sequence[Any], call: Call) -> Call:
    if "backward" not in case.direction:
        return call

    def again() -> object:
        torch.manual_seed(0)
        return case.variants["ours"](given)()

    return again


def _better(trial: Trial, size: int, results: Sequence[tuple[float, float, Row]]) -> list[str]:
    """The fastest right row, as it is to be written, if it gains enough over the one that is there."""
    right = [(ms, row) for ms, apart, row in results if apart <= MOST_APART]
    before = next((ms for ms, row in right if row == trial.rows[0]), None)
    if not right or (before is not None and right[0][0] > before * (1 - LEAST_GAIN)):
        return []
    ms, row = right[0]
    gain = "" if before is None else f"  # {before:.4f} to {ms:.4f} ms, {trial.case}"
    return [f"{trial.table}, sm_90: ({size}, {json.dumps(row)}),{gain}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=110.0, help="no trial begins after this")
    parser.add_argument("--only", default="", metavar="TEXT", help="trials whose table or case holds TEXT")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls of each row, over all orders")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    parser.add_argument("--output", type=Path, help="for the times, as JSON")
    args = parser.parse_args()
    start = time.monotonic()
    trials = [trial for trial in TRIALS if args.only in f"{trial.table} {trial.case}"]
    jobs: list[tuple[Trial, Row | None]] = [(trial, row) for trial in trials for row in trial.rows]
    jobs += [(trial, None) for trial in trials if BESIDE in trial.find().variants]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        fine = pool.starmap(compile_row, jobs, chunksize=1)
    ran = [
        [row for (of, row), good in zip(jobs, fine, strict=True) if of is trial and row is not None and good]
        for trial in trials
    ]
    roof = copy_bandwidth()
    print(f"compiled after {time.monotonic() - start:.0f} s; copy {roof / 1e12:.2f} TB/s", flush=True)
    found: list[Mapping[str, Any]] = []
    better: list[str] = []
    for trial, rows in zip(trials, ran, strict=True):
        if time.monotonic() - start > args.budget_s:
            print(f"{trial.case}: no time left")
            continue
        if not rows:
            continue
        case, results, beside = measured(trial, rows, args.repeats)
        floor_ms = case.bytes / roof * 1e3
        others = "" if beside is None else f", {BESIDE} {beside:.4f} ms {floor_ms / beside:4.0%}"
        print(f"{trial.case}: floor {floor_ms:.4f} ms{others}", flush=True)
        for ms, apart, row in results:
            ratio = "" if beside is None else f"  {beside / ms:.3f}x {BESIDE}"
            notes = "  WRONG" * (not apart <= MOST_APART) + "  as it is" * (row == trial.rows[0])
            settings = " ".join(f"{k}={v}" for k, v in row.items())
            print(
                f"  {ms:.4f} ms {floor_ms / ms:6.1%}{ratio}  apart {apart:.1e}  {settings}{notes}", flush=True
            )
            found.append(
                {
                    "case": trial.case, "table": trial.table, "ms": ms, "apart": apart, "row": row,
                    "floor_ms": floor_ms, "beside_ms": beside,
                }
            )  # fmt: skip
        better += _better(trial, trial.size(case), results)
        if args.output:
            write(args.output, record(__spec__.name, found, roof))
        torch.cuda.empty_cache()
    print("\nrows for the tables:", *better, sep="\n  ")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
