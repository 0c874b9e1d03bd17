"""What can do attention: the bundled kernel and PyTorch's own, on tensors as a pattern found them.

Settings of all calls here: `orders`, permutations of queries, keys and values to (batch, heads, tokens,
dim) and of the result back; `batch`, the sizes that one leading dimension is made of, or None; `forms`, how
each mask is meant; `causal` with its `diagonal`; `scale`, `softcap`, `dropout_p`; `compute`, the dtype that
inputs of several take; `dtype` of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from advisor.kernels.attention import attention, unsupported_reasons
from advisor.swap.rewrite.candidates import bundled, in_dtype, of_torch
from advisor.swap.site import Candidate

_SDPA = "y = torch.nn.functional.scaled_dot_product_attention(q, k, v{arguments})"
_OURS = "from advisor.kernels.attention import attention\ny = attention(q, k, v{arguments})"


def candidates(settings: dict[str, Any], grouped: int, called: bool = False) -> Iterator[Candidate]:
    """The ways to do an attention with these settings.

    Args:
        settings: see the module.
        grouped: queries' heads for each of the keys'.
        called: it is a call of PyTorch's own already, which then is no candidate.
    """
    scale, causal = settings["scale"], settings["causal"]
    arguments = f", scale={scale:g}" + (
        f", dropout_p={settings['dropout_p']:g}" if settings["dropout_p"] else ""
    )
    mask = ", mask" if settings["forms"] else ""
    yield bundled(
        "attention",
        _bundled,
        _bundled_reasons,
        _OURS.format(arguments=mask + (", causal=True" if causal else "") + arguments),
        **settings,
    )
    if settings["softcap"]:
        return
    theirs = mask.replace(", mask", ", attn_mask=mask") + (", is_causal=True" if causal else "") + arguments
    theirs += ", enable_gqa=True" if grouped > 1 else ""
    for name, backend in _backends().items():
        if called and backend is None:
            continue
        yield of_torch(
            name,
            _sdpa,
            _permanent(theirs, backend),
            partial(_sdpa_reasons, called=called),
            deterministic=name == "SDPA (math)",
            backend=backend,
            grouped=grouped,
            **settings,
        )


def _permanent(arguments: str, backend: str | None) -> str:
    line = _SDPA.format(arguments=arguments)
    if backend is None:
        return line
    return f"with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.{backend}):\n    {line}"


def _backends() -> dict[str, str | None]:
    """PyTorch's own attention by name: whichever it picks, and each that a GPU has.

    But not cuDNN's, whose backward PyTorch 2.11 plans once for queries, keys and values as they are laid out,
    and runs by that plan on output gradients of any layout: see ``docs/swap.md``.
    """
    found: dict[str, str | None] = {"SDPA": None}
    if torch.cuda.is_available():
        found["SDPA (flash)"] = "FLASH_ATTENTION"
        found["SDPA (memory-efficient)"] = "EFFICIENT_ATTENTION"
    return found


def _arranged(x: Tensor, order: tuple[int, ...], batch: tuple[int, int] | None) -> Tensor:
    """The tensor as (batch, heads, tokens, dim); one leading dimension is split, or counts as the batch."""
    x = x if order == tuple(range(len(order))) else x.permute(order)
    if x.dim() == 4:
        return x
    return x.unsqueeze(1) if batch is None else x.unflatten(0, batch)


def _merged(masks: Sequence[Tensor], forms: tuple[str, ...], rank: int) -> Tensor | None:
    """One mask of all: bool, true where a key is seen, or added."""
    seen: Tensor | None = None
    added: Tensor | None = None
    for mask, form in zip(masks, forms, strict=True):
        # PyTorch's own wants two dimensions at least; batch and heads as one dimension are the batch here.
        mask = mask.unsqueeze(0) if mask.dim() < 2 else mask
        mask = mask.unsqueeze(-3) if rank == 3 and mask.dim() == 3 else mask
        if form == "added":
            added = mask if added is None else added + mask
        else:
            here = ~mask if form == "hidden" else mask
            seen = here if seen is None else seen & here
    if added is None or seen is None:
        return seen if added is None else added
    return torch.where(seen, added, -torch.inf)


def _back(y: Tensor, order: tuple[int, ...], dtype: torch.dtype, batch: tuple[int, int] | None) -> Tensor:
    """The result as the pattern's, laid out as the queries are; where that shows, it is laid out anew."""
    if len(order) == 3:
        y = y.squeeze(1) if batch is None else y.flatten(0, 1)
    y = y if order == tuple(range(len(order))) else y.permute(order)
    return in_dtype(y, dtype)


def _rank(orders: tuple[tuple[int, ...], ...], batch: tuple[int, int] | None) -> int:
    """Of the scores as masks see them."""
    return len(orders[0]) if batch is None else 4


def _bundled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *masks: Tensor,
    orders: tuple[tuple[int, ...], ...],
    batch: tuple[int, int] | None,
    forms: tuple[str, ...],
    causal: bool,
    diagonal: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    compute: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    mask = _merged(masks, forms, _rank(orders, batch))
    q, k, v = _inputs(q, k, v, orders, batch, compute)
    y = attention(
        q,
        k,
        v,
        mask,
        causal=causal,
        align="upper_left" if diagonal == 0 else "lower_right",
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
    )
    return _back(y, orders[3], dtype, batch)


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    orders: tuple[tuple[int, ...], ...],
    batch: tuple[int, int] | None,
    compute: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arranged; of one dtype, the scores' own, where they differ."""
    q, k, v = (_arranged(x, order, batch) for x, order in zip((q, k, v), orders, strict=False))
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = (in_dtype(x, v.dtype if v.dtype == q.dtype else compute) for x in (q, k, v))
    return q, k, v


def _bundled_reasons(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *masks: Tensor,
    orders: Any,
    batch: Any,
    forms: Any,
    compute: Any,
    **settings: Any,
) -> Sequence[str]:
    mask = _merged(masks, forms, _rank(orders, batch))
    q, k, v = _inputs(q, k, v, orders, batch, compute)
    return unsupported_reasons(q, k, v, mask, softcap=settings["softcap"], dropout_p=settings["dropout_p"])


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *masks: Tensor,
    orders: tuple[tuple[int, ...], ...],
    batch: tuple[int, int] | None,
    forms: tuple[str, ...],
    causal: bool,
    diagonal: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    compute: torch.dtype,
    dtype: torch.dtype,
    backend: str | None,
    grouped: int,
) -> Tensor:
    mask = _merged(masks, forms, _rank(orders, batch))
    q, k, v = _inputs(q, k, v, orders, batch, compute)
    if causal and (mask is not None or diagonal):
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(diagonal)
        if mask is None:
            mask = seen
        else:
            mask = mask & seen if mask.dtype == torch.bool else torch.where(seen, mask, -torch.inf)
        causal = False
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(
            torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype
        )
    more = {"enable_gqa": True} if grouped > 1 else {}
    call: Callable[..., Tensor] = F.scaled_dot_product_attention
    if backend is None:
        y = call(q, k, v, mask, dropout_p, causal, scale=scale, **more)
    else:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            y = call(q, k, v, mask, dropout_p, causal, scale=scale, **more)
    return _back(y, orders[3], dtype, batch)


def _sdpa_reasons(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *masks: Tensor,
    called: bool,
    grouped: int,
    dropout_p: float,
    compute: torch.dtype,
    **settings: Any,
) -> Sequence[str]:
    reasons = []
    if grouped > 1 and tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 5):
        reasons.append("grouped queries need torch 2.5")
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    # Values made to be hard show that where no random numbers are drawn, see `advisor.swap.verify`.
    if dropout_p and compute != torch.float32 and trained and not called:
        reasons.append(
            "in 16 bits its gradients of queries and keys go wrong where keys and values have much in common"
        )
    return reasons
