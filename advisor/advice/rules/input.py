"""Input: batches that come late, and copies to the device that cost more than the link."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from advisor.advice.edits import DropSync, Edit, Estimate, HostTime, Input, Retime
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent, rate, size
from advisor.roofline.launch_class import PAGEABLE_COPY

#: A smaller share of the step is not worth workers, or more of them: taking a ready batch takes its time too.
_WORTH, _WORTH_MORE = 0.02, 0.05
#: Where typical steps wait for less than this share of what all do on average, single steps wait for all.
_TYPICALLY = 0.5
_USUAL_WORKERS, _MOST_WORKERS = 8, 16
#: Taking a ready batch from the queue of the workers.
_TAKE_NS = Estimate(600_000.0, 200_000.0, 50_000.0)
#: One thread's copy from the workers' shared memory, mapped anew for each batch, into pinned memory: an
#: H200's driver staged 38 MB batches from there at 5.2 GB/s, and 3 MB ones that the process had made at 9.5
#: GB/s. The slow end is an older host's.
_PIN_THREAD_BYTES_PER_S = Estimate(4.5e9, 7e9, 15e9)
#: The same by all threads of the process that made the batch; 46 GB/s for 134 MB on an H200's host.
_PIN_IN_PROCESS_BYTES_PER_S = Estimate(8e9, 25e9, 50e9)
#: Of the link's rate in the datasheet; 55 of 63 GB/s measured from pinned memory on an H200.
_LINK_REACHED = Estimate(0.5, 0.82, 0.9)
_COPY_START_NS = 2_000.0
#: Copies of less are latency, not data.
_SMALL_BYTES = 1 << 16


@rule(
    "input.dataloader",
    title="Batches are ready in time",
    failure="The loop waits for batches",
    source="torch.utils.data documentation: single- and multi-process data loading",
)
def dataloader(loop: Loop) -> Iterator[Finding]:
    """The training process waits in the DataLoader's `__next__`, and the GPU with it.

    With `num_workers=0` the process that launches kernels also reads, decodes, augments and collates each
    batch. Workers do that in parallel and ahead of time: the wait falls to the time of taking a finished
    batch from a queue, as long as `fetch time / workers` is shorter than the rest of the step. With workers
    that do not keep up, more are needed, or cheaper samples.

    Recognised by the DataLoader's own ranges (or the capture's input phase, for another iterable) in steady
    steps. The new step is played with a batch every `fetch time / workers`, and no sooner than one thread
    can move it into pinned memory. Silent where a fetch takes under 2 % of the step, or where the GPU is
    behind anyway so that the wait hides behind its work.
    """
    fetches = loop.host.fetches
    loop.require(len(fetches), "the trace shows no batch being fetched")
    workers = loop.setting("loader", "num_workers")
    workers = workers if isinstance(workers, int) else None
    in_process = fetches.in_process or workers == 0
    wait_ns = fetches.typical_ns * loop.real_time
    share = loop.share(wait_ns * len(fetches) / loop.steps)
    if share < (_WORTH if in_process else _WORTH_MORE):
        return
    if not in_process and _now_and_then(loop):
        yield _bursts(loop)
        return
    ready = Input(_TAKE_NS, Estimate.exactly(0.0))
    rest_ns = loop.replay.step_ns([ready])
    # Where workers are behind, each step waits for one batch: it takes all of them together a step's time.
    made_ns = wait_ns if in_process else loop.step_ns * (workers or 1)
    needed = max(2, math.ceil(1.2 * made_ns / rest_ns))
    if in_process:
        new = min(needed, _USUAL_WORKERS)
    elif workers:
        new = min(max(needed, workers + 2), max(_MOST_WORKERS, 2 * workers))
    else:
        new = 2  # times as many as now, whatever that is
    most = max(new, min(needed, _MOST_WORKERS))
    # Workers share caches and memory, and each has but one thread where the process had many.
    period = Estimate(1.8 * made_ns / new, 1.05 * made_ns / new, 0.9 * made_ns / most)
    moved = _batch_bytes(loop)
    floor = Estimate(*(moved / x * 1e9 for x in _PIN_THREAD_BYTES_PER_S.cases))
    pinned_ns = float(floor.likely)
    large = pinned_ns > float(period.likely)
    period = Estimate(*(max(pair) for pair in zip(period.cases, floor.cases, strict=True)))
    who = "the training process makes each batch itself" if in_process else "its workers do not keep up"
    yield Finding(
        title=f"the DataLoader takes {duration(wait_ns)} of a {duration(loop.step_ns)} step: {who}",
        evidence=[
            f"{fetches.iterator or 'input phase'}: {duration(wait_ns)} a fetch, "
            f"{percent(min(share, 1.0))} of the step",
            *_settings(loop),
            *_inside(loop),
            f"{size(moved)} a step go to the device" if moved else "no copy to the device was seen",
            f"without the wait a step would take {duration(rest_ns)}; to keep that up takes about "
            f"{needed if in_process or workers else 'twice as many'} workers",
            *(
                [f"moving a batch through one thread takes about {duration(pinned_ns)}: send fewer bytes"]
                if large
                else []
            ),
        ],
        edits=[Input(_TAKE_NS, period), _unwatched(loop)],
        fix=_loader_fix(loop, new, doubled=not in_process and not workers, hook=True),
        fix_torch=_loader_fix(loop, new, doubled=not in_process and not workers, hook=False),
        risk="each worker holds the dataset and a random state of its own (seed_everything(workers=True)), "
        "takes a CPU core and memory for its batches in flight",
        confidence="modelled" if in_process else "heuristic",
        note=""
        if in_process or workers
        else "how many workers there are is not in the trace: twice as many assumed",
    )


def _now_and_then(loop: Loop) -> bool:
    """Whether typical steps hardly wait, and others do: workers that fall behind are late every n-th time."""
    loader, fetches = loop.replay.graph.loader, loop.host.fetches
    typical_ns = float((loader.end_ns - loader.start_ns).mean()) if len(loader.start_ns) else 0.0
    return typical_ns < _TYPICALLY * fetches.typical_ns


def _bursts(loop: Loop) -> Finding:
    fetches, times = loop.host.fetches, loop.analysis.step_times_ns
    took_ns = (fetches.end_ns - fetches.start_ns).astype(float)
    late = int((took_ns > _TYPICALLY * fetches.typical_ns).sum())
    longest = duration(float(took_ns.max()))
    return Finding(
        title=f"{count(late, 'fetch', 'wait', what=f'of {len(fetches)}')} for the workers, up to {longest}: "
        f"a step takes {duration(float(times.mean()))} on average and {duration(float(np.median(times)))} "
        "typically",
        evidence=[
            f"{fetches.iterator}: {duration(fetches.typical_ns)} a fetch on average, "
            f"{duration(float(np.median(took_ns)))} in the median",
            *_settings(loop),
        ],
        edits=[],
        fix=_loader_fix(loop, 0, doubled=True, hook=True),
        fix_torch=_loader_fix(loop, 0, doubled=True, hook=False),
        risk="each worker takes a CPU core and memory for its batches in flight",
        confidence="measured",
        note="savings are told for typical steps, in which no batch is late: late ones come on top",
    )


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
            *_settings(loop),
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


def _unwatched(loop: Loop) -> HostTime:
    """What is not known of the host's work outside the fetches.

    The profiler makes launching 1.5 to 2 times slower and a loader's own work hardly, and of an input-bound
    step only the sum without it is known: the rest may be shorter. Beside workers, which take cores and
    caches, it may be longer: a V100's host took 1.24 times as long for a launch beside four of them.
    """
    ops = loop.timeline.trace.ops
    outside = loop.host.in_steady_step(ops.ts_ns) & (loop.timeline.op_parent < 0)
    outside &= ~loop.host.fetches.around(ops.ts_ns, ops.track)
    slower = 0.65 if loop.analysis.baseline_ns else 1.0
    return HostTime(np.flatnonzero(outside), Estimate(1.2, 1.0, slower))


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


def _batch_bytes(loop: Loop) -> float:
    """Bytes that go to the device in a step."""
    copies, _ = _to_device_copies(loop)
    known = copies & loop.counted & (loop.rows.bytes > 0)
    return float(loop.rows.bytes[known].sum()) / max(loop.steps, 1)


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
    period = Estimate(*(max(nbytes / x * 1e9, loader.period_ns) for x in _PIN_THREAD_BYTES_PER_S.cases))
    return Input(Estimate(own_ns, min(own_ns, float(_TAKE_NS.likely)), float(_TAKE_NS.optimistic)), period)


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


def _settings(loop: Loop) -> list[str]:
    loader = loop.setting("loader")
    if not isinstance(loader, dict):
        return []
    keys = ("batch_size", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    given = ", ".join(f"{key}={loader[key]!r}" for key in keys if loader.get(key) is not None)
    return [f"now: {loader.get('class') or 'DataLoader'}({given})"]


def _inside(loop: Loop, most: int = 3) -> list[str]:
    """What runs inside the fetches, by operator; the rest is Python, files and decoding."""
    fetches, ops = loop.host.fetches, loop.timeline.trace.ops
    inside = fetches.around(ops.ts_ns, ops.track)
    outermost = inside & ~np.append(inside, False)[loop.timeline.op_parent]
    total = float((fetches.end_ns - fetches.start_ns).sum())
    if not outermost.any() or not total:
        return []
    times = np.bincount(ops.name[outermost], ops.dur_ns[outermost])
    counts = np.bincount(ops.name[outermost])
    found = []
    for name in np.argsort(-times, kind="stable")[:most].tolist():
        if times[name] > 0.03 * total:
            what = (
                " (collate: return whole batches, or collate into a buffer)" if _collates(loop, name) else ""
            )
            found.append(
                f"in it {loop.timeline.trace.names[name]}: {percent(times[name] / total)} of the time in "
                f"{count(counts[name] / len(fetches), 'call')}{what}"
            )
    return found


def _collates(loop: Loop, name: int) -> bool:
    return loop.timeline.trace.names[name] in ("aten::stack", "aten::cat")


def _loader_fix(loop: Loop, workers: int, *, doubled: bool, hook: bool) -> str:
    loader = loop.setting("loader")
    loader = loader if isinstance(loader, dict) else {}

    def was(key: str) -> str:
        return f"   # was {loader[key]!r}" if key in loader else ""

    number = "2 * num_workers" if doubled else str(workers)
    arguments = [
        "dataset,",
        f"batch_size={loader['batch_size']!r}," if loader.get("batch_size") else "...,",
        f"num_workers={number},{was('num_workers')}",
        f"pin_memory=True,{was('pin_memory')}",
        f"persistent_workers=True,{was('persistent_workers')}",
        f"prefetch_factor=4,{was('prefetch_factor')}",
    ]
    inner = "\n".join(f"    {line}" for line in arguments)
    if not hook:
        return f"loader = DataLoader(\n{inner}\n)"
    inner = inner.replace("\n", "\n    ")
    return f"def train_dataloader(self):\n    return DataLoader(\n    {inner}\n    )"
