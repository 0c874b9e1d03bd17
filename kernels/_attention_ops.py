"""The operators of attention: what is launched, with what, and how autograd is told."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import _attention_hopper_tiles as hopper
from ._attention_backward import key_gradient_kernel, query_gradient_kernel
from ._attention_forward import forward_kernel
from ._attention_hopper_forward import launch_forward
from ._attention_hopper_keys import launch_key_gradient
from ._attention_hopper_queries import launch_query_gradient
from ._attention_launch import FORWARD, KEY_GRADIENT, QUERY_GRADIENT, Params, Tiles
from ._attention_masks import is_dense, listed_for, prepared
from ._device import sm_count
from ._launch import cdiv, next_power_of_2
from ._ops import operator
from ._random import keep_threshold
from ._tf32 import tf32_allowed

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    # Triton before 3.4, or none: tiles are loaded through pointers.
    TensorDescriptor = None

#: Keys and values of the heads that are worked on at a time; half of the L2 of an A100 or H100.
_L2_SHARE_BYTES = 20 * 2**20
#: Of what rounding takes from a 16-bit output: float16 would end where that is still of weight.
RESIDUE = torch.bfloat16
#: A tile's rows are addressed with 32-bit offsets, so strides beyond this are made dense first.
_MAX_STRIDE = 2**31 // 512


def _like(x: Tensor, length: int, dim: int, heads: int | None = None) -> Tensor:
    """Empty (batch, heads, length, dim), laid out as `x`: tokens outside of heads if its are."""
    batch, own_heads, _, _ = x.shape
    heads = own_heads if heads is None else heads
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, length, heads, dim).transpose(1, 2)
    return x.new_empty(batch, heads, length, dim)


def _results(q: Tensor, v: Tensor, precise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty output, log-sum-exp and residue; a float32 output is exact enough without one."""
    out, lse = _like(q, q.shape[2], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    if precise and q.dtype != torch.float32:
        return out, lse, torch.empty_like(out, dtype=RESIDUE)
    return out, lse, q.new_empty(0, dtype=RESIDUE)


def _rows(x: Tensor) -> Tensor:
    """`x`, or a dense copy where a kernel cannot address its rows."""
    return x if x.stride(3) == 1 and x.stride(2) <= _MAX_STRIDE else x.contiguous()


def _takes_tma(x: Tensor, params: Params) -> bool:
    return bool(params["TMA"]) and TensorDescriptor is not None and hopper.aligned(x)


def _roles(tiles: Tiles, options: Mapping[str, Any], q: Tensor, *others: Tensor) -> Params:
    """Parameters of the kernel with warps of different roles; empty: use the other one."""
    params = tiles.pick_roles(q, options) if hopper.AVAILABLE else {}
    return params if all(map(hopper.aligned, (q, *others))) else {}


def _described(x: Tensor, rows: int, cols: int) -> Any:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, cols])


def _together(q: Tensor, k: Tensor, v: Tensor, planes: int, per_key_head: int) -> int:
    """Planes worked on at a time, so that keys and values come from L2; whole groups of query heads."""
    held = (k.shape[2] * k.shape[3] + v.shape[2] * v.shape[3]) * k.element_size()
    return max(min(planes, per_key_head * max(1, _L2_SHARE_BYTES // max(held, 1))), 1)


def _options(
    q: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cu_q: Tensor | None,
    softcap: float,
    dropout: float,
    left: int,
    right: int,
    lower_right: bool,
) -> dict[str, Any]:
    tf32 = q.dtype == torch.float32 and tf32_allowed()
    keep = keep_threshold(dropout)
    return {
        "DIM": q.shape[3],
        "DIM_V": v.shape[3],
        "COLS": max(16, next_power_of_2(q.shape[3])),
        "COLS_V": max(16, next_power_of_2(v.shape[3])),
        "PACKED": cu_q is not None,
        "LOWER_RIGHT": lower_right,
        "LEFT": left >= 0,
        "RIGHT": right >= 0,
        "PER_KEY": bias is not None and bias.stride(2) == 0,
        "BIAS": 0 if bias is None else 1 if bias.dtype == torch.bool else 2,
        "LISTED": bias is not None and not is_dense(bias),
        "SOFTCAP": softcap > 0.0,
        # At p = 1 nothing is kept: the share of what is kept must stay finite.
        "DROPOUT": dropout > 0.0,
        "KEEP": max(keep, 1) if dropout < 1.0 else 0,
        "PRECISION": "tf32" if tf32 else "ieee",
    }


def _bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if bias is None else tuple(bias.stride())


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
    left: int,
    right: int,
    lower_right: bool,
    max_q: int,
    max_k: int,
    precise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(q, v, precise)


def _gradient_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(_like(x, x.shape[2], x.shape[3]) for x in (q, k, v))  # type: ignore[return-value]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.rest = inputs[7:15]


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, bias, cu_q, cu_k, seed, out, lse, residue = ctx.saved_tensors
    grads = attention_gradient_op(grad, q, k, v, out, lse, bias, cu_q, cu_k, seed, *ctx.rest, residue)
    return (*grads, *[None] * 13)


@operator("attention_backward", fake=_gradient_fake)
def attention_gradient_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
    left: int,
    right: int,
    lower_right: bool,
    max_q: int,
    max_k: int,
    residue: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, laid out as they are; `residue` is the output's, or empty."""
    dq, dk, dv = (_like(x, x.shape[2], x.shape[3]) for x in (q, k, v))
    if not (q.numel() and k.numel() and v.numel()) or dropout == 1.0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, k, v, out, grad = map(_rows, (q, k, v, out, grad))
    if residue.numel() and residue.stride() != out.stride():
        residue = torch.empty_strided(out.shape, out.stride(), dtype=RESIDUE, device=q.device).copy_(residue)
    options = _options(q, v, bias, cu_q, softcap, dropout, left, right, lower_right)
    heads, heads_k = q.shape[1], k.shape[1]
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    delta = torch.empty_like(lse)
    scalars = (max_q, max_k, lse.shape[2], scale, softcap, left, right)

    shift = max_k - max_q if lower_right else 0
    window = (scale, shift - left, shift + right, (left >= 0, right >= 0))
    processors = sm_count(q.device)

    planes, cells = batch * heads, None
    together = _together(q, k, v, planes, heads // heads_k)
    if params := _roles(QUERY_GRADIENT, options, q, k, v, grad):
        mask = prepared(bias)
        cells = mask.cells
        launch_query_gradient(
            q, k, v, out, residue, grad, dq, lse, delta, mask, *window, together, processors, params
        )
    else:
        params = QUERY_GRADIENT.pick(q, options)
        blocks = cdiv(max_q, params["BLOCK_M"])
        sources: tuple[Any, ...] = (q, k, v, grad)
        params["TMA"] = cu_q is None and all(_takes_tma(x, params) for x in sources)
        if params["TMA"]:
            sources = _descriptors(sources, params, options)
        query, key, value, grad_source = sources
        lists, list_strides = listed_for(bias, params["BLOCK_M"], params["BLOCK_N"], *window[1:])
        query_gradient_kernel[(planes * blocks,)](
            query, key, value, out, residue, grad_source, grad, dq, lse, delta, bias, lists, cu_q, cu_k, seed,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *grad.stride()[:3],
            *dq.stride()[:3], *_bias_strides(bias), *list_strides, heads, heads // heads_k, planes, blocks,
            together, *scalars, **options, **params, RESIDUE=residue.numel() > 0,
        )  # fmt: skip

    by_role = _roles(KEY_GRADIENT, options, q, k, v, grad)
    params = KEY_GRADIENT.pick(q, options)
    blocks = cdiv(max_k, 2 * hopper.ROWS if by_role else params["BLOCK_N"])
    splits = _splits(blocks * batch * heads_k, heads // heads_k, processors)
    planes = batch * heads_k * splits
    together = _together(k, q, grad, planes, splits)
    part_k = dk[None] if splits == 1 else dk.new_empty((splits, *dk.shape), dtype=torch.float32)
    part_v = dv[None] if splits == 1 else dv.new_empty((splits, *dv.shape), dtype=torch.float32)
    if by_role:
        mask = prepared(bias, transposed=True, cells=cells)
        launch_key_gradient(
            q, k, v, grad, part_k, part_v, lse, delta, mask, *window, together, processors, by_role
        )
    else:
        sources = (q, k, v, grad)
        params["TMA"] = cu_q is None and all(_takes_tma(x, params) for x in sources)
        if params["TMA"]:
            sources = _descriptors(sources, params, options)
        lists, list_strides = listed_for(
            bias, params["BLOCK_M"], params["BLOCK_N"], *window[1:], transposed=True
        )
        key_gradient_kernel[(planes * blocks,)](
            *sources, part_k, part_v, lse, delta, bias, lists, cu_q, cu_k, seed,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3],
            *part_k.stride()[:4], *part_v.stride()[:4], *_bias_strides(bias), *list_strides,
            heads, heads // heads_k, planes, blocks, together, *scalars, splits, **options, **params,
        )  # fmt: skip
    if splits > 1:
        dk.copy_(part_k.sum(0))
        dv.copy_(part_v.sum(0))
    return dq, dk, dv


def _descriptors(sources: tuple[Any, ...], params: Params, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Descriptors of q, k, v and, if given, the output's gradient."""
    shapes = (("M", "COLS"), ("N", "COLS"), ("N", "COLS_V"), ("M", "COLS_V"))
    return tuple(
        _described(x, params[f"BLOCK_{rows}"], options[cols])
        for x, (rows, cols) in zip(sources, shapes, strict=False)
    )


def _splits(programs: int, group: int, processors: int) -> int:
    """Parts into which to share out the query heads of a key head, so that each processor has work."""
    divisors = [d for d in range(1, group + 1) if group % d == 0]
    return next((d for d in divisors if programs * d >= processors), group)


@operator("attention", fake=_forward_fake, backward=_backward, setup_context=_setup)
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
    left: int,
    right: int,
    lower_right: bool,
    max_q: int,
    max_k: int,
    precise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, laid out as q, the log-sum-exp of each row's scores in the kernels' own units, the residue.

    q, k and v are (batch, heads, tokens, dim); packed sequences have batch 1 and `cu_q`, `cu_k`. `left` and
    `right` bound the window, negative for no bound; `softcap` 0 is none; `bias` is expanded to (batch, heads,
    q tokens, k tokens). The residue is what rounding takes from the output, if `precise`, for the backward;
    else it is empty.
    """
    out, lse, residue = _results(q, v, precise)
    if not (q.numel() and k.numel() and v.numel()) or dropout == 1.0:
        return out.zero_(), lse.fill_(torch.inf), residue.zero_()
    q, k, v = map(_rows, (q, k, v))
    options = _options(q, v, bias, cu_q, softcap, dropout, left, right, lower_right)
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    planes = batch * heads
    together = _together(q, k, v, planes, group)
    shift = max_k - max_q if lower_right else 0
    window = (shift - left, shift + right, (left >= 0, right >= 0))
    if params := _roles(FORWARD, options, q, k, v):
        launch_forward(
            q, k, v, out, residue, lse, prepared(bias), scale, *window, together, sm_count(q.device), params
        )
        return out, lse, residue
    params = FORWARD.pick(q, options)
    blocks = cdiv(max_q, params["BLOCK_M"])
    sources: tuple[Any, ...] = (q, k, v)
    params["TMA"] = cu_q is None and all(_takes_tma(x, params) for x in sources)
    if params["TMA"]:
        sources = _descriptors(sources, params, options)
    lists, list_strides = listed_for(bias, params["BLOCK_M"], params["BLOCK_N"], *window)
    forward_kernel[(planes * blocks,)](
        *sources, out, residue, lse, bias, lists, cu_q, cu_k, seed,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *_bias_strides(bias),
        *list_strides, heads, group, planes, blocks, together, max_q, max_k, lse.shape[2],
        scale, softcap, left, right, **options, **params, RESIDUE=residue.numel() > 0,
    )  # fmt: skip
    return out, lse, residue
