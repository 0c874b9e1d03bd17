"""The loss over a large vocabulary: how often its logits go through memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from advisor.advice.calls import Unit
from advisor.advice.edits import Edit, Estimate, Remove, Retime
from advisor.advice.evidence import fused, kernel_lines, module_line
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rates import at_most
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent, size

#: Classes and elements from which logits are large.
_MIN_CLASSES, _MIN_ELEMENTS = 8_192, 2**24
_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
_CASTS = frozenset({"to", "float", "_to_copy", "type_as", "contiguous", "clone"})
#: Multiples of the time in which the logits move once, forward, and are read and written, backward: Liger and
#: eager without casts; torch.compile; the bundled kernel.
_FORWARD, _BACKWARD = (5.0, 3.5, 1.4), (4.2, 1.9, 1.0)
_SOURCE = """\
An H200 (torch 2.11), 8192 x 50257 logits in bf16, forward and backward: 1.6 ms eager, 5.3 ms with .float(),
of which 1.7 ms are the copies; 1.1 to 1.4 ms under torch.compile, 0.6 ms bundled; with the linear layer
20.7 ms eager, 3.3 ms bundled
Hsu et al., Liger Kernel (2024): cross-entropy without stored probabilities"""


@dataclass(frozen=True, slots=True, eq=False)
class _Loss:
    """A cross-entropy over a large vocabulary: casts before, the operators, the logits' sizes."""

    casts: list[Unit]
    units: list[Unit]
    tokens: int
    classes: int
    itemsize: float

    @property
    def all(self) -> list[Unit]:
        return self.casts + self.units


def _losses(loop: Loop) -> list[_Loss]:
    found: list[_Loss] = []
    for sequence in loop.calls.sequences():
        units = [unit for unit in sequence if unit.forward or unit.backward]
        for at, unit in enumerate(units):
            logits = unit.tensors[0] if unit.tensors else None
            if unit.name not in ("cross_entropy_loss", "log_softmax", "_log_softmax") or logits is None:
                continue
            if len(logits.shape) < 2 or logits.numel < _MIN_ELEMENTS or logits.shape[-1] < _MIN_CLASSES:
                continue
            casts = []
            for earlier in reversed(units[max(0, at - 3) : at]):
                if earlier.name not in _CASTS or earlier.numel < 0.9 * logits.numel:
                    break
                casts.append(earlier)
            after = [one for one in units[at + 1 : at + 3] if one.name in _LOSSES]
            if unit.name != "cross_entropy_loss" and not after:
                continue
            first = casts[-1].tensors[0] if casts and casts[-1].tensors else logits
            classes = logits.shape[-1]
            found.append(
                _Loss(casts, [unit, *after], logits.numel // classes, classes, first.itemsize or 2.0)
            )
    return found


@rule(
    "loss.fp32_logits",
    title="Logits stay in 16 bits up to the loss",
    failure="Logits are copied to fp32 before the loss",
    source=_SOURCE,
)
def fp32_logits(loop: Loop) -> Iterator[Finding]:
    """`logits.float()` before the loss stores the logits again, at twice the size, and their gradient.

    `log_softmax` computes in fp32 inside whatever its input's dtype, so the copy adds memory traffic, and
    gigabytes of memory, for little. In 16 bits what follows moves half the bytes, and rows that are too long
    for the cache in fp32 fit into it. Under autocast the copies themselves do not go: the loss then casts its
    log-probabilities instead.

    Recognised by a cast of the logits right before the loss, for vocabularies of 8192 and more. Silent where
    the logits come in fp32 from the model, and for small ones.
    """
    losses = _losses(loop)
    loop.require(losses, "no cross-entropy over a large vocabulary")
    casts = [row for loss in losses for unit in loss.casts for row in unit.rows if _casts(loop, row)]
    if not casts:
        return
    after = [
        row for loss in losses for unit in loss.units for row in unit.rows
        if loss.casts and loop.rows.dur_ns[row] > 20_000
    ]  # fmt: skip
    taken = loop.per_step_ns(np.array(casts))
    loss = losses[0]
    autocast = _is_autocast(loop)
    edits: list[Edit] = [] if autocast else [Remove(np.array(casts))]
    if after:
        edits.append(_in_16_bits(loop, np.array(after), only_softmax=autocast))
    yield Finding(
        title=f"logits of {loss.tokens} x {loss.classes} are copied to fp32: {duration(taken)}, "
        f"{percent(loop.share(taken))} of the step, and {size(4.0 * loss.tokens * loss.classes)} of memory",
        evidence=[
            *kernel_lines(loop, casts),
            *kernel_lines(loop, after),
            *(["autocast casts the log-probabilities where the logits are not: as many copies"] * autocast),
            *module_line(loop, casts),
        ],
        edits=edits,
        fix="loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))  # without .float()",
        risk="the gradient of the logits is rounded to 16 bits, as autocast does anyway",
        swap="loss",
    )


#: Time in 16 bits over that in fp32: softmaxes over rows that registers hold are short of instructions; of
#: longer ones fp32 reads more than once; what only fills or picks moves half the bytes.
_IN_16_BITS = {"registers": (1.0, 0.88, 0.5), "softmax": (0.55, 0.42, 0.33), "other": (0.6, 0.5, 0.5)}
_GRADIENT_IN_REGISTERS = (0.6, 0.5, 0.45)


def _in_16_bits(loop: Loop, rows: np.ndarray, *, only_softmax: bool) -> Retime:
    """The loss' kernels on 16 bits in place of fp32."""
    names = loop.timeline.trace.names
    factors = []
    for row in rows.tolist():
        kernel = names[loop.rows.name[row]]
        if "softmax" not in kernel.lower():
            factors.append((1.0, 1.0, 1.0) if only_softmax else _IN_16_BITS["other"])
        elif not any(part in kernel for part in ("Reg", "Smem", "warp")):
            factors.append(_IN_16_BITS["softmax"])
        else:
            factors.append(_GRADIENT_IN_REGISTERS if "ackward" in kernel else _IN_16_BITS["registers"])
    now = loop.rows.dur_ns[rows].astype(float)
    return Retime(rows, Estimate(*(now * factor for factor in np.array(factors).T)))


def _is_autocast(loop: Loop) -> bool:
    """Whether 16 bits come from autocast: by the setting, or since the parameters are fp32."""
    precision = loop.setting("precision")
    if isinstance(precision, str):
        return precision.endswith("mixed")
    return any(tensor.dtype == "fp32" for tensor in loop.trained)


def _casts(loop: Loop, row: int) -> bool:
    call = loop.call(int(loop.rows.op[row]))
    dtypes = [getattr(item, "dtype", None) for item in call.inputs[:2]]
    return call.name == "aten::copy_" and len(set(dtypes)) == 2


@rule(
    "loss.cross_entropy",
    title="The loss reads its logits once or twice",
    failure="Cross-entropy over a large vocabulary passes its logits through memory many times",
    source=_SOURCE,
)
def cross_entropy(loop: Loop) -> Iterator[Finding]:
    """Eager cross-entropy stores log-probabilities, casts, zeros and fills a gradient, and casts that back.

    With a vocabulary of 50 000 each pass moves gigabytes. A fused loss reads the logits, keeps a number a
    row, and writes the gradient in their place; fused with the linear layer, whole logits never exist.

    Recognised by a cross-entropy over 8192 classes or more that takes a fiftieth of the step. The likely time
    is that under `torch.compile`, the best that of the bundled kernel.

    Silent for small vocabularies and for losses that are fused or compiled.
    """
    losses = _losses(loop)
    loop.require(losses, "no cross-entropy over a large vocabulary")
    bandwidth = loop.device.bandwidth_bytes_per_s
    loop.require(bandwidth, "the device's bandwidth is not known")
    groups: list[list[int]] = []
    times: list[Estimate] = []
    for loss in losses:
        once = loss.tokens * loss.classes * loss.itemsize / (bandwidth or 1.0) * 1e9
        forward = [row for unit in loss.all for row in unit.forward]
        backward = [row for unit in loss.all for row in unit.backward]
        for rows, roof, multiples in ((forward, once, _FORWARD), (backward, 2 * once, _BACKWARD)):
            now = float(loop.rows.dur_ns[rows].sum())
            groups.append(rows)
            times.append(at_most(Estimate(*(roof * multiple for multiple in multiples)), now))
    every = [row for rows in groups for row in rows]
    taken = loop.per_step_ns(np.array(every, np.int64))
    if loop.share(taken) < 0.02:
        return
    loss = losses[0]
    yield Finding(
        title=f"cross-entropy over {loss.tokens} x {loss.classes}: "
        f"{count(len(every) / loop.steps, 'kernel', 'take')} {duration(taken)}, "
        f"{percent(loop.share(taken))} of the step",
        evidence=[
            f"logits of {size(loss.tokens * loss.classes * loss.itemsize)} go through memory "
            f"{_passes(loop, every, loss):.0f} times a step",
            *kernel_lines(loop, every, 6),
            *module_line(loop, every),
        ],
        edits=list(fused(groups, times)),
        fix="from advisor.kernels.cross_entropy import cross_entropy\n"
        "loss = cross_entropy(logits, labels)  # logits (..., classes), labels (...)\n"
        "# with the head in one: from advisor.kernels.linear_cross_entropy import linear_cross_entropy\n"
        "# loss = linear_cross_entropy(hidden, self.head.weight, labels)\n"
        "# or: compute_loss = torch.compile(compute_loss), with the head inside",
        risk="probabilities are not rounded to 16 bits on the way; logits are overwritten by their gradient",
        swap="loss",
    )


def _passes(loop: Loop, rows: list[int], loss: _Loss) -> float:
    costs = loop.analysis.costs
    moved = float(np.nansum(costs.bytes_read[rows]) + np.nansum(costs.bytes_written[rows])) / loop.steps
    return moved / (loss.tokens * loss.classes * loss.itemsize)
