"""Cross-entropy, by name or from its parts, and the head before it.

    cross_entropy           mean (sum, none) of -log softmax(logits)[target], with ignored rows and smoothing
    linear_cross_entropy    the same of x W^T + b, where nothing else reads the logits

Taken: ``F.cross_entropy``; ``F.nll_loss`` of a log-softmax; logits whose classes come last, or lie second
only because they were transposed there; casts, copies, reshapes and slices of rows between head and loss.

Not taken: class weights; targets that are probabilities; classes that come second in memory; a log-softmax
over another dimension; logits that are used elsewhere too (for the second); a slice of the classes; a head
whose product is scaled or capped before the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from advisor.kernels.cross_entropy import cross_entropy
from advisor.kernels.cross_entropy import unsupported_reasons as loss_reasons
from advisor.kernels.linear_cross_entropy import linear_cross_entropy, unsupported_reasons
from advisor.swap.rewrite.candidates import bundled, in_dtype, of_torch
from advisor.swap.rewrite.facts import Facts, through
from advisor.swap.rewrite.match import Match, pattern
from advisor.swap.rewrite.ops import Call, read
from advisor.swap.rewrite.parts import is_float
from advisor.swap.site import Candidate


@pattern("cross_entropy", rank=55)
def find(facts: Facts) -> Iterator[Match]:
    """Every cross-entropy with class indices."""
    for loss in _losses(facts, "cross_entropy"):
        node, logits, target, settings, from_parts = loss
        what = "cross_entropy(logits, target)" + (" from log_softmax and nll_loss" if from_parts else "")
        yield Match(
            "cross_entropy", "loss", what, (logits, target), (node,), settings,
            tuple(_candidates(settings, from_parts)),
        )  # fmt: skip


@pattern("linear_cross_entropy", rank=12)
def find_heads(facts: Facts) -> Iterator[Match]:
    """Every cross-entropy right behind a linear layer."""
    for node, logits, target, settings, _ in _losses(facts, "linear_cross_entropy"):
        head = _head(logits, facts)
        if head is None:
            continue
        x, weight, bias, rows, transposed = head
        settings = {**settings, "rows": rows, "transposed": transposed}
        inputs = (x, weight, target, *(() if bias is None else (bias,)))
        call = (
            "from advisor.kernels.linear_cross_entropy import linear_cross_entropy\n"
            f"loss = linear_cross_entropy(x, head.weight, target{', linear_bias=head.bias' if bias else ''})"
        )
        yield Match(
            "linear_cross_entropy", "loss", "cross_entropy(head(x), target)", inputs, (node,), settings,
            (bundled("linear_cross_entropy", _linear_loss, _linear_reasons, call, **settings),),
        )  # fmt: skip


def _losses(facts: Facts, name: str) -> Iterator[tuple[Node, Node, Node, dict[str, Any], bool]]:
    """(loss, logits with classes last, target, settings, whether from its parts)."""
    for node in facts.nodes:
        call = read(node)
        if call is None or call.op not in ("cross_entropy", "nll_loss"):
            continue
        logits: Any = call.input
        classes_at = 1 if len(facts.shape(logits) or ()) > 1 else 0
        if call.op == "nll_loss":
            inner = read(through(logits, "cast"))
            if inner is None or inner.op != "log_softmax":
                continue
            rank = len(facts.shape(inner.input) or (0,))
            if not isinstance(inner["dim"], int) or inner["dim"] % rank != classes_at:
                facts.refuse(name, node, "the log-softmax does not go over the classes")
                continue
            logits = inner.input
        reason = _unlike(call, logits, facts)
        if reason:
            facts.refuse(name, node, reason)
            continue
        last = _classes_last(logits, facts)
        if last is None:
            facts.refuse(name, node, "classes come second, not last")
            continue
        settings = {
            "ignore_index": call["ignore_index"],
            "label_smoothing": float(call.args.get("label_smoothing", 0.0)),
            "reduction": call["reduction"],
            "dtype": facts.dtype(node),
        }
        yield node, last, call["target"], settings, call.op == "nll_loss"


def _unlike(call: Call, logits: Any, facts: Facts) -> str:
    if call["weight"] is not None:
        return "classes have weights"
    if call["size_average"] is not None or call["reduce"] is not None:
        return "the reduction is given in a form that PyTorch has given up"
    if call["reduction"] not in ("mean", "sum", "none"):
        return f"reduction {call['reduction']!r}"
    if facts.dtype(call["target"]) not in (torch.int64, torch.int32):
        return "targets are probabilities, not class indices"
    if not isinstance(call["ignore_index"], int) or not isinstance(
        call.args.get("label_smoothing", 0.0), (int, float)
    ):
        return "its settings change from step to step"
    return "" if is_float(logits) and facts.shape(logits) else "logits are not floating-point"


def _classes_last(logits: Node, facts: Facts) -> Node | None:
    """The logits with classes in the last dimension and rows shaped as the targets."""
    shape = facts.shape(logits) or ()
    if len(shape) <= 2:
        return logits
    call = read(logits)
    if call is None:
        return None
    rank = len(shape)
    if call.op in ("transpose", "mT") and rank == 3:
        dims = {1, 2} if call.op == "mT" else {call["dim0"] % rank, call["dim1"] % rank}
        return call.input if dims == {1, 2} else None
    if call.op == "permute" and tuple(d % rank for d in call["dims"]) == (0, rank - 1, *range(1, rank - 1)):
        return call.input
    return None


def _head(logits: Node, facts: Facts) -> tuple[Node, Node, Node | None, tuple[Any, ...], bool] | None:
    """(x, weight, bias, what is done to rows, whether the weight is (hidden, classes)) of a linear layer."""
    node, rows = logits, []
    shape = facts.shape(logits)
    if not shape or not isinstance(shape[-1], int):
        return None
    classes = shape[-1]
    while True:
        call = read(node)
        if call is None:
            return None
        if call.op in ("cast", "contiguous", "clone"):
            if not is_float(node, call.input):
                return None
            node = call.input
        elif call.op in ("reshape", "flatten", "getitem"):
            if not isinstance(call.input, Node) or (facts.shape(call.input) or (None,))[-1] != classes:
                return None
            step = _row_step(call, node, facts)
            if step is None:
                return None
            rows.append(step)
            node = call.input
        else:
            break
    if call.op == "linear":
        return call.input, call["weight"], call["bias"], tuple(reversed(rows)), False
    if call.op == "matmul" and len(facts.shape(call["other"]) or ()) == 2:
        weight = call["other"]
        inner = read(weight)
        turned = inner is not None and (
            inner.op in ("t", "mT")
            or (inner.op == "transpose" and {inner["dim0"] % 2, inner["dim1"] % 2} == {0, 1})
            or (inner.op == "permute" and tuple(d % 2 for d in inner["dims"]) == (1, 0))
        )
        if turned:
            assert inner is not None
            return call.input, inner.input, None, tuple(reversed(rows)), False
        return call.input, weight, None, tuple(reversed(rows)), True
    return None


def _row_step(call: Call, node: Node, facts: Facts) -> tuple[str, Any] | None:
    """What a reshape or an index does to rows, if it leaves the classes whole; to be done to x as well."""
    shape = facts.shape(node)
    source = facts.shape(call.input)
    if not shape or not source:
        return None
    if call.op in ("reshape", "flatten"):
        # The last dimension has been seen to stay. One size is what the others leave, so that fewer rows do
        # too: the one that varies, else the first.
        rows = tuple(n if isinstance(n, int) else -1 for n in shape[:-1])
        if rows and -1 not in rows:
            rows = (-1, *rows[1:])
        return ("reshape", rows) if rows.count(-1) <= 1 else None
    index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
    if not all(i is Ellipsis or isinstance(i, (slice, int)) for i in index) or len(shape) < 2:
        return None
    if any(isinstance(p, Node) for i in index if isinstance(i, slice) for p in (i.start, i.stop, i.step)):
        return None
    covered = len([i for i in index if i is not Ellipsis])
    touches_last = index[-1] is not Ellipsis if Ellipsis in index else covered == len(source)
    if touches_last and index[-1] != slice(None):
        return None
    return ("index", tuple((i.start, i.stop, i.step) if isinstance(i, slice) else i for i in index))


def _candidates(settings: dict[str, Any], from_parts: bool) -> Iterator[Candidate]:
    call = (
        "from advisor.kernels.cross_entropy import cross_entropy\nloss = cross_entropy(logits, target"
        f", ignore_index={settings['ignore_index']}, label_smoothing={settings['label_smoothing']:g}"
        f', reduction="{settings["reduction"]}")'
    )
    yield bundled("cross_entropy", _loss, _loss_reasons, call, **settings)
    if from_parts:
        theirs = "loss = torch.nn.functional.cross_entropy(logits, target)"
        yield of_torch("F.cross_entropy", _torch_loss, theirs, **settings)


def _loss(
    logits: Tensor, target: Tensor, *, ignore_index: int, label_smoothing: float, reduction: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    loss = cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    return in_dtype(loss, dtype)


def _loss_reasons(
    logits: Tensor, target: Tensor, *, label_smoothing: float, reduction: str, **_: Any
) -> Sequence[str]:
    return loss_reasons(logits, target, reduction=reduction, label_smoothing=label_smoothing)


def _torch_loss(
    logits: Tensor, target: Tensor, *, ignore_index: int, label_smoothing: float, reduction: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rows, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = F.cross_entropy(
        rows, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    return in_dtype(loss.view(target.shape) if reduction == "none" else loss, dtype)


def _rows(x: Tensor, steps: tuple[Any, ...]) -> Tensor:
    for name, what in steps:
        if name == "reshape":
            x = x.reshape(*what, x.shape[-1])
        else:
            x = x[tuple(slice(*i) if isinstance(i, tuple) else i for i in what)]
    return x


def _linear_loss(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, rows: tuple[Any, ...],
    transposed: bool, ignore_index: int, label_smoothing: float, reduction: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    loss = linear_cross_entropy(
        _rows(x, rows), weight.t() if transposed else weight, target, linear_bias=bias,
        ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction,
    )  # fmt: skip
    return in_dtype(loss, dtype)


def _linear_reasons(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, rows: tuple[Any, ...],
    transposed: bool, label_smoothing: float, reduction: str, **_: Any,
) -> Sequence[str]:  # fmt: skip
    return unsupported_reasons(
        _rows(x, rows), weight.t() if transposed else weight, target, bias, reduction=reduction,
        label_smoothing=label_smoothing,
    )  # fmt: skip
