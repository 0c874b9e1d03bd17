"""Bias, GELU and LayerNorm beside eager PyTorch and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import bias_act_norm as ours
from .norm import WAYS, inputs, traffic
from .timing import Case, compiled

COLUMNS = (256, 512, 1024, 2048, 4096, 8192, 16384)
SHAPES = [(2**26 // cols, cols) for cols in COLUMNS] + [(4096, 4096)]
QUICK = [(16384, 4096), (65536, 1024)]


def cases(quick: bool) -> Iterator[Case]:
    """Both forms of GELU, each way."""
    for rows, cols in QUICK if quick else SHAPES:
        for activation in ("gelu_tanh", "gelu"):
            if quick and activation == "gelu" and cols != 4096:
                continue

            def bundled(x, bias, weight, shift, activation=activation):
                return ours.bias_act_norm(x, bias, activation, weight, shift)

            def eager(x, bias, weight, shift, activation=activation):
                return ours.bias_act_norm_reference(x, bias, activation, weight, shift)

            functions = {"ours": bundled, "eager": eager}
            if not quick or (cols == 4096 and activation == "gelu_tanh"):
                functions["compile"] = compiled(eager)
            for direction in WAYS:
                yield Case(
                    f"bias_{activation}_layer_norm",
                    f"{rows}x{cols}",
                    "bf16",
                    direction,
                    inputs(rows, cols, 3, torch.bfloat16),
                    {name: WAYS[direction](f) for name, f in functions.items()},
                    traffic(rows, cols, 2, direction, gradients=3),
                )
