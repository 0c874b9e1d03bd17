"""Calls of `scaled_dot_product_attention`: what they are given, and how long fused attention takes on it."""

from __future__ import annotations

from advisor.advice.calls import Unit
from advisor.advice.edits import Estimate
from advisor.advice.rates import attention_ns
from advisor.roofline.costs import Tensor
from advisor.roofline.devices import Device


def heads_of(unit: Unit) -> tuple[Tensor, Tensor, Tensor] | None:
    """Queries, keys and values, (batch, heads, tokens, dim) each; None where they are not recorded so."""
    given = [tensor for tensor in unit.tensors[:3] if len(tensor.shape) == 4]
    return (given[0], given[1], given[2]) if len(given) == 3 else None


#: Position of ``is_causal`` among the arguments, by a part of the operator's name; first match counts.
_CAUSAL_AT = (("flash_attention", 4), ("cudnn_attention", 6), ("efficient_attention", 6), ("", 5))


def is_causal(unit: Unit) -> bool:
    """Whether ``is_causal=True`` was given."""
    at = next(at for part, at in _CAUSAL_AT if part in unit.name)
    return unit.call.concrete[at : at + 1] in (("True",), ("1",))


def mask_of(unit: Unit) -> Tensor | None:
    """The mask that was given, or None."""
    given = unit.call.inputs[3:4] if "flash_attention" not in unit.name else ()
    mask = given[0] if given else None
    return mask if isinstance(mask, Tensor) and mask.shape else None


def is_shared(mask: Tensor, queries: int, keys: int) -> bool:
    """Whether a mask is of one plane of queries by keys, which all sequences and heads share."""
    if mask.shape[-2:] != (queries, keys):
        return False
    strides = mask.strides or (1,) * len(mask.shape)
    return all(size == 1 or not step for size, step in zip(mask.shape[:-2], strides, strict=False))


def fused_ns(
    device: Device, heads: tuple[Tensor, Tensor, Tensor], *, causal: bool, dtype: str
) -> tuple[Estimate, Estimate] | None:
    """Time of fused attention forward and backward; None where the device has no roof for it.

    Args:
        device: it runs on.
        heads: as from `heads_of`.
        causal: whether a triangular mask leaves half of the work.
        dtype: that it is computed in.
    """
    query, key, value = heads
    batch_heads, queries = query.shape[0] * query.shape[1], query.shape[2]
    return attention_ns(
        device,
        entries=batch_heads * queries * key.shape[2] * (0.5 if causal else 1.0),
        queries=queries,
        dim=query.shape[3],
        dim_v=value.shape[3],
        batch_heads=batch_heads,
        causal=causal,
        dtype=dtype,
    )
