"""The report as data: what `--json` writes and what every renderer reads.

A figure that was not measured and could not be modelled is None, never 0. Times are in
milliseconds and per training step unless a name says otherwise. Fractions are 0..1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import pandas

#: Raised when a field changes meaning or goes (major) or is added (minor).
SCHEMA_VERSION = "1.0"


class Struct(msgspec.Struct):
    """Base of every part of the report."""


class Loss(Struct, kw_only=True):
    """Something the reader could not use, or had to repair."""

    kind: str
    count: int
    detail: str = ""


class TraceFile(Struct, kw_only=True):
    """One file that the report was made from."""

    path: str
    size_bytes: int | None
    events: int
    rank: int | None = None
    losses: list[Loss] = []


class TraceInfo(TraceFile, kw_only=True):
    """The primary trace; with several ranks, `files` has them all."""

    world_size: int | None = None
    files: list[TraceFile] = []


class Peak(Struct, kw_only=True):
    """One roof of the device: a rate and the intensity at which it meets the memory roof."""

    pipe: str
    flops_per_s: float
    ridge_flops_per_byte: float
    source: str


class DeviceInfo(Struct, kw_only=True):
    """The device and its roofs. Bandwidth and peaks are None / empty for an unknown device."""

    name: str
    #: Row of devices.toml that it was matched to, or None.
    matched: str | None = None
    #: "datasheet", "measured" (on this device), "user" (a TOML of the user's) or "unknown".
    roofs: str = "unknown"
    peaks: list[Peak] = []
    bandwidth_bytes_per_s: float | None = None
    bandwidth_source: str = ""
    memory_bytes: int | None = None
    l2_bytes: int | None = None
    sms: int | None = None
    link_bytes_per_s: float | None = None
    link_source: str = ""


class StepTime(Struct, kw_only=True):
    """Distance between successive steps on the busier side, host or device; as profiled."""

    p50: float | None
    p95: float | None
    all: list[float] = []


class BoundTimeFraction(Struct, kw_only=True):
    """Share of the summed device time by bound. Adds up to 1 where there is device time."""

    memory: float | None = None
    compute: float | None = None
    communication: float | None = None
    copy: float | None = None
    unknown: float | None = None


class Coverage(Struct, kw_only=True):
    """How much of the device time the figures stand on."""

    costed_time_fraction: float | None = None
    attributed_time_fraction: float | None = None
    orphan_time_fraction: float | None = None


class Summary(Struct, kw_only=True):
    """The headline figures."""

    #: The report's first sentence: what bounds the loop.
    verdict: str
    steps: int
    step_time_ms: StepTime
    #: Step time without the profiler, from the capture's baseline or the user; None if not known.
    baseline_step_ms: float | None = None
    #: Share of the real step that the device works; against the baseline where it is known.
    gpu_busy_fraction: float | None = None
    #: The same, as the profiled trace shows it.
    gpu_busy_fraction_profiled: float | None = None
    gpu_busy_ms_per_step: float | None = None
    #: Kernels launched by a step, their durations summed; copies and memsets are not kernels.
    kernel_time_ms_per_step: float | None = None
    kernels_per_step: float | None = None
    #: On a run without device work: CPU operators, their own times summed.
    operator_time_ms_per_step: float | None = None
    bound_time_fraction: BoundTimeFraction
    coverage: Coverage
    #: Time at the roof over time taken, over all costed kernels.
    roof_fraction: float | None = None
    flops_per_step: float | None = None
    bytes_per_step: float | None = None
    #: Model FLOPs utilisation: FLOP/s of matrix products and convolutions over the peak of the pipe
    #: they use, against the baseline step time where known.
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    #: True when there is no device in the trace and CPU operators stand in for kernels.
    cpu_only: bool = False


class Slice(Struct, kw_only=True):
    """One share of a whole."""

    name: str
    time_ms_per_step: float
    fraction: float | None


class Breakdown(Struct, kw_only=True):
    """Where the step goes, three ways. Each list adds up to its own whole."""

    #: The step's wall time on the device: compute, exposed communication, exposed copy, idle.
    step: list[Slice] = []
    #: Device time by phase: input, forward, loss, backward, optimizer, communication, logging, other.
    phase: list[Slice] = []
    #: Device time by family of operator: matmul, attention, norm, pointwise, optimizer, copy, ...
    family: list[Slice] = []


class KernelGroup(Struct, kw_only=True):
    """Launches of one kernel by one operator in one kind of module and phase.

    FLOPs, bytes and time are sums over the group's launches in one step, so that
    ``flops / time`` is what was achieved.
    """

    name: str
    op: str | None
    #: Module path with layer numbers as ``*``: ``blocks.*.attn.qkv``.
    module: str | None
    phase: str
    family: str
    calls_per_step: float
    time_ms_per_step: float
    time_fraction: float
    flops: float | None = None
    bytes_read: float | None = None
    bytes_written: float | None = None
    intensity: float | None = None
    pipe: str | None = None
    #: memory, compute, communication, copy or unknown.
    bound: str = "unknown"
    #: Achieved over attainable at this intensity (or over the link, for copies).
    efficiency: float | None = None
    flags: list[str] = []


class Saving(Struct, kw_only=True):
    """Expected change of the step time, in ms per step."""

    low: float
    likely: float
    high: float


class Finding(Struct, kw_only=True):
    """One piece of advice."""

    rule: str
    title: str
    saving_ms: Saving | None = None
    saving_fraction: float | None = None
    #: measured, modelled or heuristic.
    confidence: str = "heuristic"
    evidence: list[str] = []
    fix: str = ""
    risk: str = ""


class Quality(Struct, kw_only=True):
    """One remark on how far the figures can be trusted. Level: info, warning, error."""

    level: str
    code: str
    message: str


class RankSummary(Struct, kw_only=True):
    """One rank of a job, beside the others."""

    rank: int | None
    path: str
    device: str
    step_time_ms: float | None
    gpu_busy_fraction: float | None
    kernel_time_ms_per_step: float | None
    communication_ms_per_step: float | None
    exposed_communication_ms_per_step: float | None


class CrossCheck(Struct, kw_only=True):
    """One figure of ours beside another tool's."""

    tool: str
    figure: str
    unit: str
    ours: float | None
    theirs: float | None
    difference_fraction: float | None


class Report(Struct, kw_only=True):
    """Everything known about one captured loop."""

    schema_version: str = SCHEMA_VERSION
    tool_version: str
    created: str
    trace: TraceInfo
    device: DeviceInfo
    #: The capture's context block (versions, precision, optimizer, loader, ...); empty for a foreign trace.
    environment: dict[str, Any] = {}
    summary: Summary
    breakdown: Breakdown
    kernels: list[KernelGroup] = []
    findings: list[Finding] = []
    data_quality: list[Quality] = []
    ranks: list[RankSummary] = []
    cross_checks: list[CrossCheck] = []

    def to_pandas(self, table: str = "kernels") -> pandas.DataFrame:
        """One of the report's lists as a data frame, a row an entry; what is not known is NaN or None.

        Args:
            table: ``"kernels"``, ``"findings"``, ``"data_quality"``, ``"ranks"`` or ``"cross_checks"``.

        Raises:
            UsageError: no such table.
            MissingExtraError: pandas is not installed.
        """
        from advisor.report.tables import frame

        return frame(self, table)
