r"""Attention of a few new tokens over a cache of keys and values in blocks, for decoding. No gradient.

A sequence's keys lie in blocks of equal size anywhere in the cache (Kwon et al., "Efficient memory management
for large language model serving with PagedAttention", SOSP 2023): token j of sequence b is row
``j % block_size`` of block ``block_table[b, j // block_size]``. The last queries of a sequence of length L,
n of them, sit at the positions L - n to L - 1, and the one at position i sees the keys j <= i:

    s_ij = scale q_i . k_j            (softcap: c tanh(scale q_i . k_j / c))  + slope (j - i)
    o_i  = sum_j exp(s_ij - L_i) v_j,        L_i = log sum_j exp(s_ij)

What there is to do is to read the cache: 4 FLOPs a key, query head and dimension stand against 2 elements a
key head and dimension. So the query heads that share a key head are worked on together, and where sequences
and heads are too few to keep the device reading, the keys of a sequence are cut into splits, which are summed
by themselves (Dao et al., "Flash-Decoding", 2023). With the split's own o and L, in fp32,

    o_i = sum_s w_is o_is,     w_is = exp(L_is - L_i),     L_i = log sum_s exp(L_is)

is a second, short kernel. How long the sequences are is read on the device alone: nothing waits for it.
"""

import math

import torch
from torch import Tensor

from ._device import FLOATS, device_reasons, dtype_reasons, refuse
from ._family import Family
from ._ops import autocast_dtype
from ._paged_cache import CacheFullError, PagedBatch, PagedKVCache
from ._paged_ops import LIMITS, paged_attention_op, write_to_cache_op

FAMILY = Family(
    what="attention of new tokens over a paged cache of keys and values, and writing to it, for decoding",
    public=("PagedKVCache", "paged_attention", "write_to_cache"),
)
__all__ = [
    "CacheFullError",
    "PagedBatch",
    "PagedKVCache",
    "paged_attention",
    "paged_attention_reference",
    "unsupported_reasons",
    "write_to_cache",
]

#: Head dimensions up to this; larger ones do not fit in shared memory.
MAX_HEAD_DIM = 256
_INDICES = (torch.int32, torch.int64)


def unsupported_reasons(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window_left: int | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_context_len: int | None = None,
    total_context_len: int | None = None,
) -> list[str]:
    """Why `paged_attention` cannot be used with these arguments; empty if it can."""
    given = (q, k_cache, v_cache, block_table, context_lens, alibi_slopes, k_scale, v_scale)
    reasons = device_reasons(*given) + dtype_reasons(q) + _cache_reasons(k_cache, v_cache, k_scale, v_scale)
    reasons += dtype_reasons(block_table, context_lens, allowed=_INDICES)
    if k_cache.dtype in FLOATS and q.dtype != k_cache.dtype:
        reasons.append(f"q is {q.dtype} and the cache {k_cache.dtype}: they must be alike")
    if q.dim() not in (3, 4) or k_cache.dim() != 4:
        return [
            *reasons,
            f"q has {q.dim()} dimensions and the cache {k_cache.dim()}: they are (batch, heads, dim) or "
            "(batch, queries, heads, dim) and (blocks, block_size, heads, dim)",
        ]
    if q.shape[-1] != k_cache.shape[3] or not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        reasons.append(
            f"head dimensions {q.shape[-1]} of q and {k_cache.shape[3]} of the cache: "
            f"they must be alike, 1 to {MAX_HEAD_DIM}"
        )
    if not k_cache.shape[2] or q.shape[-2] % k_cache.shape[2]:
        reasons.append(f"{q.shape[-2]} query heads are no multiple of {k_cache.shape[2]} key heads")
    if (
        block_table.dim() != 2
        or context_lens.dim() != 1
        or not (block_table.shape[0] == context_lens.shape[0] == q.shape[0])
    ):
        reasons.append(
            f"block_table {tuple(block_table.shape)} and context_lens {tuple(context_lens.shape)}: they are "
            f"({q.shape[0]}, most blocks of a sequence) and ({q.shape[0]},)"
        )
    if alibi_slopes is not None and (
        alibi_slopes.shape != q.shape[-2:-1] or alibi_slopes.dtype not in FLOATS
    ):
        reasons.append(f"alibi_slopes {tuple(alibi_slopes.shape)}: one floating number a query head")
    if scale is not None and not scale > 0.0:
        reasons.append(f"scale {scale}: it must be positive")
    if not softcap >= 0.0:
        reasons.append(f"softcap {softcap}: it must not be negative")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        reasons.append(
            "an argument requires a gradient, which the kernel does not compute: use torch.no_grad()"
        )
    return reasons


def _cache_reasons(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> list[str]:
    reasons = dtype_reasons(k_cache, v_cache, allowed=(*FLOATS, *LIMITS))
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype or k_cache.dim() != 4:
        return [
            *reasons,
            f"caches {tuple(k_cache.shape)} {k_cache.dtype} and {tuple(v_cache.shape)} {v_cache.dtype}: "
            "they are (blocks, block_size, heads, dim), alike",
        ]
    if not k_cache.shape[1]:
        reasons.append("blocks of no tokens")
    if k_cache.shape[3] > 1 and not k_cache.stride(3) == v_cache.stride(3) == 1:
        reasons.append("the elements of a head are not side by side in the cache, which is too large to copy")
    scales = (k_scale, v_scale)
    if k_cache.dtype in LIMITS and any(
        s is None or s.shape != k_cache.shape[2:3] or s.dtype != torch.float32 or not s.is_contiguous()
        for s in scales
    ):
        reasons.append(f"a cache of {k_cache.dtype} needs k_scale and v_scale: fp32, one number a key head")
    elif k_cache.dtype not in LIMITS and any(s is not None for s in scales):
        reasons.append(f"k_scale and v_scale are for a cache of 8 bits, this one is {k_cache.dtype}")
    return reasons


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window_left: int | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_context_len: int | None = None,
    total_context_len: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's last tokens over what the cache holds of it.

    Args:
        q: (batch, heads, dim), or (batch, queries, heads, dim) for several new tokens a sequence, whose keys
            and values are in the cache already. Any strides.
        k_cache: (blocks, block_size, key heads, dim), the number of key heads a divisor of q's (query head h
            goes with key head ``h // (heads / key heads)``). Any strides with a dense last dimension, so a
            cache laid out by heads is passed transposed. Of q's dtype; or int8 or float8_e4m3fn with scales.
        v_cache: the same for values.
        block_table: (batch, most blocks of a sequence) int32 or int64: blocks of each sequence, in order. It
            is read as far as a sequence reaches, from where its window begins: other entries may be anything.
        context_lens: (batch,) int32 or int64: tokens of each sequence in the cache, the new ones included. A
            sequence of 0 tokens, like a query before its sequence's first token, gives 0.
        scale: of the scores, positive; ``1 / sqrt(dim)`` unless given.
        softcap: c > 0 replaces scaled scores s by ``c tanh(s / c)``.
        window_left: the query at position i sees keys from ``i - window_left``; None is without bound.
        alibi_slopes: (heads,): ``slope * (j - i)`` is added to the score of key j.
        k_scale: (key heads,) fp32: what stored keys are multiplied by, for a cache of 8 bits.
        v_scale: the same for values.
        max_context_len: the longest sequence, if the host knows: fewer splits are launched for nothing. The
            result does not depend on it.
        total_context_len: the sum of `context_lens`, if the host knows. It is recorded with the operator, so
            that a profile tells how much was read; nothing else depends on it.
        return_lse: give the log-sum-exp of each row's scores too, fp32, -inf where it sees no key.

    Returns:
        q's shape and dtype, dense; with `return_lse` also (batch, heads) or (batch, queries, heads).

    Under autocast q is cast to the cache's dtype.

    Raises:
        UnsupportedError: for the reasons that `unsupported_reasons` gives.
    """
    if autocast_dtype(q) is not None and k_cache.dtype in FLOATS:
        q = q.to(k_cache.dtype)
    reasons = unsupported_reasons(
        q, k_cache, v_cache, block_table, context_lens, scale=scale, softcap=softcap,
        window_left=window_left, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    refuse(reasons, "paged_attention")
    out, lse = paged_attention_op(
        q if q.dim() == 4 else q[:, None],
        k_cache,
        v_cache,
        block_table,
        context_lens,
        None if alibi_slopes is None else alibi_slopes.float().contiguous(),
        k_scale,
        v_scale,
        1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        float(softcap),
        -1 if window_left is None else max(window_left, -1),
        block_table.shape[1] * k_cache.shape[1] if max_context_len is None else max_context_len,
        -1 if total_context_len is None else total_context_len,
    )
    if q.dim() == 3:
        out, lse = out[:, 0], lse[:, 0]
    return (out, lse) if return_lse else out


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window_left: int | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` and its log-sum-exp in plain PyTorch: the cache gathered, all scores stored."""
    if q.dim() == 3:
        out, lse = paged_attention_reference(
            q[:, None], k_cache, v_cache, block_table, context_lens, scale=scale, softcap=softcap,
            window_left=window_left, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        return out[:, 0], lse[:, 0]
    _, n_queries, heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    j = torch.arange(block_table.shape[1] * block_size, device=q.device)
    lens = context_lens.long()[:, None]
    i = lens - n_queries + torch.arange(n_queries, device=q.device)
    held = j < lens
    if window_left is not None and window_left >= 0:
        held &= j >= i[:, :1] - window_left
    # Of blocks without a token to be seen neither number nor contents are known.
    block = torch.where(held, block_table.long().repeat_interleave(block_size, 1), 0)

    def gathered(cache: Tensor, unit: Tensor | None) -> Tensor:
        rows = cache[block, j % block_size].to(q.dtype).masked_fill(~held[:, :, None, None], 0.0)
        if unit is not None:
            rows = rows * unit.to(q.dtype)[:, None]
        return rows.repeat_interleave(heads // kv_heads, 2).permute(0, 2, 1, 3)

    k, v = gathered(k_cache, k_scale), gathered(v_cache, v_scale)
    scores = (q.transpose(1, 2) * (dim**-0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = (j - i[:, :, None])[:, None]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(q.dtype)[:, None, None] * distance
    seen = held[:, None, None] & (distance <= 0)
    if window_left is not None and window_left >= 0:
        seen = seen & (distance >= -window_left)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores.float() if q.dtype != torch.float64 else scores, -1).transpose(1, 2)
    # A row without keys has only -inf: its softmax is NaN, which must not reach the result.
    empty = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return (weights @ v).transpose(1, 2).contiguous(), lse


def write_to_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Put new tokens' keys and values into the cache, in place.

    Args:
        key: (..., key heads, dim), any floating dtype and strides.
        value: the same.
        k_cache: (blocks, block_size, key heads, dim), as for `paged_attention`; written to.
        v_cache: the same.
        slots: key's leading shape, int32 or int64: ``block * block_size + row`` for each token, all
            different; a token whose slot is negative, or beyond the cache, is left out.
        k_scale: (key heads,) fp32: keys are divided by it before they are stored, for a cache of 8 bits;
            what is beyond the dtype's range becomes its end.
        v_scale: the same for values.

    Raises:
        UnsupportedError: dtypes, shapes or devices do not fit, or a gradient is asked for.
    """
    given = (key, value, k_cache, v_cache, slots)
    reasons = device_reasons(*given, k_scale, v_scale) + dtype_reasons(key, value)
    reasons += dtype_reasons(slots, allowed=_INDICES) + _cache_reasons(k_cache, v_cache, k_scale, v_scale)
    if key.shape != value.shape or key.dim() < 2 or key.shape[-2:] != k_cache.shape[-2:]:
        reasons.append(
            f"key {tuple(key.shape)} and value {tuple(value.shape)}: (..., heads, dim) of the cache, "
            f"{tuple(k_cache.shape[-2:])}"
        )
    elif slots.shape != key.shape[:-2]:
        reasons.append(f"slots {tuple(slots.shape)} for keys {tuple(key.shape)}: one a token")
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        reasons.append("an argument requires a gradient, which a cache does not pass on: use torch.no_grad()")
    refuse(reasons, "write_to_cache")
    write_to_cache_op(
        key.reshape(-1, *key.shape[-2:]),
        value.reshape(-1, *value.shape[-2:]),
        k_cache,
        v_cache,
        slots.reshape(-1),
        k_scale,
        v_scale,
    )
