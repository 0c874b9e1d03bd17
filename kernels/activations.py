"""Activations with their bias, and gated activations.

With z = x + b and an activation f of `ACTIVATIONS` (GELU by erf or tanh, SiLU, ReLU, ReLU squared):

    y = f(z)            dx = dy f'(z)            db = sum of dx over rows

and for a gate g and a linear part u, two tensors or the halves of one packed along its last dimension
(SwiGLU, GeGLU and their kin; Shazeer, "GLU variants improve transformer", 2020):

    y = f(g) u          dg = dy u f'(g)          du = dy f(g)

Only inputs are saved; f is computed again in the backward, which costs no traffic. Compulsory bytes an
element: read 1 and write 1 forward, read 2 and write 1 backward; gated 2 + 1 and 3 + 2.

The result has the promoted dtype of the inputs, in and out of autocast, as elementwise PyTorch operators
have. Inputs that are not contiguous are copied first, save the halves of a packed tensor.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._device import device_reasons, dtype_reasons, refuse, sm_count
from ._family import Family
from ._launch import LaunchTable, cdiv, next_power_of_2
from ._math import ACTIVATIONS, activation, activation_gradient, widened
from ._ops import operator
from ._rows import fitting_stages, sum_partials
from ._triton import tl, triton

FAMILY = Family(
    what="bias with GELU, SiLU, ReLU or ReLU squared; SwiGLU, GeGLU and their kin",
    public=(
        "bias_activation",
        "bias_gelu",
        "relu_squared",
        "gated_activation",
        "gated_activation_packed",
        "swiglu",
        "geglu",
        "SwiGLU",
        "GeGLU",
    ),
    replaces=("torch.nn.functional.gelu", "silu(gate) * up", "relu(x) ** 2"),
)

#: Size: columns of a row (of the whole tensor where rows do not matter).
ELEMENTWISE = LaunchTable(
    "activations_elementwise",
    {
        "default": [(None, {"BLOCK": 2048, "num_warps": 4})],
        "interpreter": [(None, {"BLOCK": 4096, "num_warps": 1})],
    },
)
#: Of gated ones; size: columns.
GATED = LaunchTable(
    "activations_gated",
    {
        "default": [(None, {"BLOCK": 2048, "num_warps": 4})],
        "sm_90": [(None, {"BLOCK": 2048, "num_warps": 8})],
        "interpreter": [(None, {"BLOCK": 4096, "num_warps": 1})],
    },
)
#: Size: columns. Programs an SM: how many row groups are summed apart.
BIAS_BACKWARD = LaunchTable(
    "activations_bias_backward",
    {
        "default": [
            (256, {"ROWS": 8, "BLOCK": 256, "STAGES": 3, "programs_per_sm": 6, "num_warps": 4}),
            (None, {"ROWS": 4, "BLOCK": 512, "STAGES": 3, "programs_per_sm": 6, "num_warps": 4}),
        ],
        "interpreter": [(None, {"ROWS": 8, "BLOCK": 256, "STAGES": 1, "programs_per_sm": 4, "num_warps": 1})],
    },
)


@triton.jit
def _tile(n_cols, blocks, BLOCK: tl.constexpr):
    """This program's row (or band of rows), first column, and how many of its `BLOCK` columns exist."""
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    start = (pid % blocks).to(tl.int64) * BLOCK
    return row, start, tl.minimum(n_cols - start, BLOCK).to(tl.int32)


@triton.jit
def _bias_activation_forward_kernel(
    x_ptr, bias_ptr, y_ptr, n_rows, n_cols, blocks, ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    band, start, left = _tile(n_cols, blocks, BLOCK)
    at, rows = start + tl.arange(0, BLOCK), band * ROWS + tl.arange(0, ROWS)
    inside = tl.arange(0, BLOCK) < left
    mask = (rows < n_rows)[:, None] & inside[None, :]
    where = rows[:, None] * n_cols + at[None, :]
    z = tl.load(x_ptr + where, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + where, activation(z, ACT), mask=mask)


@triton.jit
def _activation_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, n_cols, blocks, ACT: tl.constexpr, BLOCK: tl.constexpr
):
    row, start, left = _tile(n_cols, blocks, BLOCK)
    at = tl.arange(0, BLOCK)
    mask = at < left
    where = row * n_cols + start + at
    x = tl.load(x_ptr + where, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + where, mask=mask, other=0.0).to(tl.float32)
    dx = dy * activation_gradient(x, ACT, dx_ptr.dtype.element_ty == tl.float32)
    tl.store(dx_ptr + where, dx, mask=mask)


@triton.jit
def _bias_activation_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, n_rows, n_cols, blocks, groups,
    ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A program owns a strip of columns in every `groups`-th band of rows, and sums it in fp32; rows of the
    # tile are added up after the last band, so that threads need not wait for each other before.
    pid = tl.program_id(0)
    group, cols = pid // blocks, (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for band in tl.range(group, tl.cdiv(n_rows, ROWS), groups, num_stages=STAGES):
        rows = band * ROWS + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & col_mask[None, :]
        where = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
        z = tl.load(x_ptr + where, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        dy = tl.load(dy_ptr + where, mask=mask, other=0.0).to(tl.float32)
        dx = dy * activation_gradient(z, ACT, dx_ptr.dtype.element_ty == tl.float32)
        tl.store(dx_ptr + where, dx, mask=mask)
        total += dx
    tl.store(partial_ptr + group.to(tl.int64) * n_cols + cols, tl.sum(total, axis=0), mask=col_mask)


@triton.jit
def _gated_forward_kernel(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, n_cols, blocks, ACT: tl.constexpr, BLOCK: tl.constexpr
):
    row, start, left = _tile(n_cols, blocks, BLOCK)
    at = tl.arange(0, BLOCK)
    mask = at < left
    gate = widened(tl.load(gate_ptr + row * gate_stride + start + at, mask=mask, other=0.0))
    up = widened(tl.load(up_ptr + row * up_stride + start + at, mask=mask, other=0.0))
    tl.store(y_ptr + row * n_cols + start + at, activation(gate, ACT) * up, mask=mask)


@triton.jit
def _gated_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, gate_stride, up_stride, dgate_stride, dup_stride,
    n_cols, blocks, ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start, left = _tile(n_cols, blocks, BLOCK)
    at = tl.arange(0, BLOCK)
    mask = at < left
    dy = widened(tl.load(dy_ptr + row * n_cols + start + at, mask=mask, other=0.0))
    gate = widened(tl.load(gate_ptr + row * gate_stride + start + at, mask=mask, other=0.0))
    up = widened(tl.load(up_ptr + row * up_stride + start + at, mask=mask, other=0.0))
    EXACT: tl.constexpr = dgate_ptr.dtype.element_ty == tl.float32
    dgate = dy * up * activation_gradient(gate, ACT, EXACT)
    tl.store(dgate_ptr + row * dgate_stride + start + at, dgate, mask=mask)
    tl.store(dup_ptr + row * dup_stride + start + at, dy * activation(gate, ACT), mask=mask)


def _blocks(
    n_cols: int, device: torch.device, table: LaunchTable = ELEMENTWISE
) -> tuple[int, dict[str, int]]:
    params = dict(table.pick(n_cols, device))
    # A whole block per row where rows are short.
    params["BLOCK"] = min(params["BLOCK"], max(next_power_of_2(n_cols), 32))
    return cdiv(n_cols, params["BLOCK"]), params


def _bias_activation_fake(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _bias_activation_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, bias, ctx.name = inputs
    ctx.save_for_backward(x, bias)


def _bias_activation_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    dx, db = bias_activation_gradient_op(dy, x, bias, ctx.name)
    return dx, None if bias is None else db, None


def _bias_activation_gradient_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, name: str
) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), (
        x.new_empty(0) if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    )


@operator("bias_activation_backward", fake=_bias_activation_gradient_fake)
def bias_activation_gradient_op(
    dy: Tensor, x: Tensor, bias: Tensor | None, name: str
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the bias (an empty tensor without one)."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if bias is None:
        if x.numel():
            blocks, params = _blocks(x.numel(), x.device)
            _activation_backward_kernel[(blocks,)](dy, x, dx, x.numel(), blocks, ACT=name, **params)
        return dx, x.new_empty(0)
    if not x.numel():
        return dx, torch.zeros_like(bias)
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    params = dict(BIAS_BACKWARD.pick(n_cols, x.device))
    wanted = params.pop("programs_per_sm") * sm_count(x.device)
    blocks = cdiv(n_cols, params["BLOCK"])
    groups = min(max(wanted // blocks, 1), cdiv(n_rows, params["ROWS"]))
    tile_bytes = params["ROWS"] * params["BLOCK"] * (x.element_size() + dy.element_size())
    params["STAGES"] = fitting_stages(params["STAGES"], tile_bytes, x.device)
    partial = torch.empty(groups, 1, n_cols, dtype=torch.float32, device=x.device)
    _bias_activation_backward_kernel[(blocks * groups,)](
        dy, x, bias.contiguous(), dx, partial, n_rows, n_cols, blocks, groups, ACT=name, **params
    )
    (db,) = sum_partials(partial, [bias.dtype])
    return dx, db


@operator(
    "bias_activation",
    fake=_bias_activation_fake,
    backward=_bias_activation_backward,
    setup_context=_bias_activation_setup,
)
def bias_activation_op(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """``f(x + bias)``, contiguous, in the promoted dtype."""
    y = _bias_activation_fake(x, bias, name)
    if not x.numel():
        return y
    x = x.contiguous()
    n_cols = x.numel() if bias is None else x.shape[-1]
    n_rows = x.numel() // n_cols
    blocks, params = _blocks(n_cols, x.device)
    # As many short rows as make up a long one: a thread has several neighbours.
    params["ROWS"] = max(1, ELEMENTWISE.pick(n_cols, x.device)["BLOCK"] // params["BLOCK"])
    _bias_activation_forward_kernel[(cdiv(n_rows, params["ROWS"]) * blocks,)](
        x, None if bias is None else bias.contiguous(), y, n_rows, n_cols, blocks, ACT=name, **params
    )
    return y


def _rows(x: Tensor) -> Tensor:
    """(rows, columns) with contiguous columns: a view where possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _gated_launch_shape(*parts: Tensor) -> tuple[list[Tensor], int, int]:
    """The parts as (rows, columns), one long row where none has gaps; then rows and columns."""
    rows = [_rows(part) for part in parts]
    if all(part.is_contiguous() for part in rows):
        rows = [part.view(1, -1) for part in rows]
    return rows, rows[0].shape[0], rows[0].shape[1]


def _launch_gated_forward(gate: Tensor, up: Tensor, y: Tensor, name: str) -> None:
    if not y.numel():
        return
    (g, u), n_rows, n_cols = _gated_launch_shape(gate, up)
    blocks, params = _blocks(n_cols, y.device, GATED)
    _gated_forward_kernel[(n_rows * blocks,)](
        g, u, y, g.stride(0), u.stride(0), n_cols, blocks, ACT=name, **params
    )


def _launch_gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, name: str
) -> None:
    if not dy.numel():
        return
    (g, u, dg, du), n_rows, n_cols = _gated_launch_shape(gate, up, dgate, dup)
    blocks, params = _blocks(n_cols, dy.device, GATED)
    _gated_backward_kernel[(n_rows * blocks,)](
        dy.contiguous(), g, u, dg, du, g.stride(0), u.stride(0), dg.stride(0), du.stride(0),
        n_cols, blocks, ACT=name, **params,
    )  # fmt: skip


def _halves(packed: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    first, second = packed.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)


def _gated_fake(gate: Tensor, up: Tensor, name: str) -> Tensor:
    return torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)


def _gated_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    gate, up, ctx.name = inputs
    ctx.save_for_backward(gate, up)


def _gated_grad(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*gated_gradient_op(dy, *ctx.saved_tensors, ctx.name), None)


def _gated_gradient_fake(dy: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@operator("gated_activation_backward", fake=_gated_gradient_fake)
def gated_gradient_op(dy: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Gradients of the gate and of the linear part, contiguous."""
    dgate, dup = _gated_gradient_fake(dy, gate, up, name)
    _launch_gated_backward(dy, gate, up, dgate, dup, name)
    return dgate, dup


@operator("gated_activation", fake=_gated_fake, backward=_gated_grad, setup_context=_gated_setup)
def gated_op(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """``f(gate) * up``, contiguous, in the promoted dtype."""
    y = _gated_fake(gate, up, name)
    _launch_gated_forward(gate, up, y, name)
    return y


def _packed_fake(packed: Tensor, name: str, gate_first: bool) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], packed.shape[-1] // 2)


def _packed_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    packed, ctx.name, ctx.gate_first = inputs
    ctx.save_for_backward(packed)


def _packed_grad(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    return packed_gradient_op(dy, *ctx.saved_tensors, ctx.name, ctx.gate_first), None, None


def _packed_gradient_fake(dy: Tensor, packed: Tensor, name: str, gate_first: bool) -> Tensor:
    return packed.new_empty(packed.shape)


@operator("gated_activation_packed_backward", fake=_packed_gradient_fake)
def packed_gradient_op(dy: Tensor, packed: Tensor, name: str, gate_first: bool) -> Tensor:
    """The gradient of both halves, in one contiguous tensor."""
    dpacked = packed.new_empty(packed.shape)
    parts = (*_halves(packed, gate_first), *_halves(dpacked, gate_first))
    _launch_gated_backward(dy, *parts, name)
    return dpacked


@operator("gated_activation_packed", fake=_packed_fake, backward=_packed_grad, setup_context=_packed_setup)
def packed_op(packed: Tensor, name: str, gate_first: bool) -> Tensor:
    """``f(gate) * up`` of the halves of `packed`, contiguous."""
    y = _packed_fake(packed, name, gate_first)
    _launch_gated_forward(*_halves(packed, gate_first), y, name)
    return y


def bias_activation_reference(x: Tensor, bias: Tensor | None = None, name: str = "gelu") -> Tensor:
    """The same in plain PyTorch."""
    z = x if bias is None else x + bias
    if name == "relu_squared":
        return F.relu(z).square()
    if name.startswith("gelu"):
        return F.gelu(z, approximate="tanh" if name == "gelu_tanh" else "none")
    return z if name == "none" else getattr(F, name)(z)


def gated_activation_reference(gate: Tensor, up: Tensor, name: str = "silu") -> Tensor:
    """The same in plain PyTorch."""
    return bias_activation_reference(gate, None, name) * up


def unsupported_reasons(x: Tensor, other: Tensor | None = None, name: str = "gelu") -> list[str]:
    """Why the kernels cannot take `x` and its bias (one dimension) or its linear part (as `x`)."""
    reasons = device_reasons(x, other) + dtype_reasons(x, other)
    if name not in ACTIVATIONS:
        reasons.append(f"activation {name!r}: one of {', '.join(ACTIVATIONS)}")
    if other is not None and other.shape != x.shape and other.shape != x.shape[-1:]:
        reasons.append(
            f"shape {tuple(other.shape)} is neither that of a row of {tuple(x.shape)} nor the same"
        )
    return reasons


def bias_activation(x: Tensor, bias: Tensor | None = None, name: str = "gelu") -> Tensor:
    """An activation of ``x + bias`` in one pass.

    Args:
        x: (..., n).
        bias: (n,), or None.
        name: one of `ACTIVATIONS`.

    Returns:
        (..., n), contiguous, in the promoted dtype of `x` and `bias`.

    Raises:
        UnsupportedError: see `unsupported_reasons`.
    """
    reasons = unsupported_reasons(x, bias, name)
    if bias is not None and bias.dim() != 1:
        reasons.append(f"bias of {bias.dim()} dimensions: the kernel takes one, as long as a row")
    refuse(reasons, "bias_activation")
    return bias_activation_op(x, bias, name)


def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """``gelu(x + bias)``; `approximate` as in `torch.nn.functional.gelu`."""
    return bias_activation(x, bias, _gelu(approximate))


def relu_squared(x: Tensor) -> Tensor:
    """``relu(x) ** 2`` (So et al., "Primer", 2021)."""
    return bias_activation(x, None, "relu_squared")


def gated_activation(gate: Tensor, up: Tensor, name: str = "silu") -> Tensor:
    """``f(gate) * up`` in one pass.

    Args:
        gate: (..., n); rows may lie apart, as those of a slice of a wider tensor do.
        up: the same shape.
        name: one of `ACTIVATIONS`.

    Returns:
        (..., n), contiguous, in the promoted dtype.

    Raises:
        UnsupportedError: see `unsupported_reasons`.
    """
    reasons = unsupported_reasons(gate, up, name)
    if gate.shape != up.shape:
        reasons.append(f"gate {tuple(gate.shape)} and linear part {tuple(up.shape)} differ in shape")
    refuse(reasons, "gated_activation")
    return gated_op(gate, up, name)


def gated_activation_packed(packed: Tensor, name: str = "silu", gate_first: bool = True) -> Tensor:
    """``f(gate) * up`` where both are the halves of one tensor, whose gradient then is one tensor too.

    Args:
        packed: (..., 2 n).
        name: one of `ACTIVATIONS`.
        gate_first: the gate is the first half, as in Phi-3; else the second, as in diffusers' GEGLU.

    Returns:
        (..., n), contiguous.

    Raises:
        UnsupportedError: see `unsupported_reasons`; or the last dimension is odd.
    """
    reasons = unsupported_reasons(packed, None, name)
    if packed.dim() == 0 or packed.shape[-1] % 2:
        reasons.append(f"shape {tuple(packed.shape)} has no two halves along its last dimension")
    refuse(reasons, "gated_activation_packed")
    return packed_op(packed, name, gate_first)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return gated_activation(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up``; `approximate` as in `torch.nn.functional.gelu`."""
    return gated_activation(gate, up, _gelu(approximate))


def _gelu(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


class SwiGLU(nn.Module):
    """A gated feed-forward block, ``down_proj(silu(gate_proj(x)) * up_proj(x))``, named as Llama's MLP is.

    Args:
        hidden_size: of the input and the output.
        intermediate_size: between them.
        bias: of the three projections.
    """

    activation = "silu"

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, **factory: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, **factory)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) to the same."""
        return self.down_proj(gated_activation(self.gate_proj(x), self.up_proj(x), self.activation))


class GeGLU(SwiGLU):
    """The same with GELU in its tanh form, as Gemma's MLP."""

    activation = "gelu_tanh"
