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
SCHEMA_VERSION = "1.7"


class Struct(msgspec.Struct):
    """Base of every part of the report."""


class Loss(Struct, kw_only=True):
    """Something the reader could not use, or had to repair."""

    #: Short code, e.g. ``truncated``.
    kind: str
    #: Events, or bytes where `detail` says so.
    count: int
    #: What happened, for a reader.
    detail: str = ""


class TraceFile(Struct, kw_only=True):
    """One file that the report was made from."""

    #: As given: a path, a URL, or ``-`` for stdin.
    path: str
    #: As stored, so packed for a .gz; null for stdin.
    size_bytes: int | None
    #: Events in the file, of every kind.
    events: int
    #: By the file's own word, else by its name; null if neither says.
    rank: int | None = None
    #: What could not be read or had to be repaired; empty for a sound file.
    losses: list[Loss] = []


class TraceInfo(TraceFile, kw_only=True):
    """The primary trace; with several ranks, `files` has them all."""

    #: Ranks in the job; null if the trace does not say.
    world_size: int | None = None
    #: Every file that was read, by rank.
    files: list[TraceFile] = []


class Peak(Struct, kw_only=True):
    """One roof of the device: a rate and the intensity at which it meets the memory roof."""

    #: The unit that computes: ``tensor_bf16``, ``vector_fp32``, ...
    pipe: str
    #: Dense FLOP/s.
    flops_per_s: float
    #: FLOP/byte at which the pipe's roof meets the memory's.
    ridge_flops_per_byte: float
    #: Where the figure comes from.
    source: str
    #: The datasheet's dense FLOP/s, which utilisation is told of; null where it has none.
    datasheet_flops_per_s: float | None = None


class MemoryLevel(Struct, kw_only=True):
    """One level of the memory that the device works from."""

    #: For a reader, e.g. ``L2 cache``.
    name: str
    #: Of the whole device; null where it is not known, or not the device's (host memory, disk).
    size_bytes: float | None = None
    #: Of the whole device; of a link in one direction; null where it is not known.
    bandwidth_bytes_per_s: float | None = None
    #: How many times longer a byte takes than at the level `compared_with`; null for the first.
    times_slower_than_above: float | None = None
    #: Name of the nearest level above whose bandwidth is known; null for the first.
    compared_with: str | None = None
    #: Where the figures come from, or how they were worked out; a rule of thumb says so.
    source: str = ""


class DeviceInfo(Struct, kw_only=True):
    """The device and its roofs."""

    #: As the trace or the driver names it.
    name: str
    #: Row of devices.toml that it was matched to, or null.
    matched: str | None = None
    #: "datasheet", "measured" (on this device), "user" (a TOML of the user's) or "unknown".
    roofs: str = "unknown"
    #: One entry a pipe; empty for an unknown device.
    peaks: list[Peak] = []
    #: Of the device's memory; null for an unknown device.
    bandwidth_bytes_per_s: float | None = None
    #: Where the figure comes from.
    bandwidth_source: str = ""
    #: As the driver reported it, else nominal; null if neither is known.
    memory_bytes: int | None = None
    #: L2 cache; null if not known.
    l2_bytes: int | None = None
    #: Streaming multiprocessors, compute units, or cores of a CPU; null if not known.
    sms: int | None = None
    #: Between host and device, in one direction; null if not known.
    link_bytes_per_s: float | None = None
    #: Where the figure comes from.
    link_source: str = ""
    #: Registers to disk, fastest first; empty where nothing is known of the device.
    hierarchy: list[MemoryLevel] = []


class StepTime(Struct, kw_only=True):
    """Distance between successive steps on the busier side, host or device; as profiled."""

    #: Median of `all`, in ms; null without steps.
    p50: float | None
    #: 95th percentile of `all`, in ms; null without steps.
    p95: float | None
    #: Every steady step, in ms, in time order.
    all: list[float] = []


class BoundTimeFraction(Struct, kw_only=True):
    """Share of the summed device time by bound. Adds up to 1 where there is device time."""

    #: Memory-bound; null without device time, as are the others.
    memory: float | None = None
    #: Compute-bound.
    compute: float | None = None
    #: Collectives.
    communication: float | None = None
    #: Copies over a link: host to device and back, between devices.
    copy: float | None = None
    #: Without a cost, or without a roof to set it against.
    unknown: float | None = None


class Coverage(Struct, kw_only=True):
    """How much of the device time the figures stand on."""

    #: Share of the steady steps' device time that has FLOPs and bytes, or crosses a link; null without device
    #: time.
    costed_time_fraction: float | None = None
    #: Share of all device time whose launch lies in a host operator; null without device time.
    attributed_time_fraction: float | None = None
    #: Share of all device time whose launch is not in the trace; null without device time.
    orphan_time_fraction: float | None = None
    #: Share of all device time replayed from CUDA or HIP graphs; null without device time.
    replayed_time_fraction: float | None = None
    #: Share of all device time whose cost was taken from the same kernels outside a graph; in
    #: `costed_time_fraction` too.
    inferred_time_fraction: float | None = None


class Summary(Struct, kw_only=True):
    """The headline figures."""

    #: The report's first sentence: what bounds the loop.
    verdict: str
    #: Steady steps that the figures are taken from.
    steps: int
    #: As profiled.
    step_time_ms: StepTime
    #: Step time without the profiler, from the capture's baseline or the user; null if not known.
    baseline_step_ms: float | None = None
    #: Share of the real step that the device works; against the baseline where it is known.
    gpu_busy_fraction: float | None = None
    #: The same, as the profiled trace shows it.
    gpu_busy_fraction_profiled: float | None = None
    #: Length of the union of a step's device work, in ms; null on a run without a device.
    gpu_busy_ms_per_step: float | None = None
    #: Kernels launched by a step, their durations summed; copies and memsets are not kernels. Null on a run
    #: without a device.
    kernel_time_ms_per_step: float | None = None
    #: Kernels launched by a step; null without steps or on a run without a device.
    kernels_per_step: float | None = None
    #: On a run without device work: CPU operators, their own times summed.
    operator_time_ms_per_step: float | None = None
    #: What bounds the kernels.
    bound_time_fraction: BoundTimeFraction
    #: What the figures stand on.
    coverage: Coverage
    #: Time at the roof over time taken, over all costed kernels but collectives.
    roof_fraction: float | None = None
    #: FLOPs of the costed launches of a step, without padding; null if none is costed.
    flops_per_step: float | None = None
    #: Bytes read and written by the costed launches of a step; null if none is costed.
    bytes_per_step: float | None = None
    #: Model FLOPs utilisation: useful FLOP/s of matrix products and convolutions over the peak of the pipe
    #: they use, against the baseline step time where known.
    mfu: float | None = None
    #: High-water mark of the allocator, from the capture; null if it did not record it.
    peak_memory_bytes: int | None = None
    #: True when there is no device in the trace and CPU operators stand in for kernels.
    cpu_only: bool = False


class Slice(Struct, kw_only=True):
    """One share of a whole."""

    #: Of the part.
    name: str
    #: In ms per step.
    time_ms_per_step: float
    #: Of its whole; null if the whole is nought.
    fraction: float | None


class Breakdown(Struct, kw_only=True):
    """Where the step goes, three ways. Each list adds up to its own whole."""

    #: The step's wall time on the device: compute, exposed communication, exposed copy, idle.
    step: list[Slice] = []
    #: Device time by phase; see `kernels`.
    phase: list[Slice] = []
    #: Device time by family of operator: matmul, attention, norm, pointwise, optimizer, copy, ...
    family: list[Slice] = []


class Measured(Struct, kw_only=True):
    """What hardware counters say of a group, and the model beside it: means over the launches joined.

    Per launch, not per step: counters may cover a part of a group's launches.
    """

    #: Launches of the group that have counters.
    launches: int
    #: Duration under the counters' tool, in ms.
    time_ms: float | None = None
    #: Of device memory.
    bytes_read: float | None = None
    #: Of device memory; what stays in a cache is not written.
    bytes_written: float | None = None
    #: Of matrix units where they worked, else of plain arithmetic; null if not collected.
    flops: float | None = None
    #: Of the peak bandwidth.
    dram_fraction: float | None = None
    #: The model's, over the same launches; null if one of them has no cost.
    modelled_bytes_read: float | None = None
    #: The model's, over the same launches; null if one of them has no cost.
    modelled_bytes_written: float | None = None
    #: The model's, over the same launches; null if one of them has no cost.
    modelled_flops: float | None = None
    #: memory or compute by the counted intensity; null where it cannot be told or launches differ.
    bound: str | None = None


class KernelGroup(Struct, kw_only=True):
    """Launches of one kernel by one operator in one kind of module and phase, under one bound.

    FLOPs, bytes and time are sums over the group's launches in one step, so that
    ``flops / time`` is what was achieved.
    """

    #: Of the kernel, copy or memset; of the operator on a run without a device.
    name: str
    #: Innermost operator around the launch; null outside any.
    op: str | None
    #: Module path with layer numbers as ``*``: ``blocks.*.attn.qkv``; null outside any module.
    module: str | None
    #: input, forward, loss, backward, optimizer, communication, validation, logging or other.
    phase: str
    #: Kind of work: matmul, attention, norm, pointwise, ...
    family: str
    #: Launches in a step.
    calls_per_step: float
    #: Summed durations, in ms per step.
    time_ms_per_step: float
    #: Of the device time of a step.
    time_fraction: float
    #: As executed, per step; null without a cost.
    flops: float | None = None
    #: The part of `flops` on tile padding and on masked blocks, per step; null without a cost.
    flops_padding: float | None = None
    #: Bytes per step: each element once, and again where the cache is too small; null without a cost.
    bytes_read: float | None = None
    #: The part of `bytes_read` that is fetched again, per step; null without a cost.
    bytes_reread: float | None = None
    #: Compulsory bytes per step; null without a cost.
    bytes_written: float | None = None
    #: FLOP/byte; null without a cost or without bytes.
    intensity: float | None = None
    #: The unit that computes, ``none`` for pure data movement; null without a cost.
    pipe: str | None = None
    #: memory, compute, communication, copy or unknown.
    bound: str = "unknown"
    #: Time that the useful work (without padding and re-reads) takes at the roof, over the time taken; for
    #: copies, at the link's rate.
    efficiency: float | None = None
    #: Any of latency, inefficient, few_blocks, cached, above_roof, no_roof, pageable, padded.
    flags: list[str] = []
    #: Hardware counters, where a file of them was given and could be joined.
    measured: Measured | None = None


class CollectiveGroup(Struct, kw_only=True):
    """Collectives of one kind, dtype, size of process group and class of payload, per step of this rank."""

    #: all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, send_recv, gather, scatter or
    #: other.
    kind: str
    #: Of the elements; null where not recorded.
    dtype: str | None = None
    #: Ranks in the process group; null where not recorded.
    ranks: int | None = None
    #: Range that the payload of one call lies in, for a reader; null where it is not known.
    size_class: str | None = None
    #: Launches in a step.
    calls_per_step: float
    #: The full buffers: what each rank ends or starts with, whichever is more; null where not recorded.
    payload_bytes: float | None = None
    #: What crosses this rank's link in one direction, as nccl-tests counts it; null where payload or group
    #: are not known.
    bus_bytes: float | None = None
    #: Summed durations, in ms per step; waiting for other ranks is in it.
    time_ms_per_step: float
    #: Of the same collectives, each as long as on the rank where it is shortest; null unless traces of
    #: several ranks tell.
    transfer_ms_per_step: float | None = None
    #: The part of the time during which the device computes nothing.
    exposed_ms_per_step: float
    #: The share of the time during which the device computes too; null if the time is nought.
    overlap_fraction: float | None = None
    #: `bus_bytes` over the transfer where it is known, else over the time, waiting included.
    bus_bandwidth_bytes_per_s: float | None = None
    #: Of the link between devices, in one direction; null unless the group is known to share such a link.
    link_bytes_per_s: float | None = None
    #: Bus bandwidth over the link's; null without either.
    efficiency: float | None = None


class Saving(Struct, kw_only=True):
    """Expected change of the step time, in ms per step."""

    #: In ms per step.
    low: float
    #: In ms per step.
    likely: float
    #: In ms per step.
    high: float


class Finding(Struct, kw_only=True):
    """One piece of advice."""

    #: Identifier of the rule, e.g. ``precision.tf32``.
    rule: str
    #: One line for a reader.
    title: str
    #: Null where no saving can be told.
    saving_ms: Saving | None = None
    #: `saving_ms.likely` over the step time; null where no saving can be told.
    saving_fraction: float | None = None
    #: measured, modelled or heuristic.
    confidence: str = "heuristic"
    #: Kernels, operators, modules and figures that it rests on.
    evidence: list[str] = []
    #: The exact change to make, in Lightning's terms.
    fix: str = ""
    #: The same for a plain PyTorch loop; empty where it does not differ.
    fix_torch: str = ""
    #: What may change besides the speed.
    risk: str = ""
    #: What to know of the saving: why it is nothing, say.
    note: str = ""
    #: The kind of swap that makes the change by itself; null if none does.
    swap: str | None = None
    #: Whether what the loop computes is not what it is meant to; such findings come first.
    wrong: bool = False


class Together(Struct, kw_only=True):
    """The largest findings made together, from one replay: their savings need not add up."""

    #: Rules whose changes were played.
    rules: list[str]
    #: In ms per step.
    saving_ms: Saving
    #: `saving_ms.likely` over the step time.
    saving_fraction: float | None = None


class Passed(Struct, kw_only=True):
    """A rule that found nothing to say."""

    #: Identifier of the rule.
    rule: str
    #: What is so, for a reader.
    title: str


class ReplayInfo(Struct, kw_only=True):
    """How the step was replayed that savings are told against."""

    #: Step time that savings are told against: without the profiler where that is known, else as profiled.
    step_ms: float
    #: Step time as profiled.
    observed_ms: float | None = None
    #: What the unedited replay returns at the profiled speed; its distance from `observed_ms` is the replay's
    #: error.
    replayed_ms: float | None = None
    #: Factor on host times that makes the replay return `step_ms`; null if the baseline is not known.
    host_factor: float | None = None


class Quality(Struct, kw_only=True):
    """One remark on how far the figures can be trusted. Level: info, warning, error."""

    #: ``info``, ``warning`` or ``error``.
    level: str
    #: Stable identifier, e.g. ``baseline.unknown``.
    code: str
    #: For a reader, with the way out.
    message: str


class RankSummary(Struct, kw_only=True):
    """One rank of a job, beside the others."""

    #: Null if neither the file nor its name says.
    rank: int | None
    #: As in `trace.files`.
    path: str
    #: Name of its device.
    device: str
    #: As it really runs where the baseline is known, else as profiled; null without steps.
    step_time_ms: float | None
    #: Of that step time; null without steps or on a run without a device.
    gpu_busy_fraction: float | None
    #: Kernels launched by a step, their durations summed; null without steps or on a run without a device.
    kernel_time_ms_per_step: float | None
    #: Collectives, their durations summed; null without steps.
    communication_ms_per_step: float | None
    #: The part of it during which nothing is computed; null without steps.
    exposed_communication_ms_per_step: float | None
    #: Communication beyond that of the rank with the least: waiting, where all ranks move the same data. Null
    #: where ranks or their communication are not known.
    waiting_ms_per_step: float | None = None


class CrossCheck(Struct, kw_only=True):
    """One figure of ours beside another tool's."""

    #: Name of the other tool.
    tool: str
    #: What is compared.
    figure: str
    #: Of both figures.
    unit: str
    #: Null where we have none.
    ours: float | None
    #: Null where it has none.
    theirs: float | None
    #: (ours - theirs) / theirs; null where either is missing.
    difference_fraction: float | None


class Disagreement(Struct, kw_only=True):
    """One launch whose counters contradict the model."""

    #: Of the kernel.
    name: str
    #: Innermost operator around the launch; null outside any.
    op: str | None
    #: ``uncosted``, ``flops``, ``bytes read`` or ``bound``.
    what: str
    #: The model's figure or bound; null without one.
    modelled: float | str | None
    #: The counters' figure, or the bound that their intensity gives.
    measured: float | str | None
    #: Duration under the counters' tool, in ms.
    time_ms: float


class CounterSummary(Struct, kw_only=True):
    """How far hardware counters bear the model out. Fractions are of the joined launches' time."""

    #: File of counters.
    path: str
    #: Launches in it.
    launches: int
    #: Launches of it that were joined to the trace's.
    joined: int
    #: Joined launches over the trace's kernels.
    joined_launch_fraction: float | None
    #: Their time over that of the trace's kernels.
    joined_time_fraction: float | None
    #: Has a cost.
    costed_time_fraction: float | None = None
    #: Of kernels of matrix units: FLOPs within 2 %.
    flops_agree_time_fraction: float | None = None
    #: Of kernels that read over 64 MB: modelled bytes read within a factor 1.25 of the counted.
    read_within_1_25_time_fraction: float | None = None
    #: The same within a factor 1.5.
    read_within_1_5_time_fraction: float | None = None
    #: The bound is the one that the counted intensity gives.
    bound_agrees_time_fraction: float | None = None
    #: Modelled over counted bytes read of the kernels that read over 64 MB: 5th percentile by time.
    read_ratio_p5: float | None = None
    #: Median of the same.
    read_ratio_p50: float | None = None
    #: 95th percentile of the same.
    read_ratio_p95: float | None = None
    #: The longest launches that the model gets wrong.
    disagreements: list[Disagreement] = []


class SwapTrial(Struct, kw_only=True):
    """How one candidate did at one site."""

    #: Name of the candidate: ``advisor.kernels.rms_norm``, ``torch SDPA (cuDNN)``.
    candidate: str
    #: ``bundled``, or ``torch`` for what torch itself offers.
    source: str = ""
    #: Why it is out; empty if it may serve.
    refused: str = ""
    #: Whether repeated runs agree to the bit; null where it was not said.
    deterministic: bool | None = None
    #: Largest error of outputs and gradients against the reference of higher precision; null if not computed.
    error: float | None = None
    #: The same of what the loop calls by itself.
    eager_error: float | None = None
    #: Forward and backward of one call, in ms; null if not timed.
    time_ms: float | None = None
    #: The same of what the loop calls by itself.
    eager_time_ms: float | None = None
    #: Peak beyond the inputs; null if not known.
    memory_bytes: int | None = None
    #: The same of what the loop calls by itself.
    eager_memory_bytes: int | None = None


class SwapSite(Struct, kw_only=True):
    """Places in the loop that do the same work on the same shapes, and what was decided for them."""

    #: norm, activation, gate, attention, rope, softmax, loss, optimizer or replay.
    kind: str
    #: What stands there, for a reader.
    what: str
    #: Module paths or lines of code.
    where: list[str] = []
    #: ``module``, ``pattern`` or ``optimizer``.
    mechanism: str = ""
    #: Of all its places together; null if not counted.
    calls_per_step: int | None = None
    #: The candidate that won; null if none did.
    chosen: str | None = None
    #: Why, in one line.
    reason: str = ""
    #: What the site takes by itself, timed alone, in ms per step; null if not timed.
    eager_ms_per_step: float | None = None
    #: The same with the candidate that won.
    swapped_ms_per_step: float | None = None
    #: `eager_ms_per_step` over the step time; null where either is not known.
    step_fraction: float | None = None
    #: The change to make by hand, as a diff; empty where nothing was chosen.
    permanent: str = ""
    #: Every candidate's.
    trials: list[SwapTrial] = []


class SwapSteps(Struct, kw_only=True):
    """Whole live steps without and with what was chosen, in alternating blocks of the running training."""

    #: Each timed step without, in time order, in ms; of accumulated gradients the mean batch of a cycle.
    eager_ms: list[float] = []
    #: Each timed step with.
    swapped_ms: list[float] = []
    #: Median of `eager_ms`; null without steps.
    eager_p50_ms: float | None = None
    #: Median of `swapped_ms`; null without steps.
    swapped_p50_ms: float | None = None
    #: What a step saves: Hodges and Lehmann's estimate with its 95 % interval; null with too few steps.
    saving_ms: Saving | None = None
    #: Peak memory of the steps without; null if not known.
    eager_peak_bytes: int | None = None
    #: Peak memory of the steps with; null if not known.
    swapped_peak_bytes: int | None = None


class Swaps(Struct, kw_only=True):
    """What swap found, tried, kept and refused."""

    #: Kinds that were asked for.
    asked: list[str] = []
    #: In one line: what a step gains, or why nothing was swapped.
    verdict: str
    #: Whether anything is in force.
    kept: bool = False
    #: What was looked at.
    sites: list[SwapSite] = []
    #: Whole steps without and with; null where they were not compared.
    steps: SwapSteps | None = None
    #: Time that finding, proving and timing took of the training, in s; null if not known.
    pause_s: float | None = None
    #: What else there is to say, such as what was left alone and why.
    remarks: list[str] = []


class Report(Struct, kw_only=True):
    """Everything known about one captured loop."""

    #: Major.minor: the major rises when a field changes meaning or goes, the minor when one is added.
    schema_version: str = SCHEMA_VERSION
    #: Of training-advisor.
    tool_version: str
    #: When the report was made: ISO 8601, UTC.
    created: str
    #: What was read.
    trace: TraceInfo
    #: What it ran on.
    device: DeviceInfo
    #: The capture's context block (versions, precision, optimizer, loader, ...); empty for a foreign trace.
    environment: dict[str, Any] = {}
    #: The headline figures.
    summary: Summary
    #: Where the step goes.
    breakdown: Breakdown
    #: Launches of the steady steps in groups, longest first.
    kernels: list[KernelGroup] = []
    #: What to change, largest saving first.
    findings: list[Finding] = []
    #: The largest findings made together; null without findings that save.
    together: Together | None = None
    #: Rules that looked and found nothing to say.
    passed: list[Passed] = []
    #: Rules whose subject the loop does not have, or about which the trace does not tell.
    not_applicable: list[str] = []
    #: How the step was replayed; null where it could not be: without steps or device work.
    replay: ReplayInfo | None = None
    #: What stands in the way of trusting the figures, worst first.
    data_quality: list[Quality] = []
    #: Collectives of the steady steps in groups, longest first; empty without any.
    communication: list[CollectiveGroup] = []
    #: One entry a rank; empty for a single trace.
    ranks: list[RankSummary] = []
    #: Another tool's figures beside ours; empty unless asked for.
    cross_checks: list[CrossCheck] = []
    #: Hardware counters beside the model; null unless a file of them was given.
    counters: CounterSummary | None = None
    #: What was replaced by faster kernels; null unless swap was asked for.
    swaps: Swaps | None = None

    def __repr__(self) -> str:
        """One line: what was read, and the verdict."""
        return f"<Report on {self.trace.path}: {self.summary.verdict}>"

    def to_pandas(self, table: str = "kernels") -> pandas.DataFrame:
        """One of the report's lists as a data frame, a row an entry; what is not known is NaN or None.

        Args:
            table: ``"kernels"``, ``"findings"``, ``"data_quality"``, ``"communication"``, ``"ranks"`` or
                ``"cross_checks"``.

        Raises:
            UsageError: no such table.
            MissingExtraError: pandas is not installed.
        """
        from advisor.report.tables import frame

        return frame(self, table)
