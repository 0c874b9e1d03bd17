"""Input: copies to the device that cost more than the link."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.advice.batches import PIN_THREAD_BYTES_PER_S, TAKE_NS, loader_settings
from advisor.advice.edits import DropSync, Edit, Estimate, Input, Retime
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, rate, size
from advisor.roofline.launch_class import PAGEABLE_COPY

#: Into pinned memory by all threads of the process that made the batch; 46 GB/s for 134 MB on an H200's host.
_PIN_IN_PROCESS_BYTES_PER_S = Estimate(8e9, 25e9, 50e9)
#: Of the link's rate in the datasheet; 55 of 63 GB/s measured from pinned memory on an H200.
_LINK_REACHED = Estimate(0.5, 0.82, 0.9)
_COPY_START_NS = 2_000.0
#: Copies of less are latency, not data.
_SMALL_BYTES = 1 << 16


@rule(
    "input.pageable_copy",
    title="Batches go to the device from pinned memory",
    failure="Batches are copied from pageable memory, or the host waits for their copies",
    source="CUDA C++ Best Practices Guide: pinned memory\nPyTorch tutorial: pin_memory and non_blocking",
)
def pageable_copy(loop: Loop) -> Iterator[Finding]:
    """A copy from pageable host memory is staged by the driver through a small pinned buffer.

    It runs at a fraction of the link's rate, and the host stands still meanwhile: it cannot launch the next
    step's kernels, so a loop that was ahead of the GPU falls in step with it. With `pin_memory=True` the
    loader hands over page-locked batches, and `non_blocking=True` copies (Lightning's own default) return
    at once and run at the link's rate. On the same stream they still take their time before the first
    kernel.

    The new time is bytes over the measured rate of the link (`advisor calibrate`), or 82 % of the
    datasheet's. Pinning costs a copy on the host: with workers in a thread that can limit the loop, else in
    the training process; both are played. Silent where batches come from pinned memory without a wait, or
    are small.
    """
    copies, waits = _to_device_copies(loop)
    loop.require(copies.any(), "the trace shows no copy from the host to the device")
    link = loop.device.measured_links.get("to_device_pinned")
    reached = (
        Estimate(link * 0.8, link, link) if link else _scaled(_LINK_REACHED, loop.device.link_bytes_per_s)
    )
    loop.require(reached is not None, "the rate of the host link is not known")
    assert reached is not None
    pageable = copies & (loop.analysis.classes == PAGEABLE_COPY)
    blocking = copies & ~pageable & np.isin(loop.host.call_of, waits[:, 0])
    rows = np.flatnonzero(loop.counted & (pageable | blocking) & (loop.rows.bytes >= _SMALL_BYTES))
    moved = loop.rows.bytes[rows].astype(float)
    calls = _with_waits(loop, rows, waits)
    held_ns = float(loop.timeline.trace.runtime.dur_ns[calls].sum()) / loop.steps
    took_ns = loop.per_step_ns(rows)
    if not len(rows) or max(held_ns, took_ns) < 0.01 * loop.step_ns:
        return
    slower = pageable[rows]
    new = Estimate(
        *(
            np.where(
                slower,
                np.minimum(moved / by * 1e9 + _COPY_START_NS, loop.rows.dur_ns[rows]),
                loop.rows.dur_ns[rows],
            )
            for by in reached.cases
        )
    )
    edits: list[Edit] = [Retime(rows, new), DropSync(calls)]
    pinning = _pinning(loop, moved.sum() / loop.steps) if slower.any() else None
    if pinning is not None:
        edits.append(pinning)
    speed = moved.sum() / max(loop.rows.dur_ns[rows].sum(), 1) * 1e9
    kind = "pageable" if slower.any() else "pinned, but blocking,"
    yield Finding(
        title=f"{size(moved.sum() / loop.steps)} a step are copied from {kind} memory at {rate(speed)} "
        f"and hold the host for {duration(held_ns)}",
        evidence=[
            *_largest_of_last_step(loop, rows),
            f"the host stands in these copies for {duration(held_ns)} a step",
            f"from pinned memory the link gives about {rate(float(reached.likely))}"
            + (" (measured)" if link else f" ({loop.device.link_source})"),
            *loader_settings(loop),
        ],
        edits=edits,
        fix="DataLoader(..., pin_memory=True)   # was "
        f"{_shown(loop.setting('loader', 'pin_memory'))}; Lightning copies with non_blocking=True by itself\n"
        "# a batch of your own class needs a pin_memory() method; a batch made by hand: tensor.pin_memory()",
        fix_torch="loader = DataLoader(..., pin_memory=True)\n"
        "for batch in loader:\n"
        "    batch = batch.to(device, non_blocking=True)",
        risk="page-locked memory cannot be swapped out: a few batches of it; change a pinned batch in place "
        "only after its copy is through",
        confidence="modelled",
    )


@rule(
    "input.made_on_host",
    title="What the step needs is made on the device",
    failure="Small tensors are made on the host and sent to the device within the step",
    source="PyTorch Performance Tuning Guide: create tensors directly on the target device",
)
def made_on_host(loop: Loop) -> Iterator[Finding]:
    """A tensor made on the host inside the step (`torch.arange(n).to(device)`, a mask, a Python number that
    a metric or `self.log` turns into a tensor) travels by a small copy from pageable memory, and the host
    waits until the GPU has come that far.

    `device=` at the call makes it by one short kernel without a wait; what never changes belongs into a
    buffer. Recognised by small copies from the host after the first kernel of a step. Silent about copies
    before it, which are the batch's, and about copies in a batch's own fetch.
    """
    copies, waits = _to_device_copies(loop)
    loop.require(copies.any(), "the trace shows no copy from the host to the device")
    first = loop.first_kernel_ns
    step = np.maximum(loop.rows.step, 0)
    small = (loop.rows.bytes >= 0) & (loop.rows.bytes < _SMALL_BYTES)
    late = (loop.rows.step >= 0) & (loop.rows.launch_ts_ns > first[step])
    rows = np.flatnonzero(copies & loop.counted & small & late)
    if not len(rows):
        return
    calls = _with_waits(loop, rows, waits)
    held_ns = float(loop.timeline.trace.runtime.dur_ns[calls].sum()) / loop.steps
    each = len(rows) / loop.steps
    yield Finding(
        title=f"{count(each, 'small tensor')} a step made on the host within it: "
        f"sending them holds it for {duration(held_ns)}",
        evidence=_places(loop, rows),
        edits=[
            Retime(
                rows,
                Estimate.around(
                    np.minimum(loop.rows.dur_ns[rows].astype(float), 2_000.0), worse=1.0, better=0.8
                ),
            ),
            DropSync(calls),
        ],
        fix="positions = torch.arange(n, device=self.device)       # was torch.arange(n).to(self.device)\n"
        'self.register_buffer("mask", mask, persistent=False)  # once, for what never changes\n'
        'self.log("ratio", ratio)                              # a device tensor; floats every n steps only',
        fix_torch="positions = torch.arange(n, device=x.device)",
        confidence="measured",
    )


def _scaled(estimate: Estimate, factor: float | None) -> Estimate | None:
    return None if factor is None else Estimate(*(part * factor for part in estimate.cases))


def _shown(value: object) -> str:
    return "not set" if value is None else repr(value)


def _to_device_copies(loop: Loop) -> tuple[np.ndarray, np.ndarray]:
    """bool (launches,): copies from host to device; and pairs (launching call, waiting call) of one
    operator."""
    copies = loop.to_device
    host, waiting = loop.host, loop.host.calls_named(r"(Stream|Device|Event)Synchronize")
    launched = host.call_of[copies & (host.call_of >= 0)]
    by_op = {
        int(op): int(call)
        for call, op in zip(launched.tolist(), host.op[launched].tolist(), strict=True)
        if op >= 0
    }
    pairs = [
        (by_op[op], call) for call in np.flatnonzero(waiting).tolist() if (op := int(host.op[call])) in by_op
    ]
    return copies, np.array(pairs, np.int64).reshape(-1, 2)


def _with_waits(loop: Loop, rows: np.ndarray, waits: np.ndarray) -> np.ndarray:
    """Calls that launch these copies, and those that wait for them."""
    own = loop.host.call_of[rows]
    return np.concatenate([own[own >= 0], waits[np.isin(waits[:, 0], own), 1]])


def _pinning(loop: Loop, nbytes: float) -> Input | None:
    """What pinning adds to the fetches; None where no loader is seen that could pin."""
    fetches = loop.host.fetches
    if not len(fetches):
        return None
    now_ns = fetches.typical_ns * loop.real_time
    nbytes /= max(len(fetches) / loop.steps, 1)
    if fetches.in_process:
        by = _PIN_IN_PROCESS_BYTES_PER_S.cases
        return Input(Estimate(*(now_ns + nbytes / x * 1e9 for x in by)), Estimate.exactly(0.0))
    # A thread beside them pins; workers that are behind stay so.
    loader = loop.replay.graph.loader
    own_ns = float(loader.own_ns.mean()) if loader.waits else now_ns
    period = Estimate(*(max(nbytes / x * 1e9, loop.replay.loader_ns) for x in PIN_THREAD_BYTES_PER_S.cases))
    return Input(Estimate(own_ns, min(own_ns, float(TAKE_NS.likely)), float(TAKE_NS.optimistic)), period)


def _largest_of_last_step(loop: Loop, rows: np.ndarray, most: int = 3) -> list[str]:
    last = rows[loop.rows.step[rows] == loop.rows.step[rows].max()]
    last = last[np.argsort(-loop.rows.bytes[last], kind="stable")][:most]
    return [
        f"{loop.timeline.trace.names[name]}: {size(nbytes)} in {duration(dur_ns)}, "
        f"{rate(nbytes / max(dur_ns, 1) * 1e9)}"
        for name, nbytes, dur_ns in zip(
            loop.rows.name[last], loop.rows.bytes[last], loop.rows.dur_ns[last], strict=True
        )
    ]


def _places(loop: Loop, rows: np.ndarray, most: int = 6) -> list[str]:
    """Where small copies come from: module or Python frame, operator and size, in the last step."""
    found = []
    for row in rows[loop.rows.step[rows] == loop.rows.step[rows].max()].tolist():
        ts, track = int(loop.rows.launch_ts_ns[row]), int(loop.rows.track[row])
        place = loop.host.frame(ts, track) or loop.module_of(row)
        call = loop.host.call_of[row]
        held = f", host held {duration(loop.timeline.trace.runtime.dur_ns[call])}" if call >= 0 else ""
        operator = (loop.host.chain(int(loop.rows.op[row])) or ["copy"])[-1]
        found.append(f"{operator} of {size(loop.rows.bytes[row])}{held}" + (f" in {place}" if place else ""))
    return found[:most] + ([f"and {len(found) - most} more"] if len(found) > most else [])
