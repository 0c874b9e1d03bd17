"""Memory: room that is not used, and work that is done twice to save it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.advice.edits import Edit, Remove
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.recompute import host_of_checkpoints, recomputed_ops
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent, size

#: Below this share of the device's memory there is room; above the other there is none to give away.
_ROOM, _FULL = 0.5, 0.8
_IDLE, _SMALL_KERNELS = 0.15, 0.25
#: A backward that is forward operators for the most part is one that records its own graph (double backward).
_MOST_OF_BACKWARD = 0.55


@rule(
    "memory.room",
    title="The device's memory is in use",
    failure="A larger batch would fit and be cheaper for each sample",
    source="PyTorch documentation: torch.cuda.max_memory_allocated",
)
def room(loop: Loop) -> Iterator[Finding]:
    """A device that idles between small kernels does more work in nearly the same time: with twice the
    batch the same launches carry twice the samples.

    Recognised where peak memory, as the capture recorded it, is under half of the device's and the device
    idles for over 15 % of the step or spends a quarter of its time in kernels too small to fill it. No
    saving is told, since a step with more samples is not the same step. Silent in loops that keep the
    device busy, or that wait for a loader's workers, who would take longer for a larger batch; not applicable
    without the capture's figures.
    """
    peak, total = loop.peak_memory_bytes, loop.memory_bytes
    loop.require(peak and total, "peak memory was not recorded")
    assert peak
    assert total
    small = loop.flagged("latency") & loop.counted
    busy_ns = max(loop.per_step_ns(loop.counted), 1.0)
    small_share = loop.per_step_ns(small) / busy_ns
    idle = max(0.0, 1 - loop.busy_share)
    if peak > _ROOM * total or (idle < _IDLE and small_share < _SMALL_KERNELS):
        return
    if loop.replay.loader_ns:
        return
    batch = loop.setting("loader", "batch_size")
    known = isinstance(batch, int) and batch > 0
    # Parameters and states do not grow with the batch, so there is room for at least as much.
    times = max(2, int(0.85 * total / peak))
    times = 1 << min(times, 8).bit_length() - 1
    more = batch * times if known else f"{times} * batch_size"
    yield Finding(
        title=f"peak memory is {size(peak)} of {size(total)}, and the device idles {percent(idle)} "
        "of the step: a larger batch fits",
        evidence=[
            f"peak allocated: {percent(peak / total)} of the device's memory",
            f"the device idles {percent(idle)} of the step; kernels too small to fill it take "
            f"{percent(small_share)} of its time",
            f"{f'batch_size={batch}' if known else 'batch size not recorded'}: {times} times as much "
            "should fit",
        ],
        edits=[],
        fix=f"DataLoader(..., batch_size={more})" + (f"     # was {batch}" if known else "") + "\n"
        "# or: from lightning.pytorch.tuner import Tuner; Tuner(trainer).scale_batch_size(model)",
        fix_torch=f"DataLoader(..., batch_size={more})",
        risk="a larger batch changes training: learning rate and schedule have to follow",
        confidence="heuristic",
        note="told without a saving: it is the time for each sample that falls, not the step's",
    )


@rule(
    "memory.checkpointing",
    title="Nothing is computed twice for want of memory",
    failure="Activation checkpointing computes the forward again, and memory has room",
    source="Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016\n"
    "PyTorch documentation: torch.utils.checkpoint",
)
def checkpointing(loop: Loop) -> Iterator[Finding]:
    """Activation checkpointing drops activations in the forward and computes them again in backward: up to
    a third more work for a fraction of the memory. Where they fit, the work is for nothing.

    Recognised by operators inside backward that autograd numbers as it does the forward's own. With them goes
    the Python that calls them, and what the host does at the start of each checkpointed region. Silent where
    peak memory is above 80 % of the device's; where it was not recorded the finding is told as a guess.
    Checkpointing fewer layers gives back a part of it.
    """
    again = recomputed_ops(loop)
    rows = np.flatnonzero((loop.under(again) >= 0) & loop.counted)
    loop.require(loop.in_phase("backward").any(), "the loop has no backward")
    backward_ns = loop.per_step_ns(loop.in_phase("backward") & ~loop.analysis.collective)
    again_ns = loop.per_step_ns(rows)
    if not len(rows) or again_ns > _MOST_OF_BACKWARD * backward_ns:
        return
    host = host_of_checkpoints(loop, again)
    edits: list[Edit] = [Remove(rows), host] if host else [Remove(rows)]
    host_ns = loop.host_gain_ns(edits)
    launching = f", which the host takes {duration(host_ns)} to launch" if host_ns > again_ns else ""
    peak, total = loop.peak_memory_bytes, loop.memory_bytes
    if peak and total and peak > _FULL * total:
        return
    used = (
        f"peak memory is {size(peak)} of {size(total)}" if peak and total else "peak memory was not recorded"
    )
    yield Finding(
        title=f"checkpointing computes {duration(again_ns)} of forward twice in each step{launching}; {used}",
        evidence=[
            f"{count(len(rows) / loop.steps, 'kernel')} of {duration(again_ns)} a step, "
            f"{percent(again_ns / max(backward_ns, 1.0))} of backward's time",
            used,
            *_modules(loop, rows),
        ],
        edits=edits,
        fix="# without torch.utils.checkpoint around the block, gradient_checkpointing_enable() or\n"
        "# activation_checkpointing_policy=...; or around every second block only",
        risk="activations stay in memory until their backward: try the largest batch first",
        confidence="modelled" if peak and total and peak < _ROOM * total else "heuristic",
        note="" if peak and total else "whether the activations fit is not known",
    )


def _modules(loop: Loop, rows: np.ndarray, most: int = 4) -> list[str]:
    found: dict[str, float] = {}
    for row in rows.tolist():
        module = loop.module_of(row)
        if module:
            found[module] = found.get(module, 0.0) + float(loop.rows.dur_ns[row]) / loop.steps
    worst = sorted(found.items(), key=lambda item: -item[1])[:most]
    return [f"in {module}: {duration(took)} a step" for module, took in worst]
