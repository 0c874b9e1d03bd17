"""Loops for the rules' tests: one step written by hand, repeated, analysed and ready to be audited."""

from __future__ import annotations

from collections.abc import Callable

from advisor.advice.advise import saving_of
from advisor.advice.finding import Finding, Saving
from advisor.advice.loop import Loop
from advisor.advice.replay import Replay
from advisor.advice.rule import NotApplicable, find_rule
from advisor.roofline.analysis import analyse_timeline
from tests.trace.builder import Builder

START_US = 10_000


class Step:
    """What one step's script writes with: a builder, and times in µs from the step's own start."""

    def __init__(self, builder: Builder, start_us: float, number: int) -> None:
        self.builder, self.start, self.number = builder, start_us, number
        self._correlation = (number + 1) * 100_000
        self._free: dict[int, float] = {}

    def free_at(self, stream: int = 7) -> float:
        """When a stream is through with what was launched."""
        return self._free.get(stream, 0.0)

    def op(self, name: str, at: float, dur: float, **args) -> Step:
        """An operator."""
        self.builder.op(name, self.start + at, dur, **args)
        return self

    def range(self, name: str, at: float, dur: float) -> Step:
        """A range."""
        self.builder.range(name, self.start + at, dur)
        return self

    def launch(self, kernel: str, at: float, *, on_device: float, dur: float, **work) -> Step:
        """A launch `at` a time, and its kernel from `on_device` on, or when the stream is free."""
        self._correlation += 1
        call_us, name = work.pop("call_us", 2), work.pop("call", "cudaLaunchKernel")
        stream = work.get("stream", 7)
        on_device = max(on_device, self.free_at(stream) + 1)
        self._free[stream] = on_device + dur
        self.builder.call(self.start + at, correlation=self._correlation, name=name, dur=call_us)
        self.builder.work(kernel, self.start + on_device, dur, correlation=self._correlation, **work)
        return self

    def run(
        self, name: str, at: float, *, on_device: float, dur: float, kernel: str = "kernel", **args
    ) -> Step:
        """An operator of 10 µs with one kernel."""
        work = {key: args.pop(key) for key in ("cat", "stream", "bytes", "call", "call_us") if key in args}
        self.op(name, at, max(10.0, work.get("call_us", 0) + 4), **args)
        return self.launch(kernel, at + 2, on_device=on_device, dur=dur, **work)

    def copy_in(self, at: float, *, nbytes: int, dur: float, pinned: bool = False) -> Step:
        """Something goes to the device; from pageable memory the call returns when it is there."""
        kind = "Pinned" if pinned else "Pageable"
        call_us = 5 if pinned else max(self.free_at() + 1, at + 5) + dur + 2 - at
        return self.run(
            "aten::copy_", at, on_device=at + 5, dur=dur, kernel=f"Memcpy HtoD ({kind} -> Device)",
            cat="gpu_memcpy", bytes=nbytes, call="cudaMemcpyAsync", call_us=call_us,
        )  # fmt: skip

    def call(self, name: str, at: float, dur: float) -> Step:
        """A runtime call that starts nothing."""
        self._correlation += 1
        self.builder.call(self.start + at, correlation=self._correlation, name=name, dur=dur)
        return self

    def wait(self, at: float) -> Step:
        """The host waits for all that was launched."""
        return self.call("cudaDeviceSynchronize", at, max(3, self.free_at() + 4 - at))


def loop_of(
    script: Callable[[Step], object],
    *,
    step_us: float = 1000,
    count: int = 4,
    baseline: bool = True,
    builder: Builder | None = None,
    **context,
) -> Loop:
    """A loop of `count` equal steps of `step_us`; with `baseline` they take no longer un-profiled."""
    builder = builder or Builder()
    for i in range(count):
        start = START_US + i * step_us
        builder.step(i, start, step_us)
        script(Step(builder, start, i))
    if context:
        builder.context(**context)
    analysis = analyse_timeline(builder.join(), baseline_step_ms=step_us / 1000 if baseline else None)
    return Loop(analysis, Replay(analysis))


def audit(rule: str, loop: Loop) -> list[Finding]:
    """What a rule finds."""
    return list(find_rule(rule).audit(loop))


def applies(rule: str, loop: Loop) -> bool:
    """Whether the loop has the rule's subject."""
    try:
        audit(rule, loop)
    except NotApplicable:
        return False
    return True


def saving(finding: Finding, loop: Loop) -> Saving:
    """What a finding saves, in µs a step."""
    found = saving_of(finding.edits, loop.replay)
    return Saving(found.low_ns / 1e3, found.likely_ns / 1e3, found.high_ns / 1e3)


def training(step: Step, *, at: float = 0, kernel_us: float = 40, forward: int = 3) -> float:
    """A forward of a few products and its backward; returns the time at which the host is through."""
    t = at
    for _ in range(forward):
        step.run("aten::mm", t, on_device=t + 10, dur=kernel_us, kernel="gemm")
        t += 20
    for _ in range(forward):
        name = "autograd::engine::evaluate_function: MmBackward0"
        step.op(name, t, 18)
        step.run("aten::mm", t + 2, on_device=t + 12, dur=kernel_us, kernel="gemm")
        t += 20
    return t
