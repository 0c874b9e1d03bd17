"""Capture: how to record this loop so that the figures mean more. Told without a saving."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent

#: The profiler's usual cost with shapes on is 1.5 to 2.1 times the step; with stacks 2.1 to 2.7.
_HEAVY = 2.2
_FEW_STEPS = 2
_SPREAD = 0.15


@rule(
    "capture.stacks",
    title="The profiler's own cost is moderate",
    failure="Recording Python stacks distorts the step",
    source="H200, three models: step time with CUDA and CPU activity 1.6 to 2.0 times the un-profiled one, "
    "with stacks 2.1 to 2.7 times",
)
def stacks(loop: Loop) -> Iterator[Finding]:
    """With `with_stack=True` the profiler hooks every Python call: steps take 2.1 to 2.7 times as long, all
    of it host time. Stacks tell where a wait comes from, but times are better read off a capture without
    them.

    Recognised by Python frames in the trace. Silent where the profiled step is under 2.2 times the real
    one.
    """
    frames = len(loop.timeline.trace.python)
    loop.require(frames, "the trace has no Python frames")
    loop.require(loop.timeline.steps.source != "trace", "the trace marks no steps")
    profiled, baseline = loop.analysis.profiled_step_ns or 0.0, loop.analysis.baseline_ns
    if baseline and profiled < _HEAVY * baseline:
        return
    times = (
        f"{profiled / baseline:.1f} times the real step"
        if baseline
        else "usually 2.1 to 2.7 times the real one"
    )
    yield Finding(
        title=f"stacks were recorded: a step took {duration(profiled)} under the profiler, {times}",
        evidence=[f"{count(frames, 'Python frame')} in the trace"],
        edits=[],
        fix="Trainer(callbacks=[TrainingAdvisor()])      # records modules and phases without stacks",
        fix_torch="torch.profiler.profile(..., record_shapes=True, with_stack=False)",
        confidence="measured",
        note="a second capture with stacks is for reading where calls come from",
    )


@rule(
    "capture.steps",
    title="The captured steps agree with each other",
    failure="Too few steps, or unlike ones, were captured",
    source="docs/capture.md",
)
def steps(loop: Loop) -> Iterator[Finding]:
    """Figures of a step are medians over steady steps. From one or two, or from steps that differ by more
    than 15 %, they say little of the loop: batches of changing length, a cache that fills, another job on
    the machine.

    Silent where three or more steady steps agree.
    """
    loop.require(loop.timeline.steps.source == "profiler", "the trace marks no steps")
    times = loop.analysis.step_times_ns.astype(float)
    spread = float(times.std() / max(times.mean(), 1.0)) if len(times) > 1 else 0.0
    if loop.steps >= _FEW_STEPS and spread < _SPREAD:
        return
    wanted = 3 if spread < _SPREAD else 10
    listed = ", ".join(duration(time) for time in times[:8].tolist())
    yield Finding(
        title=f"{count(loop.steps, 'steady step')} captured"
        + (f", which differ by {percent(spread)}" if spread >= _SPREAD else ""),
        evidence=[f"step times: {listed}"],
        edits=[],
        fix=f"TrainingAdvisor(capture_steps={wanted})",
        fix_torch=f"torch.profiler.schedule(wait=10, warmup=3, active={wanted + 1})",
        confidence="measured",
        note="the savings of the other findings hold for the steps that were captured",
    )


@rule(
    "capture.shapes",
    title="Operators' shapes were recorded",
    failure="Operators' shapes were not recorded",
    source="torch.profiler documentation: record_shapes",
)
def shapes(loop: Loop) -> Iterator[Finding]:
    """Without the shapes of operators' arguments there are no FLOPs and no bytes: nothing is set against a
    roof, and the rules that need sizes cannot look.

    Silent where operators carry shapes, or where all kernels come from graphs.
    """
    args = loop.timeline.trace.ops.args
    loop.require(len(args), "the trace has no operators")
    sample = np.linspace(0, len(args) - 1, min(len(args), 500)).astype(int).tolist()
    if any(b'"Input Dims"' in bytes(args[i]) for i in sample):
        return
    yield Finding(
        title="shapes were not recorded: no kernel can be set against its roof",
        evidence=[f"{count(len(args), 'operator call')}, none with shapes"],
        edits=[],
        fix="Trainer(callbacks=[TrainingAdvisor()])      # records shapes",
        fix_torch="torch.profiler.profile(..., record_shapes=True)",
        confidence="measured",
        note="rules that need sizes had nothing to look at",
    )
