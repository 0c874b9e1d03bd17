"""Memory layout: convolutions that turn their tensors around, copies that only rearrange."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from advisor.advice.edits import Edit, Estimate, Remove, Retime
from advisor.advice.evidence import kernel_lines, module_line
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.nchw import is_nchw, nchw_rows
from advisor.advice.patterns.copies import INTO_ATTENTION, UNDONE, UNKNOWN, fates
from advisor.advice.rates import at_most
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent
from advisor.roofline.costs import Tensor

#: Norms, poolings and their gradients over channels_last, as multiples of the roof with a start-up: two or
#: three passes where the compulsory bytes are one.
_NORM_PASSES, _POOL_PASSES = (4.4, 3.4, 2.2), (5.0, 3.0, 2.0)
_START_NS = (4_000.0, 3_000.0, 2_000.0)


@rule(
    "layout.channels_last",
    title="Convolutions get their tensors in the layout that tensor cores want",
    failure="Convolutions on NCHW tensors are surrounded by layout transforms",
    source="""\
PyTorch, Channels Last Memory Format; NVIDIA, Deep Learning Performance: Convolutional Layers, NHWC
ResNet-50, batch 64, fp16, on an H200 (torch 2.11): 23.1 ms a step in NCHW, 16.0 ms in channels_last""",
)
def channels_last(loop: Loop) -> Iterator[Finding]:
    """Tensor-core convolutions work on NHWC. Given NCHW, cuDNN turns input, weight and result around.

    The transforms cost bandwidth, and so do NCHW batch norms and poolings, whose channels lie far apart.
    In `channels_last` the transforms go, norms and poolings read whole lines, and nothing else changes.

    Recognised by layout kernels inside convolutions whose input is NCHW by its strides. The new times: no
    transforms; norms and poolings at about three times their compulsory bytes.

    Silent where inputs are channels_last already, and in fp32 without TF32, where convolutions take NCHW.
    """
    loop.require(((loop.family == "convolution") & loop.counted).any(), "no convolutions")
    nchw = [unit for unit in loop.calls.units if "conv" in unit.name and is_nchw(unit.tensors)]
    transforms, others = nchw_rows(loop)
    if not len(transforms) or not nchw:
        return
    edits: list[Edit] = [Remove(transforms)]
    if len(others):
        edits.append(Retime(others, _in_channels_last(loop, others)))
    turned, beside_ns = loop.per_step_ns(transforms), loop.per_step_ns(others)
    yield Finding(
        title=f"NCHW convolutions: {count(len(transforms) / loop.steps, 'layout transform', 'take')} "
        f"{duration(turned)}, norms and poolings between them {duration(beside_ns)}",
        evidence=[
            f"{count(len(nchw) / loop.steps, 'convolution')} on NCHW tensors, such as "
            f"{list(nchw[0].tensors[0].shape)} {nchw[0].tensors[0].dtype} with strides "
            f"{list(nchw[0].tensors[0].strides or ())}",
            *kernel_lines(loop, transforms.tolist(), 2),
            *kernel_lines(loop, others.tolist(), 3),
            *module_line(loop, transforms.tolist()),
        ],
        edits=edits,
        fix="# in the LightningModule\n"
        "def configure_model(self):\n"
        "    self.net = self.net.to(memory_format=torch.channels_last)\n"
        "def on_before_batch_transfer(self, batch, dataloader_idx):  # or in the collate function\n"
        "    images, labels = batch\n"
        "    return images.contiguous(memory_format=torch.channels_last), labels",
        fix_torch="model = model.to(memory_format=torch.channels_last)\n"
        "images = images.to(device, memory_format=torch.channels_last, non_blocking=True)",
        risk="another algorithm of cuDNN: rounding differs; `.view` across channels has to become `.reshape`",
    )


def _in_channels_last(loop: Loop, rows: np.ndarray) -> Estimate:
    roof = loop.analysis.bounds.roof_ns[rows]
    is_norm = loop.family[rows] == "norm"
    cases = [
        np.where(is_norm, norm * roof, pool * roof) + start
        for norm, pool, start in zip(_NORM_PASSES, _POOL_PASSES, _START_NS, strict=True)
    ]
    return at_most(Estimate(*cases), loop.rows.dur_ns[rows].astype(float))


#: Of copies that rearrange, so much can usually be avoided: where attention reads the result, which takes
#: strides, and where nobody can tell from a trace.
_AVOIDABLE = {INTO_ATTENTION: (0.4, 0.85, 1.0), UNKNOWN: (0.0, 0.35, 0.9)}
_MIN_SHARE = 0.02
_COPIES = frozenset({"contiguous", "clone", "reshape", "permute", "transpose", "cat", "stack", "flatten"})


@rule(
    "layout.copies",
    title="Tensors are rarely copied only to be rearranged",
    failure="Much time goes into copies that only rearrange tensors",
    source="PyTorch, Tensor Views: which operators copy and which only change strides",
)
def copies(loop: Loop) -> Iterator[Finding]:
    """`contiguous`, `reshape` of a transposed tensor and `cat` move all elements and compute nothing.

    Often the copy is not needed: the next operator takes strides, the order of dimensions can be chosen when
    the tensor is made, or results can be written into one tensor instead of being concatenated.

    Recognised by copy kernels without a change of dtype under such operators, forward and backward, where
    they take a fiftieth of the step. Copies of copies that end as the first began, by their strides, go
    altogether, and most of those that fused attention reads. Which of the others can go is not to be seen in
    a trace, so a third of their time is likely. Silent about those inside explicit attention, convolutions
    and products, which other rules speak of.
    """
    spoken_for = loop.patterns.rows()
    rows: dict[str, list[int]] = defaultdict(list)
    for sequence in loop.calls.sequences():
        moving = {
            id(unit): own for unit in sequence
            if unit.name in _COPIES and unit.numel >= 65_536
            and (own := [row for row in unit.rows if row not in spoken_for and _only_copies(loop, row)])
        }  # fmt: skip
        for unit, fate in fates(sequence, set(moving)).items():
            rows[fate] += moving[unit]
    loop.require(loop.calls.units, "no operators with shapes")
    every = sorted(row for own in rows.values() for row in own)
    if not every or loop.share(loop.per_step_ns(np.array(every))) < _MIN_SHARE:
        return
    taken = loop.per_step_ns(np.array(every))
    edits: list[Edit] = [Remove(np.array(rows[UNDONE]))] if rows[UNDONE] else []
    for fate, parts in _AVOIDABLE.items():
        if rows[fate]:
            now = loop.rows.dur_ns[rows[fate]].astype(float)
            left = Estimate(*((1 - part) * now for part in parts))
            edits.append(Retime(np.array(rows[fate]), left))
    yield Finding(
        title=f"{count(len(every) / loop.steps, 'rearrangement', 'take', what='of tensors')} "
        f"{duration(taken)}, {percent(loop.share(taken))} of the step",
        evidence=[
            *_of_fate(loop, rows[UNDONE], "turned back by the copies after them"),
            *_of_fate(loop, rows[INTO_ATTENTION], "read by fused attention, which takes strides"),
            *kernel_lines(loop, every, 5),
            *module_line(loop, every),
        ],
        edits=edits,
        fix="# leave out .contiguous() where the next operator takes strides (matmul, attention, pointwise)\n"
        "# choose the order once: x.view(b, t, heads, dim).transpose(1, 2) goes into attention as it is\n"
        "out = x.new_empty(b, t, n); torch.mul(a, s, out=out[..., :k])  # in place of torch.cat",
        confidence="heuristic" if rows[UNKNOWN] else "modelled",
    )


def _of_fate(loop: Loop, rows: list[int], what: str) -> list[str]:
    if not rows:
        return []
    taken = duration(loop.per_step_ns(np.array(rows)))
    return [f"{taken} a step in copies that are {what}"]


def _only_copies(loop: Loop, row: int) -> bool:
    call = loop.call(int(loop.rows.op[row]))
    if call.name == "aten::cat":
        return True
    first, second = (*call.inputs, None, None)[:2]
    both = isinstance(first, Tensor) and isinstance(second, Tensor)
    return call.name == "aten::copy_" and both and first.dtype == second.dtype  # type: ignore[union-attr]
