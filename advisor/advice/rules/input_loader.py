"""Input: batches that come late."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from advisor.advice.batches import PIN_THREAD_BYTES_PER_S, TAKE_NS, loader_settings
from advisor.advice.edits import Estimate, HostTime, Input
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent, size

#: A smaller share of the step is not worth workers, or more of them: taking a ready batch takes its time too.
_WORTH, _WORTH_MORE = 0.02, 0.05
#: Where typical steps wait for less than this share of what all do on average, single steps wait for all.
_TYPICALLY = 0.5
_USUAL_WORKERS, _MOST_WORKERS = 8, 16


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
    steps; or, since workers run ahead while a profiler starts, by steps without it that are longer than host
    and device explain. The new step is played with a batch every `fetch time / workers`, and no sooner than
    one thread can move it into pinned memory. Silent where a fetch takes under 2 % of the step, or where the
    GPU is behind anyway so that the wait hides behind its work.
    """
    fetches = loop.host.fetches
    loop.require(len(fetches), "the trace shows no batch being fetched")
    workers = loop.setting("loader", "num_workers")
    workers = workers if isinstance(workers, int) else None
    in_process = fetches.in_process or workers == 0
    wait_ns = _fetch_ns(loop, in_process)
    share = loop.share(wait_ns * len(fetches) / loop.steps)
    if share < (_WORTH if in_process else _WORTH_MORE):
        return
    if not in_process and not loop.replay.loader_ns and _now_and_then(loop):
        yield _bursts(loop)
        return
    ready = Input(TAKE_NS, Estimate.exactly(0.0))
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
    floor = Estimate(*(moved / x * 1e9 for x in PIN_THREAD_BYTES_PER_S.cases))
    pinned_ns = float(floor.likely)
    large = pinned_ns > float(period.likely)
    period = Estimate(*(max(pair) for pair in zip(period.cases, floor.cases, strict=True)))
    who = "the training process makes each batch itself" if in_process else "its workers do not keep up"
    yield Finding(
        title=f"the DataLoader takes {duration(wait_ns)} of a {duration(loop.step_ns)} step: {who}",
        evidence=[
            f"{fetches.iterator or 'input phase'}: {duration(wait_ns)} a fetch, "
            f"{percent(min(share, 1.0))} of the step",
            *_unseen(loop),
            *loader_settings(loop),
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
        edits=[Input(TAKE_NS, period), _unwatched(loop)],
        fix=_loader_fix(loop, new, doubled=not in_process and not workers, hook=True),
        fix_torch=_loader_fix(loop, new, doubled=not in_process and not workers, hook=False),
        risk="each worker holds the dataset and a random state of its own (seed_everything(workers=True)), "
        "takes a CPU core and memory for its batches in flight",
        confidence="modelled" if in_process else "heuristic",
        note=""
        if in_process or workers
        else "how many workers there are is not in the trace: twice as many assumed",
    )


def _unseen(loop: Loop) -> list[str]:
    """What to know of workers that hold up the loop, but no fetch of the capture."""
    loader = loop.replay.graph.loader
    if not loop.replay.loader_ns or loader.waits:
        return []
    longest_ns = int((loader.end_ns - loader.start_ns).max(initial=0))
    return [
        f"in the capture no fetch takes more than {duration(longest_ns)}: it lives from the workers' queue, "
        "which filled while the profiler started; host and device alone would be faster than the loop is"
    ]


def _fetch_ns(loop: Loop, in_process: bool) -> float:
    """What a fetch takes without the profiler: made here, or waited for."""
    replay, fetches = loop.replay, loop.host.fetches
    if in_process and replay.fetch_ns:
        return replay.fetch_ns
    wait_ns = fetches.typical_ns * loop.real_time
    if replay.loader_ns:
        # Workers that set the pace do so in a capture as well that lives from their queue.
        ready = Input(TAKE_NS, Estimate.exactly(0.0))
        held_ns = (loop.step_ns - replay.step_ns([ready])) * loop.steps / len(fetches)
        wait_ns = max(wait_ns, held_ns)
    return wait_ns


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
            *loader_settings(loop),
        ],
        edits=[],
        fix=_loader_fix(loop, 0, doubled=True, hook=True),
        fix_torch=_loader_fix(loop, 0, doubled=True, hook=False),
        risk="each worker takes a CPU core and memory for its batches in flight",
        confidence="measured",
        note="savings are told for typical steps, in which no batch is late: late ones come on top",
    )


def _unwatched(loop: Loop) -> HostTime:
    """What is not known of the host's work outside the fetches.

    The profiler makes launching 2 to 3 times slower and a loader's own work hardly, and of an input-bound
    step only the sum without it is known: the rest may be shorter. Beside workers, which take cores and
    caches, it may be longer: a V100's host took 1.24 times as long for a launch beside four of them.
    """
    ops = loop.timeline.trace.ops
    outside = loop.host.in_steady_step(ops.ts_ns) & (loop.timeline.op_parent < 0)
    outside &= ~loop.host.fetches.around(ops.ts_ns, ops.track)
    slower = 0.65 if loop.analysis.baseline_ns else 1.0
    return HostTime(np.flatnonzero(outside), Estimate(1.2, 1.0, slower))


def _batch_bytes(loop: Loop) -> float:
    """Bytes that go to the device in a step."""
    known = loop.to_device & loop.counted & (loop.rows.bytes > 0)
    return float(loop.rows.bytes[known].sum()) / max(loop.steps, 1)


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

    def line(key: str, new: str) -> str:
        was = repr(loader.get(key, new))
        return f"{key}={new}," + (f"   # was {was}" if was != new and key in loader else "")

    number = "2 * num_workers" if doubled else str(workers)
    arguments = [
        "dataset,",
        f"batch_size={loader['batch_size']!r}," if loader.get("batch_size") else "...,",
        line("num_workers", number),
        line("pin_memory", "True"),
        line("persistent_workers", "True"),
        line("prefetch_factor", "4"),
    ]
    inner = "\n".join(f"    {argument}" for argument in arguments)
    if not hook:
        return f"loader = DataLoader(\n{inner}\n)"
    inner = inner.replace("\n", "\n    ")
    return f"def train_dataloader(self):\n    return DataLoader(\n    {inner}\n    )"
