"""Optimizer: many small kernels where a fused one would do, and states kept off the device."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from advisor.advice.edits import Edit, Estimate, Fuse, Remove
from advisor.advice.finding import Finding
from advisor.advice.host_calls import Stretches
from advisor.advice.loop import Loop
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent, rate, size
from advisor.roofline.costs.model import DTYPE_BYTES
from advisor.trace.nesting import Nesting

#: Classes of torch.optim with `fused=True`, and tensors of a parameter's size that the fused kernel moves:
#: read and written parameter, gradient (read only) and states.
_FUSED_ACCESSES = {"Adam": 7, "AdamW": 7, "SGD": 5, "Adagrad": 5}
#: Tensors that the many kernels move instead, an element: torch.optim's foreach code, decay and momentum
#: included.
_UNFUSED_ACCESSES = {"Adam": 18, "AdamW": 20, "SGD": 11, "Adagrad": 13}
#: Of the memory's datasheet rate, and of a measured copy's: 3.4 TB/s on an H200, whose copies reach 4.27 of
#: 4.8.
_OF_DATASHEET, _OF_COPY = 0.71, 0.80
#: One launch of a fused kernel takes so many tensors, or so many chunks of 65,536 elements
#: (MultiTensorApply.cuh).
_TENSORS_A_LAUNCH, _CHUNKS_A_LAUNCH, _CHUNK = 36, 320, 65_536
_LAUNCH_ON_DEVICE_NS = 4_000.0
#: Host time of a fused step: lists are gathered for all tensors, then one operator.
_FUSED_HOST_NS, _FUSED_HOST_A_TENSOR_NS = 120_000.0, 1_500.0
_CLIPPING = (
    r"^aten::(_foreach_norm|linalg_vector_norm|norm|clamp|clamp_max|clamp_)$"
    r"|_amp_(foreach_)?non_finite_check_and_unscale_$"
)
_SCALING = re.compile(
    r"^aten::(_foreach_mul_|mul_|mul|to|_to_copy|copy_|lift_fresh|detach_?|item|_local_scalar_dense)$"
)


@rule(
    "optimizer.fused",
    title="The optimizer steps by fused kernels",
    failure="The optimizer steps by many small kernels",
    source="PyTorch documentation: torch.optim, fused implementations\n"
    "H200, AdamW, 124 M parameters: for-loop 9.17 ms, foreach 2.85 ms, fused 1.02 ms (3.4 TB/s)",
)
def fused(loop: Loop) -> Iterator[Finding]:
    """An optimizer step is a handful of elementwise operations over all parameters, bound by memory. The
    for-loop form launches each of them for each tensor; foreach batches tensors but still sweeps over
    memory once an operation: some 20 accesses an element for AdamW. The fused form reads and writes each
    tensor once: 7 accesses.

    The new time is those bytes at 71 % of the memory's datasheet rate (80 % of a measured copy's), never
    under 4 µs a launch; sizes come from the capture, or from the gradients that autograd accumulates.
    Without sizes it is the present time by the ratio of accesses. Gradient clipping stays as it is.

    Silent for optimizers that are fused already, for classes without a fused form in torch.optim (only
    Adam, AdamW, SGD and Adagrad have one), and for compiled steps.
    """
    rows = _step_rows(loop)
    loop.require(len(rows), "no launch of an optimizer step was recognised")
    name = optimizer_class(loop)
    if name not in _FUSED_ACCESSES or loop.setting("optimizers", 0, "fused"):
        return
    ops = loop.under(loop.ops_named(r"_fused_(adam|sgd|adagrad)|multi_tensor_adam|^FusedAdam"))
    compiled = loop.kernels_named(r"^triton_")
    if (ops[rows] >= 0).any() or compiled[rows].any():
        return
    groups = [rows[loop.rows.step[rows] == step] for step in np.unique(loop.rows.step[rows]).tolist()]
    each = len(rows) / loop.steps
    if each < 4:
        return
    now_ns = loop.per_step_ns(rows)
    new, basis = _fused_ns(loop, name, now_ns)
    foreach = (loop.under(loop.ops_named(r"^aten::_foreach_"))[rows] >= 0).mean() > 0.5
    stretches = _host_between(loop, groups)
    edits: list[Edit] = [Fuse(groups, new)]
    if len(stretches):
        edits.append(stretches.removed)
    host_ns = loop.host_gain_ns(edits)
    sooner = f", and the host {duration(host_ns)} less" if host_ns > now_ns - float(new.likely) else ""
    form = "foreach" if foreach else "for-loop"
    given = loop.setting("optimizers", 0) or {}
    was = ", ".join(f"{key}={given[key]!r}" for key in ("fused", "foreach") if key in given) or form
    clip = loop.setting("gradient_clip_val")
    older = "\n# an older PyTorch has it for the CPU alone: foreach=True there" if name == "Adagrad" else ""
    yield Finding(
        title=f"{name} optimizer steps by {count(each, f'{form} kernel')}, {duration(now_ns)} a step: "
        f"the fused form would take {duration(float(new.likely))}{sooner}",
        evidence=[
            f"{count(each, 'kernel')} a step, {duration(now_ns)} on the device, "
            f"{percent(loop.share(now_ns))} of the step",
            *(f"{op}: {count(n / loop.steps, 'kernel')} a step" for op, n in _operators(loop, rows)),
            f"the host between them: {duration(stretches.total_ns / loop.steps * loop.real_time)} a step",
            basis,
            f"now: {name}({was})",
        ],
        edits=edits,
        fix="def configure_optimizers(self):\n"
        f"    return torch.optim.{name}(self.parameters(), lr=..., fused=True)   # was {was}"
        + (
            "\n# with gradient_clip_val and 16-mixed precision Lightning refuses fused optimizers: "
            "clip in on_before_optimizer_step"
            if clip and str(loop.setting("precision")).startswith("16")
            else ""
        )
        + older,
        fix_torch=f"torch.optim.{name}(model.parameters(), lr=..., fused=True)" + older,
        risk="the last bits differ; all parameters must be on one kind of device",
        confidence="modelled",
        swap="optimizer",
    )


@rule(
    "optimizer.offload",
    title="The optimizer's states are on the device",
    failure="The optimizer's states travel between host and device each step",
    source="ZeRO-Offload (Ren et al., USENIX ATC 2021)",
)
def offload(loop: Loop) -> Iterator[Finding]:
    """With offloaded states the gradients go to the host, the CPU steps, and the parameters come back:
    bytes over the link each step, and a step at the CPU's memory rate. It is worth its time only where the
    states do not fit.

    Recognised by copies of over 1 MB a step between host and device in the optimizer phase. The saving
    counts the copies alone; the CPU's own work is not seen in a trace. Silent without such copies.
    """
    copies = loop.to_device | loop.to_host
    rows = np.flatnonzero(copies & loop.counted & loop.in_phase("optimizer") & (loop.rows.bytes > 0))
    moved = float(loop.rows.bytes[rows].sum()) / max(loop.steps, 1)
    if moved < 1e6:
        return
    took = loop.per_step_ns(rows)
    states = sum(t.numel for t in loop.trained) * 8.0
    peak, total = loop.peak_memory_bytes, loop.memory_bytes
    fits, room = False, []
    if states and total and peak:
        fits = peak + states < 0.9 * total
        room = [f"two fp32 states take {size(states)}; peak memory is {size(peak)} of {size(total)}"]
    yield Finding(
        title=f"the optimizer moves {size(moved)} a step between host and device: {duration(took)}",
        evidence=[
            f"{count(len(rows) / loop.steps, 'transfer')} a step at {rate(moved / max(took, 1) * 1e9)}",
            *room,
        ],
        edits=[Remove(rows)],
        fix='Trainer(strategy="deepspeed_stage_2")      # in place of "deepspeed_stage_2_offload"',
        risk="the states need device memory" + ("" if fits else ", and whether it suffices is not known"),
        confidence="modelled" if fits else "heuristic",
        note="the CPU's own step is not in the trace: the saving is a lower bound",
    )


def optimizer_class(loop: Loop) -> str | None:
    """Class of the optimizer, as the capture or torch's own ranges tell it."""
    listed = loop.setting("optimizers")
    if isinstance(listed, list) and listed:
        given = [entry.get("class") if isinstance(entry, dict) else None for entry in listed]
        names = {name if isinstance(name, str) else None for name in given}
        return names.pop() if len(names) == 1 else None
    marks = loop.host.ranges(r"^Optimizer\.step#")
    found = {loop.timeline.trace.names[i].split("#", 1)[1].split(".")[0] for i in marks.name.tolist()}
    return found.pop() if len(found) == 1 else None


def _step_rows(loop: Loop) -> np.ndarray:
    """Launches of the optimizer's own step, without the clipping and unscaling before it."""
    rows = np.flatnonzero(
        loop.counted & loop.in_phase("optimizer") & (loop.rows.kind == 0) & (loop.rows.op >= 0)
    )
    zeroing = loop.host.ranges(r"^Optimizer\.zero_grad#")
    if len(zeroing):
        nesting = Nesting(zeroing.track, zeroing.ts_ns, zeroing.dur_ns)
        rows = rows[nesting.innermost(loop.rows.track[rows], loop.rows.launch_ts_ns[rows]) < 0]
    rows = rows[np.argsort(loop.rows.launch_ts_ns[rows], kind="stable")]
    clipping = loop.ops_named(_CLIPPING)
    in_clip = loop.under(clipping)[rows] >= 0
    kept = []
    for step in np.unique(loop.rows.step[rows]).tolist():
        own = np.flatnonzero(loop.rows.step[rows] == step)
        clips = np.flatnonzero(in_clip[own])
        start = int(clips[-1]) + 1 if len(clips) else 0
        # The clip's own scaling of the gradients follows its norm.
        while start < len(own) and len(clips) and _scales(loop, int(rows[own[start]])):
            start += 1
        kept.append(rows[own[start:]])
    return np.concatenate(kept) if kept else rows


def _scales(loop: Loop, row: int) -> bool:
    chain = loop.host.chain(int(loop.rows.op[row]))
    return bool(chain) and _SCALING.match(chain[-1]) is not None


def _fused_ns(loop: Loop, name: str, now_ns: float) -> tuple[Estimate, str]:
    """Device time of the fused step, and in words what it rests on."""
    trained = [tensor for tensor in loop.trained if tensor.numel]
    bandwidth = loop.device.bandwidth_bytes_per_s
    if trained and bandwidth:
        nbytes = (
            sum(tensor.numel * DTYPE_BYTES.get(tensor.dtype, 4) for tensor in trained) * _FUSED_ACCESSES[name]
        )
        reached = bandwidth * (_OF_COPY if loop.device.roofs == "measured" else _OF_DATASHEET)
        chunks = sum(math.ceil(tensor.numel / _CHUNK) for tensor in trained)
        launches = max(math.ceil(len(trained) / _TENSORS_A_LAUNCH), math.ceil(chunks / _CHUNKS_A_LAUNCH))
        likely = max(nbytes / reached * 1e9, launches * _LAUNCH_ON_DEVICE_NS)
        elements = sum(tensor.numel for tensor in trained)
        basis = (
            f"{elements / 1e6:,.1f} M parameters in {count(len(trained), 'tensor')}: {size(nbytes)} to move "
            f"once, at {rate(reached)}"
        )
        return Estimate.around(min(likely, now_ns), worse=1.4, better=0.85), basis
    ratio = _FUSED_ACCESSES[name] / _UNFUSED_ACCESSES[name]
    basis = (
        f"sizes are not recorded: {_FUSED_ACCESSES[name]} accesses an element "
        f"in place of {_UNFUSED_ACCESSES[name]}"
    )
    return Estimate.around(now_ns * ratio, worse=1.5, better=0.6), basis


def _operators(loop: Loop, rows: np.ndarray, most: int = 3) -> list[tuple[str, int]]:
    found = Counter((loop.host.chain(int(op)) or ["?"])[-1] for op in loop.rows.op[rows].tolist())
    return found.most_common(most)


def _host_between(loop: Loop, groups: list[np.ndarray]) -> Stretches:
    """The step's host work between its launches, less what a fused step needs itself.

    Python for each parameter, and operators that launch nothing: step counts are kept on the host.
    """
    needed_ns = (_FUSED_HOST_NS + _FUSED_HOST_A_TENSOR_NS * len(loop.trained)) / loop.real_time
    launched = np.argsort(loop.rows.launch_ts_ns, kind="stable")
    place = np.empty(len(launched), np.int64)
    place[launched] = np.arange(len(launched))
    found = []
    for group in groups:
        group = group[np.argsort(place[group])]
        begins, ends = loop.rows.launch_ts_ns[group[:-1]], loop.rows.launch_ts_ns[group[1:]]
        # Where something else is launched in between, another optimizer's batch say, it stays.
        own = np.diff(place[group]) == 1
        begins, ends = begins[own], ends[own]
        kept = np.cumsum(ends - begins) > needed_ns
        track = np.full(int(kept.sum()), loop.rows.track[group[0]], np.int32)
        found.append(Stretches(begins[kept], ends[kept], track))
    return Stretches.join(found)
