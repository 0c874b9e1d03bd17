"""Whether attention's gradients are right, whatever layouts of output gradients a process has met before.

    python benchmarks/attention_layouts.py [--out FILE]        ten seconds on a GPU
    python benchmarks/attention_layouts.py --tiny              on a CPU: does it run at all

For each of PyTorch's backends and the bundled kernel: a forward and backward whose output gradient has heads
outside of tokens in memory or tokens outside of heads, then another of the same shapes with the other layout
or the same. Told is how far the second's gradients are off float64's, relative to their size; eager PyTorch
is at 3e-3 in bfloat16. Each pair has a number of tokens of its own, so that no other pair's plans serve it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

LAYOUTS = ("heads outside", "tokens outside")
BATCH, HEADS, DIM = 2, 4, 64
#: Off by more, a gradient is none of that function.
WRONG = 0.5


def ways(tiny: bool) -> dict[str, Callable[..., Tensor]]:
    """Causal attention by name."""
    from advisor.kernels.attention import attention

    def of(backend: SDPBackend) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return call

    if tiny:
        return {"SDPA (math)": of(SDPBackend.MATH)}
    return {
        "SDPA (cuDNN)": of(SDPBackend.CUDNN_ATTENTION),
        "SDPA (flash)": of(SDPBackend.FLASH_ATTENTION),
        "SDPA (memory-efficient)": of(SDPBackend.EFFICIENT_ATTENTION),
        "advisor.kernels.attention": lambda q, k, v: attention(q, k, v, causal=True),
    }


def rows(tokens: int, layout: str, device: str) -> Tensor:
    """(batch, heads, tokens, dim), random."""
    if layout == LAYOUTS[0]:
        return torch.randn(BATCH, HEADS, tokens, DIM, device=device, dtype=torch.bfloat16)
    return torch.randn(BATCH, tokens, HEADS, DIM, device=device, dtype=torch.bfloat16).transpose(1, 2)


def second_error(call: Callable[..., Tensor], inputs: str, first: str, second: str, tokens: int) -> float:
    """Of the gradients of the second of two calls, over those of float64, the largest."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for layout in (first, second):
        leaves = [rows(tokens, inputs, device).requires_grad_() for _ in range(3)]
        grad = rows(tokens, layout, device)
        mine = torch.autograd.grad(call(*leaves), leaves, grad)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*exact, is_causal=True)
    theirs = torch.autograd.grad(out, exact, grad.double())
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="few tokens, the mathematical backend alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/attention_layouts.json")
    args = parser.parse_args()
    from end_to_end import device_and_versions

    torch.manual_seed(0)
    found: list[dict[str, Any]] = []
    for name, call in ways(args.tiny).items():
        pairs = [(i, a, b) for i in LAYOUTS for a in LAYOUTS for b in LAYOUTS]
        for number, (inputs, first, second) in enumerate(pairs):
            tokens = (8 if args.tiny else 128) * (number + 1)
            error = second_error(call, inputs, first, second, tokens)
            found.append({"way": name, "inputs": inputs, "first": first, "second": second, "error": error})
            told = "WRONG" if error > WRONG else ""
            print(
                f"{name:26} inputs {inputs:14} first {first:14} then {second:14} {error:.1e} {told}",
                flush=True,
            )
    record = {
        "command": "python benchmarks/attention_layouts.py " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "cudnn": torch.backends.cudnn.version(),
        **device_and_versions(),
        "pairs": found,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
