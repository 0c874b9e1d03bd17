r"""Attention that never stores the scores (FlashAttention), forward and backward.

Forward, for a query row i and the keys j that it sees (Dao, "FlashAttention-2", 2023, algorithm 1):

    s_ij = scale q_i . k_j            (softcap: c tanh(scale q_i . k_j / c))  + bias_ij
    p_ij = exp(s_ij - L_i),           L_i = log sum_j exp(s_ij)
    o_i  = sum_j d_ij p_ij v_j,       d_ij = 0 or 1 / (1 - dropout)

in one pass over blocks of keys: with the running maximum m and sum l, a new block of scores gives
m' = max(m, s), and l and o shrink by exp(m - m') before the block is added. L, one fp32 number a row, is all
that is saved besides the output. Exponentials are taken to base 2, with log2(e) within the scale.

Gradient, given g = dL/do, with the scores computed again from q and k:

    dv_j  = sum_i d_ij p_ij g_i
    dp_ij = d_ij g_i . v_j
    ds_ij = p_ij (dp_ij - D_i),       D_i = sum_j p_ij dp_ij = g_i . o_i     (softcap: times 1 - tanh^2)
    dq_i  = scale sum_j ds_ij k_j,    dk_j = scale sum_i ds_ij q_i

D_i = g_i . o_i is free, but takes the rounding of a 16-bit o_i along: the ds_ij of a row then sum to that
error instead of 0, and where keys have a common part, dq_i gets it times that part. Where values have one
too, as they come to have within a few steps of training, that may be larger than dq_i itself. Hence the
forward keeps what rounding takes from o_i, 16 bits more a number, and divides by the sum of the p_ij as they
were rounded to be multiplied with v, so that what all v_j have in common comes out exact.

Work: 4 FLOPs a score and head dimension forward, and 14 backward (10 would do with atomic sums of dq, at the
price of gradients that differ from run to run). Blocks of scores that no query sees are skipped; only blocks
at the edge of what is seen evaluate the mask.
"""

import math

import torch
from torch import Tensor, nn

from ._attention_ops import attention_op
from ._device import device_reasons, dtype_reasons, refuse
from ._family import Family
from ._ops import autocast_dtype
from ._random import draw_seed

FAMILY = Family(
    what="FlashAttention forward and backward: causal, window, mask, soft-cap, grouped, packed",
    public=("attention", "FlashAttention"),
    replaces=("torch.nn.functional.scaled_dot_product_attention",),
    differs="causal in place of is_causal; no gradient for a mask; other dropout masks from the same seed",
    hardware="NVIDIA of compute capability 8.0 or newer; TMA and wgmma on 9.0",
)

#: Head dimensions up to this; larger ones do not fit in shared memory.
MAX_HEAD_DIM = 256


def unsupported_reasons(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    align: str = "upper_left",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> list[str]:
    """Why `attention` cannot be used with these arguments; empty if it can."""
    reasons = device_reasons(q, k, v, mask, cu_seqlens_q, cu_seqlens_k) + dtype_reasons(q, k, v)
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        reasons.append(f"dtypes of q, k and v differ: {q.dtype}, {k.dtype}, {v.dtype}")
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    rank = 3 if packed else 4
    if not q.dim() == k.dim() == v.dim() == rank:
        what = "(tokens, heads, dim) where cu_seqlens are given" if packed else "(batch, heads, tokens, dim)"
        return [*reasons, f"q, k and v have {q.dim()}, {k.dim()}, {v.dim()} dimensions: they are {what}"]
    heads, tokens = (1, 0) if packed else (1, 2)
    shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if (
        k.shape[-1] != q.shape[-1]
        or k.shape[:-1] != v.shape[:-1]
        or (not packed and q.shape[0] != k.shape[0])
    ):
        reasons.append(f"shapes of q, k and v do not fit together: {shapes}")
    elif q.shape[heads] % max(k.shape[heads], 1) or (q.shape[heads] and not k.shape[heads]):
        reasons.append(f"{q.shape[heads]} query heads are no multiple of {k.shape[heads]} key heads")
    if not 1 <= min(q.shape[-1], v.shape[-1]) <= max(q.shape[-1], v.shape[-1]) <= MAX_HEAD_DIM:
        reasons.append(f"head dimensions {q.shape[-1]} and {v.shape[-1]}: 1 to {MAX_HEAD_DIM} are taken")
    if scale is not None and not scale > 0.0:
        reasons.append(f"scale {scale}: it must be positive")
    if not softcap >= 0.0:
        reasons.append(f"softcap {softcap}: it must not be negative")
    if not 0.0 <= dropout_p <= 1.0:
        reasons.append(f"dropout_p {dropout_p}: a probability is between 0 and 1")
    if align not in ("upper_left", "lower_right"):
        reasons.append(f"align {align!r}: upper_left or lower_right")
    if mask is not None:
        reasons += _mask_reasons(mask, q, k, packed)
    if packed:
        reasons += _packed_reasons(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    elif max(q.shape[tokens], k.shape[tokens]) >= 2**31 - 512:
        reasons.append("2^31 tokens or more in a sequence")
    return reasons


def _mask_reasons(mask: Tensor, q: Tensor, k: Tensor, packed: bool) -> list[str]:
    if packed:
        return ["a mask with packed sequences"]
    reasons = [] if mask.dtype == torch.bool else dtype_reasons(mask)
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    fits = mask.dim() <= 4 and all(
        m in (1, n) for m, n in zip(reversed(mask.shape), reversed(full), strict=False)
    )
    if not fits:
        reasons.append(f"a mask of shape {tuple(mask.shape)} does not broadcast to {full}")
    if mask.requires_grad and torch.is_grad_enabled():
        reasons.append("the mask requires a gradient, which the kernel does not compute")
    return reasons


def _packed_reasons(
    cu_q: Tensor | None, cu_k: Tensor | None, max_q: int | None, max_k: int | None
) -> list[str]:
    if cu_q is None or cu_k is None or max_q is None or max_k is None:
        return ["packed sequences need cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k, all four"]
    if cu_q.dim() != 1 or cu_q.shape != cu_k.shape or not len(cu_q):
        return [
            f"cu_seqlens of shapes {tuple(cu_q.shape)} and {tuple(cu_k.shape)}: both are (sequences + 1,)"
        ]
    return dtype_reasons(cu_q, cu_k, allowed=(torch.int32, torch.int64))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    align: str = "upper_left",
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    precise_gradient: bool = True,
) -> Tensor:
    """``dropout(softmax(scale q k^T + mask)) v``, memory linear in the number of tokens.

    Args:
        q: (batch, heads, tokens, dim), any strides with a dense last dimension (else it is copied); packed
            sequences (tokens, heads, dim).
        k: the same with its own tokens and a number of heads that divides q's (grouped queries: head h of q
            goes with head ``h // (heads of q / heads of k)``).
        v: as k, with a head dimension of its own.
        mask: broadcastable to (batch, heads, q tokens, k tokens): bool, True where a key is seen, or float,
            added to the scaled scores. ALiBi is a float mask (heads, 1, k tokens), ``slope * arange``, under
            `causal`: a term that is the same along a row leaves the softmax as it is. Numbers below
            -2.35e38, as float32's and bfloat16's least one, hide a key as -inf does. No gradient.
        causal: query i sees keys up to i.
        window: (left, right): query i sees keys from ``i - left`` to ``i + right``; negative is without
            bound. With `causal` too, right is 0.
        align: where key and query indices meet if their numbers differ: ``upper_left`` is `is_causal` of
            ``F.scaled_dot_product_attention``; ``lower_right`` lets the last query meet the last key, as
            decoding needs, as ``torch.nn.attention.bias.causal_lower_right`` and the flash-attn package do.
        scale: of the scores, positive; ``1 / sqrt(dim)`` unless given.
        softcap: c > 0 replaces scaled scores s by ``c tanh(s / c)``, before the mask is added.
        dropout_p: probability with which a weight is dropped, on torch's generator of q's device. The masks
            differ from those of torch's own attention for the same seed.
        cu_seqlens_q: (sequences + 1,) int32 or int64, where each packed sequence starts and ends.
        cu_seqlens_k: the same for keys and values.
        max_seqlen_q: at least the longest sequence's queries; longer ones would be cut.
        max_seqlen_k: the same for keys.
        precise_gradient: gradients of 16-bit queries and keys as accurate as written-out attention's, also
            where keys and values have a large part in common, for 2 bytes more of memory for each number of
            the output. Without, they are as PyTorch's own attention has them.

    Returns:
        (batch, heads, tokens, dim of v), laid out as q; rows that see no key are 0, with zero gradients.

    Under autocast q, k and v are cast to its dtype, as torch's own attention does.

    Raises:
        UnsupportedError: for the reasons that `unsupported_reasons` gives.
    """
    to = autocast_dtype(q)
    if to is not None:
        q, k, v = q.to(to), k.to(to), v.to(to)
    reasons = unsupported_reasons(
        q, k, v, mask, window=window, scale=scale, softcap=softcap, dropout_p=dropout_p, align=align,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    refuse(reasons, "attention")
    left, right = window or (-1, -1)
    if causal:
        right = 0
    packed = cu_seqlens_q is not None
    if packed:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    bias = None
    if mask is not None:
        bias = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    out, *_ = attention_op(
        q,
        k,
        v,
        bias,
        cu_seqlens_q,
        cu_seqlens_k,
        draw_seed(q.device) if 0.0 < dropout_p < 1.0 else None,
        1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        float(softcap),
        float(dropout_p),
        max(left, -1),
        max(right, -1),
        align == "lower_right",
        q.shape[2] if max_seqlen_q is None else max_seqlen_q,
        k.shape[2] if max_seqlen_k is None else max_seqlen_k,
        precise_gradient and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    )
    return out[0].transpose(0, 1) if packed else out


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    align: str = "upper_left",
    scale: float | None = None,
    softcap: float = 0.0,
    weights_kept: Tensor | None = None,
) -> Tensor:
    """`attention` in plain PyTorch, scores and all, for unpacked sequences.

    Args:
        q, k, v, mask, causal, window, align, scale, softcap: as for `attention`.
        weights_kept: what multiplies the weights in place of dropout: 0 or 1 / (1 - p).
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
    distance = j - i - (k.shape[2] - q.shape[2] if align == "lower_right" else 0)
    left, right = window or (-1, -1)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal or right >= 0:
        seen &= distance <= (0 if causal else right)
    if left >= 0:
        seen &= distance >= -left
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    scores = scores.masked_fill(~seen, -torch.inf)
    # A row without keys has only -inf: its softmax is NaN, which must reach neither result nor gradient.
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return (weights if weights_kept is None else weights * weights_kept) @ v


class FlashAttention(nn.Module):
    """`attention` as a module without parameters; drops weights only while training.

    Args:
        causal, window, align, scale, softcap, dropout_p, precise_gradient: as for `attention`.
    """

    def __init__(
        self,
        *,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        align: str = "upper_left",
        scale: float | None = None,
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        precise_gradient: bool = True,
    ) -> None:
        super().__init__()
        self.causal, self.window, self.align = causal, window, align
        self.scale, self.softcap, self.dropout_p = scale, softcap, dropout_p
        self.precise_gradient = precise_gradient

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of q over k and v, as the function of that name."""
        return attention(
            q,
            k,
            v,
            mask,
            causal=self.causal,
            window=self.window,
            align=self.align,
            scale=self.scale,
            softcap=self.softcap,
            dropout_p=self.dropout_p if self.training else 0.0,
            precise_gradient=self.precise_gradient,
        )

    def extra_repr(self) -> str:
        """The options that differ from the defaults."""
        options = {"causal": False, "window": None, "align": "upper_left", "scale": None, "softcap": 0.0}
        options |= {"dropout_p": 0.0, "precise_gradient": True}
        return ", ".join(f"{k}={getattr(self, k)!r}" for k, v in options.items() if getattr(self, k) != v)
