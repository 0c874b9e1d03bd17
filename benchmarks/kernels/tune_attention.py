"""Times launch parameters of the attention kernels on this GPU, each checked against PyTorch's attention.

    python -m benchmarks.kernels.tune_attention [--dims 64 128] [--full] [--budget-s 60]

Prints, fastest first, what `kernels/_attention_launch.py` may take over for this architecture. A candidate
costs about a second to compile; the likeliest come first, and each kernel goes on with the fastest before it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from advisor.kernels import _attention_launch as launch
from advisor.kernels import _attention_ops as ops

#: Of each kernel by head dimension: (queries, keys, warps, stages); the first also without descriptors.
CANDIDATES: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {
    "forward": {
        64: [(128, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2), (128, 128, 8, 3)],
        128: [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 128, 4, 2), (128, 64, 8, 2)],
    },
    "query_gradient": {
        64: [(128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 128, 4, 2), (64, 64, 4, 3)],
        128: [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 128, 8, 2)],
    },
    "key_gradient": {
        64: [(64, 128, 8, 2), (64, 64, 4, 2), (128, 128, 8, 2), (64, 64, 4, 3), (32, 128, 8, 3)],
        128: [(64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 2), (32, 64, 4, 3)],
    },
}
TILES = {
    "forward": launch.FORWARD,
    "query_gradient": launch.QUERY_GRADIENT,
    "key_gradient": launch.KEY_GRADIENT,
}
SHAPES = {64: (8, 32, 2048, 64), 128: (4, 16, 4096, 128)}


def use(kernel: str, params: launch.Params) -> None:
    """Let every head dimension's plain launch of `kernel` take these parameters."""
    TILES[kernel].plain.pick = lambda size, device: params  # type: ignore[method-assign]


def median_ms(call: Callable[[], Any], repeats: int = 8) -> float:
    call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, by norms."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


class Problem:
    """One shape: its tensors, PyTorch's results, and one call for each kernel."""

    def __init__(self, dim: int, causal: bool) -> None:
        batch, heads, tokens, _ = SHAPES[dim]
        self.q, self.k, self.v, self.grad = (
            torch.randn(batch, heads, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)
        )
        self.rest = (dim**-0.5, 0.0, 0.0, -1, 0 if causal else -1, False, tokens, tokens)
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        self.wanted = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        self.gradients = torch.autograd.grad(self.wanted, leaves, self.grad)
        seen = 0.5 if causal else 1.0
        self.flops = 4.0 * batch * heads * tokens**2 * dim * seen
        self.out, self.lse = self.forward()

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.attention_op(self.q, self.k, self.v, None, None, None, None, *self.rest)

    def backward(self) -> tuple[torch.Tensor, ...]:
        saved = (self.grad, self.q, self.k, self.v, self.out, self.lse)
        return ops.attention_gradient_op(*saved, None, None, None, None, *self.rest)

    def call(self, kernel: str) -> Callable[[], Any]:
        return self.forward if kernel == "forward" else self.backward

    def error(self, kernel: str) -> float:
        """The largest relative error of what `kernel` writes."""
        if kernel == "forward":
            return error(self.forward()[0], self.wanted)
        pairs = list(zip(self.backward(), self.gradients, strict=True))
        return max(error(*pair) for pair in (pairs[:1] if kernel == "query_gradient" else pairs[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64], choices=sorted(SHAPES))
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--budget-s", type=float, default=60.0, help="stop trying after this long")
    args = parser.parse_args()
    stop = time.monotonic() + args.budget_s
    picks = {name: tiles.plain.pick for name, tiles in TILES.items()}
    for dim in args.dims:
        for name, pick in picks.items():
            TILES[name].plain.pick = pick  # type: ignore[method-assign]
        problem = Problem(dim, not args.full)
        for kernel, tiles in CANDIDATES.items():
            found = []
            for tile, tma in [(tile, 1) for tile in tiles[dim]] + [(tiles[dim][0], 0)]:
                if time.monotonic() > stop:
                    break
                params = launch.tile(*tile, tma)
                use(kernel, params)
                try:
                    wrong = problem.error(kernel)
                    found.append((median_ms(problem.call(kernel)), wrong, params))
                except Exception as failure:  # noqa: BLE001
                    print(f"  {kernel} {params}: {type(failure).__name__} {str(failure)[:80]}")
            found.sort(key=lambda entry: entry[0])
            TILES[kernel].plain.pick = picks[kernel]  # type: ignore[method-assign]
            factor = 1.0 if kernel == "forward" else 2.5
            for ms, wrong, params in found:
                rate = factor * problem.flops / ms / 1e9
                print(
                    f"{dim} {kernel:15} {ms:.3f} ms {rate:4.0f} TFLOP/s error {wrong:.1e} {params}",
                    flush=True,
                )
            if found:
                use(kernel, found[0][2])
        total = median_ms(problem.forward) + median_ms(problem.backward)
        print(
            f"{dim} fastest of each: {total:.3f} ms {3.5 * problem.flops / total / 1e9:.0f} TFLOP/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
