"""Fusion: memory-bound work in many passes where one would do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from advisor.advice.edits import Estimate
from advisor.advice.evidence import fused, kernel_lines, module_line
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.patterns.groups import Group, ends_in_norm
from advisor.advice.rates import at_most
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent, size

#: Below this share of the step there is nothing worth a reader's time.
_MIN_SHARE = 0.01
#: From this share on, a saving that hides behind other work is worth a note.
_LARGE_SHARE = 0.05
_START_NS = 2_500.0
_BENCHMARKS = (
    "An H200 (torch 2.11): benchmarks/results/kernels_*.json, eager, torch.compile, Liger and bundled"
)


@dataclass(frozen=True, slots=True)
class _Passes:
    """Time of a fused kernel as a multiple of its compulsory bytes at the datasheet's bandwidth.

    From pessimistic to optimistic. The middle is that of the fix named first, the best that of the bundled
    kernels.
    """

    forward: tuple[float, float, float]
    backward: tuple[float, float, float]


def _times(loop: Loop, group: Group, passes: _Passes, *, worse: bool = False) -> list[Estimate]:
    """Forward's and backward's time when fused; not above what is taken now, unless it may get `worse`."""
    bandwidth = loop.device.bandwidth_bytes_per_s or 1.0
    found = []
    for rows, nbytes, multiples in (
        (group.forward, group.forward_bytes, passes.forward),
        (group.backward, group.backward_bytes, passes.backward),
    ):
        roof, now = nbytes / bandwidth * 1e9, float(loop.rows.dur_ns[rows].sum())
        time = Estimate(*(roof * multiple + _START_NS for multiple in multiples))
        found.append(time if worse else at_most(time, now))
    return found


def _groups(loop: Loop, kind: str, absent: str) -> Sequence[Group]:
    """The loop's groups of a kind; none where they take too little of the step.

    Raises:
        NotApplicable: it has none, or what they would take cannot be told.
    """
    groups = loop.patterns.of(kind)
    loop.require(groups, absent)
    loop.require(loop.device.bandwidth_bytes_per_s, "the device's bandwidth is not known")
    rows = [row for group in groups for row in group.rows]
    return groups if rows and loop.share(loop.per_step_ns(np.array(rows))) >= _MIN_SHARE else []


def _finding(
    loop: Loop,
    groups: Sequence[Group],
    times: Sequence[Sequence[Estimate]],
    *,
    title: str,
    fix: str,
    risk: str,
    swap: str | None,
    note: str = "",
    with_host: bool = True,
) -> Finding:
    """A finding over all groups of a kind; `title` goes before count and time."""
    rows = [row for group in groups for row in group.rows]
    taken = loop.per_step_ns(np.array(rows))
    by_kind: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_kind[group.what].append(group)
    largest = sorted(by_kind.items(), key=lambda item: -sum(_time_of(loop, group) for group in item[1]))
    edits = list(
        fused(
            [rows for group in groups for rows in (group.forward, group.backward)],
            [time for pair in times for time in pair],
            with_host=with_host,
        )
    )
    if not note and loop.share(taken) >= _LARGE_SHARE and loop.hides(edits):
        note = "this work hides behind the host, the input or another stream: the step would not be shorter"
    return Finding(
        title=f"{title} in {count(len(groups) / loop.steps, 'place')}: "
        f"{count(len(rows) / loop.steps, 'kernel', 'take')} {duration(taken)}, "
        f"{percent(loop.share(taken))} of the step",
        evidence=[
            *(
                f"{what}, {size(same[0].forward_bytes)} if moved once, "
                f"{count(len(same) / loop.steps, 'time')}: {_time_a_step(loop, same)}"
                for what, same in largest[:4]
            ),
            *kernel_lines(loop, rows, 5),
            *module_line(loop, rows),
        ],
        edits=edits,
        fix=fix,
        risk=risk,
        swap=swap,
        note=note,
    )


def _time_a_step(loop: Loop, groups: Sequence[Group]) -> str:
    return duration(sum(_time_of(loop, group) for group in groups) / loop.steps)


def _time_of(loop: Loop, group: Group) -> float:
    return float(loop.rows.dur_ns[group.rows].sum())


#: The norms' own operators forward take 1.5 to 2.1 times the roof, bundled ones 1.2 and, backward, 1.3.
_NORM = _Passes((2.2, 1.6, 1.2), (4.6, 3.2, 1.3))
#: Backward, theirs are two kernels: the input's gradient at so many times the roof, and the weights', which
#: walks down the rows with few blocks: so long a row, and no less than so many times the roof. Within a fifth
#: of eight sizes of 512 to 16384 columns.
_OF_INPUT, _OF_WEIGHTS, _BETWEEN_NS = 1.33, 1.3, 5_000.0
_ROW_NS = {"RMSNorm": 3.5, "LayerNorm": 4.6}
_NORM_WORSE = 1.4


@rule(
    "fusion.norm",
    title="Norms run as one kernel",
    failure="Norms are written out in many passes",
    source=f"Zhang and Sennrich, Root Mean Square Layer Normalization (2019)\n{_BENCHMARKS}",
)
def norm(loop: Loop) -> Iterator[Finding]:
    """A norm written as `x * rsqrt(mean(x²) + eps) * weight` reads and writes its tensor many times.

    Six to ten kernels forward and twice as many backward do what one pass each way does. `F.rms_norm` and
    `F.layer_norm` are single kernels on the device.

    Recognised by a mean or variance over the last dimension, the root of it, and products with it; casts
    around and gradients belong to it. The new time is that of the norm's own operator, whose weight gradient
    is slow on many short rows, at best that of the bundled ones.

    Silent for norms that are one operator already.
    """
    groups = _groups(loop, "norm", "no norms written out")
    if not groups:
        return
    centred = groups[0].what.startswith("LayerNorm")
    name, function = ("LayerNorm", "layer_norm") if centred else ("RMSNorm", "rms_norm")
    yield _finding(
        loop,
        groups,
        [_norm_times(loop, group) for group in groups],
        title=f"hand-written {name}",
        fix=f"self.norm = torch.nn.{name}({groups[0].width}, eps=eps)  # torch >= 2.9 fuses RMSNorm on CUDA\n"
        f"# or in place: y = torch.nn.functional.{function}(x, (x.shape[-1],), self.weight, eps=eps)\n"
        f"# or bundled: from advisor.kernels import {function}  # called alike",
        risk="sums in another order; a cast back to 16 bits that came before the weight comes after it now",
        swap="norm",
    )


def _norm_times(loop: Loop, group: Group) -> list[Estimate]:
    """Forward's and backward's time of a norm's own operator; not above what is taken now."""
    forward, bundled = _times(loop, group, _NORM)
    roof_ns = group.backward_bytes / (loop.device.bandwidth_bytes_per_s or 1.0) * 1e9
    walked_ns = group.elements / max(group.width, 1) * _ROW_NS[group.what.partition(" ")[0]]
    own_ns = _OF_INPUT * roof_ns + _BETWEEN_NS + max(walked_ns, _OF_WEIGHTS * roof_ns)
    now_ns = float(loop.rows.dur_ns[group.backward].sum())
    return [forward, at_most(Estimate(own_ns * _NORM_WORSE, own_ns, bundled.optimistic), now_ns)]


_GATE = _Passes((2.0, 1.3, 1.12), (2.0, 1.3, 1.12))


@rule(
    "fusion.gate",
    title="Gated activations run as one kernel",
    failure="Gated activations store the activation on the way",
    source=f"Shazeer, GLU Variants Improve Transformer (2020)\n{_BENCHMARKS}",
)
def gate(loop: Loop) -> Iterator[Finding]:
    """`silu(a) * b` in two kernels writes and reads `silu(a)` for nothing, and more so backward.

    One kernel reads both and writes the product; backward it computes the activation again.

    Recognised by an activation followed by a product of two tensors of its size, with a matrix product
    between them or not. Silent for gates that are one operator, or compiled.
    """
    groups = _groups(loop, "gate", "no gated activations in two operators")
    if not groups:
        return
    yield _finding(
        loop,
        groups,
        [_times(loop, group, _GATE) for group in groups],
        title=f"gated activation {groups[0].what}",
        fix=_gate_fix(groups[0].units[0].name),
        risk="the activation is not rounded to 16 bits before the product",
        swap="gate",
    )


def _gate_fix(activation: str) -> str:
    bundled = {"silu": "swiglu(self.gate(x), self.up(x))", "gelu": "geglu(self.gate(x), self.up(x))"}
    bundled |= {"relu": 'gated_activation(self.gate(x), self.up(x), "relu")'}
    if activation not in bundled:
        return "self.mlp.compile()     # the module around activation and product"
    call = bundled[activation]
    return (
        f"from advisor.kernels import {call.partition('(')[0]}\ny = self.down({call})\n"
        "# or: self.mlp.compile()"
    )


_ROPE = _Passes((2.5, 1.5, 1.35), (5.0, 3.0, 1.3))


@rule(
    "fusion.rope",
    title="Rotary embedding runs as one kernel",
    failure="Rotary embedding takes many passes",
    source=f"Su et al., RoFormer (2021)\n{_BENCHMARKS}",
)
def rope(loop: Loop) -> Iterator[Finding]:
    """`x * cos + rotate_half(x) * sin` is five kernels forward, on queries and keys, where one does all.

    Recognised by a negated half, concatenated, in a product and a sum; or by a product of complex numbers.
    Silent for rotations that are one operator, or compiled.
    """
    groups = _groups(loop, "rope", "no rotary embedding in several operators")
    if not groups:
        return
    yield _finding(
        loop,
        groups,
        [_times(loop, group, _ROPE) for group in groups],
        title="rotary embedding",
        fix="from advisor.kernels.rope import rope\nq, k = rope(q, k, cos, sin)  # heads before tokens\n"
        "# or: apply_rotary = torch.compile(apply_rotary)",
        risk="products are summed in fp32 before rounding",
        swap="rope",
    )


_SOFTMAX = _Passes((3.5, 2.0, 1.2), (2.5, 1.5, 1.2))


@rule(
    "fusion.softmax_mask",
    title="Softmaxes take scale and mask along",
    failure="Scale, mask and casts around a softmax take passes of their own",
    source=_BENCHMARKS,
)
def softmax_mask(loop: Loop) -> Iterator[Finding]:
    """Scale, mask and cast before a softmax, and the cast after it, each read and write the whole tensor.

    One kernel loads a row, applies them on the way, and writes the result once. Recognised by pointwise
    operators of the softmax's size right around it. Silent inside attention, where all of it can be fused.
    """
    groups = _groups(loop, "softmax", "no softmax with work around it, outside attention")
    if not groups:
        return
    yield _finding(
        loop,
        groups,
        [_times(loop, group, _SOFTMAX) for group in groups],
        title="softmax with scale, mask or casts",
        fix="from advisor.kernels.softmax import softmax\np = softmax(scores, scale=scale, mask=mask)\n"
        "# or: torch.compile the function around the softmax",
        risk="in 16 bits the softmax is computed in fp32 inside, without an fp32 copy",
        swap="softmax",
    )


#: Eager takes 4 times the roof and more each way; torch.compile in a GPT step 2.4 to 3.4 and 2, bundled 1.4.
_RESIDUAL = _Passes((4.0, 2.9, 1.4), (3.6, 2.2, 1.5))


@rule(
    "fusion.residual_norm",
    title="Residual sums and norms run together",
    failure="Residual sums are stored only to be read again by a norm",
    source=_BENCHMARKS,
)
def residual_norm(loop: Loop) -> Iterator[Finding]:
    """A residual sum, with dropout before it or not, and the norm after it can share one pass.

    The sum is in registers when the norm needs it; backward, the two gradients of the residual are added on
    the way. Eager LayerNorm's weight gradient is slow besides, at a quarter of the bandwidth.

    Recognised by a sum of two tensors of one size right before a norm's operator of that size. Silent for
    compiled models, and where sum and norm are in different layers with work between them.
    """
    groups = _groups(loop, "residual_norm", "no residual sum right before a norm")
    if not groups:
        return
    rms = "rms" in groups[0].what
    width, function = groups[0].width, "add_rms_norm" if rms else "add_layer_norm"
    yield _finding(
        loop,
        groups,
        [_times(loop, group, _RESIDUAL) for group in groups],
        title="residual sum before a norm",
        fix=f"from advisor.kernels import {function}\nw = self.norm\n"
        f"y, residual = {function}(x, residual, {width}, w.weight{'' if rms else ', w.bias'}, eps=w.eps)\n"
        "# or: self.block.compile()",
        risk="the norm sees the sum before it is rounded",
        swap="norm",
    )


_POINTWISE = _Passes((2.0, 1.35, 1.12), (2.2, 1.4, 1.12))
#: A chain that ends in a norm. Forward torch.compile takes 4.1 to 4.7 times the roof; backward, with its sums
#: over rows, 4.8 to 5.8 where the chain is a function of its own and 8.2 where torch.compile took the whole
#: loop. The bundled kernel takes 1.5 to 1.9 and 1.7 to 2.1.
_TO_NORM = _Passes((4.7, 4.4, 1.5), (8.2, 6.2, 1.7))


@rule(
    "fusion.chain",
    title="Pointwise work runs in few passes",
    failure="Chains of pointwise work store and read what they could keep in registers",
    source=f"{_BENCHMARKS}\nAn H200 (torch 2.11), twelve of x + bias, GELU, LayerNorm on 32768 x 2048 in "
    "bf16, a training step:\n10.0 to 10.9 ms eager; 7.8 ms with each of the twelve compiled by itself, "
    "12.1 ms where torch.compile took\nthe whole loop; 6.9 ms bundled, which the host limits; 2.5 ms if all "
    "bytes moved once",
)
def chain(loop: Loop) -> Iterator[Finding]:
    """Each pointwise operator reads and writes its whole tensor; a fused chain does so once.

    Recognised by neighbours in program order that work on tensors of one size, up to a norm, a softmax or a
    sum at the end. The new time counts the bytes that have to move: inputs and result once. The host's time
    stays as it is: a compiled region has its own.

    `torch.compile` fuses pointwise chains well. Where a chain ends in a norm it gains forward, while
    backward, with its sums over rows, takes as long as eager's or longer. A fifth of the step was saved with
    each chain compiled by itself and an eighth lost where torch.compile took the whole loop, presumably since
    many chains were in one graph then. The likely time lies between. The best case is the bundled kernel's,
    which a swap tries and keeps only where it is faster.

    Silent for what other patterns explain, for compiled work, for small tensors, and for the end of a loss,
    where a number comes out.
    """
    groups = _groups(loop, "chain", "no chains of pointwise work")
    if not groups:
        return
    to_norm = [group for group in groups if ends_in_norm(group)]
    times = [
        _times(loop, group, _TO_NORM, worse=True) if ends_in_norm(group) else _times(loop, group, _POINTWISE)
        for group in groups
    ]
    by_kind: dict[str, float] = defaultdict(float)
    for group in groups:
        by_kind[group.what] += _time_of(loop, group)
    rows = [row for group in to_norm for row in group.rows]
    share = loop.share(loop.per_step_ns(np.array(rows, np.int64)))
    yield _finding(
        loop,
        groups,
        times,
        title=f"chains such as {max(by_kind, key=lambda what: by_kind[what])}",
        fix="# put the chain into one function and compile it:\n"
        "@torch.compile\ndef block(x, bias, weight, beta):\n"
        "    return F.layer_norm(F.gelu(x + bias), (x.shape[-1],), weight, beta)\n"
        "# or the bundled kernel, which is faster forward and backward:\n"
        "from advisor.kernels.bias_act_norm import bias_act_norm\n"
        'y = bias_act_norm(x, bias, "gelu", weight, beta)'
        if to_norm
        else "# put the chain into one function and compile it, or the module around it:\n"
        "self.block.compile()     # in place: the state_dict keeps its keys",
        risk="what lies between is not rounded to 16 bits any more",
        swap="activation",
        with_host=False,
        note="a chain that ends in a norm gains by torch.compile as a function of its own: with the whole "
        "loop under torch.compile it came out slower on an H200; the best case is the bundled kernel's"
        if share >= _LARGE_SHARE
        else "",
    )
