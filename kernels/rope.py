"""Rotary position embedding (Su et al., "RoFormer", 2021) of queries and keys in one launch.

The first r of a head's d elements are rotated in pairs by a position's angles, the rest are copied. With the
pair (a, b), and cosines and sines c, s at a's place and c', s' at b's:

    a' = a c - b s          b' = b c' + a s'
    da = da' c + db' s'     db = db' c' - da' s

``half``: a is in the first half of the r elements and b at the same place in the second (GPT-NeoX, Llama).
``interleaved``: a and b are neighbours (GPT-J, RoFormer). Tables give r values a position, or r / 2 that
serve both elements of a pair. They get no gradient.

One program takes all heads of one token: it loads the angles once, and queries and keys after each other, by
their strides, so that (batch, tokens, heads, d) and (batch, heads, tokens, d) are the same to it. Every
element is read once and written once, to new tensors of the inputs' layout and dtype; arithmetic is fp32.
Eager code that keeps fp32 tables beside 16-bit queries gives fp32; here the result has the queries' dtype.
"""

from typing import Any

import torch
from torch import Tensor

from ._device import device_reasons, dtype_reasons, refuse
from ._family import Family
from ._launch import LaunchTable, cdiv, next_power_of_2
from ._ops import operator
from ._triton import tl, triton

FAMILY = Family(
    what="rotary embedding of queries and keys in one launch, half-split or interleaved",
    public=("rope",),
    replaces=("Hugging Face's apply_rotary_pos_emb",),
    differs="layout in place of unsqueeze_dim; cos and sin get no gradient",
)

LAYOUTS = ("bshd", "bhsd")

#: Size: elements of a token's queries. TILE: elements that are rotated at once. SPREAD: by a program of their
#: own; else a program takes all heads of a token, one tile after the other.
ROTATE = LaunchTable(
    "rope",
    {
        "default": [
            (1024, {"TILE": 1024, "num_warps": 1}),
            (2048, {"TILE": 2048, "num_warps": 2}),
            (None, {"TILE": 4096, "num_warps": 4}),
        ],
        "sm_90": [
            (1024, {"TILE": 1024, "num_warps": 1, "SPREAD": 1}),
            (None, {"TILE": 2048, "num_warps": 2, "SPREAD": 1}),
        ],
        "interpreter": [(None, {"TILE": 64, "num_warps": 1})],
    },
)


@triton.jit
def _tables(
    cos_row, sin_row, HALF: tl.constexpr, FULL_TABLE: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """One token's cosines and sines of each pair's first and second."""
    pairs = tl.arange(0, PAIRS)[None, :]
    at_a = pairs * 2 if FULL_TABLE and INTERLEAVED else pairs
    at_b = at_a
    if FULL_TABLE:
        at_b = at_a + 1 if INTERLEAVED else at_a + HALF
    cos_a = tl.load(cos_row + at_a, mask=pairs < HALF, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_row + at_a, mask=pairs < HALF, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_row + at_b, mask=pairs < HALF, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_row + at_b, mask=pairs < HALF, other=0.0).to(tl.float32)
    return cos_a, cos_b, sin_a, sin_b


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, x_stride, y_stride, first, n_heads, cos_a, cos_b, sin_a, sin_b,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Heads of one token, from `first` on; `x_ptr` and `y_ptr` are at its first head."""
    pairs = tl.arange(0, PAIRS)[None, :]
    heads = first + tl.arange(0, HEADS)[:, None]
    x_head = x_ptr + heads.to(tl.int64) * x_stride
    y_head = y_ptr + heads.to(tl.int64) * y_stride
    live = heads < n_heads
    if INTERLEAVED:
        # Neighbours are loaded together and taken apart in registers.
        both = tl.arange(0, 2 * PAIRS)[None, :]
        mask = live & (both < 2 * HALF)
        x = tl.load(x_head + both, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (HEADS, PAIRS, 2)))
    else:
        mask = live & (pairs < HALF)
        a = tl.load(x_head + pairs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_head + HALF + pairs, mask=mask, other=0.0).to(tl.float32)
    if TRANSPOSED:
        new_a = a * cos_a + b * sin_b
        new_b = b * cos_b - a * sin_a
    else:
        new_a = a * cos_a - b * sin_a
        new_b = b * cos_b + a * sin_b
    if INTERLEAVED:
        y = tl.reshape(tl.join(new_a, new_b), (HEADS, 2 * PAIRS))
        tl.store(y_head + both, y, mask=mask)
    else:
        tl.store(y_head + pairs, new_a, mask=mask)
        tl.store(y_head + HALF + pairs, new_b, mask=mask)
    if REST > 0:
        tail = tl.arange(0, TAIL)[None, :]
        mask = live & (tail < REST)
        kept = tl.load(x_head + 2 * HALF + tail, mask=mask)
        tl.store(y_head + 2 * HALF + tail, kept, mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, n_tokens,
    q_batch, q_token, q_head, q_out_batch, q_out_token, q_out_head, q_heads,
    k_batch, k_token, k_head, k_out_batch, k_out_token, k_out_head, k_heads,
    cos_batch, cos_token, sin_batch, sin_token,
    HALF: tl.constexpr, REST: tl.constexpr, FULL_TABLE: tl.constexpr,
    INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    q_groups = tl.cdiv(q_heads, HEADS)
    pid, group = tl.program_id(0), 0
    if SPREAD:
        groups = q_groups + tl.cdiv(k_heads, HEADS)
        pid, group = pid // groups, pid % groups
    batch, token = (pid // n_tokens).to(tl.int64), (pid % n_tokens).to(tl.int64)
    cos_a, cos_b, sin_a, sin_b = _tables(
        cos_ptr + batch * cos_batch + token * cos_token, sin_ptr + batch * sin_batch + token * sin_token,
        HALF, FULL_TABLE, INTERLEAVED, PAIRS,
    )  # fmt: skip
    q_ptr += batch * q_batch + token * q_token
    q_out_ptr += batch * q_out_batch + token * q_out_token
    if k_ptr is not None:
        k_ptr += batch * k_batch + token * k_token
        k_out_ptr += batch * k_out_batch + token * k_out_token
    if SPREAD:
        # Chosen without a branch, so that tables and heads are on their way together.
        first, x_ptr, y_ptr, x_head, y_head, n_heads = group, q_ptr, q_out_ptr, q_head, q_out_head, q_heads
        if k_ptr is not None:
            of_q = group < q_groups
            first = tl.where(of_q, group, group - q_groups)
            x_ptr, y_ptr = tl.where(of_q, q_ptr, k_ptr), tl.where(of_q, q_out_ptr, k_out_ptr)
            x_head, y_head = tl.where(of_q, q_head, k_head), tl.where(of_q, q_out_head, k_out_head)
            n_heads = tl.where(of_q, q_heads, k_heads)
        _rotate_heads(
            x_ptr, y_ptr, x_head, y_head, first * HEADS, n_heads, cos_a, cos_b, sin_a, sin_b,
            HALF, REST, INTERLEAVED, TRANSPOSED, HEADS, PAIRS, TAIL,
        )  # fmt: skip
    else:
        for first in range(0, q_heads, HEADS):
            _rotate_heads(
                q_ptr, q_out_ptr, q_head, q_out_head, first, q_heads, cos_a, cos_b, sin_a, sin_b,
                HALF, REST, INTERLEAVED, TRANSPOSED, HEADS, PAIRS, TAIL,
            )  # fmt: skip
        if k_ptr is not None:
            for first in range(0, k_heads, HEADS):
                _rotate_heads(
                    k_ptr, k_out_ptr, k_head, k_out_head, first, k_heads, cos_a, cos_b, sin_a, sin_b,
                    HALF, REST, INTERLEAVED, TRANSPOSED, HEADS, PAIRS, TAIL,
                )  # fmt: skip


def _rows_in_place(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(x: Tensor, layout: str) -> tuple[int, int, int]:
    """Of batch, token and head, in elements."""
    batch, second, third, _ = x.stride()
    return (batch, second, third) if layout == "bshd" else (batch, third, second)


def _table_strides(table: Tensor) -> tuple[int, int]:
    """Of batch and token; 0 where all batches share a table."""
    if table.dim() == 2:
        return 0, table.stride(0)
    return (0 if table.shape[0] == 1 else table.stride(0)), table.stride(1)


def _empty_like(x: Tensor) -> Tensor:
    """Of x's layout if that has contiguous heads, else contiguous."""
    out = torch.empty_like(x)
    return out if out.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, rotary_dim: int, layout: str, interleaved: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _empty_like(q), q.new_empty(0) if k is None else _empty_like(k)


def _setup(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    _, k, cos, sin, *ctx.settings, ctx.transposed = inputs
    ctx.has_k = k is not None
    if not ctx.has_k:
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(cos, sin)


def _grad(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    # The transposed rotation is as linear as the rotation: this operator again, differentiable again.
    dk_in = dk if ctx.has_k else None
    dq, dk = rope_op(dq, dk_in, *ctx.saved_tensors, *ctx.settings, not ctx.transposed)
    return dq, dk if ctx.has_k else None, None, None, None, None, None, None


@operator("rope", fake=_fake, backward=_grad, setup_context=_setup)
def rope_op(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, rotary_dim: int, layout: str, interleaved: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys (or an empty tensor) rotated, by the transposed rotation if `transposed`."""
    q_out, k_out = _fake(q, k, cos, sin, rotary_dim, layout, interleaved, transposed)
    if not q.numel() and (k is None or not k.numel()):
        return q_out, k_out
    q, cos, sin = _rows_in_place(q), _rows_in_place(cos), _rows_in_place(sin)
    k = None if k is None else _rows_in_place(k)
    head_dim, half = q.shape[-1], rotary_dim // 2
    token_axis, head_axis = (1, 2) if layout == "bshd" else (2, 1)
    params = dict(ROTATE.pick(q.shape[head_axis] * head_dim, q.device))
    pairs = next_power_of_2(half)
    heads = min(max(params.pop("TILE") // (2 * pairs), 1), next_power_of_2(q.shape[head_axis]))
    spread = params.pop("SPREAD", 0) and (k is None or k.dtype == q.dtype)
    k_heads = 0 if k is None else k.shape[head_axis]
    groups = cdiv(q.shape[head_axis], heads) + cdiv(k_heads, heads) if spread else 1
    k_strides = (0,) * 6 if k is None else (*_strides(k, layout), *_strides(k_out, layout))
    _rope_kernel[(q.shape[0] * q.shape[token_axis] * groups,)](
        q, k, q_out, k_out, cos, sin, q.shape[token_axis],
        *_strides(q, layout), *_strides(q_out, layout), q.shape[head_axis],
        *k_strides, k_heads,
        *_table_strides(cos), *_table_strides(sin),
        HALF=half, REST=head_dim - rotary_dim, FULL_TABLE=cos.shape[-1] == rotary_dim,
        INTERLEAVED=interleaved, TRANSPOSED=transposed, HEADS=heads, PAIRS=pairs,
        TAIL=next_power_of_2(head_dim - rotary_dim), SPREAD=bool(spread), **params,
    )  # fmt: skip
    return q_out, k_out


def rope_reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, rotary_dim: int | None = None,
    layout: str = "bhsd", interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same in plain PyTorch, in the promoted dtype of tables and inputs, cast back to the inputs'."""
    r = cos.shape[-1] if rotary_dim is None else rotary_dim

    def table(t: Tensor) -> Tensor:
        if t.shape[-1] != r:
            t = t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)
        t = t if t.dim() == 3 else t[None]
        return t.unsqueeze(2 if layout == "bshd" else 1)

    def rotate(x: Tensor) -> Tensor:
        part = x[..., :r]
        if interleaved:
            turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
        else:
            turned = torch.cat((-part[..., r // 2 :], part[..., : r // 2]), -1)
        out = part * table(cos) + turned * table(sin)
        return torch.cat((out.to(x.dtype), x[..., r:]), -1)

    return rotate(q), None if k is None else rotate(k)


def unsupported_reasons(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, rotary_dim: int | None = None,
    layout: str = "bhsd",
) -> list[str]:  # fmt: skip
    """Why the kernel cannot take these arguments; empty if it can."""
    reasons = device_reasons(q, k, cos, sin) + dtype_reasons(q, k, cos, sin)
    if layout not in LAYOUTS:
        return [*reasons, f"layout {layout!r}: one of {', '.join(LAYOUTS)}"]
    if q.dim() != 4 or (k is not None and k.dim() != 4):
        return [*reasons, "queries and keys must have four dimensions: batch, tokens, heads and head dim"]
    token_axis = 1 if layout == "bshd" else 2
    sizes = (q.shape[0], q.shape[token_axis], q.shape[-1])
    if k is not None and (k.shape[0], k.shape[token_axis], k.shape[-1]) != sizes:
        reasons.append(f"queries {tuple(q.shape)} and keys {tuple(k.shape)} differ in more than heads")
    r = cos.shape[-1] if rotary_dim is None else rotary_dim
    if r % 2 or not 0 < r <= sizes[2]:
        reasons.append(f"{r} rotated dimensions of {sizes[2]}: an even number from 2")
    if cos.shape != sin.shape or cos.dim() not in (2, 3) or cos.shape[-1] not in (r, r // 2):
        reasons.append(f"tables {tuple(cos.shape)} and {tuple(sin.shape)}: ([batch,] tokens, {r} or half)")
    elif cos.shape[-2] != sizes[1] or (cos.dim() == 3 and cos.shape[0] not in (1, sizes[0])):
        reasons.append(f"tables {tuple(cos.shape)} for {sizes[0]} x {sizes[1]} tokens")
    if cos.requires_grad or sin.requires_grad:
        reasons.append("tables that require a gradient")
    return reasons


def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, rotary_dim: int | None = None,
    layout: str = "bhsd", interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Rotate queries and keys by their positions.

    Args:
        q: (batch, heads, tokens, d), or (batch, tokens, heads, d) with layout ``bshd``. Any strides but the
            last, which is 1 (else copied).
        k: the same with its own number of heads, or None.
        cos: (tokens, w) or (batch or 1, tokens, w), the cosines of the tokens' positions in order.
        sin: the same shape.
        rotary_dim: how many of the d elements are rotated. By default w: tables hold each angle twice, as
            Hugging Face's. With tables of one value a pair give 2 w.
        layout: ``bhsd`` or ``bshd``.
        interleaved: pairs are neighbours rather than halves.

    Returns:
        New tensors of the dtype and, where dense, the strides of `q` and `k`.

    Raises:
        UnsupportedError: see `unsupported_reasons`.
    """
    refuse(unsupported_reasons(q, k, cos, sin, rotary_dim=rotary_dim, layout=layout), "rope")
    r = cos.shape[-1] if rotary_dim is None else rotary_dim
    q_out, k_out = rope_op(q, k, cos, sin, r, layout, interleaved, False)
    return q_out, None if k is None else k_out
