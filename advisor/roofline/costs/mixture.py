"""Mixtures of experts that one operator runs: vLLM's call of TensorRT-LLM's generated kernels.

The operator's arguments are the tokens and the router's scores; neither the experts' weights nor the choices
are. The rest is in the kernels: a grid has a column of blocks for each tile of the weight's rows, and as many
tiles of tokens as the choices could fill at worst, which tells how many experts a token chooses. Names tell
the tile and the element types (TensorRT-LLM, ``trtllmGenKernels/fp8BlockScaleMoe/runner.h``,
``getMaxNumCtasInBatchDim``). Every expert is as likely to be chosen, and taken to be on this device: where
experts are spread over devices, arithmetic and bytes shrink alike, and the bound stays.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from advisor.roofline.costs.args import Unknown, footprint, itemsize, tensor
from advisor.roofline.costs.conventions import FMA
from advisor.roofline.costs.model import Cost, Launch, OpCall
from advisor.roofline.costs.registry import Result, assign, cost
from advisor.roofline.costs.traffic import distinct

#: The family of operators that these count under.
FAMILY = "matmul"

#: Types of result, weight and tokens; rows of the weight, tokens and depth of a tile.
_PRODUCT = re.compile(r"^bmm_([A-Za-z0-9]+)_([A-Za-z0-9]+)_Fp32_t(\d+)x(\d+)x(\d+)")
_PAIR = re.compile(r"(MxE4m3|MxE2m1|Bfloat16|E4m3|E2m1)")
#: Bytes an element, with the scale that 32 (of E2m1 16) elements share.
_BYTES = {
    "Bfloat16": 2.0, "MxE4m3": 1 + 1 / 32, "E4m3": 1.0, "MxE2m1": 0.5 + 1 / 32, "E2m1": 0.5 + 1 / 16,
}  # fmt: skip
_MAX_CHOICES = 64


@dataclass(frozen=True)
class _Experts:
    """One of the two products.

    Attributes:
        result, weight, token: element types.
        rows, tokens: of a tile.
        blocks: of the grid.
        gated: pairs of the weight's rows make one element of the result.
    """

    result: str
    weight: str
    token: str
    rows: int
    tokens: int
    blocks: int
    gated: bool


def _product(launch: Launch) -> _Experts:
    found = _PRODUCT.match(launch.name)
    operands = _PAIR.findall(found[2]) if found else []
    if found is None or not operands or found[1] not in _BYTES or not launch.grid_blocks:
        raise Unknown("not a product of experts")
    gated = re.search(r"swiglu|geglu", launch.name, re.I) is not None
    return _Experts(
        found[1], operands[0], operands[-1], int(found[3]), int(found[4]), launch.grid_blocks, gated
    )


def most_tiles(tokens: int, choices: int, experts: int, tile: int) -> int:
    """Tiles of tokens at worst: one choice for each expert, and all others for one of them."""
    chosen = tokens * choices
    filled = min(experts, chosen)
    return filled + (chosen - filled) // tile


def _choices(tokens: int, experts: int, tile: int, tiles: int) -> int:
    found = [
        k for k in range(1, min(experts, _MAX_CHOICES) + 1) if most_tiles(tokens, k, experts, tile) == tiles
    ]
    if len(found) != 1:
        raise Unknown("the number of choices is not told")
    return found[0]


@cost("vllm::moe_forward")
def trtllm_experts(call: OpCall) -> Result:
    """``(tokens, hidden)`` and scores ``(tokens, experts)``: two products, routing, and the weighted sum.

    The second product's rows are the hidden size, so its grid tells the tiles of tokens; those tell the first
    product's rows.
    """
    x, scores = tensor(call, 0), tensor(call, 1)
    products = [launch for launch in call.launches if _PRODUCT.match(launch.name)]
    if len(products) != 2 or len(x.shape) != 2 or len(scores.shape) != 2 or x.shape[0] != scores.shape[0]:
        raise Unknown("not two products of experts")
    first, second = map(_product, products)
    (tokens, hidden), experts = x.shape, scores.shape[1]
    tiles, rest = divmod(second.blocks, math.ceil(hidden / second.rows))
    if rest or not tiles or first.blocks % tiles or first.tokens != second.tokens:
        raise Unknown("the grids do not fit the sizes")
    choices = _choices(tokens, experts, second.tokens, tiles)
    wide = first.blocks // tiles * first.rows
    inner = wide // 2 if first.gated else wide
    chosen = tokens * choices
    used = distinct(chosen, experts)
    main = {
        products[0]: _cost(first, used, chosen, wide, hidden, tokens * hidden, chosen * inner),
        products[1]: _cost(second, used, chosen, hidden, inner, chosen * inner, chosen * hidden),
    }
    rows, ids = (
        Cost(0.0, footprint(scores), 8.0 * chosen, "none"),
        Cost(0.0, 8.0 * chosen, 12.0 * chosen, "none"),
    )
    width = itemsize(x.dtype)
    finalize = Cost(
        float(FMA * chosen * hidden),
        chosen * hidden * _BYTES[second.result],
        tokens * hidden * width,
        "vector_fp32",
    )
    quantised = Cost(float(2 * x.numel), footprint(x), x.numel * _BYTES[first.token], "vector_fp32")
    others = assign(
        call,
        rows,
        (r"scoreskernel", rows),
        (r"routing", ids),
        (r"finalize", finalize),
        (r"quantize", quantised),
    )
    assert isinstance(others, tuple)
    known = re.compile(r"routing|finalize|quantize", re.I)
    return tuple(
        main.get(launch) or (found if known.search(launch.name) else None)
        for launch, found in zip(call.launches, others, strict=True)
    )


def _cost(
    product: _Experts, used: float, chosen: int, rows: int, depth: int, read: int, written: int
) -> Cost:
    """A product of the chosen tokens with their experts' ``rows x depth``, in whole tiles of tokens.

    Args:
        used: experts that any token chooses.
        read, written: elements of the tokens before and after.
    """
    each = chosen / used
    padded = used * math.ceil(each / product.tokens) * product.tokens
    flops = 2.0 * rows * depth * padded
    needed = 2.0 * rows * depth * chosen
    pipe = "tensor_bf16" if "Bfloat16" in (product.weight, product.token) else "tensor_fp8"
    if product.weight == product.token == "E2m1":
        pipe = "tensor_fp4"
    return Cost(
        flops,
        used * rows * depth * _BYTES[product.weight] + read * _BYTES[product.token],
        written * _BYTES[product.result],
        pipe,
        flops_padding=flops - needed,
    )
