"""Training steps that follow a script, run by a small simulator that writes down what a profiler would see.

    steps = Script(lambda step: (step.work(50), step.launch(200), step.sync()))
    replay = steps.replay()

It is the tests' own idea of host, streams and waits, apart from the replay's; times in µs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from advisor.advice.replay import Replay
from advisor.roofline.analysis import analyse_timeline
from tests.trace.builder import BACKWARD, MAIN, Builder

#: A launching operator takes this long; its call begins and ends within it at these times.
OP, CALL_AT, CALL = 8, 3, 2
#: From a call to the kernel on an idle stream; between kernels of a stream; a synchronisation's own cost,
#: and its return after the end of the work.
LATENCY, GAP, SYNC, RETURN = 5, 1, 3, 4
COMPUTE, SIDE = 7, 20
#: Calls that a profiler records of one stream's waiting for another: both, or only the second.
RECORDED, UNRECORDED = ("cudaEventRecord", "cudaStreamWaitEvent"), ("cudaStreamWaitEvent",)
_EPOCH = 1_000_000


class Script:
    """Runs `step` again and again and records the last of the runs.

    Args:
        step: called with this object; makes one step of calls to its methods.
        recorded: steps to record, besides one before them.
        warm: steps to run unrecorded.
        depth: launches in flight at which a launch waits.
        workers_us: time between batches of the loader's workers.
        dur: changes the duration of a kernel, by its number within the step.
    """

    def __init__(
        self,
        step: Callable[[Script], object],
        *,
        recorded: int = 2,
        warm: int = 20,
        depth: int = 1024,
        workers_us: float = 0,
        dur: Callable[[int, float], float] = lambda number, us: us,
    ) -> None:
        self.now, self.builder = float(_EPOCH), Builder()
        self._free: dict[int, float] = {}
        self._began: list[float] = []
        self._depth, self._workers, self._dur = depth, workers_us, dur
        self._ready = 0.0
        self._correlation = 0
        self._recording = False
        self._unseen: list[dict[str, Any]] = []
        ends, device = [], []
        for number in range(warm + 1 + recorded):
            self._recording, self._number, begin = number >= warm, 0, self.now
            step(self)
            if self._recording:
                self.builder.on(MAIN).step(number, begin, self.now - begin)
            ends.append(self.now)
            device.append(max(self._free.values(), default=0.0))
        self._orphans(ends[warm - 1])
        #: Time of a step once it is steady.
        self.period_us = max(ends[-1] - ends[-1 - recorded], device[-1] - device[-1 - recorded]) / recorded

    def replay(self, **options: float) -> Replay:
        """A replay of what was recorded."""
        return Replay(analyse_timeline(self.builder.join(), **options))

    def free(self, stream: int = COMPUTE) -> float:
        """When a stream will be through with what has been launched on it."""
        return self._free[stream]

    def _emit(self, method: str, /, *args: object, **named: object) -> None:
        if self._recording:
            getattr(self.builder, method)(*args, **named)

    def work(self, us: float) -> None:
        """Python on the host."""
        self.now += us

    def op(self, us: float, name: str = "aten::view") -> None:
        """An operator that launches nothing."""
        self._emit("op", name, self.now, us)
        self.now += us

    def launch(self, us: float, stream: int = COMPUTE, op: str = "aten::mm", kernel: str = "gemm") -> None:
        """An operator with one kernel."""
        start = self.now
        waited = self._room()
        call = start + CALL_AT
        self._device(kernel, call, call + waited, us, stream, CALL + waited)
        self.now = start + OP + waited
        self._emit("op", op, start, OP + waited)

    def graph(self, *us: float) -> None:
        """One call that launches these kernels one after the other."""
        self._correlation += 1
        ready = self.now + LATENCY
        self._emit("call", self.now, correlation=self._correlation, name="cudaGraphLaunch", dur=CALL)
        for each in us:
            self._work("in_graph", ready, each, COMPUTE, "kernel")
        self.now += CALL

    def copy(self, us: float, *, blocking: bool) -> None:
        """A copy to the device; a blocking one holds the host until it is through."""
        start, call = self.now, self.now + CALL_AT
        kind = "Pageable" if blocking else "Pinned"
        self._correlation += 1
        end = self._work(
            f"Memcpy HtoD ({kind} -> Device)", call + LATENCY, us, COMPUTE, "gpu_memcpy", bytes=4096
        )
        length = max(end + RETURN - call, SYNC) if blocking else CALL
        self._emit("call", call, correlation=self._correlation, name="cudaMemcpyAsync", dur=length)
        self._emit("op", "aten::copy_", start, CALL_AT + length + 3)
        self.now = call + length + 3

    def sync(self, stream: int | None = COMPUTE, name: str = "", until: float | None = None) -> None:
        """Wait for a stream, for all of them, or until some time, in a call of this name."""
        free = max(self._free.values()) if stream is None else self._free.get(stream, 0.0)
        end = max(self.now + SYNC, (free if until is None else until) + RETURN)
        name = name or ("cudaDeviceSynchronize" if stream is None else "cudaStreamSynchronize")
        self._correlation += 1
        self._emit("call", self.now, correlation=self._correlation, name=name, dur=end - self.now)
        self.now = end

    def wait(self, stream: int, on: int, calls: tuple[str, ...] = RECORDED) -> None:
        """Let a stream wait for what has been launched on another; the last launch must be on that one."""
        for name in calls:
            self._correlation += 1
            self._emit("call", self.now, correlation=self._correlation, name=name, dur=1)
            self.now += 1
        self._free[stream] = max(self._free.get(stream, 0.0), self._free.get(on, 0.0))

    def fetch(self, us: float, *, workers: bool = True) -> None:
        """Ask the loader for a batch, which costs this much besides waiting for the workers."""
        self._ready = max(self._ready + self._workers, 0.0 if self._ready else self.now)
        end = max(self.now + us, self._ready if workers else 0.0)
        kind = "_MultiProcessingDataLoaderIter" if workers else "_SingleProcessDataLoaderIter"
        self._emit("range", f"enumerate(DataLoader)#{kind}.__next__", self.now, end - self.now)
        self.now = end

    def backward(self, body: Callable[[], object]) -> None:
        """What the autograd engine's thread does while the main one waits."""
        if self._recording:
            self.builder.on(BACKWARD)
        start = self.now
        body()
        self._emit("op", "autograd::engine::evaluate_function: MmBackward0", start, self.now - start)
        if self._recording:
            self.builder.on(MAIN)

    def _orphans(self, since: float) -> None:
        """Work launched before the recording that the profiler still sees."""
        for event in self._unseen:
            if event["ts"] + event["dur"] > since:
                self.builder.work(**event, correlation=None)

    def _room(self) -> float:
        if len(self._began) < self._depth:
            return 0.0
        return max(self._began[-self._depth] - (self.now + CALL_AT), 0.0)

    def _device(self, kernel: str, call: float, ready: float, us: float, stream: int, length: float) -> None:
        self._correlation += 1
        self._emit("call", call, correlation=self._correlation, dur=length)
        self._work(kernel, ready + LATENCY, us, stream, "kernel")

    def _work(self, name: str, ready: float, us: float, stream: int, cat: str, **args: object) -> float:
        us = self._dur(self._number, us)
        self._number += 1
        start = max(ready, self._free.get(stream, -1e9) + GAP)
        self._began.append(start)
        event = {"name": name, "ts": start, "dur": us, "stream": stream, "cat": cat}
        if self._recording:
            self.builder.work(**event, correlation=self._correlation, **args)
        else:
            self._unseen.append(event)
        self._free[stream] = start + us
        return start + us


def rows_named(replay: Replay, text: str) -> np.ndarray:
    """Recorded launches whose kernel's name holds this text."""
    timeline = replay.graph.analysis.timeline
    names = timeline.trace.names
    named = np.array([text in names[i] for i in timeline.launches.name.tolist()])
    return np.flatnonzero(named & (timeline.launches.launch_ts_ns >= 0))


def us(ns: float) -> float:
    """In µs."""
    return ns / 1e3
