"""Softmax and log-softmax over the last dimension, with scale, mask and causality inside.

    z = scale x + mask        y = exp(z - max z) / sum exp(z - max z)        log form: z - max z - log sum exp

A boolean mask keeps where it is true, as in `torch.nn.functional.scaled_dot_product_attention`; what it or
causality excludes is -inf in z. Backward, with s the sum over a row:

    dx = scale y (dy - s),  s = sum y dy          log form: dx = scale (dy - exp(y) s),  s = sum dy

Only y is saved. A row that is excluded entirely gives NaN, as `torch.softmax` of -inf does. The mask is read
by its strides, so that broadcasting costs no memory; one that needs a gradient gets dz summed over what was
broadcast. Excluded scores of a causal row are not read.

Rows up to `_WHOLE_ROW` columns stay in registers between the sum and the result: one read, one write. Longer
ones are swept twice, the second time from the L2 cache as far as it holds them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ._device import device_reasons, dtype_reasons, refuse
from ._family import Family
from ._launch import LaunchTable, cdiv, next_power_of_2
from ._math import exp, exp_beside, reciprocal, widened, widened_again
from ._ops import autocast_dtype, operator
from ._rows import shares, store_tile
from ._triton import tl, triton

FAMILY = Family(
    what="softmax and its logarithm with scale, mask and causality, any row length",
    public=("softmax", "log_softmax"),
    replaces=("torch.softmax", "torch.log_softmax"),
    differs="over the last dimension alone, without dim",
)

_WHOLE_ROW = 16384

#: Size: columns. TILE: elements of a program that takes several short rows. JOIN: warps that share a row wait
#: for each other once.
FORWARD = LaunchTable(
    "softmax_forward",
    {
        "default": [
            (2048, {"TILE": 4096, "num_warps": 4}),
            (4096, {"TILE": 4096, "num_warps": 8}),
            (_WHOLE_ROW, {"TILE": 1, "num_warps": 16}),
            (None, {"TILE": 8192, "num_warps": 16}),
        ],
        # Over 1024 columns 32 scores a thread.
        "sm_90": [
            (1024, {"TILE": 1024, "num_warps": 2}),
            (2048, {"TILE": 2048, "num_warps": 2, "JOIN": 1}),
            (4096, {"TILE": 4096, "num_warps": 4, "JOIN": 1}),
            (8192, {"TILE": 8192, "num_warps": 8, "JOIN": 1}),
            (_WHOLE_ROW, {"TILE": 1, "num_warps": 16, "JOIN": 1}),
            (None, {"TILE": 8192, "num_warps": 16}),
        ],
        "interpreter": [
            (256, {"TILE": 2048, "num_warps": 1}),
            (_WHOLE_ROW, {"TILE": 2048, "num_warps": 1}),
            (None, {"TILE": 2048, "num_warps": 1}),
        ],
    },
)
BACKWARD = LaunchTable(
    "softmax_backward",
    {
        "default": [
            (2048, {"TILE": 2048, "num_warps": 4}),
            (4096, {"TILE": 4096, "num_warps": 8}),
            (_WHOLE_ROW, {"TILE": 1, "num_warps": 16}),
            (None, {"TILE": 8192, "num_warps": 16}),
        ],
        "sm_90": [
            (2048, {"TILE": 2048, "num_warps": 2}),
            (4096, {"TILE": 4096, "num_warps": 8}),
            # With 64 registers a thread, as whole rows of 16 bits need, two such programs run side by side.
            (_WHOLE_ROW, {"TILE": 1, "num_warps": 16, "maxnreg": 64}),
            (None, {"TILE": 8192, "num_warps": 16}),
        ],
        "interpreter": [
            (256, {"TILE": 2048, "num_warps": 1}),
            (_WHOLE_ROW, {"TILE": 2048, "num_warps": 1}),
            (None, {"TILE": 2048, "num_warps": 1}),
        ],
    },
)


@triton.jit
def _limits(rows, n_queries, n_cols, diagonal, CAUSAL: tl.constexpr):
    """How many leading columns each row may see."""
    if CAUSAL:
        return tl.minimum(rows % n_queries + diagonal + 1, n_cols)
    return rows * 0 + n_cols


@triton.jit
def _sum(e, axis: tl.constexpr, EXACT: tl.constexpr):
    """Where EXACT, in fp64: an error of the sum is in every result of the row, and nothing evens it out."""
    if EXACT:
        e = e.to(tl.float64)
    return tl.sum(e, axis=axis).to(tl.float32)


@triton.jit
def _mask_rows(rows, size_1, size_2, stride_0, stride_1, stride_2):
    # Divided in 32 bits, which is several times as fast.
    first, second, third = rows // (size_1 * size_2), rows // size_2 % size_1, rows % size_2
    return first.to(tl.int64) * stride_0 + second.to(tl.int64) * stride_1 + third.to(tl.int64) * stride_2


@triton.jit
def _scores(
    x_ptrs, mask_ptrs, mask_stride, cols, limit, n_cols, scale, BOOL: tl.constexpr,
    FULL: tl.constexpr = False,
):  # fmt: skip
    """z in fp32, -inf from each row's `limit` on; groups of 8 are loaded whole, so that loads are wide.

    FULL: every row and column exists and is seen.
    """
    seen = (cols // 8 * 8 < limit) & (cols < n_cols)
    if FULL:
        z = widened(tl.load(x_ptrs + cols)) * scale
    else:
        z = widened(tl.load(x_ptrs + cols, mask=seen, other=0.0)) * scale
    if mask_ptrs is not None:
        m = tl.load(mask_ptrs + cols * mask_stride, mask=seen & (cols < limit), other=0)
        if BOOL:
            z = tl.where(m != 0, z, float("-inf"))
        else:
            z += m.to(tl.float32)
    return z if FULL else tl.where(cols < limit, z, float("-inf"))


@triton.jit
def _shared_softmax(z, SHARES: tl.constexpr, CHUNK: tl.constexpr):
    """Softmax for results of 16 bits in which warps wait for each other once, not twice.

    Each warp takes powers beside the peak of its own columns (`shares` says which those are) and scales them
    once the peak and the sum of the row are known.
    """
    parts = tl.reshape(z, [z.shape[0], z.shape[1] // (SHARES * CHUNK), SHARES, CHUNK])
    # A warp that has seen nothing but -inf has powers of 0 and not NaN.
    own = tl.maximum(tl.max(tl.max(parts, axis=1), axis=2) * 1.4426950408889634, -1e38)
    e = exp_beside(parts, own[:, None, :, None])
    peak, total = tl.reduce((own, tl.sum(tl.sum(e, axis=1), axis=2)), 1, _joined_sums)
    share = tl.exp2(own - peak[:, None]) * reciprocal(total)[:, None]
    return tl.reshape(e * share[:, None, :, None], z.shape)


@triton.jit
def _joined_sums(peak, total, other_peak, other_total):
    """Of two sets of powers of 2 beside a peak their union's peak and sum."""
    top = tl.maximum(peak, other_peak)
    return top, total * tl.exp2(peak - top) + other_total * tl.exp2(other_peak - top)


@triton.jit
def _softmax_forward_kernel(
    x_ptr, mask_ptr, y_ptr, x_stride, n_rows, n_cols, scale, n_queries, diagonal,
    size_1, size_2, stride_0, stride_1, stride_2, stride_col,
    CAUSAL: tl.constexpr, BOOL: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr, SHARES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    limit = tl.where(rows < n_rows, _limits(rows, n_queries, n_cols, diagonal, CAUSAL), 0)
    mask_ptrs = mask_ptr
    if mask_ptr is not None:
        mask_ptrs += _mask_rows(rows, size_1, size_2, stride_0, stride_1, stride_2)
    row = rows.to(tl.int64)
    z = _scores(x_ptr + row * x_stride, mask_ptrs, stride_col, cols, limit, n_cols, scale, BOOL, FULL)
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    if SHARES > 1 and not (LOG or EXACT):
        y = _shared_softmax(z, SHARES, CHUNK)
    else:
        peak = tl.max(z, axis=1)[:, None]
        if LOG or EXACT:
            z -= peak
            e = exp(z, EXACT)
        else:
            e = exp_beside(z, peak * 1.4426950408889634)
        total = _sum(e, 1, EXACT)[:, None]
        # One division a row is more exact than an approximate one an element, and fewer instructions.
        y = z - tl.log(total) if LOG else e * (tl.div_rn(1.0, total) if EXACT else reciprocal(total))
    store_tile(y_ptr + row * n_cols + cols, y, (rows < n_rows) & (cols < n_cols), 1, FULL)


@triton.jit
def _softmax_forward_long_kernel(
    x_ptr, mask_ptr, y_ptr, x_stride, n_rows, n_cols, scale, n_queries, diagonal,
    size_1, size_2, stride_0, stride_1, stride_2, stride_col,
    CAUSAL: tl.constexpr, BOOL: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    limit = _limits(tl.program_id(0), n_queries, n_cols, diagonal, CAUSAL)
    mask_row = mask_ptr
    if mask_ptr is not None:
        mask_row += _mask_rows(tl.program_id(0), size_1, size_2, stride_0, stride_1, stride_2)
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    peak = float("-inf")
    total = tl.zeros([BLOCK], tl.float64 if EXACT else tl.float32)
    for start in range(0, limit, BLOCK):
        z = _scores(x_row, mask_row, stride_col, start + at, limit, n_cols, scale, BOOL)
        new_peak = tl.maximum(peak, tl.max(z, axis=0))
        # While all scores so far are -inf, subtract 0 so that exp gives 0 and not NaN.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * exp(peak - safe, EXACT) + exp(z - safe, EXACT)
        peak = new_peak
    whole = _sum(total, 0, EXACT)
    share = tl.div_rn(1.0, whole)
    log_whole = tl.log(whole)
    for start in range(0, n_cols, BLOCK):
        cols = start + at
        z = _scores(x_row, mask_row, stride_col, cols, limit, n_cols, scale, BOOL) - peak
        y = z - log_whole if LOG else exp(z, EXACT) * share
        tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols, eviction_policy="evict_first")


@triton.jit
def _term(dy, y, LOG: tl.constexpr):
    return dy if LOG else dy * y


@triton.jit
def _gradient(dy, y, total, scale, BLOCKED: tl.constexpr, LOG: tl.constexpr, EXACT: tl.constexpr):
    if LOG:
        dx = dy - exp(y, EXACT) * total
        if BLOCKED:
            # Where a score was replaced by -inf, none of dy goes to x.
            dx = tl.where(y == float("-inf"), 0.0, dx)
    else:
        dx = y * (dy - total)
    return dx * scale


@triton.jit
def _softmax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, n_rows, n_cols, scale, n_queries, diagonal,
    CAUSAL: tl.constexpr, BLOCKED: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    limit = tl.where(rows < n_rows, _limits(rows, n_queries, n_cols, diagonal, CAUSAL), 0)
    # A row's place and then a column's, which is known at compile time: one address for all of a thread's.
    row = rows.to(tl.int64) * n_cols
    seen = (cols // 8 * 8 < limit) & (cols < n_cols)
    if FULL:
        y = tl.load(y_ptr + row + cols)
        dy = tl.load(dy_ptr + row + cols)
    else:
        y = tl.load(y_ptr + row + cols, mask=seen, other=float("-inf") if LOG else 0.0)
        dy = tl.load(dy_ptr + row + cols, mask=seen, other=0.0)
    total = tl.sum(_term(widened(dy), widened(y), LOG), axis=1)[:, None]
    EXACT: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    # Whole rows are short of registers, others of instructions.
    if FULL:
        y, dy = widened_again(y), widened_again(dy)
    else:
        y, dy = widened(y), widened(dy)
    dx = _gradient(dy, y, total, scale, BLOCKED, LOG, EXACT)
    store_tile(dx_ptr + row + cols, dx, (rows < n_rows) & (cols < n_cols), 1, FULL)


@triton.jit
def _softmax_backward_long_kernel(
    dy_ptr, y_ptr, dx_ptr, n_rows, n_cols, scale, n_queries, diagonal,
    CAUSAL: tl.constexpr, BLOCKED: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        mask = start + at < n_cols
        where = row * n_cols + start + at
        y = tl.load(y_ptr + where, mask=mask, other=float("-inf") if LOG else 0.0).to(tl.float32)
        sums += _term(tl.load(dy_ptr + where, mask=mask, other=0.0).to(tl.float32), y, LOG)
    total = tl.sum(sums, axis=0)
    for start in range(0, n_cols, BLOCK):
        mask = start + at < n_cols
        where = row * n_cols + start + at
        y = tl.load(y_ptr + where, mask=mask, other=float("-inf") if LOG else 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + where, mask=mask, other=0.0).to(tl.float32)
        dx = _gradient(dy, y, total, scale, BLOCKED, LOG, y_ptr.dtype.element_ty == tl.float32)
        tl.store(dx_ptr + where, dx, mask=mask, eviction_policy="evict_first")


def _plan(table: LaunchTable, x: Tensor, causal: bool) -> tuple[bool, int, dict[str, int]]:
    """Whether rows are long, the number of programs, and launch parameters."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    params = dict(table.pick(n_cols, x.device))
    tile = params.pop("TILE")
    if n_cols > _WHOLE_ROW:
        return True, n_rows, params | {"BLOCK": tile, "ROWS": 1}
    block = max(next_power_of_2(n_cols), 8)
    rows = min(max(tile // block, 1), 64)
    params |= {"BLOCK": block, "ROWS": rows, "FULL": block == n_cols and n_rows % rows == 0 and not causal}
    return False, cdiv(n_rows, rows), params


def _mask_layout(mask: Tensor, shape: torch.Size) -> tuple[Tensor, list[int], list[int]]:
    """The mask, its last two leading sizes of three, and its strides over those three and columns."""
    mask = mask.expand(shape)
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], mask.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 3:
        return _mask_layout(mask.contiguous(), shape)
    dims = [(1, 0)] * (3 - len(dims)) + dims
    return mask, [size for size, _ in dims[1:]], [stride for _, stride in dims] + [mask.stride(-1)]


def _forward_fake(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, diagonal: int, log: bool, dtype: torch.dtype
) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, mask, ctx.scale, ctx.causal, ctx.diagonal, ctx.log, _ = inputs
    ctx.x_dtype = x.dtype
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    ctx.save_for_backward(output)


def _grad(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    blocked = ctx.causal or (ctx.mask is not None and ctx.mask[1] == torch.bool)
    options = (ctx.causal, ctx.diagonal, ctx.log, blocked)
    dmask = None
    if ctx.needs_input_grad[1]:
        dz = gradient_op(dy, y, 1.0, *options, torch.float32)
        shape, dtype = ctx.mask
        dmask = dz.sum_to_size(shape).to(dtype)
        dx = (dz * ctx.scale).to(ctx.x_dtype)
    else:
        dx = gradient_op(dy, y, ctx.scale, *options, ctx.x_dtype)
    return dx, dmask, None, None, None, None, None


@operator(
    "softmax_backward",
    fake=lambda dy, y, scale, causal, diagonal, log, blocked, dtype: torch.empty(
        y.shape, dtype=dtype, device=y.device
    ),
)
def gradient_op(
    dy: Tensor, y: Tensor, scale: float, causal: bool, diagonal: int, log: bool, blocked: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The gradient of the scores times `scale`, contiguous."""
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if not y.numel():
        return dx
    n_cols = y.shape[-1]
    n_rows = y.numel() // n_cols
    long, programs, params = _plan(BACKWARD, y, causal and not log)
    if y.element_size() + dy.element_size() > 4 or not params.get("FULL"):
        # More than there is a limit for has to stay in registers.
        params.pop("maxnreg", None)
    # In the log form dy counts where the score was excluded too: all of it is read.
    (_softmax_backward_long_kernel if long else _softmax_backward_kernel)[(programs,)](
        dy.contiguous(), y, dx, n_rows, n_cols, scale, y.shape[-2] if y.dim() > 1 else 1, diagonal,
        CAUSAL=causal and not log, BLOCKED=blocked, LOG=log, **params,
    )  # fmt: skip
    return dx


@operator("softmax", fake=_forward_fake, backward=_grad, setup_context=_setup)
def softmax_op(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, diagonal: int, log: bool, dtype: torch.dtype
) -> Tensor:
    """Softmax or its logarithm, contiguous, in `dtype`."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.numel():
        return y
    n_cols = x.shape[-1]
    flat = x.reshape(-1, n_cols)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    sizes, strides = [1, 1], [0, 0, 0, 0]
    is_bool = mask is not None and mask.dtype == torch.bool
    if mask is not None:
        mask, sizes, strides = _mask_layout(mask.view(torch.uint8) if is_bool else mask, x.shape)
    long, programs, params = _plan(FORWARD, x, causal)
    join = params.pop("JOIN", 0)
    if not long:
        params |= shares(join, params["BLOCK"], params["ROWS"], params["num_warps"], flat)
    (_softmax_forward_long_kernel if long else _softmax_forward_kernel)[(programs,)](
        flat, mask, y, flat.stride(0), flat.shape[0], n_cols, scale,
        x.shape[-2] if x.dim() > 1 else 1, diagonal, *sizes, *strides,
        CAUSAL=causal, BOOL=is_bool, LOG=log, **params,
    )  # fmt: skip
    return y


def softmax_reference(
    x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False, diagonal: int = 0,
    log: bool = False, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The same in plain PyTorch."""
    z = x * scale
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask
    if causal:
        seen = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(diagonal)
        z = z.masked_fill(~seen, -math.inf)
    return (torch.log_softmax if log else torch.softmax)(z, -1, dtype=dtype)


def unsupported_reasons(
    x: Tensor, mask: Tensor | None = None, *, dim: int = -1, causal: bool = False,
    dtype: torch.dtype | None = None,
) -> list[str]:  # fmt: skip
    """Why the kernel cannot take these arguments; empty if it can."""
    reasons = device_reasons(x, mask) + dtype_reasons(x)
    if mask is not None and mask.dtype != torch.bool:
        reasons += [f"mask of {r}, or bool" for r in dtype_reasons(mask)]
    if dtype is not None and dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"result of {dtype}: float32, float16, bfloat16")
    if x.dim() == 0 or dim % max(x.dim(), 1) != x.dim() - 1:
        reasons.append(f"dimension {dim} of {x.dim()}: the kernel works along the last")
    if x.numel() and x.numel() // x.shape[-1] >= 2**31 - 64:
        reasons.append("2^31 rows or more")
    if causal and x.dim() < 2:
        reasons.append("causal needs two dimensions, queries and keys")
    if mask is not None and (
        mask.dim() > x.dim()
        or any(m not in (1, n) for m, n in zip(mask.shape[::-1], x.shape[::-1], strict=False))
    ):
        reasons.append(f"mask {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}")
    return reasons


def softmax(
    x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False, diagonal: int = 0,
    log: bool = False, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """``softmax(scale * x + mask)`` over the last dimension, or its logarithm.

    Args:
        x: (..., n), or (..., queries, keys) if causal. Rows may lie apart.
        scale: of the scores, before the mask.
        mask: broadcasts to x; bool (true is kept) or added. Any strides.
        causal: query i sees keys j <= i + `diagonal`.
        diagonal: keys minus queries, where the last query sees all keys.
        log: give the logarithm.
        dtype: of the result. By default x's, or fp32 under autocast, as eager does.

    Returns:
        The shape of x, contiguous.

    Raises:
        UnsupportedError: see `unsupported_reasons`.
    """
    refuse(unsupported_reasons(x, mask, causal=causal, dtype=dtype), "softmax")
    if dtype is None:
        dtype = x.dtype if autocast_dtype(x) is None else torch.float32
    return softmax_op(x, mask, float(scale), causal, diagonal, log, dtype)


def log_softmax(x: Tensor, **options: Any) -> Tensor:
    """`softmax` with ``log=True``."""
    return softmax(x, log=True, **options)
