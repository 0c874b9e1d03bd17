"""Attention: written out by hand, or on a slow backend of `scaled_dot_product_attention`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from advisor.advice.calls import Unit
from advisor.advice.edits import Edit, Estimate, Retime
from advisor.advice.evidence import fused, kernel_lines, module_line
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.patterns.groups import Attention, score_entries
from advisor.advice.rates import at_most, attention_ns, pass_ns
from advisor.advice.rule import rule
from advisor.advice.sdpa import fused_ns, heads_of, is_causal, is_shared, mask_of
from advisor.advice.wording import count, duration, percent
from advisor.roofline.costs import Tensor

_SOURCE = """\
Dao, FlashAttention-2 (2023): forward 4, backward 10 FLOPs a score entry and element of the head
torch.nn.functional.scaled_dot_product_attention: its backends and what each supports
An H200 (torch 2.11), TFLOP/s: cuDNN 257 to 603, FlashAttention-2 164 to 342, memory-efficient 126 to 159
A 6-layer GPT there, 8 x 1024 tokens in bf16: 35.2 ms with attention by hand, 18.0 ms with SDPA"""

_FIX = """\
# in the attention's forward, in place of q @ k.transpose(-2, -1), scale, mask, softmax, dropout and @ v:
y = torch.nn.functional.scaled_dot_product_attention(
    q, k, v,{mask}
    dropout_p=self.dropout_p if self.training else 0.0,
)  # q, k, v: (batch, heads, tokens, head_dim)"""
_RISK = """\
sums in another order, in 16 bits a softmax in fp32 inside: differences as by rounding; in 16 bits, \
gradients of queries and keys lose accuracy where keys and values have much in common, as training \
may make them, which advisor.kernels.attention keeps (docs/swap.md); \
attention weights are no longer there to be logged"""
_MASK = " attn_mask=mask,  # bool: True where a query may look; or numbers to be added to the scores"
_Heads: TypeAlias = "tuple[Tensor, Tensor, Tensor]"
#: Longest head that FlashAttention and cuDNN take.
_MAX_HEAD = 256
#: cuDNN forward and backward; below so many tokens its lead over FlashAttention-2 is small.
_MAX_CUDNN_HEAD, _MIN_TOKENS = 128, 512


@rule(
    "attention.explicit",
    title="Attention is fused",
    failure="Attention is written out: scores are stored and read again",
    source=_SOURCE,
)
def explicit(loop: Loop) -> Iterator[Finding]:
    """Attention written as two products around a softmax stores a score for each pair of tokens.

    Scale, mask, softmax, casts and dropout each read and write that tensor, forward and backward, though no
    result needs it in memory. Fused attention (FlashAttention, cuDNN) keeps blocks of scores on the chip:
    memory traffic falls from quadratic to linear in the tokens.

    Recognised by a product whose result has the size of a softmax's input, the softmax, and a product that
    takes its result, in this order on one thread; what lies between and works on that size goes too, and so
    do the gradients, by autograd's sequence numbers. The new time is that of fused attention at rates
    measured by head dimension and mask.

    What to watch: in 16 bits, fused gradients of queries and keys lose accuracy where keys and values have
    much in common, which the bundled attention keeps; the page on swap tells what was measured.

    Silent where attention is fused already, and for softmaxes that are not between two such products.
    """
    groups = [group for group in loop.patterns.of("attention") if isinstance(group, Attention)]
    loop.require(groups, "no attention by products and a softmax")
    loop.require(loop.device.bandwidth_bytes_per_s, "the device's roofs are not known")
    edits = _fused_attention(loop, groups)
    if not edits:
        return
    rows = [row for group in groups for row in group.rows]
    taken = loop.per_step_ns(np.array(rows))
    first = groups[0]
    each = len(groups) / loop.steps
    stored = sum(group.elements for group in groups) / loop.steps * (first.units[0].tensors[0].itemsize or 2)
    mask = " is_causal=True," if first.causal else _MASK if first.masked else ""
    yield Finding(
        title=f"attention by hand in {count(each, 'place')}: "
        f"{count(len(rows) / loop.steps, 'kernel', 'take')} {duration(taken)}, "
        f"{percent(loop.share(taken))} of the step",
        evidence=[
            f"scores of {first.scores.batch} x {first.scores.m} x {first.scores.n} in {first.dtype}, "
            f"{_kind(first)}: {stored / 1e9:.1f} GB a step for one pass over them",
            *kernel_lines(loop, rows, 6),
            *module_line(loop, rows),
        ],
        edits=edits,
        fix=_FIX.format(mask=mask),
        risk=_RISK,
        swap="attention",
    )


def _kind(group: Attention) -> str:
    mask = "causal" if group.causal else "masked" if group.masked else "no mask"
    return f"head dimension {group.scores.k}, {mask}{', with dropout' if group.dropout else ''}"


def _fused_attention(loop: Loop, groups: list[Attention]) -> list[Edit]:
    rows: list[list[int]] = []
    times: list[Estimate] = []
    for group in groups:
        found = attention_ns(
            loop.device,
            entries=score_entries(group),
            queries=group.scores.m,
            dim=group.scores.k,
            dim_v=group.values.n,
            batch_heads=group.scores.batch,
            causal=group.causal,
            dtype=group.dtype,
            masked=group.masked and not group.causal,
        )
        if found is None or group.scores.k > _MAX_HEAD:
            continue
        for own, time in zip((group.forward, group.backward), found, strict=True):
            if own:
                slower = 1.4 if group.dropout else 1.0
                time = Estimate(
                    float(time.pessimistic) * slower, float(time.likely) * slower, time.optimistic
                )
                rows.append(own)
                times.append(at_most(time, float(loop.rows.dur_ns[own].sum())))
    return [*fused(rows, times), *_contiguous_gradients(loop, groups)]


def _contiguous_gradients(loop: Loop, groups: list[Attention]) -> list[Edit]:
    """Gradients of fused attention come as the projection lies, so that joining them is a plain copy."""
    rows = [row for group in groups if group.split is not None for row in group.split.backward]
    costs = loop.analysis.costs
    rows = [row for row in rows if costs.pipe[row] >= 0]
    time = pass_ns(loop.device, costs.bytes_read[rows] + costs.bytes_written[rows]) if rows else None
    if time is None:
        return []
    return [Retime(np.array(rows), at_most(time, loop.rows.dur_ns[rows].astype(float)))]


@rule(
    "attention.backend",
    title="scaled_dot_product_attention runs on its fastest backend",
    failure="scaled_dot_product_attention falls back to a slow backend",
    source=_SOURCE,
)
def backend(loop: Loop) -> Iterator[Finding]:
    """`scaled_dot_product_attention` picks a kernel by its arguments, and falls back without a word.

    FlashAttention and cuDNN want 16-bit tensors, head dimensions in multiples of 8 up to 256 and, for
    FlashAttention, no mask besides `is_causal`. With anything else the memory-efficient kernel runs, at half
    their rate or less, or the mathematical form, which stores the scores. cuDNN reads a mask given as a
    tensor, but then computes the hidden half of the scores too, at little over half its rate. On Hopper it
    takes two thirds of FlashAttention-2's time.

    Recognised by the operator that runs inside; the arguments tell what keeps the fast one away. Silent where
    the fastest backend runs, where the mask is needed as it is, and on devices that have no fast backend,
    such as NVIDIA's before compute capability 8.0.
    """
    slow: dict[tuple[str, str], list[tuple[Unit, _Heads]]] = defaultdict(list)
    inner = {id(unit): _backend_of(unit, loop) for unit in loop.calls.units if "dot_product" in unit.name}
    loop.require(inner, "no scaled_dot_product_attention")
    loop.require(loop.device.peak("tensor_bf16"), "no fast backend for this device")
    for unit in loop.calls.units:
        which = inner.get(id(unit))
        heads = heads_of(unit)
        if which is None or heads is None:
            continue
        why = _what_keeps_away(unit, heads, which, loop)
        if why:
            slow[which, why].append((unit, heads))
    for (which, why), calls in slow.items():
        yield from _slow_backend(loop, which, why, calls)


_NAMES = {
    "math": "the mathematical backend",
    "efficient": "the memory-efficient backend",
    "flash": "FlashAttention-2",
    "cudnn": "cuDNN with a mask",
}


def _backend_of(unit: Unit, loop: Loop) -> str:
    """A key of `_NAMES`, or ``""``."""
    inside = " ".join(call.name for call in unit.calls)
    for part, which in (("cudnn_attention", "cudnn"), ("flash_attention", "flash"), ("overrideable", "")):
        if part in inside:
            return which
    if "efficient_attention" in inside:
        return "efficient"
    kernels = {loop.timeline.trace.names[loop.rows.name[row]] for row in unit.forward}
    return "math" if any("softmax" in kernel.lower() for kernel in kernels) else ""


def _what_keeps_away(unit: Unit, heads: _Heads, which: str, loop: Loop) -> str:
    """A key of `_REASONS`; ``""`` where the fastest backend runs."""
    query, mask = heads[0], mask_of(unit)
    triangular = mask is not None and _may_be_triangular(mask, heads)
    if which == "cudnn":
        return "causal_mask" if triangular else ""
    if which == "flash":
        long = query.shape[-2] >= _MIN_TOKENS and query.shape[-1] <= _MAX_CUDNN_HEAD
        return "older" if loop.device.arch == "sm_90" and long and not query.shape[-1] % 8 else ""
    if which not in ("math", "efficient"):
        return ""
    if query.dtype not in ("bf16", "fp16"):
        return "dtype"
    if query.shape[-1] % 8 or query.shape[-1] > _MAX_HEAD:
        return "head"
    if mask is not None:
        return "causal_mask" if triangular else "mask"
    if any(tensor.strides is not None and tensor.strides[-1] != 1 for tensor in heads):
        return "layout"
    return "disabled"


def _may_be_triangular(mask: Tensor, heads: _Heads) -> bool:
    """A mask that all sequences share is the triangle nearly always."""
    queries, keys = heads[0].shape[-2], heads[1].shape[-2]
    return queries == keys and is_shared(mask, queries, keys)


#: Measured with torch 2.11 and cuDNN 9.19 on an H200, see docs/swap.md.
_TWO_LAYOUTS = (
    "by cuDNN, gradients are wrong where one process backpropagates through attention of the same shapes "
    "with output gradients laid out in two ways (seen in torch 2.11)"
)
_REASONS = {
    "dtype": (
        "queries, keys and values are {dtype}, and the fast backends take bf16 and fp16",
        'trainer = Trainer(precision="bf16-mixed")  # or cast q, k, v to torch.bfloat16 before the call',
        "bf16 keeps 8 bits of mantissa in scores and weights",
    ),
    "head": (
        "the head dimension {dim} is no multiple of 8 up to 256",
        "# choose n_embd / n_head as a multiple of 8 (64 or 128), or pad the heads before the call:\n"
        "q, k, v = (torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)) for t in (q, k, v))  # and cut y",
        "",
    ),
    "causal_mask": (
        "a mask of {queries} x {keys} that all sequences share is given where is_causal=True would do",
        "# if the mask is the lower triangle\n"
        "y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "another result if the mask is not the lower triangle",
    ),
    "mask": (
        "an explicit mask is given",
        "# without padding: pack sequences; or express the mask for a compiled kernel:\n"
        "from torch.nn.attention.flex_attention import flex_attention, create_block_mask",
        "",
    ),
    "layout": (
        "the head dimension is not the innermost in memory",
        "q, k, v = (t.contiguous() for t in (q, k, v))  # or project so that heads come out last in memory",
        "",
    ),
    "older": (
        "cuDNN's attention would take {dtype} heads of {dim}, and is disabled or comes later in the order",
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
        "with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):\n"
        "    ...  # around the step; torch >= 2.6",
        _TWO_LAYOUTS,
    ),
    "disabled": (
        "nothing in the arguments keeps the fast backends away: they are disabled or not built",
        "torch.backends.cuda.enable_flash_sdp(True)\ntorch.backends.cuda.enable_cudnn_sdp(True)\n"
        "# and look for sdpa_kernel(...) contexts around the call",
        _TWO_LAYOUTS,
    ),
}


#: Whether anything is gained is not certain there.
_UNSURE = ("mask", "older")


def _slow_backend(loop: Loop, which: str, why: str, calls: list[tuple[Unit, _Heads]]) -> Iterator[Finding]:
    rows: list[list[int]] = []
    times: list[Estimate] = []
    for unit, heads in calls:
        causal = why == "causal_mask" or is_causal(unit)
        dtype = heads[0].dtype if heads[0].dtype in ("bf16", "fp16") else "bf16"
        found = fused_ns(loop.device, heads, causal=causal, dtype=dtype)
        if found is None:
            return
        for own, time in zip((unit.forward, unit.backward), found, strict=True):
            if own:
                now = float(loop.rows.dur_ns[own].sum())
                kept = Estimate(now, time.likely, time.optimistic) if why in _UNSURE else time
                rows.append(own)
                times.append(at_most(kept, now))
    every = [row for own in rows for row in own]
    taken = loop.per_step_ns(np.array(every))
    query, key, _ = calls[0][1]
    reason, fix, risk = _REASONS[why]
    yield Finding(
        title=f"attention runs on {_NAMES[which]}: "
        f"{duration(taken)}, {percent(loop.share(taken))} of the step",
        evidence=[
            reason.format(dtype=query.dtype, dim=query.shape[3], queries=query.shape[2], keys=key.shape[2]),
            f"{count(len(calls) / loop.steps, 'call')} a step on {list(query.shape)} {query.dtype}",
            *kernel_lines(loop, every),
            *module_line(loop, every),
        ],
        edits=list(fused(rows, times)),
        fix=fix,
        risk=risk,
        confidence="heuristic" if why in _UNSURE or why == "disabled" else "modelled",
        swap="attention" if why in ("mask", "causal_mask") else None,
    )
