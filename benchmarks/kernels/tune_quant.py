"""Times launch parameters of the weight-only products on this GPU, each checked against the reference first.

    python -m benchmarks.kernels.tune_quant [--rows 1 8 16] [--budget-s 60]

Prints what `SPLIT` of `kernels/_quant_launch.py` may take over for this architecture: the times of two int4
weights for each candidate, and for the best three those of int8 too, with the share of the copy bandwidth.
The other kernels' times beside them tell where the limits of `kernels/quant_matmul.py` belong. A candidate
costs a second or two to compile; the likeliest come first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from advisor.kernels import _quant_launch as launches
from advisor.kernels._device import architecture
from advisor.kernels.bench.quant_matmul import random_weight
from advisor.kernels.bench.timing import copy_bandwidth, median_ms
from advisor.kernels.quant_matmul import QuantizedWeight, weight_only_linear_reference

#: Rows of W a program, warps, blocks a warp and step, stages.
FEW = [
    (32, 8, 1, 4), (16, 4, 1, 5), (16, 8, 1, 4), (64, 8, 1, 4), (32, 4, 1, 5), (32, 8, 1, 3), (16, 8, 1, 3),
    (16, 4, 2, 3), (64, 16, 1, 3), (32, 4, 1, 7), (64, 8, 1, 3), (16, 4, 1, 7), (16, 2, 2, 4), (64, 4, 1, 6),
]  # fmt: skip
MANY = [
    (64, 8, 1, 4), (32, 8, 1, 4), (64, 4, 1, 5), (64, 4, 1, 4), (64, 8, 1, 3), (32, 4, 1, 5), (32, 8, 1, 3),
    (64, 4, 2, 3), (16, 8, 1, 4), (128, 4, 1, 4), (32, 16, 1, 3), (16, 4, 1, 5),
]  # fmt: skip
#: Out and columns.
INT4, INT8 = [(8192, 8192), (4096, 14336)], [(8192, 8192)]
#: Enough sets that the cache holds none when its turn comes again.
SETS = 7


@dataclass
class Given:
    """Input sets of one weight's shape, and what the first of them must give."""

    weights: list[QuantizedWeight]
    xs: list[torch.Tensor]
    expected: torch.Tensor

    @property
    def bytes(self) -> int:
        """Compulsory: the weight, x and y."""
        return self.weights[0].nbytes + 2 * (self.xs[0].numel() + self.expected.numel())


def given(out: int, columns: int, rows: int, bits: int) -> Given:
    """Random inputs; the reference in fp32."""
    weights = [random_weight(out, columns, bits) for _ in range(SETS)]
    xs = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
    return Given(weights, xs, weight_only_linear_reference(xs[0].float(), weights[0]))


def checked_ms(launch: Callable[..., None], inputs: Given) -> float:
    """Median time of one launch; raises where the result is another than the reference's."""

    def product(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        y = torch.full((x.shape[0], weight.out_features), torch.nan, device="cuda", dtype=x.dtype)
        launch(x, weight.packed, weight.scale.t(), None, None, y, weight.bits)
        return y

    error = (product(inputs.xs[0], inputs.weights[0]) - inputs.expected).norm() / inputs.expected.norm()
    # NaN, too, is wrong.
    if not error < 4e-3:
        raise AssertionError(f"wrong by {error:.1e} of the result")
    out = torch.empty_like(inputs.expected, dtype=torch.bfloat16)
    calls = [
        partial(launch, x, w.packed, w.scale.t(), None, None, out, w.bits)
        for x, w in zip(inputs.xs, inputs.weights, strict=True)
    ]
    return median_ms(calls, 3 * SETS)


def tune(rows: int, budget_s: float, bytes_per_s: float) -> None:
    """Print the candidates for so many rows of x as they are timed, and the best of them."""
    device = torch.device("cuda", 0)
    arch, before = architecture(device), dict(launches.SPLIT.rows)
    start = time.monotonic()
    int4, int8 = ([given(*shape, rows, bits) for shape in shapes] for bits, shapes in ((4, INT4), (8, INT8)))
    found: list[tuple[float, dict[str, int]]] = []

    def with_row(row: dict[str, int], inputs: list[Given]) -> list[float]:
        launches.SPLIT.rows = {**before, arch: ((None, row),)}
        try:
            return [checked_ms(launches.launch_split, each) for each in inputs]
        finally:
            launches.SPLIT.rows = before

    now = dict(launches.SPLIT.pick(rows, device))
    keys = ("ROWS", "WARPS", "BLOCKS", "STAGES")
    others = [dict(zip(keys, values, strict=True)) for values in (FEW if rows == 1 else MANY)]
    for row in [now, *(row for row in others if row != now)]:
        # The last of the time is for int8 and the other kernels.
        if time.monotonic() - start > 0.7 * budget_s:
            break
        try:
            times = with_row(row, int4)
        except Exception as error:  # noqa: BLE001
            print(f"  {row}: {type(error).__name__} {str(error).splitlines()[0][:60]}", flush=True)
            continue
        found.append((sum(times), row))
        print(f"  {row}: {' + '.join(f'{ms:.4f}' for ms in times)} ms", flush=True)
    for _, row in sorted(found, key=lambda pair: pair[0])[:3]:
        times = with_row(row, int4 + int8)
        shares = [i.bytes / bytes_per_s / (ms * 1e-3) for i, ms in zip(int4 + int8, times, strict=True)]
        cells = ", ".join(f"{ms:.4f} ({share:.0%})" for ms, share in zip(times, shares, strict=True))
        print(f"  best: ({rows}, {row})  {cells}", flush=True)
    for launch in (launches.launch_gemv, launches.launch_tile):
        try:
            print(f"  {launch.__name__}: {checked_ms(launch, int4[0]):.4f} ms", flush=True)
        except Exception as error:  # noqa: BLE001
            print(f"  {launch.__name__}: {type(error).__name__} {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 8], help="of x, 16 at most")
    parser.add_argument("--budget-s", type=float, default=60.0, help="for all of them together")
    args = parser.parse_args()
    bytes_per_s = copy_bandwidth()
    print(f"copy {bytes_per_s / 1e12:.2f} TB/s; int4 {INT4}, int8 {INT8}", flush=True)
    for rows in args.rows:
        print(f"rows of x: {rows}", flush=True)
        tune(rows, args.budget_s / len(args.rows), bytes_per_s)


if __name__ == "__main__":
    main()
