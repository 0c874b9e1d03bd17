"""Bias, activation and LayerNorm in one pass: y = LayerNorm(f(x + b)), any part of it left out.

With u = x + b, z = f(u), m = mean(z), r = 1 / sqrt(mean((z - m)^2) + eps) over the n columns of a row:

    h = (z - m) r                y = h w + c
    g = dy w                     dz = r (g - h mean(g h) - mean(g))
    dx = dz f'(u)                db = sum of dx        dw = sum of dy h        dc = sum of dy, over rows

Eager PyTorch reads 3 and writes 3 tensors forward where 1 and 1 must be, and rounds u and z on the way; this
rounds u alone, and only where x and b have the same dtype of 16 bits. x, m and r are saved; u, z and h are
computed again, at no traffic. Compulsory bytes an element: read 1, write 1 forward; read 2, write 1 backward.

The kernels are built as those of `norm`, with three sums over rows instead of two. Rows of more than
`MAX_BLOCK` columns, where three sums no longer fit into registers, are done in two steps, activation and
norm.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import norm
from ._bias_act_norm_stream import STREAM, backward_stream
from ._device import refuse, sm_count
from ._family import Family
from ._launch import LaunchTable, cdiv, next_power_of_2
from ._math import ACTIVATIONS, activation, activation_gradient, at_once, sum_as_eager, widened
from ._norm_stream import stream_row
from ._ops import operator
from ._rows import (
    as_rows,
    fitting_stages,
    gradient_means,
    input_gradient,
    load_tile,
    load_vector,
    normalised,
    shares,
    store_tile,
    streams,
    sum_partials,
    tile_mask,
)
from ._triton import tl, triton
from .activations import bias_activation, bias_activation_reference
from .norm import follows_autocast, layer_norm

FAMILY = Family(
    what="bias, activation and LayerNorm in one pass, any part left out",
    public=("bias_act_norm", "BiasActivationLayerNorm"),
    replaces=("LayerNorm(GELU(x + bias))",),
    differs="the norm is over the last dimension alone",
)

#: Columns that a program holds in registers, with three sums beside them.
MAX_BLOCK = 8192

#: Size: columns, rounded up to a power of two. 32 elements a thread, since this kernel is short of
#: instructions rather than of bandwidth: vectors are unpacked, and reductions made, once for many elements.
#: STREAM: stores pass the cache by where it could not hold the result. JOIN: warps that share a row wait for
#: each other once. CHAIN: the slope of GELU's rough exact form by its sigmoid.
FORWARD = LaunchTable(
    "bias_act_norm_forward",
    {
        "default": [
            (128, {"ROWS": 32, "num_warps": 4}),
            (256, {"ROWS": 16, "num_warps": 4}),
            (512, {"ROWS": 8, "num_warps": 4}),
            (1024, {"ROWS": 4, "num_warps": 4}),
            (2048, {"ROWS": 2, "num_warps": 4}),
            (4096, {"ROWS": 1, "num_warps": 4}),
            (None, {"ROWS": 1, "num_warps": 8}),
        ],
        # As few warps as hold a row: one does not wait for another.
        "sm_90": [
            (128, {"ROWS": 8, "num_warps": 1}),
            (256, {"ROWS": 4, "num_warps": 1}),
            (512, {"ROWS": 2, "num_warps": 1}),
            (1024, {"ROWS": 1, "num_warps": 1}),
            (2048, {"ROWS": 1, "num_warps": 2, "JOIN": 1}),
            (4096, {"ROWS": 1, "num_warps": 4, "STREAM": 1, "JOIN": 1}),
            (None, {"ROWS": 1, "num_warps": 8, "STREAM": 1, "JOIN": 1}),
        ],
        "interpreter": [(256, {"ROWS": 4, "num_warps": 1}), (None, {"ROWS": 1, "num_warps": 1})],
    },
)
BACKWARD = LaunchTable(
    "bias_act_norm_backward",
    {
        "default": [
            (128, {"ROWS": 8, "num_warps": 4, "STAGES": 2, "programs_per_sm": 4}),
            (256, {"ROWS": 4, "num_warps": 4, "STAGES": 2, "programs_per_sm": 4}),
            (512, {"ROWS": 2, "num_warps": 4, "STAGES": 2, "programs_per_sm": 4}),
            (1024, {"ROWS": 1, "num_warps": 4, "STAGES": 3, "programs_per_sm": 4}),
            (2048, {"ROWS": 1, "num_warps": 8, "STAGES": 3, "programs_per_sm": 3}),
            (4096, {"ROWS": 1, "num_warps": 16, "STAGES": 3, "programs_per_sm": 1}),
            (None, {"ROWS": 1, "num_warps": 32, "STAGES": 2, "programs_per_sm": 1}),
        ],
        # 16 elements a thread.
        "sm_90": [
            (128, {"ROWS": 8, "num_warps": 4, "STAGES": 2, "programs_per_sm": 4}),
            (256, {"ROWS": 4, "num_warps": 4, "STAGES": 2, "programs_per_sm": 4}),
            (512, {"ROWS": 4, "num_warps": 4, "STAGES": 3, "programs_per_sm": 4}),
            (1024, {"ROWS": 2, "num_warps": 4, "STAGES": 3, "programs_per_sm": 3}),
            (2048, {"ROWS": 2, "num_warps": 4, "STAGES": 3, "programs_per_sm": 2}),
            (4096, {"ROWS": 2, "num_warps": 8, "STAGES": 3, "programs_per_sm": 1, "CHAIN": 1}),
            (None, {"ROWS": 1, "num_warps": 32, "STAGES": 2, "programs_per_sm": 1}),
        ],
        "interpreter": [
            (256, {"ROWS": 2, "num_warps": 1, "STAGES": 1, "programs_per_sm": 1}),
            (None, {"ROWS": 1, "num_warps": 1, "STAGES": 1, "programs_per_sm": 1, "CHAIN": 1}),
        ],
    },
)


@triton.jit
def _bias_act_norm_forward_kernel(
    x_ptr, bias_ptr, w_ptr, c_ptr, y_ptr, stats_ptr, x_stride, n_rows, n_cols, eps,
    ACT: tl.constexpr, ROUGH: tl.constexpr, FULL: tl.constexpr, STREAM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SHARES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = tile_mask(rows, cols, n_rows, n_cols, FULL)
    row = rows.to(tl.int64)[:, None]
    x = load_tile(x_ptr + row * x_stride + cols[None, :], mask, ROWS, FULL)
    u = widened(x) if bias_ptr is None else sum_as_eager(x, load_vector(bias_ptr, cols, n_cols, FULL))
    # Every activation maps 0 to 0, so that z is 0 beyond the columns.
    z = activation(u, ACT, ROUGH)
    SHORT: tl.constexpr = y_ptr.dtype.element_ty != tl.float32
    y, mean, rstd = normalised(z, cols, n_cols, eps, False, FULL, SHORT, SHARES, CHUNK)
    tl.store(stats_ptr + rows, mean, mask=rows < n_rows)
    tl.store(stats_ptr + n_rows + rows, rstd, mask=rows < n_rows)
    if w_ptr is not None:
        y *= widened(load_vector(w_ptr, cols, n_cols, FULL))
    if c_ptr is not None:
        y += widened(load_vector(c_ptr, cols, n_cols, FULL))
    store_tile(y_ptr + row * n_cols + cols[None, :], y, mask, ROWS, FULL, STREAM)


@triton.jit
def _bias_act_norm_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, dy_stride, x_stride, n_rows, n_cols,
    ACT: tl.constexpr, ROUGH: tl.constexpr, PARTS: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    cols = tl.arange(0, BLOCK)
    if bias_ptr is not None:
        bias = load_vector(bias_ptr, cols, n_cols, FULL)
    if w_ptr is not None:
        w = widened(load_vector(w_ptr, cols, n_cols, FULL))
    dbias = tl.zeros([BLOCK], tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    dc = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        row = rows.to(tl.int64)[:, None]
        mask = tile_mask(rows, cols, n_rows, n_cols, FULL)
        x = load_tile(x_ptr + row * x_stride + cols[None, :], mask, ROWS, FULL)
        dy = widened(load_tile(dy_ptr + row * dy_stride + cols[None, :], mask, ROWS, FULL))
        mean = tl.load(stats_ptr + rows, mask=rows < n_rows, other=0.0)
        rstd = tl.load(stats_ptr + n_rows + rows, mask=rows < n_rows, other=0.0)
        u = widened(x) if bias_ptr is None else sum_as_eager(x, bias)
        xhat = (activation(u, ACT, ROUGH) - mean[:, None]) * rstd[:, None]
        # Before threads wait for the sums: then one number is held instead of u and all that is made of it.
        slope = at_once(activation_gradient(u, ACT, EXACT, ROUGH))
        if PARTS > 1:
            dw += tl.sum(dy * xhat, axis=0)
            dc += tl.sum(dy, axis=0)
        if w_ptr is not None:
            dy = dy * w
        along, level = gradient_means(dy, xhat, n_cols, False)
        dx = input_gradient(dy, xhat, rstd, along, level, False)
        dx *= slope
        if PARTS == 1 or PARTS == 3:
            # Masked rows have rstd 0; masked columns are not stored.
            dbias += tl.sum(dx, axis=0)
        store_tile(dx_ptr + row * n_cols + cols[None, :], dx, mask, ROWS, FULL)
    partial_ptr += tl.program_id(0).to(tl.int64) * PARTS * n_cols + cols
    if PARTS > 1:
        tl.store(partial_ptr, dw, mask=cols < n_cols)
        tl.store(partial_ptr + n_cols, dc, mask=cols < n_cols)
        partial_ptr += 2 * n_cols
    if PARTS == 1 or PARTS == 3:
        tl.store(partial_ptr, dbias, mask=cols < n_cols)


def _forward_fake(
    x: Tensor, bias: Tensor | None, weight: Tensor | None, shift: Tensor | None, eps: float, name: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    stats = x.new_empty(2, x.numel() // max(x.shape[-1], 1), dtype=torch.float32)
    return torch.empty(x.shape, dtype=dtype, device=x.device), stats


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, weight, shift, _, ctx.name, _ = inputs
    ctx.save_for_backward(x, bias, weight, shift, output[1])
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx: Any, dy: Tensor, _stats: Any) -> tuple[Any, ...]:
    x, bias, weight, shift, stats = ctx.saved_tensors
    of_bias, of_weight, of_shift = ctx.needs_input_grad[1:4]
    parts = 2 * (of_weight or of_shift) + of_bias
    dx, *sums = _bias_act_norm_backward(dy, x, bias, weight, shift, stats, ctx.name, parts)
    return (
        dx,
        sums[-1] if of_bias else None,
        sums[0] if of_weight else None,
        sums[1] if of_shift else None,
        None,
        None,
        None,
    )


def _dtypes(
    bias: Tensor | None, weight: Tensor | None, shift: Tensor | None, parts: int
) -> list[torch.dtype]:
    """Of the sums that are asked for: 0 none, 1 the bias's, 2 weight's and shift's, 3 all."""
    wanted = ([weight, shift] if parts > 1 else []) + ([bias] if parts % 2 else [])
    return [torch.float32 if t is None else t.dtype for t in wanted]


def _rough(x: Tensor, bias: Tensor | None) -> bool:
    """Whether eager PyTorch's activation would be rounded to bfloat16."""
    return x.dtype == torch.bfloat16 and (bias is None or bias.dtype == torch.bfloat16)


def _backward_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, weight: Tensor | None, shift: Tensor | None, stats: Tensor,
    name: str, parts: int,
) -> list[Tensor]:  # fmt: skip
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return [dx, *[x.new_empty(x.shape[-1], dtype=d) for d in _dtypes(bias, weight, shift, parts)]]


@operator("bias_act_norm_backward", fake=_backward_fake)
def _bias_act_norm_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, weight: Tensor | None, shift: Tensor | None, stats: Tensor,
    name: str, parts: int,
) -> list[Tensor]:  # fmt: skip
    n_cols = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dtypes = _dtypes(bias, weight, shift, parts)
    if not x.numel():
        return [dx, *[torch.zeros(n_cols, dtype=d, device=x.device) for d in dtypes]]
    rows, drows = as_rows(x), as_rows(dy)
    params = stream_row(STREAM, rows, drows, bias, weight)
    if params is not None:
        partial = backward_stream(drows, rows, bias, weight, stats, dx, name, _rough(x, bias), parts, params)
        return [dx, *(sum_partials(partial, dtypes) if parts else [])]
    block = max(next_power_of_2(n_cols), 8)
    params = dict(BACKWARD.pick(block, x.device))
    most = params.pop("programs_per_sm") * sm_count(x.device)
    programs = min(most, cdiv(rows.shape[0], params["ROWS"]))
    tile_bytes = params["ROWS"] * block * (rows.element_size() + drows.element_size())
    params["STAGES"] = fitting_stages(params["STAGES"], tile_bytes, x.device)
    rough = _rough(x, bias) * (1 + params.pop("CHAIN", 0))
    partial = torch.empty(programs, parts, n_cols, dtype=torch.float32, device=x.device)
    _bias_act_norm_backward_kernel[(programs,)](
        drows, rows, bias, weight, stats, dx, partial, drows.stride(0), rows.stride(0), rows.shape[0], n_cols,
        ACT=name, ROUGH=rough, PARTS=parts, FULL=block == n_cols, BLOCK=block, **params,
    )  # fmt: skip
    return [dx, *(sum_partials(partial, dtypes) if parts else [])]


@operator("bias_act_norm", fake=_forward_fake, backward=_autograd, setup_context=_setup)
def _bias_act_norm(
    x: Tensor, bias: Tensor | None, weight: Tensor | None, shift: Tensor | None, eps: float, name: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    stats = torch.empty(2, x.numel() // max(x.shape[-1], 1), dtype=torch.float32, device=x.device)
    if not x.numel():
        return y, stats
    rows = as_rows(x)
    n_rows, n_cols = rows.shape
    block = max(next_power_of_2(n_cols), 8)
    params = dict(FORWARD.pick(block, x.device))
    stream = streams(params.pop("STREAM", 0), y)
    shared = shares(params.pop("JOIN", 0), block, params["ROWS"], params["num_warps"], rows)
    _bias_act_norm_forward_kernel[(cdiv(n_rows, params["ROWS"]),)](
        rows, bias, weight, shift, y, stats, rows.stride(0), n_rows, n_cols, eps,
        ACT=name, ROUGH=int(_rough(x, bias)), FULL=block == n_cols, STREAM=stream, BLOCK=block,
        **shared, **params,
    )  # fmt: skip
    return y, stats


def bias_act_norm(
    x: Tensor,
    bias: Tensor | None = None,
    activation: str = "gelu",
    weight: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``layer_norm(f(x + bias))`` over the last dimension.

    Args:
        x: (..., n), fp32, fp16 or bf16; rows may have any stride.
        bias: (n,) or None.
        activation: ``none``, ``relu``, ``relu_squared``, ``silu``, ``gelu`` (by erf) or ``gelu_tanh``.
        weight: the norm's, (n,) or None.
        shift: the norm's bias, (n,) or None.
        eps: added to the variance.
        out_dtype: of the result; as eager PyTorch has it unless given (fp32 inside CUDA autocast, else the
            promoted dtype of x and bias).

    Raises:
        UnsupportedError: dtypes, devices or shapes that the kernel does not take.
        ValueError: unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: it must be one of {', '.join(ACTIVATIONS)}")
    refuse(unsupported_reasons(x, bias, weight, shift), "bias_act_norm")
    dtype = out_dtype or _eager_dtype(x, bias)
    if x.shape[-1] > MAX_BLOCK:
        z = bias_activation(x, bias, activation)
        return layer_norm(z, x.shape[-1:], weight, shift, eps, out_dtype=dtype)
    vectors = [None if v is None else v.contiguous() for v in (bias, weight, shift)]
    return _bias_act_norm(x, *vectors, eps, activation, dtype)[0]


def unsupported_reasons(x: Tensor, *vectors: Tensor | None) -> list[str]:
    """Why these cannot be taken: the tensors' devices and dtypes, and vectors that are not a row long."""
    reasons = [reason for v in vectors for reason in norm.unsupported_reasons(x, v)]
    if not reasons:
        shapes = [list(v.shape) for v in vectors if v is not None and v.shape != x.shape[-1:]]
        reasons = [f"a vector of shape {shape} for rows of {x.shape[-1]}" for shape in shapes]
    return list(dict.fromkeys(reasons))


def _eager_dtype(x: Tensor, bias: Tensor | None) -> torch.dtype:
    norm_dtype = follows_autocast(x, "aten::layer_norm")
    return norm_dtype if bias is None else torch.promote_types(norm_dtype, bias.dtype)


def bias_act_norm_reference(
    x: Tensor,
    bias: Tensor | None = None,
    activation: str = "gelu",
    weight: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The same in plain PyTorch."""
    z = bias_activation_reference(x, bias, activation)
    return F.layer_norm(z, x.shape[-1:], weight, shift, eps)


class BiasActivationLayerNorm(nn.LayerNorm):
    """``LayerNorm(f(x + input_bias))``: what stands after a linear layer without bias.

    Args:
        features: columns of a row.
        activation: see `bias_act_norm`.
        eps: added to the variance.
        input_bias: have a bias before the activation.
        elementwise_affine: have the norm's weight and bias.
        device: of the parameters.
        dtype: of the parameters.
    """

    input_bias: Tensor | None

    def __init__(
        self,
        features: int,
        activation: str = "gelu",
        eps: float = 1e-5,
        input_bias: bool = True,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, eps, elementwise_affine, device=device, dtype=dtype)
        self.activation = activation
        self.register_parameter(
            "input_bias",
            nn.Parameter(torch.zeros(features, device=device, dtype=dtype)) if input_bias else None,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Add, activate and normalise the rows of `input`."""
        return bias_act_norm(input, self.input_bias, self.activation, self.weight, self.bias, self.eps)
