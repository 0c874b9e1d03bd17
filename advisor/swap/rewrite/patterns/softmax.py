"""A softmax with scale and masks inside it, where what follows is no product with values.

    softmax(scale x + masks)        log_softmax likewise

Taken: as under `attention`, with casts to fp32 and back around it. Not taken: a softmax over another
dimension than the last; one without scale, mask or cast, where there is nothing to save; a soft-cap; a mask
on the result; a mask that widens what it is added to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from advisor.kernels.softmax import softmax, unsupported_reasons
from advisor.swap.rewrite.candidates import bundled
from advisor.swap.rewrite.facts import Facts, sole_user
from advisor.swap.rewrite.match import Match, pattern
from advisor.swap.rewrite.ops import is_op, read
from advisor.swap.rewrite.parts import is_float, is_last_dim
from advisor.swap.rewrite.scores import scores

NAME = "softmax"


@pattern(NAME, rank=60)
def find(facts: Facts) -> Iterator[Match]:
    """Every softmax that takes in what stands around it."""
    for node in facts.nodes:
        if is_op(node, "softmax", "log_softmax"):
            match = _around(node, facts)
            if match is not None:
                yield match


def _around(node: Node, facts: Facts) -> Match | None:
    call = read(node)
    assert call is not None
    shape = facts.shape(node)
    if not shape or not is_float(node):
        return None
    under = scores(call.input, facts, NAME)
    if under is None or not isinstance(under.core, Node) or not is_float(under.core):
        return None
    out = node
    user = sole_user(node)
    if user is not None and is_op(user, "cast") and is_float(user):
        out = user
    if under.scale == 1.0 and not under.masks and not under.causal and out is node:
        return None
    if under.softcap:
        return facts.refuse(NAME, node, "scores with a soft-cap")
    if not is_last_dim(call["dim"], len(shape)):
        return facts.refuse(NAME, node, f"it goes over dimension {call['dim']}, not over the last")
    if facts.shape(under.core) != shape:
        return facts.refuse(NAME, node, "a mask widens the scores")
    settings: dict[str, Any] = {
        "forms": under.forms,
        "scale": under.scale,
        "causal": under.causal,
        "diagonal": under.diagonal,
        "log": call.op == "log_softmax",
        "dtype": facts.dtype(out),
    }
    masks = tuple(mask.node for mask in under.masks)
    permanent = (
        f"from advisor.kernels.softmax import softmax\ny = softmax(x, scale={under.scale:g}"
        + (", mask=mask" if masks else "")
        + (f", causal=True, diagonal={under.diagonal}" if under.causal else "")
        + (", log=True)" if settings["log"] else ")")
    )
    what = (
        f"{call.op}(scale * x{''.join(f', {m.form} mask' for m in under.masks)}{', causal' * under.causal})"
    )
    return Match(
        NAME, "softmax", what, (under.core, *masks), (out,), settings,
        (bundled("softmax", _softmax, _reasons, permanent, **settings),), under.proofs,
    )  # fmt: skip


def _softmax(
    x: Tensor, *masks: Tensor, forms: tuple[str, ...], scale: float, causal: bool, diagonal: int, log: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return softmax(
        x, scale=scale, mask=_mask(masks, forms), causal=causal, diagonal=diagonal, log=log, dtype=dtype
    )


def _mask(masks: Sequence[Tensor], forms: tuple[str, ...]) -> Tensor | None:
    """The one mask, true where a key is seen if it is bool."""
    if not masks:
        return None
    return ~masks[0] if forms[0] == "hidden" else masks[0]


def _reasons(
    x: Tensor, *masks: Tensor, forms: tuple[str, ...], causal: bool, dtype: torch.dtype, **_: Any
) -> Sequence[str]:
    if len(masks) > 1:
        return ["several masks"]
    return unsupported_reasons(x, _mask(masks, forms), causal=causal, dtype=dtype)
