"""Tries launch parameters of the memory-bound kernels, on this GPU, in about 45 seconds.

    python -m benchmarks.kernels.tune_rows [--budget-s 110] [--only TEXT] [--output FILE]

Each trial is one case of a family and one launch table, with the row that it has for Hopper, those that came
near it and, for sizes that have not been tried yet, the row before. Trials are compiled side by side; a
trial's rows are held to eager PyTorch's results and timed in turns. What is printed, fastest first, may go
into the table under the architecture's name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from advisor.kernels._device import architecture
from advisor.kernels._launch import LaunchTable, next_power_of_2
from advisor.kernels.bench import run
from advisor.kernels.bench.timing import Call, Case, copy_bandwidth, rotated_ms
from torch import Tensor

Row = dict[str, int]
#: Of the norm of the difference to eager's result over that of the result: its roundings may make 2e-2.
MOST_APART = 5e-2
SETS = 3


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
    """Rows of these keys; a value that is not there leaves its key out, as 0 does but for STREAM and JOIN."""
    rows = [dict(zip(keys.split(), row, strict=False)) for row in values]
    return [{k: v for k, v in row.items() if v or k in ("STREAM", "JOIN")} for row in rows]


WIDE_BACKWARD = "ROWS num_warps STAGES programs_per_sm SUMMED"
BACKWARD = "ROWS num_warps STAGES programs_per_sm maxnreg"
FORWARD = "ROWS num_warps STREAM JOIN"
BIASED = _rows(FORWARD, (1, 4, 1, 1), (1, 4, 1), (1, 8, 1, 1))
BIASED_BACKWARD = _rows(BACKWARD, (2, 8, 3, 1), (2, 16, 3, 1), (1, 8, 4, 1))
LOSS = _rows("BLOCK num_warps maxnreg", (4096, 4, 64), (4096, 8), (8192, 8, 64), (2048, 4), (2048, 2, 64))
LOSS_AND_GRADIENT = _rows("BLOCK num_warps maxnreg", (8192, 16, 64), (16384, 16, 64), (8192, 8))

TRIALS = [
    Trial("bias_act_norm", "bias_act_norm_forward", "bias_gelu_tanh_layer_norm 16384x4096 forward", BIASED),
    Trial("bias_act_norm", "bias_act_norm_forward", "bias_gelu_layer_norm 16384x4096 forward", BIASED),
    Trial(
        "bias_act_norm", "bias_act_norm_forward", "bias_gelu_tanh_layer_norm 32768x2048 forward",
        _rows(FORWARD, (1, 2, 0, 1), (1, 2), (1, 2, 1, 1), (1, 1)),
    ),
    Trial(
        "bias_act_norm", "bias_act_norm_forward", "bias_gelu_tanh_layer_norm 8192x8192 forward",
        _rows(FORWARD, (1, 8, 1, 1), (1, 8, 1), (1, 16, 1, 1)),
    ),
    Trial(
        "bias_act_norm", "bias_act_norm_backward", "bias_gelu_tanh_layer_norm 16384x4096 backward",
        BIASED_BACKWARD,
    ),
    Trial(
        "bias_act_norm", "bias_act_norm_backward", "bias_gelu_layer_norm 16384x4096 backward", BIASED_BACKWARD
    ),
    Trial(
        "bias_act_norm", "bias_act_norm_backward", "bias_gelu_tanh_layer_norm 65536x1024 backward",
        _rows(BACKWARD, (2, 4, 3, 3), (2, 4, 3, 4, 128), (2, 2, 3, 4), (4, 4, 3, 2)),
    ),
    Trial(
        "bias_act_norm", "bias_act_norm_backward", "bias_gelu_tanh_layer_norm 32768x2048 backward",
        _rows(BACKWARD, (2, 4, 3, 2), (1, 4, 3, 3), (2, 8, 3, 2, 128)),
    ),
    Trial(
        "bias_act_norm", "bias_act_norm_backward", "bias_gelu_tanh_layer_norm 8192x8192 backward",
        _rows(BACKWARD, (1, 32, 2, 1), (1, 32, 3, 1), (1, 16, 2, 1)),
    ),
    Trial("cross_entropy", "cross_entropy_loss", "cross_entropy 8192x50304 forward", LOSS),
    Trial(
        "cross_entropy", "cross_entropy_rows", "cross_entropy 8192x50304 forward+backward", LOSS_AND_GRADIENT
    ),
    Trial("cross_entropy", "cross_entropy_loss", "cross_entropy 8192x50257 forward", LOSS),
    Trial(
        "cross_entropy", "cross_entropy_rows", "cross_entropy 8192x50257 forward+backward", LOSS_AND_GRADIENT
    ),
    Trial(
        "norm", "norm_backward", "layer_norm 4096x16384 backward",
        _rows(WIDE_BACKWARD, (1, 32, 3, 1, 1), (1, 32, 2, 1, 1), (1, 16, 3, 1, 2)),
    ),
    Trial(
        "norm", "norm_backward", "rms_norm 4096x16384 backward",
        _rows(WIDE_BACKWARD, (1, 32, 3, 1, 1), (1, 16, 2, 1, 2)),
    ),
    Trial(
        "norm", "norm_forward", "layer_norm 4096x16384 forward",
        _rows("ROWS num_warps JOIN maxnreg", (1, 16, 1, 64), (1, 16, 0, 64), (1, 8, 1)),
    ),
    Trial(
        "norm", "norm_forward", "layer_norm 16384x8192 forward",
        _rows("ROWS num_warps JOIN", (1, 8), (1, 8, 1), (1, 16)),
    ),
    Trial(
        "norm", "norm_forward", "layer_norm 16384x4096 forward",
        _rows("ROWS num_warps JOIN", (1, 8), (1, 4), (1, 4, 1)),
    ),
    Trial("norm", "norm_forward", "rms_norm 16384x4096 forward", _rows("ROWS num_warps", (1, 8), (1, 4))),
    Trial(
        "norm", "norm_forward", "layer_norm 65536x1024 forward",
        _rows("ROWS num_warps JOIN", (2, 4), (4, 4), (2, 2, 1)),
    ),
    Trial("norm", "norm_forward", "rms_norm 65536x1024 forward", _rows("ROWS num_warps", (2, 4), (4, 4))),
    Trial(
        "bias_act_norm", "bias_act_norm_forward", "bias_gelu_tanh_layer_norm 65536x1024 forward",
        _rows(FORWARD, (1, 1), (1, 1, 1), (1, 2, 0, 1)),
    ),
    Trial(
        "softmax", "softmax_forward", "softmax 16384x4096 forward",
        _rows("TILE num_warps JOIN", (4096, 4, 1), (4096, 8), (4096, 8, 1)),
    ),
    Trial(
        "softmax", "softmax_forward", "softmax 8192x16384 forward",
        _rows("TILE num_warps JOIN", (1, 16, 1), (1, 16), (1, 8, 1)),
    ),
    Trial(
        "softmax", "softmax_forward", "softmax 32768x2048 forward",
        _rows("TILE num_warps JOIN", (2048, 2, 1), (4096, 4), (2048, 4, 1)),
    ),
    Trial(
        "softmax", "softmax_forward", "softmax 4096x8192 forward",
        _rows("TILE num_warps JOIN", (8192, 8, 1), (1, 16), (1, 16, 1)),
    ),
    Trial(
        "rope", "rope", "rope 4x4096x32/8x128 forward",
        _rows("TILE num_warps SPREAD", (2048, 2, 1), (1024, 1, 1), (4096, 4)),
    ),
    Trial(
        "rope", "rope", "rope 16x1024x12/12x64 forward",
        _rows("TILE num_warps SPREAD", (1024, 1, 1), (2048, 2, 1), (1024, 1)),
    ),
    Trial(
        "activations", "activations_bias_backward", "bias_gelu_tanh 16384x4096 forward+backward",
        _rows("ROWS BLOCK STAGES programs_per_sm num_warps", (4, 512, 3, 6, 4), (8, 512, 3, 4, 4)),
    ),
    Trial(
        "softmax", "softmax_backward", "softmax_causal 96x1024x1024 forward+backward",
        _rows("TILE num_warps", (2048, 2), (1024, 2), (2048, 4)),
    ),
    Trial(
        "softmax", "softmax_forward", "softmax_causal 96x1024x1024 forward",
        _rows("TILE num_warps JOIN", (1024, 2), (1024, 1), (1024, 2, 1)),
    ),
    Trial(
        "softmax", "softmax_forward", "softmax_causal 64x2048x2048 forward",
        _rows("TILE num_warps JOIN", (2048, 2, 1), (2048, 2), (4096, 4)),
    ),
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


def compile_rows(trial: Trial) -> list[Row]:
    """Run each row once, which leaves it compiled in Triton's cache on disk: those that ran."""
    case = trial.find()
    call = case.variants["ours"](case.inputs())
    table, ran = LaunchTable.known[trial.table], []
    for row in trial.rows:
        try:
            _with_row(table, row, call)()
            torch.cuda.synchronize()
            ran.append(row)
        except Exception as error:  # noqa: BLE001
            print(f"  {trial.case}: {row}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
    return ran


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for t in result if isinstance(t, Tensor)]


def _apart(result: Any, expected: Any) -> float:
    pairs = zip(_tensors(result), _tensors(expected), strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)) for a, b in pairs)


def measured(trial: Trial, rows: Sequence[Row], repeats: int) -> tuple[Case, list[tuple[float, float, Row]]]:
    """Time in ms, distance from eager's result, and row of each, fastest first."""
    case = trial.find()
    table = LaunchTable.known[trial.table]
    sets = [case.inputs() for _ in range(SETS)]
    calls = [case.variants["ours"](given) for given in sets]
    apart = []
    expected = _expected(case, sets[0])
    for row in rows:
        apart.append(_apart(_with_row(table, row, _ours(case, sets[0], calls[0]))(), expected))
    variants = {str(i): [_with_row(table, row, call) for call in calls] for i, row in enumerate(rows)}
    times = rotated_ms(variants, repeats)
    return case, sorted(zip(times.values(), apart, rows, strict=True), key=lambda entry: entry[0])


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


def _machine() -> dict[str, Any]:
    """Where and when this was timed."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.kernels.tune_rows",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=110.0, help="no trial begins after this")
    parser.add_argument("--only", default="", metavar="TEXT", help="trials whose case holds TEXT")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each row")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    parser.add_argument("--output", type=Path, help="JSON of all times")
    args = parser.parse_args()
    start = time.monotonic()
    trials = [trial for trial in TRIALS if args.only in trial.case]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        ran = pool.map(compile_rows, trials, chunksize=1)
    roof = copy_bandwidth()
    print(f"compiled after {time.monotonic() - start:.0f} s; copy {roof / 1e12:.2f} TB/s", flush=True)
    found: list[Mapping[str, Any]] = []
    for trial, rows in zip(trials, ran, strict=True):
        if time.monotonic() - start > args.budget_s:
            print(f"{trial.case}: no time left")
            continue
        case, results = measured(trial, rows, args.repeats)
        floor_ms = case.bytes / roof * 1e3
        print(f"{trial.case}: floor {floor_ms:.4f} ms", flush=True)
        for ms, apart, row in results:
            notes = "  WRONG" * (apart > MOST_APART) + "  as it is" * (row == trial.rows[0])
            print(
                f"  {ms:.4f} ms {floor_ms / ms:4.0%}  apart {apart:.1e}  ({trial.size(case)}, {row}),{notes}"
            )
            found.append({"case": trial.case, "table": trial.table, "ms": ms, "apart": apart, "row": row})
        torch.cuda.empty_cache()
    if args.output:
        args.output.write_text(json.dumps({**_machine(), "copy_bytes_per_s": roof, "rows": found}, indent=1))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
