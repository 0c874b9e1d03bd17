"""Linear layer with cross-entropy: three matrix products, and what the logits cost beside them."""

from collections.abc import Iterator

import torch

from .. import linear_cross_entropy as lce
from .timing import Case, compiled, forward_backward

#: Tokens, hidden, classes.
SIZES = [
    (8192, 768, 50257),
    (8192, 4096, 32000),
    (4096, 2048, 128256),
    (16384, 1024, 50304),
    (2048, 768, 50257),
]


def _fast(x, weight, target):
    return lce.linear_cross_entropy(x, weight, target, variant="fast")


def _memory(x, weight, target):
    return lce.linear_cross_entropy(x, weight, target, variant="memory")


def _eager(x, weight, target):
    return lce.linear_cross_entropy_reference(x, weight, target)


def _liger(x, weight, target):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]


def cases(quick: bool) -> Iterator[Case]:
    """Forward with backward."""
    for tokens, hidden, classes in SIZES[:1] if quick else SIZES:

        def inputs(t=tokens, h=hidden, v=classes):
            x = torch.randn(t, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            weight = torch.randn(v, h, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
            return x, weight, torch.randint(0, v, (t,), device="cuda")

        functions = {
            "ours": _fast, "ours_memory": _memory, "eager": _eager, "compile": compiled(_eager),
            "liger": _liger,
        }  # fmt: skip
        yield Case(
            "linear_cross_entropy", f"{tokens}x{hidden}x{classes}", "bf16", "forward+backward", inputs,
            {name: forward_backward(function) for name, function in functions.items()},
            bytes=2 * 2 * (tokens * hidden + classes * hidden), flops=6.0 * tokens * hidden * classes,
            required=("ours", "ours_memory"),
        )  # fmt: skip
