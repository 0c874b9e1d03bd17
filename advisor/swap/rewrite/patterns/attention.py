"""Attention written out: ``dropout(softmax(scale q k^T + masks)) v``.

Taken: any spelling of the two products (``@``, matmul, bmm, baddbmm, einsum), of the scale (before, after,
a multiplication or a division), of masks (filled with minus infinity, chosen by where, added), a soft-cap
inside them, softmax in fp32 with casts around it, dropout of the weights, keys and values repeated for
grouped heads.

Not taken: a softmax over another dimension; a mask after the softmax; weights that are used or returned
besides; a negative scale; a mask within the soft-cap; a finite number filled in where rows might see no
key. A mask counts as causal only where its value was computed and looked at (see `constants`); any other
stays a mask. A scale that is not 1 / sqrt(d), permuted keys and masks along any axis are carried as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from advisor.kernels.attention import attention, unsupported_reasons
from advisor.swap.rewrite.candidates import bundled, in_dtype, of_torch
from advisor.swap.rewrite.facts import Facts, sole_user
from advisor.swap.rewrite.match import Match, pattern
from advisor.swap.rewrite.ops import is_op, read
from advisor.swap.rewrite.parts import is_float, is_last_dim, uncast
from advisor.swap.rewrite.scores import Product, Scores, einsum_labels, product, scores, unrepeated
from advisor.swap.site import Candidate

NAME = "attention"

_SDPA = "y = torch.nn.functional.scaled_dot_product_attention(q, k, v{arguments})"
_OURS = "from advisor.kernels.attention import attention\ny = attention(q, k, v{arguments})"


@pattern(NAME, rank=10)
def find(facts: Facts) -> Iterator[Match]:
    """Every attention whose scores are there to be seen."""
    for node in facts.nodes:
        if is_op(node, "softmax"):
            match = _around(node, facts)
            if match is not None:
                yield match


def _around(softmax: Node, facts: Facts) -> Match | None:
    call = read(softmax)
    assert call is not None
    shape = facts.shape(softmax)
    weights, dropout_p = _weights(softmax)
    user = sole_user(weights)
    end = None if user is None else _times_values(user, weights, facts)
    if shape is None or end is None or user is None:
        _note_near_miss(softmax, weights, facts)
        return None
    if not is_last_dim(call["dim"], len(shape)):
        return facts.refuse(
            NAME, softmax, f"the softmax goes over dimension {call['dim']}, not over the keys"
        )
    under = scores(call.input, facts, NAME)
    if under is None:
        return None
    made = product(under.core, facts)
    if made is None or not is_float(made.q, made.k):
        return facts.refuse(NAME, softmax, "what stands under the softmax is no product of queries and keys")
    if made.bias is not None:
        return facts.refuse(NAME, softmax, "a bias is added by the product itself")
    v, v_order, out_order = end
    return _match(under, made, v, v_order, out_order, user, dropout_p, facts)


def _weights(softmax: Node) -> tuple[Node, float]:
    """The attention weights after casts and dropout, and dropout's probability."""
    node, p = softmax, 0.0
    while True:
        user = sole_user(node)
        if user is not None and is_op(user, "cast") and is_float(user):
            node = user
        elif user is not None and is_op(user, "dropout") and not p:
            call = read(user)
            assert call is not None
            p = float(call["p"]) if call["training"] else 0.0
            node = user
        else:
            return node, p


def _times_values(
    user: Node, weights: Node, facts: Facts
) -> tuple[Node, tuple[int, ...], tuple[int, ...]] | None:
    """(values, their order, the result's order) of ``weights @ v``."""
    call = read(user)
    rank = len(facts.shape(weights) or ())
    if call is None or rank not in (3, 4):
        return None
    straight = tuple(range(rank))
    if call.op == "matmul":
        v = call["other"]
        shapes = facts.shape(weights), facts.shape(v)
        fits = call.input is weights and v is not weights and shapes[1] and len(shapes[1]) == rank
        if not fits or shapes[0][:-2] != shapes[1][:-2]:  # type: ignore[index]
            return None
        return v, straight, straight
    if call.op == "einsum":
        labels = einsum_labels(call)
        if labels is None:
            return None
        first, second, out = labels
        operands = list(call["operands"])
        if operands[0] is not weights:
            first, second = second, first
            operands.reverse()
        if operands[0] is not weights or operands[1] is weights:
            return None
        *batch, query, key = list(first)
        dims = set(second) - {*batch, key}
        if len(dims) != 1 or query in second or set(second) != {*batch, key, *dims} or len(out) != rank:
            return None
        (dim,) = dims
        if set(out) != {*batch, query, dim}:
            return None
        made = [*batch, query, dim]
        return (
            operands[1],
            tuple(second.index(c) for c in (*batch, key, dim)),
            tuple(made.index(c) for c in out),
        )
    return None


def _note_near_miss(softmax: Node, weights: Node, facts: Facts) -> None:
    call = read(softmax)
    assert call is not None
    under = uncast(call.input)
    if not _hangs_on_product(under):
        return
    if len(weights.users) > 1:
        facts.refuse(NAME, softmax, "the weights are used elsewhere too")
        return
    user = sole_user(weights)
    after = read(user)
    if after is not None and after.op in ("masked_fill", "where", "mul", "add", "div"):
        facts.refuse(NAME, softmax, f"{after.op} stands between the softmax and the product with the values")


def _hangs_on_product(node: Any) -> bool:
    for _ in range(8):
        call = read(node)
        if call is None:
            return False
        if call.op in ("matmul", "einsum", "baddbmm"):
            return True
        node = call["input"] if "input" in call.args else call.input
    return False


def _match(
    under: Scores,
    made: Product,
    v: Node,
    v_order: tuple[int, ...],
    out_order: tuple[int, ...],
    out: Node,
    dropout_p: float,
    facts: Facts,
) -> Match | None:
    q, k = made.q, made.k
    if not is_float(q, k, v, out):
        return facts.refuse(NAME, out, "queries, keys and values are not all floating-point")
    q, q_scale = _prescaled(q, facts)
    k, k_scale = _prescaled(k, facts)
    grouped = 1
    keys, values = unrepeated(k, made.k_order, facts), unrepeated(v, v_order, facts)
    if keys is not None and values is not None and keys[1] == values[1]:
        (k, grouped), v = keys, values[0]
    dtype = facts.dtype(out)
    assert dtype is not None
    inner = facts.dtype(under.core)
    settings: dict[str, Any] = {
        "orders": (made.q_order, made.k_order, v_order, out_order),
        "forms": under.forms,
        "causal": under.causal,
        "diagonal": under.diagonal,
        "scale": under.scale * made.scale * q_scale * k_scale,
        "softcap": under.softcap,
        "dropout_p": dropout_p,
        "compute": inner,
        "dtype": dtype,
    }
    if settings["scale"] <= 0.0:
        return facts.refuse(NAME, out, f"scores are scaled by {settings['scale']:g}")
    masks = tuple(mask.node for mask in under.masks)
    return Match(
        NAME,
        "attention",
        _what(under, dropout_p, grouped),
        (q, k, v, *masks),
        (out,),
        {**settings, "grouped": grouped},
        tuple(_candidates(settings, grouped)),
        under.proofs,
        random=dropout_p > 0.0,
    )


def _prescaled(node: Node, facts: Facts) -> tuple[Node, float]:
    """Queries or keys before a scale of their own, if nothing else uses the scaled ones."""
    call = read(node)
    if call is None or call.op not in ("mul", "div") or len(node.users) != 1:
        return node, 1.0
    number = facts.number(call["other"])
    if not number or not isinstance(call.input, Node) or call.args.get("rounding_mode"):
        return node, 1.0
    return call.input, number if call.op == "mul" else 1.0 / number


def _what(under: Scores, dropout_p: float, grouped: int) -> str:
    inside = "scale * q @ k.T" + "".join(f", {m.form} mask" for m in under.masks)
    inside += ", causal" if under.causal else ""
    inside += ", soft-cap" if under.softcap else ""
    weights = f"softmax({inside})"
    weights = f"dropout({weights})" if dropout_p else weights
    return f"{weights} @ v" + (f", {grouped} queries a key head" if grouped > 1 else "")


def _candidates(settings: dict[str, Any], grouped: int) -> Iterator[Candidate]:
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
        yield of_torch(
            name,
            _sdpa,
            _SDPA.format(arguments=theirs),
            _sdpa_reasons,
            deterministic=name == "SDPA (math)",
            backend=backend,
            grouped=grouped,
            **settings,
        )


def _backends() -> dict[str, str | None]:
    """PyTorch's own attention by name: whichever it picks, and each that a GPU has."""
    found: dict[str, str | None] = {"SDPA": None}
    if torch.cuda.is_available():
        found["SDPA (flash)"] = "FLASH_ATTENTION"
        found["SDPA (cuDNN)"] = "CUDNN_ATTENTION"
        found["SDPA (memory-efficient)"] = "EFFICIENT_ATTENTION"
    return found


def _arranged(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The tensor as (batch, heads, tokens, dim); one batch dimension counts as the batch."""
    x = x if order == tuple(range(len(order))) else x.permute(order)
    return x if x.dim() == 4 else x.unsqueeze(1)


def _merged(masks: Sequence[Tensor], forms: tuple[str, ...], rank: int) -> Tensor | None:
    """One mask of all: bool, true where a key is seen, or added."""
    seen: Tensor | None = None
    added: Tensor | None = None
    for mask, form in zip(masks, forms, strict=True):
        mask = mask.unsqueeze(-3) if rank == 3 and mask.dim() == 3 else mask
        if form == "added":
            added = mask if added is None else added + mask
        else:
            here = ~mask if form == "hidden" else mask
            seen = here if seen is None else seen & here
    if added is None or seen is None:
        return seen if added is None else added
    return torch.where(seen, added, -torch.inf)


def _back(y: Tensor, order: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    y = y if len(order) == 4 else y.squeeze(1)
    y = y if order == tuple(range(len(order))) else y.permute(order)
    return in_dtype(y, dtype)


def _bundled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *masks: Tensor,
    orders: tuple[tuple[int, ...], ...],
    forms: tuple[str, ...],
    causal: bool,
    diagonal: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    compute: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    mask = _merged(masks, forms, len(orders[0]))
    q, k, v = _inputs(q, k, v, orders, compute)
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
    return _back(y, orders[3], dtype)


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, orders: tuple[tuple[int, ...], ...], compute: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Arranged; of one dtype, the scores' own, where they differ."""
    q, k, v = (_arranged(x, order) for x, order in zip((q, k, v), orders, strict=False))
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = (in_dtype(x, v.dtype if v.dtype == q.dtype else compute) for x in (q, k, v))
    return q, k, v


def _bundled_reasons(
    q: Tensor, k: Tensor, v: Tensor, *masks: Tensor, orders: Any, forms: Any, compute: Any, **settings: Any
) -> Sequence[str]:
    mask = _merged(masks, forms, len(orders[0]))
    q, k, v = _inputs(q, k, v, orders, compute)
    return unsupported_reasons(q, k, v, mask, softcap=settings["softcap"], dropout_p=settings["dropout_p"])


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *masks: Tensor,
    orders: tuple[tuple[int, ...], ...],
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
    mask = _merged(masks, forms, len(orders[0]))
    q, k, v = _inputs(q, k, v, orders, compute)
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
    return _back(y, orders[3], dtype)


def _sdpa_reasons(q: Tensor, *rest: Tensor, grouped: int, **settings: Any) -> Sequence[str]:
    if grouped > 1 and tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 5):
        return ["grouped queries need torch 2.5"]
    return []
