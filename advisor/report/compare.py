"""Two reports beside each other: what changed, and whether it is more than noise."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from advisor.report import format as fmt
from advisor.report.model import KernelGroup, Report, Struct
from advisor.report.noise import (
    DEVICE_FLOOR,
    HOST_FLOOR,
    error_fraction,
    floor_of,
    host_limits,
    noise_fraction,
)

#: With less of all work than this in what occurs on both sides, the two are hardly runs of one program.
_IN_COMMON = 0.1
#: Above this noise, the steps are what to look at first.
_LOUD = 0.2
#: Modules tell places apart where both sides have them for this share of the kernels' time.
_KNOWN_MODULES = 0.5


class Side(Struct, kw_only=True):
    """One of the two."""

    #: As given.
    path: str
    #: Of its device.
    device: str
    #: Median, in ms; null without steps.
    step_ms: float | None
    #: Standard error of `step_ms` over it, from the spread of the steps; null with fewer than two. Where
    #: `step_ms` was given as one figure, that of the profiled steps.
    step_error_fraction: float | None
    #: The report's own verdict.
    verdict: str


class Change(Struct, kw_only=True):
    """One figure on both sides."""

    #: What it is.
    name: str
    #: Of both: ``ms``, ``bytes``, or empty for a fraction or a count.
    unit: str
    #: Null where it is not known.
    before: float | None
    #: Null where it is not known.
    after: float | None

    @property
    def difference(self) -> float | None:
        """After less before; None where either is not known."""
        return None if self.before is None or self.after is None else self.after - self.before


class KernelChange(Struct, kw_only=True):
    """Work of one operator in one kind of module and phase, on both sides."""

    #: Operator; the kernel's name where there is none.
    op: str
    #: Module path with layer numbers as ``*``; null outside any module.
    module: str | None
    #: As in the report.
    phase: str
    #: In ms per step; 0 where it does not occur.
    before_ms: float
    #: In ms per step; 0 where it does not occur.
    after_ms: float
    #: Launches a step.
    before_calls: float
    #: Launches a step.
    after_calls: float
    #: appeared, vanished, faster, slower or same.
    change: str
    #: Kernels that did most of the work, before and after; empty where it does not occur.
    kernels: list[str]


class Comparison(Struct, kw_only=True):
    """Two reports beside each other."""

    #: One sentence.
    verdict: str
    #: faster, slower, same or unknown.
    outcome: str
    #: What the step times are: ``baseline`` (without the profiler) or ``profiled``.
    basis: str
    #: The first.
    before: Side
    #: The second.
    after: Side
    #: Change of the step time over the first's; null where either is not known.
    step_change_fraction: float | None
    #: Changes below this are noise; null where it cannot be told.
    noise_fraction: float | None
    #: Headline figures.
    figures: list[Change]
    #: Shares of the step on the device's clock, in ms.
    breakdown: list[Change]
    #: Largest change first.
    kernels: list[KernelChange]
    #: What stands in the way of comparing.
    remarks: list[str]


def compare(before: Report, after: Report, *, noise_floor: float | None = None) -> Comparison:
    """Set two reports of one program beside each other.

    Args:
        before: the first.
        after: the second.
        noise_floor: fraction that the step times of two runs differ by though nothing changed; by default
            `DEVICE_FLOOR`, or `HOST_FLOOR` where the host limits one of them.
    """
    basis = "baseline" if has_baseline(before) and has_baseline(after) else "profiled"
    one, other = _side(before, basis), _side(after, basis)
    change = (
        (other.step_ms - one.step_ms) / one.step_ms if one.step_ms and other.step_ms is not None else None
    )
    floor = floor_of(before, after, basis) if noise_floor is None else noise_floor
    noise = None
    if change is not None:
        noise = noise_fraction([one.step_error_fraction, other.step_error_fraction], floor)
    outcome = _outcome(change, noise, floor)
    kernels = _kernels(before, after, _kernel_noise(before, after, noise, floor))
    return Comparison(
        verdict=_verdict(outcome, one, other, change, noise, floor),
        outcome=outcome,
        basis=basis,
        before=one,
        after=other,
        step_change_fraction=change,
        noise_fraction=noise,
        figures=[_figure(before, after, *one) for one in _FIGURES],
        breakdown=_breakdown(before, after),
        kernels=kernels,
        remarks=[
            *_remarks(before, after, basis),
            *_likeness_remarks(kernels),
            *_noise_remarks(before, after, basis, noise, noise_floor),
        ],
    )


_FIGURES: tuple[tuple[str, str, Callable[[Report], Any]], ...] = (
    ("kernels", "ms", lambda r: r.summary.kernel_time_ms_per_step),
    ("operators", "ms", lambda r: r.summary.operator_time_ms_per_step),
    ("device busy", "ms", lambda r: r.summary.gpu_busy_ms_per_step),
    ("launches", "", lambda r: r.summary.kernels_per_step),
    ("bytes moved", "bytes", lambda r: r.summary.bytes_per_step),
    ("FLOPs", "FLOP", lambda r: r.summary.flops_per_step),
    ("peak memory", "bytes", lambda r: r.summary.peak_memory_bytes),
)


def _figure(before: Report, after: Report, name: str, unit: str, read: Callable[[Report], Any]) -> Change:
    return Change(name=name, unit=unit, before=read(before), after=read(after))


def has_baseline(report: Report) -> bool:
    """Whether the step time without the profiler is known: figures of the step are told against it then."""
    return bool(_baselines(report))


def _baselines(report: Report) -> list[float]:
    """Un-profiled step times: those of the capture, or the one that the user gave."""
    if report.summary.baseline_step_ms is None:
        return []
    block = report.environment.get("baseline")
    steps = block.get("step_ms") if isinstance(block, dict) else None
    times = [t for t in steps if isinstance(t, (int, float)) and t > 0] if isinstance(steps, list) else []
    # A baseline of the user's in the place of the capture's has no steps to show.
    if times and math.isclose(statistics.median(times), report.summary.baseline_step_ms, rel_tol=0.05):
        return times
    return [report.summary.baseline_step_ms]


def step_ms(report: Report) -> float | None:
    """Step time, without the profiler where that is known; None for a trace that marks no steps."""
    return report.summary.baseline_step_ms or _profiled_ms(report)


def _profiled_ms(report: Report) -> float | None:
    # Without steps the whole trace stands for one.
    if any(remark.code == "steps.none" for remark in report.data_quality):
        return None
    return report.summary.step_time_ms.p50


def _side(report: Report, basis: str) -> Side:
    centre = report.summary.baseline_step_ms if basis == "baseline" else _profiled_ms(report)
    times = _baselines(report) if basis == "baseline" else []
    if len(times) < 2:
        times = report.summary.step_time_ms.all
    return Side(
        path=report.trace.path,
        device=report.device.name,
        step_ms=centre,
        step_error_fraction=error_fraction(times),
        verdict=report.summary.verdict,
    )


def _outcome(change: float | None, noise: float | None, floor: float) -> str:
    if change is None:
        return "unknown"
    # The floor holds whatever the spread of the steps.
    if abs(change) <= (floor if noise is None else noise):
        return "same"
    if noise is None:
        return "unknown"
    return "slower" if change > 0 else "faster"


def _verdict(
    outcome: str, before: Side, after: Side, change: float | None, noise: float | None, floor: float
) -> str:
    if change is None:
        lacking = [name for name, side in (("first", before), ("second", after)) if not side.step_ms]
        whose = f"the {lacking[0]} marks no" if len(lacking) == 1 else "neither marks"
        return f"The step times cannot be compared: {whose} steps."
    times = f"{fmt.duration(after.step_ms)}, before {fmt.duration(before.step_ms)} ({fmt.change(change)})"
    if outcome == "same":
        least = floor if noise is None else noise
        return f"No change beyond the noise of {least:.1%}: a step takes {times}."
    if noise is None:
        return f"A step takes {times}; with fewer than two steps on both sides the noise is not known."
    return f"{outcome.capitalize()}: a step takes {times}, beyond the noise of {noise:.1%}."


def _breakdown(before: Report, after: Report) -> list[Change]:
    sides = [{s.name: s.time_ms_per_step for s in r.breakdown.step} for r in (before, after)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    return [
        Change(name=name, unit="ms", before=sides[0].get(name, 0.0), after=sides[1].get(name, 0.0))
        for name in names
    ]


_Key = tuple[str, "str | None", str]


def _kernel_noise(before: Report, after: Report, noise: float | None, floor: float) -> float:
    """Kernels take as long as ever while the host is late; operators on the CPU are the host's own."""
    if before.summary.cpu_only or after.summary.cpu_only:
        return floor if noise is None else noise
    return DEVICE_FLOOR


def _kernels(before: Report, after: Report, noise: float) -> list[KernelChange]:
    modules = all(_has_modules(report.kernels) for report in (before, after))
    one, other = _by_key(before.kernels, modules), _by_key(after.kernels, modules)
    changes = [_kernel_change(key, one.get(key, []), other.get(key, []), noise) for key in {**one, **other}]
    return sorted(changes, key=lambda c: (-abs(c.after_ms - c.before_ms), c.op, c.module or "", c.phase))


def _has_modules(groups: Sequence[KernelGroup]) -> bool:
    known = sum(group.time_ms_per_step for group in groups if group.module is not None)
    return known > _KNOWN_MODULES * sum(group.time_ms_per_step for group in groups)


def _by_key(groups: Sequence[KernelGroup], modules: bool) -> dict[_Key, list[KernelGroup]]:
    found: dict[_Key, list[KernelGroup]] = defaultdict(list)
    for group in groups:
        found[group.op or group.name, group.module if modules else None, group.phase].append(group)
    return found


def _kernel_change(
    key: _Key, before: Sequence[KernelGroup], after: Sequence[KernelGroup], noise: float
) -> KernelChange:
    was, now = (sum(g.time_ms_per_step for g in groups) for groups in (before, after))
    if not before or not after:
        change = "vanished" if before else "appeared"
    elif abs(now - was) <= noise * max(was, now):
        change = "same"
    else:
        change = "slower" if now > was else "faster"
    op, module, phase = key
    heaviest = [max(groups, key=lambda g: g.time_ms_per_step).name for groups in (before, after) if groups]
    return KernelChange(
        op=op,
        module=module,
        phase=phase,
        before_ms=was,
        after_ms=now,
        before_calls=sum(g.calls_per_step for g in before),
        after_calls=sum(g.calls_per_step for g in after),
        change=change,
        kernels=list(dict.fromkeys(heaviest)),
    )


def _remarks(before: Report, after: Report, basis: str) -> list[str]:
    found = []
    if before.device.name != after.device.name:
        found.append(f"different devices: {before.device.name} and {after.device.name}")
    if basis == "profiled":
        found.append("step times are as profiled, the profiler's cost included: host-bound steps look slower")
    worlds = before.trace.world_size, after.trace.world_size
    if worlds[0] != worlds[1]:
        found.append(f"different numbers of ranks: {worlds[0] or 'unknown'} and {worlds[1] or 'unknown'}")
    if has_baseline(before) != has_baseline(after):
        found.append(
            "the step time without the profiler is known of one side only: its idle time is that of the real "
            "step, the other side's that of the profiled one"
        )
    with_stacks = {any(found.rule == "capture.stacks" for found in side.findings) for side in (before, after)}
    if basis == "profiled" and len(with_stacks) == 2:
        found.append("Python stacks were recorded on one side only: they lengthen its steps")
    return found


def _likeness_remarks(kernels: Sequence[KernelChange]) -> list[str]:
    whole = sum(kernel.before_ms + kernel.after_ms for kernel in kernels)
    both = sum(
        kernel.before_ms + kernel.after_ms for kernel in kernels if kernel.before_calls and kernel.after_calls
    )
    if not whole or both >= _IN_COMMON * whole:
        return []
    return ["hardly any work occurs on both sides: see that they are runs of one program"]


def _noise_remarks(
    before: Report, after: Report, basis: str, noise: float | None, given: float | None
) -> list[str]:
    if noise is not None and noise > _LOUD and noise != given:
        return [
            "the steps of one run differ too much to tell more: record more of them, or on a quieter machine"
        ]
    if given is not None or noise != HOST_FLOOR:
        return []
    limited = host_limits(before, basis), host_limits(after, basis)
    which = "both" if all(limited) else "the first" if limited[0] else "the second"
    return [f"the host limits {which}, and runs of one such loop often differ by {HOST_FLOOR:.0%}"]
