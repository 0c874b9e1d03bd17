"""Weight-only products beside bf16 `F.linear` and PyTorch's own packed products, for few rows.

The floor counts packed words, scales, x and y; `eager` reads the bf16 weight, two to four times as much. For
rows near a limit, both of our ways are timed (`ours_split`, `ours_tile`, or `ours_stream` for one row),
whatever the limit is.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import quant_matmul as qm
from .._quant_format import BLOCK, words_of
from .._quant_launch import launch_split, launch_stream, launch_tile
from .timing import Case, Variant, forward

#: Rows and columns of the weight.
WEIGHTS = [
    (4096, 4096),
    (1024, 4096),
    (11008, 4096),
    (4096, 11008),
    (14336, 4096),
    (4096, 14336),
    (8192, 8192),
    (28672, 8192),
]
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
#: Out, columns, rows of x, bits.
QUICK = [
    (4096, 4096, 1, 4), (4096, 14336, 1, 4), (8192, 8192, 1, 4), (28672, 8192, 1, 4), (8192, 8192, 1, 8),
    (8192, 8192, 16, 4),
]  # fmt: skip
_GROUP = 128
#: Rows of x for which both ways are timed.
_BOTH = (8, 16, 32)


def random_weight(out: int, columns: int, bits: int) -> qm.QuantizedWeight:
    """Random words are as good as packed ones, and made faster."""
    words = torch.randint(
        -(2**31), 2**31 - 1, (out, words_of(columns, bits)), device="cuda", dtype=torch.int32
    )
    scales = 1 if bits == 8 else -(-columns // BLOCK) * BLOCK // _GROUP
    scale = torch.rand(scales, out, device="cuda", dtype=torch.bfloat16).t()
    return qm.QuantizedWeight(words, scale, None, bits, columns)


def _ours(x: Tensor, words: Tensor, scale: Tensor, bits: int) -> Tensor:
    return qm.weight_only_linear(x, qm.QuantizedWeight(words, scale, None, bits, x.shape[1]))


def _by(launch: Callable[..., None]) -> Callable[..., Tensor]:
    def product(x: Tensor, words: Tensor, scale: Tensor, bits: int) -> Tensor:
        y = torch.empty(x.shape[0], words.shape[0], device=x.device, dtype=x.dtype)
        launch(x, words, scale.t(), None, None, y, bits)
        return y

    return product


def _of_another_weight(make: Callable[[int, int], Callable[[Tensor], Any]]) -> Variant:
    """A competitor that reads a weight of its own, made of random numbers when the inputs are."""

    def prepare(inputs: Sequence[Any]) -> Callable[[], object]:
        x, words = inputs[0], inputs[1]
        product = make(words.shape[0], x.shape[1])

        def call() -> object:
            with torch.no_grad():
                return product(x)

        return call

    return prepare


def _linear(out: int, columns: int) -> Callable[[Tensor], Any]:
    weight = torch.randn(out, columns, device="cuda", dtype=torch.bfloat16)
    return lambda x: F.linear(x, weight)


def _torch_int4(out: int, columns: int) -> Callable[[Tensor], Any]:
    nibbles = torch.randint(0, 256, (out, columns // 2), device="cuda", dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, 8)
    scales = torch.rand(columns // _GROUP, out, 2, device="cuda", dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, _GROUP, scales)


def _torch_int8(out: int, columns: int) -> Callable[[Tensor], Any]:
    weight = torch.randint(-127, 128, (out, columns), device="cuda", dtype=torch.int8)
    scale = torch.rand(out, device="cuda", dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, weight, scale)


def rivals(bits: int) -> dict[str, Variant]:
    """Products that PyTorch brings, each with a weight of its own."""
    return {
        "eager_bf16": _of_another_weight(_linear),
        "torch_packed": _of_another_weight(_torch_int4 if bits == 4 else _torch_int8),
    }


def case(out: int, columns: int, rows: int, bits: int) -> Case:
    """One weight, in groups of 128 columns where it has 4 bits, and so many rows of x."""

    def inputs() -> Sequence[Any]:
        weight = random_weight(out, columns, bits)
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        return x, weight.packed, weight.scale, bits

    variants = {"ours": forward(_ours)}
    if rows in _BOTH:
        variants |= {"ours_split": forward(_by(launch_split)), "ours_tile": forward(_by(launch_tile))}
    if rows == 1:
        variants |= {"ours_split": forward(_by(launch_split)), "ours_stream": forward(_by(launch_stream))}
    variants |= rivals(bits)
    scales = out * (1 if bits == 8 else columns // _GROUP) * 2
    moved = out * words_of(columns, bits) * 4 + scales + 2 * rows * (out + columns)
    return Case(
        f"int{bits}_linear", f"{rows}x{out}x{columns}", "bf16", "forward", inputs, variants, moved,
        2.0 * rows * out * columns,
        required=("ours",),
    )  # fmt: skip


def cases(quick: bool) -> Iterator[Case]:
    """Weights of common models, from one row of x to many."""
    if quick:
        yield from (case(*size) for size in QUICK)
        return
    for out, columns in WEIGHTS:
        for rows in ROWS:
            for bits in (4, 8):
                yield case(out, columns, rows, bits)
