"""Attention: output gradients laid out in two ways, which cuDNN's cached plans take for one another."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from advisor.advice.evidence import shape
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rule import rule
from advisor.advice.wording import count, one_line
from advisor.roofline.costs import Tensor

_SOURCE = """\
benchmarks/attention_layouts.py: on an H200 with torch 2.11 and cuDNN 9.19, gradients for the second layout \
are off by 1.4 times their size; those of other backends and of the bundled kernel are right
PyTorch, aten/src/ATen/native/cudnn/MHA.cpp: what a plan is kept by, and that each thread keeps its own"""

_FIX = """\
# in the attention's forward, so that cuDNN gets one layout, whatever follows
y = torch.nn.functional.scaled_dot_product_attention(...)  # as it is
if y.requires_grad:
    y.register_hook(lambda grad: {dense})

# or without cuDNN, once, before training; on Hopper, FlashAttention-2 takes half as long again
torch.backends.cuda.enable_cudnn_sdp(False)"""
_TOKENS_OUTSIDE = "grad.transpose(1, 2).contiguous().transpose(1, 2)"
_HEADS_OUTSIDE = "grad.contiguous()"
_RISK = """\
gradients change, and with them how the loop learns; what it has learnt so far, it learnt from wrong ones"""

_BACKWARD = r"^aten::_scaled_dot_product_cudnn_attention_backward$"
#: Positions of its arguments.
_GRADIENT, _HEADS, _OUT, _MASK, _DROPOUT, _CAUSAL = 0, slice(1, 4), 4, 8, 13, 14
#: Where it was seen.
_SEEN = "2.11."
_MOST_MODULES = 8

_Strides: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True, eq=False)
class _Call:
    """One backward of attention.

    Attributes:
        op: position in ``Trace.ops``.
        query: queries.
        gradient: of the output.
        plan: all that cuDNN's plan is kept by.
        layout: strides that the plan has to know of.
        steady: of a steady step.
    """

    op: int
    query: Tensor
    gradient: Tensor
    plan: tuple[object, ...]
    layout: _Strides
    steady: bool


@rule(
    "attention.layouts",
    title="cuDNN's attention gets output gradients in one layout",
    failure="cuDNN's attention gets output gradients in two layouts, and its gradients are wrong",
    source=_SOURCE,
)
def layouts(loop: Loop) -> Iterator[Finding]:
    """PyTorch keeps cuDNN's plan for attention's backward by sizes and strides of queries, keys, values and
    mask, and by dropout, but not by the strides of the output's gradient, which the plan rests on too.

    Where one process backpropagates through attention of the same sizes with gradients laid out in two ways,
    only those calls are right whose gradients lie as the first one's did. So it is where one layer joins its
    heads by `transpose(1, 2).reshape(...)` and another goes on with heads outside of tokens. The others read
    their gradients in the wrong order. What they return is finite, of plausible size, and garbage, and
    nothing tells of it but a loss that falls less than it should. On Hopper cuDNN is what
    `scaled_dot_product_attention` picks by itself.

    Recognised by backward calls that one plan serves and whose output gradients differ in strides.
    Dimensions of one element do not count, and a gradient that is not dense in the head dimension counts as
    laid out like the output, since PyTorch copies it so. Which layout came first is read off the recorded
    steps. No saving is told: the step gets no shorter, it gets right.

    Silent with one layout for each plan, for other backends, and where strides and values of arguments were
    not recorded. What the process met before the recording, by another model say, the trace does not show.
    """
    ops = loop.ops_named(_BACKWARD)
    loop.require(ops.any(), "no backward of attention by cuDNN")
    around = loop.under(ops)
    steady = set(around[loop.counted].tolist())
    found = [_call(op, op in steady, loop) for op in np.unique(around[around >= 0]).tolist()]
    calls = [call for call in found if call is not None]
    loop.require(calls, "strides and values of the arguments of attention's backward were not recorded")
    plans: dict[tuple[object, ...], list[_Call]] = defaultdict(list)
    for call in sorted(calls, key=lambda call: int(loop.timeline.trace.ops.ts_ns[call.op])):
        plans[call.plan].append(call)
    mixed = [group for group in plans.values() if _wrong(group)]
    if not mixed:
        return
    wrong = [call for group in mixed for call in _wrong(group)]
    every = sum(call.steady for call in calls)
    ways = max(len({call.layout for call in group}) for group in mixed)
    version = one_line(loop.setting("versions", "torch") or "")
    seen = version.startswith(_SEEN)
    yield Finding(
        title=f"cuDNN's attention gets output gradients in {count(ways, 'layout')}: wrong gradients "
        f"{'from' if seen else 'likely from'} {len(wrong) / loop.steps:.3g} of "
        f"{count(every / loop.steps, 'call')} a step",
        evidence=[*(line for group in mixed for line in _lines(group, loop)), *_modules(wrong, around, loop)],
        edits=[],
        fix=_FIX.format(dense=_dense([call for group in mixed for call in group])),
        risk=_RISK,
        confidence="modelled" if seen else "heuristic",
        wrong=True,
        note="told without a saving: what the loop computes is wrong, not slow; seen in torch 2.11 with "
        f"cuDNN 9.19, and this trace {f'is of torch {version}' if version else 'does not tell its versions'}",
    )


def _call(op: int, steady: bool, loop: Loop) -> _Call | None:
    """What a backward was called with; None where the trace does not tell enough of it."""
    given = loop.call(op)
    if len(given.inputs) <= _CAUSAL or len(given.concrete) <= _CAUSAL or not given.concrete[_CAUSAL]:
        return None
    tensors = [given.inputs[_GRADIENT], *given.inputs[_HEADS], given.inputs[_OUT]]
    # Packed sequences, for which no plan is kept, have three dimensions.
    known = [
        tensor
        for tensor in tensors
        if isinstance(tensor, Tensor) and len(tensor.shape) == 4 and len(tensor.strides or ()) == 4
    ]
    if len(known) < len(tensors):
        return None
    gradient, query, key, value, out = known
    mask = given.inputs[_MASK]
    settings = (given.concrete[_DROPOUT], given.concrete[_CAUSAL])
    # Each thread keeps plans of its own.
    thread = int(loop.timeline.trace.ops.track[op])
    plan = (thread, query, key, value, mask, settings)
    return _Call(op, query, gradient, plan, _layout(gradient, out), steady)


def _layout(gradient: Tensor, out: Tensor) -> _Strides:
    """Strides of a gradient as cuDNN gets it, of dimensions of more than one element."""
    strides = gradient.strides or ()
    if strides[-1] != 1:
        strides = _dense_like(out)
    return tuple(stride for size, stride in zip(gradient.shape, strides, strict=True) if size > 1)


def _dense_like(out: Tensor) -> _Strides:
    """Strides of a dense copy whose dimensions lie in the order of another tensor's."""
    given = out.strides or ()
    strides, step = [0] * len(given), 1
    for dim in sorted(range(len(given)), key=lambda dim: (given[dim], -dim)):
        strides[dim], step = step, step * out.shape[dim]
    return tuple(strides)


def _wrong(group: Sequence[_Call]) -> list[_Call]:
    """Calls of one plan, in steady steps, whose gradients do not lie as those that it was made for."""
    return [call for call in group if call.steady and call.layout != group[0].layout]


def _lines(group: Sequence[_Call], loop: Loop) -> Iterator[str]:
    """What one plan served: the sizes, then each layout of gradients with its calls, by time."""
    steady = Counter(call.layout for call in group if call.steady)
    given = {call.layout: call.gradient.strides for call in group}
    query = group[0].query
    yield f"queries of {shape(query)}, strides {list(query.strides or ())}"
    for layout, strides in given.items():
        told = "which the plan is made for" if layout == group[0].layout else "wrong"
        calls = count(steady[layout] / loop.steps, "call")
        yield f"{calls} a step with gradients of strides {list(strides or ())}: {told}"


def _modules(calls: Sequence[_Call], around: np.ndarray, loop: Loop) -> list[str]:
    """Where in the model, with the numbers of layers, which differ here."""
    rows = np.flatnonzero(np.isin(around, [call.op for call in calls])).tolist()
    paths = list(dict.fromkeys(path for row in rows if (path := loop.module_of(row))))
    rest = len(paths) - _MOST_MODULES
    more = f" and {rest} more" if rest > 0 else ""
    return [f"wrong in {', '.join(map(one_line, paths[:_MOST_MODULES]))}{more}"] if paths else []


def _dense(calls: Sequence[_Call]) -> str:
    """Code that lays a gradient out as most of these are already, which then costs them no copy."""
    strides = [call.gradient.strides or () for call in calls]
    tokens_outside = sum(heads < tokens for _, heads, tokens, _ in strides)
    return _TOKENS_OUTSIDE if 2 * tokens_outside >= len(calls) else _HEADS_OUTSIDE
