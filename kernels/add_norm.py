"""Residual addition with the norm that follows it, dropout in between where there is any.

    s = dropout(x) + residual            y = norm(s)                 (both are returned)
    ds = (gradient of the norm at s, see `norm`) + (what reaches s beside it)
    dresidual = ds                       dx = keep ds / (1 - p)

s has the promoted dtype of x and residual and is rounded to it before it is normalised, as in eager PyTorch.
Compulsory bytes an element: read 2, write 2 forward; read 3, write 1 backward (write 2 with dropout or where
x and residual differ in dtype). Apart, addition and norm read 3 and write 2, then read 3 and write 2.

The mask is drawn again in the backward from a saved seed, see `_random`. The kernels are those of `norm`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._device import device_reasons, dtype_reasons, refuse
from ._family import Family
from ._launch import LaunchTable, cdiv
from ._norm_rows import (
    MAX_BACKWARD_BLOCK,
    handed_out,
    launch_backward,
    launch_forward,
    parts_wanted,
    weight_dtypes,
)
from ._ops import operator
from ._random import draw_seed, keep_8, keep_scale, keep_threshold
from ._triton import tl, triton
from .norm import (
    _flat,
    as_columns,
    follows_autocast,
    layer_norm,
    layer_norm_reference,
    rms_dtype,
    rms_norm,
    rms_norm_reference,
    unsupported_reasons,
)

FAMILY = Family(
    what="residual addition, with dropout before it and either norm after it",
    public=("add_layer_norm", "add_rms_norm", "dropout_add"),
    replaces=("x + residual, then a norm", "dropout(x) + residual"),
    differs="dropout draws other masks from the same seed; a norm gives the sum, too",
)

#: Size: elements.
DROPOUT_ADD = LaunchTable(
    "dropout_add",
    {
        "default": [(None, {"BLOCK": 2048, "num_warps": 4})],
        "interpreter": [(None, {"BLOCK": 4096, "num_warps": 1})],
    },
)


@triton.jit
def _dropout_add_kernel(
    x_ptr, residual_ptr, seed_ptr, y_ptr, numel, scale, THRESHOLD: tl.constexpr, BLOCK: tl.constexpr
):
    """dropout(x) + residual, or dropout(x) without one, which is the gradient of x too."""
    group = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[:, None]
    lane = tl.arange(0, 8)[None, :]
    at = group * 8 + lane
    x = tl.load(x_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
    y = tl.where(keep_8(tl.load(seed_ptr), group, lane, THRESHOLD), x * scale, 0.0)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y, mask=at < numel)


def _launch_dropout_add(
    x: Tensor, residual: Tensor | None, seed: Tensor, p: float, dtype: torch.dtype
) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel():
        params = DROPOUT_ADD.pick(y.numel(), x.device)
        other = None if residual is None else residual.contiguous()
        _dropout_add_kernel[(cdiv(y.numel(), params["BLOCK"]),)](
            x.contiguous(), other, seed, y, y.numel(), keep_scale(p), THRESHOLD=keep_threshold(p), **params
        )
    return y


def _add_fake(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)


def _add_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, seed, ctx.p = inputs
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(seed)


def _add_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (seed,) = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    return _dropout(dy, seed, ctx.p, x_dtype), dy.to(residual_dtype), None, None


def _dropout_fake(x: Tensor, seed: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@operator("dropout_gradient", fake=_dropout_fake)
def _dropout(x: Tensor, seed: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return _launch_dropout_add(x, None, seed, p, dtype)


@operator("dropout_add", fake=_add_fake, backward=_add_backward, setup_context=_add_setup)
def _dropout_add_op(x: Tensor, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    return _launch_dropout_add(x, residual, seed, p, torch.promote_types(x.dtype, residual.dtype))


def _norm_fake(
    x: Tensor, residual: Tensor, seed: Tensor | None, p: float, weight: Tensor | None, bias: Tensor | None,
    eps: float, offset: float, is_rms: bool, round_first: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    stats = x.new_empty(1 if is_rms else 2, x.numel() // max(x.shape[-1], 1), dtype=torch.float32)
    return torch.empty(x.shape, dtype=dtype, device=x.device), total, stats


def _norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, seed, ctx.p, weight, bias, _, ctx.offset, ctx.is_rms, ctx.round_first, _ = inputs
    _, total, stats = output
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(total, seed, weight, bias, stats)
    ctx.mark_non_differentiable(stats)
    # A result that nothing used must not cost a tensor of zeros.
    ctx.set_materialize_grads(False)


def _norm_backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, _stats: Any) -> tuple[Any, ...]:
    total, seed, weight, bias, stats = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    if dy is None and dsum is None:
        return (None,) * 11
    dy = torch.zeros_like(total) if dy is None else dy
    apart = seed is not None or x_dtype != total.dtype
    dtotal, *rest = _add_norm_backward(
        dy, dsum, total, weight, bias, stats, seed, ctx.p, ctx.offset, ctx.is_rms, ctx.round_first,
        parts_wanted(ctx, 4), x_dtype if apart else None,
    )  # fmt: skip
    dx = rest.pop(0) if apart else dtotal
    dw, db = handed_out(ctx, rest, 4)
    return dx, dtotal.to(residual_dtype), None, None, dw, db, None, None, None, None, None


def _backward_fake(
    dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
    seed: Tensor | None, p: float, offset: float, is_rms: bool, round_first: bool, parts: int,
    dropped_dtype: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    dtypes = [total.dtype] + ([] if dropped_dtype is None else [dropped_dtype])
    full = [torch.empty(total.shape, dtype=dtype, device=total.device) for dtype in dtypes]
    return [*full, *[total.new_empty(total.shape[-1], dtype=d) for d in weight_dtypes(weight, bias, parts)]]


@operator("add_norm_backward", fake=_backward_fake)
def _add_norm_backward(
    dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
    seed: Tensor | None, p: float, offset: float, is_rms: bool, round_first: bool, parts: int,
    dropped_dtype: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    dtotal, dropped, grads = launch_backward(
        dy, dsum, total, weight, bias, stats, seed, p, offset, is_rms, round_first, parts, dropped_dtype
    )
    return [dtotal, *([] if dropped is None else [dropped]), *grads]


@operator("add_norm", fake=_norm_fake, backward=_norm_backward, setup_context=_norm_setup)
def _add_norm(
    x: Tensor, residual: Tensor, seed: Tensor | None, p: float, weight: Tensor | None, bias: Tensor | None,
    eps: float, offset: float, is_rms: bool, round_first: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    y, total, stats = launch_forward(
        x, residual, seed, p, weight, bias, eps, offset, is_rms, round_first, dtype
    )
    assert total is not None
    return y, total, stats


def dropout_add(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """`F.dropout(x, p, training) + residual` in one kernel each way, without a stored mask.

    Args:
        x: any shape; fp32, fp16 or bf16.
        residual: of the same shape.
        p: chance that an element of x is dropped, kept to 2^-17; the others grow to keep the mean.
        training: without it nothing is dropped.

    Raises:
        UnsupportedError: shapes differ, or dtypes or devices that the kernel does not take.
        ValueError: p is not in 0..1.
    """
    refuse(_pair_reasons(x, residual) + device_reasons(x, residual), "dropout_add")
    if not _drops(p, training):
        return x + residual
    return _dropout_add_op(x, residual, draw_seed(x.device), p)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    p: float = 0.0,
    training: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``s = dropout(x, p) + residual`` and its LayerNorm, as ``(y, s)``.

    Args:
        x: (..., *normalized_shape), fp32, fp16 or bf16.
        residual: of the same shape; its dtype may differ.
        normalized_shape: the last dimensions.
        weight: see `norm.layer_norm`.
        bias: see `norm.layer_norm`.
        eps: added to the variance.
        p: chance that an element of x is dropped.
        training: without it nothing is dropped.
        out_dtype: of y; as eager PyTorch's LayerNorm of s has it unless given.

    Raises:
        UnsupportedError: shapes differ, or see `norm.unsupported_reasons`.
        ValueError: p is not in 0..1.
    """
    rows, other, shape = _checked(x, residual, normalized_shape, weight, bias, "add_layer_norm")
    if rows.shape[-1] > MAX_BACKWARD_BLOCK:
        total = dropout_add(x, residual, p, training)
        return layer_norm(total, shape, weight, bias, eps, out_dtype=out_dtype), total
    dtype = out_dtype or _sum_dtype(x, residual, lambda s: follows_autocast(s, "aten::layer_norm"))
    seed = draw_seed(x.device) if _drops(p, training) else None
    flat = _flat(weight, shape), _flat(bias, shape)
    y, total, _ = _add_norm(rows, other, seed, p, *flat, eps, 0.0, False, False, dtype)
    return y.view(x.shape), total.view(x.shape)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    casting: str = "fp32",
    p: float = 0.0,
    training: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``s = dropout(x, p) + residual`` and its RMSNorm, as ``(y, s)``.

    Args:
        x: (..., *normalized_shape), fp32, fp16 or bf16.
        residual: of the same shape; its dtype may differ.
        normalized_shape: the last dimensions.
        weight: see `norm.rms_norm`.
        eps: added to the mean square; s's dtype's machine epsilon unless given.
        offset: added to the weight.
        casting: ``"fp32"`` or ``"llama"``, see `norm`.
        p: chance that an element of x is dropped.
        training: without it nothing is dropped.
        out_dtype: of y; as `norm.rms_norm` of s has it unless given.

    Raises:
        UnsupportedError: shapes differ, or see `norm.unsupported_reasons`.
        ValueError: p is not in 0..1, or unknown casting.
    """
    rows, other, shape = _checked(x, residual, normalized_shape, weight, None, "add_rms_norm")
    if rows.shape[-1] > MAX_BACKWARD_BLOCK:
        total = dropout_add(x, residual, p, training)
        y = rms_norm(total, shape, weight, eps, offset=offset, casting=casting, out_dtype=out_dtype)
        return y, total
    dtype = out_dtype or _sum_dtype(x, residual, lambda s: rms_dtype(s, weight, casting))
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, residual.dtype)).eps
    seed = draw_seed(x.device) if _drops(p, training) else None
    flat = _flat(weight, shape)
    y, total, _ = _add_norm(rows, other, seed, p, flat, None, eps, offset, True, casting == "llama", dtype)
    return y.view(x.shape), total.view(x.shape)


def add_norm_reference(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    rms: bool = False,
    offset: float = 0.0,
    casting: str = "fp32",
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch; with dropout the same in law."""
    total = F.dropout(x, p) + residual
    if rms:
        return rms_norm_reference(total, normalized_shape, weight, eps, offset=offset, casting=casting), total
    return layer_norm_reference(total, normalized_shape, weight, bias, eps), total


def _pair_reasons(x: Tensor, residual: Tensor) -> list[str]:
    reasons = dtype_reasons(x, residual)
    if x.shape != residual.shape:
        reasons.append(f"x is {list(x.shape)}, residual {list(residual.shape)}: they must be alike")
    return reasons


def _drops(p: float, training: bool) -> bool:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability {p}: it must be from 0 to 1")
    return training and p > 0.0


def _checked(
    x: Tensor, residual: Tensor, normalized_shape: Sequence[int] | int, weight: Tensor | None,
    bias: Tensor | None, kernel: str,
) -> tuple[Tensor, Tensor, list[int]]:  # fmt: skip
    refuse(_pair_reasons(x, residual), kernel)
    rows, shape = as_columns(x, normalized_shape)
    refuse(unsupported_reasons(rows, weight, bias, residual), kernel)
    return rows, as_columns(residual, shape)[0], shape


def _sum_dtype(x: Tensor, residual: Tensor, rule: Any) -> torch.dtype:
    # The rules ask for a tensor's dtype and device alone.
    return rule(x.new_empty(0, dtype=torch.promote_types(x.dtype, residual.dtype)))
