"""Bias + GELU and gated activations: memory-bound; bytes are each input read and each output written once."""

from collections.abc import Iterator

import torch

from .. import activations as act
from .timing import Case, compiled, forward, forward_backward

GATED = [
    (16384, 11008), (4096, 4096), (512, 4096), (8192, 14336), (1024, 11008), (65536, 1024), (2048, 8192),
    (2048, 1024), (32768, 2048), (128, 14336), (16384, 3072), (4096, 11008),
]  # fmt: skip
BIAS = [(16384, 4096), (8192, 3072), (32768, 2048), (2048, 8192), (65536, 1024), (262144, 256), (8192, 16384)]


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def _liger_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def _bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return act.bias_gelu(x, bias, "tanh")


def _bias_gelu_eager(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return act.bias_activation_reference(x, bias, "gelu_tanh")


def cases(quick: bool) -> Iterator[Case]:
    """Forward, and forward with backward, of each."""
    for rows, columns in GATED[:1] if quick else GATED:
        yield from _gated(rows, columns)
    for rows, columns in BIAS[:1] if quick else BIAS:
        yield from _both(
            "bias_gelu_tanh", rows, columns, lambda r=rows, c=columns: (_randn(r, c), _randn(c)),
            _bias_gelu, _bias_gelu_eager, {}, (2, 5),
        )  # fmt: skip


def grid() -> Iterator[Case]:
    """SwiGLU over twelve sizes."""
    for rows, columns in GATED:
        yield from _gated(rows, columns)


def _gated(rows: int, columns: int) -> Iterator[Case]:
    yield from _both(
        "swiglu", rows, columns, lambda: (_randn(rows, columns), _randn(rows, columns)),
        act.swiglu, act.gated_activation_reference, {"liger": _liger_swiglu}, (3, 8),
    )  # fmt: skip


def _both(kernel, rows, columns, inputs, ours, eager, others, passes) -> Iterator[Case]:
    directions = (("forward", forward), ("forward+backward", forward_backward))
    for (direction, timed), visits in zip(directions, passes, strict=True):
        functions = {"ours": ours, "eager": eager, "compile": compiled(eager)} | others
        yield Case(
            kernel, f"{rows}x{columns}", "bf16", direction, inputs,
            {name: timed(function) for name, function in functions.items()},
            bytes=visits * rows * columns * 2,
        )  # fmt: skip
