"""Calls of ``F.scaled_dot_product_attention``, for which a faster kernel may exist than PyTorch picks.

Taken: any mask, scale, dropout and grouping that it takes, on tensors of four dimensions. Not taken: a mask
that requires a gradient is left to PyTorch by the kernel's own reasons; a causal flag beside a mask, which
PyTorch refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from advisor.swap.rewrite.attend import candidates
from advisor.swap.rewrite.facts import Facts
from advisor.swap.rewrite.match import Match, pattern
from advisor.swap.rewrite.ops import read
from advisor.swap.rewrite.parts import is_float

NAME = "sdpa"
_STRAIGHT = (0, 1, 2, 3)


@pattern(NAME, rank=11)
def find(facts: Facts) -> Iterator[Match]:
    """Every call."""
    for node in facts.nodes:
        call = read(node)
        if call is None or call.op != "sdpa":
            continue
        q, k, v, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
        shapes = [facts.shape(x) for x in (q, k, v)]
        if not is_float(q, k, v, node) or any(s is None or len(s) != 4 for s in shapes):
            facts.refuse(NAME, node, "tensors that have not four dimensions")
            continue
        dim = shapes[0][-1]  # type: ignore[index]
        scale = dim**-0.5 if call["scale"] is None else call["scale"]
        plain = (
            isinstance(dim, int)
            and isinstance(scale, (int, float))
            and isinstance(call["dropout_p"], (int, float))
        )
        if not plain or (mask is not None and call["is_causal"]):
            facts.refuse(
                NAME, node, "settings that change from step to step, or a mask beside the causal flag"
            )
            continue
        form = "seen" if facts.dtype(mask) == torch.bool else "added"
        settings: dict[str, Any] = {
            "orders": (_STRAIGHT,) * 4,
            "batch": None,
            "forms": () if mask is None else (form,),
            "causal": bool(call["is_causal"]),
            "diagonal": 0,
            "scale": float(scale),
            "softcap": 0.0,
            "dropout_p": float(call["dropout_p"]),
            "compute": facts.dtype(node),
            "dtype": facts.dtype(node),
        }
        grouped = 2 if call["enable_gqa"] else 1
        what = "scaled_dot_product_attention" + (f", {form} mask" if mask is not None else "")
        yield Match(
            NAME,
            "attention",
            what + ", causal" * settings["causal"],
            (q, k, v) if mask is None else (q, k, v, mask),
            (node,),
            {**settings, "grouped": grouped},
            tuple(candidates(settings, grouped, called=True)),
            random=settings["dropout_p"] > 0.0,
        )
