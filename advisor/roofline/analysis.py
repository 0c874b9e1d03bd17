"""One trace worked out: joined, costed and classified. What reports and tables are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from advisor.errors import UsageError
from advisor.roofline.attach import LaunchCosts, attach_costs, gather_host_operators
from advisor.roofline.bound import Bounds, classify_many
from advisor.roofline.collectives import Message, collective_kind
from advisor.roofline.devices import Device, find_device
from advisor.roofline.graphs import Replays, find_replays, infer_replays
from advisor.roofline.launch_class import (
    COLLECTIVE,
    LINK_COPIES,
    device_traffic,
    launch_classes,
)
from advisor.roofline.measured import choose_roofs
from advisor.roofline.messages import find_messages, link_bytes_per_s
from advisor.trace.intervals import covered_before, merged, union_ns
from advisor.trace.link import Timeline
from advisor.trace.steps import step_times_ns

#: No step takes longer, eleven days; what claims to has lost its unit.
_MAX_STEP_MS = 1e9


@dataclass(eq=False)
class Analysis:
    """A timeline with its figures, each worked out when it is first asked for.

    Costs and bounds take most of the time; what compares ranks needs neither.

    Attributes:
        timeline: the joined trace; host operators stand in for launches where it has no device work.
        device: the device it ran on, with its roofs.
        baseline_ns: step time without the profiler, or None.
        baseline_source: ``"capture"``, ``"user"`` or ``""``.
        replays: what is known of launches replayed from graphs; None where there are none.
    """

    timeline: Timeline
    device: Device
    baseline_ns: float | None = None
    baseline_source: str = ""
    replays: Replays | None = None

    @cached_property
    def classes(self) -> np.ndarray:
        """uint8 (launches,), from `advisor.roofline.launch_class`."""
        rows = self.timeline.launches
        return launch_classes(rows.kind, rows.name, self.timeline.trace.names)

    @cached_property
    def costs(self) -> LaunchCosts:
        """FLOPs and bytes of each launch."""
        if self.replays is not None:
            return self.replays.costs
        found = attach_costs(self.timeline, self.device)
        # Memsets and copies within the device move what the trace states, whatever operator asked for them.
        found.put_traffic(*device_traffic(self.classes, self.timeline.launches.bytes))
        found.put_traffic(*self._collective_traffic())
        return found

    @property
    def replayed(self) -> np.ndarray:
        """bool (launches,): replayed from a CUDA or HIP graph."""
        return self.replays.replayed if self.replays else np.zeros(len(self.timeline.launches), bool)

    @property
    def inferred(self) -> np.ndarray:
        """bool (launches,): replayed, with the cost of the same kernel outside a graph."""
        return self.replays.inferred if self.replays else np.zeros(len(self.timeline.launches), bool)

    @cached_property
    def bounds(self) -> Bounds:
        """Bound, efficiency and flags of each launch."""
        rows, costs = self.timeline.launches, self.costs
        return classify_many(
            flops=costs.flops,
            bytes_moved=costs.bytes_read + costs.bytes_written,
            pipe=costs.pipe,
            pipes=costs.pipes,
            dur_ns=rows.dur_ns,
            kind=rows.kind,
            name=rows.name,
            names=self.timeline.trace.names,
            device=self.device,
            copy_bytes=rows.bytes,
            grid_blocks=rows.grid_blocks,
            flops_padding=costs.flops_padding,
            bytes_reread=costs.bytes_reread,
            bus_bytes=self._bus_bytes(),
        )

    @cached_property
    def messages(self) -> dict[int, Message]:
        """What each collective moves, by launch."""
        rows = np.flatnonzero(self.collective)
        # An operator around a graph's launch is not that of what is in the graph.
        outside, inside = rows[~self.replayed[rows]], rows[self.replayed[rows]]
        found = dict(zip(outside.tolist(), find_messages(self.timeline, outside), strict=True))
        names, name = self.timeline.trace.names, self.timeline.launches.name
        return found | {row: Message(collective_kind(names[name[row]])) for row in inside.tolist()}

    def _collective_traffic(self) -> tuple[np.ndarray, np.ndarray]:
        """Memory traffic of collectives whose input and output are both known; NaN elsewhere."""
        read, written = np.full((2, len(self.timeline.launches)), np.nan)
        for row, message in self.messages.items():
            if message.bytes_in is not None and message.bytes_out is not None:
                read[row], written[row] = message.bytes_in, message.bytes_out
        return read, written

    def _bus_bytes(self) -> np.ndarray:
        """Bytes that collectives move over a link that their group is known to share; NaN elsewhere."""
        found = np.full(len(self.timeline.launches), np.nan)
        for row, message in self.messages.items():
            if message.bus_bytes is not None and link_bytes_per_s(self.device, self.timeline, message):
                found[row] = message.bus_bytes
        return found

    @cached_property
    def counted(self) -> np.ndarray:
        """bool (launches,): launched by a steady step, so counted in the per-step figures."""
        return self.timeline.in_steady_step

    @cached_property
    def step_count(self) -> int:
        """Number of steady steps."""
        return int(self.timeline.steady.sum())

    @property
    def collective(self) -> np.ndarray:
        """bool (launches,): collectives, by kernel name."""
        return self.classes == COLLECTIVE

    @property
    def step_times_ns(self) -> np.ndarray:
        """int64 (steady steps,), as profiled."""
        return self._step_times[0]

    @property
    def busier_side(self) -> str:
        """``"host"`` or ``"device"``: which side the step time was taken on."""
        return self._step_times[1]

    @cached_property
    def _step_times(self) -> tuple[np.ndarray, str]:
        end, busy = self.timeline.device_work_of_steps()
        return step_times_ns(self.timeline.steps, self.timeline.steady, end, busy)

    @cached_property
    def profiled_step_ns(self) -> float | None:
        """Typical step time as profiled; None without steps.

        The median; the mean where gradients are accumulated, since the batches of a cycle differ by
        design and the baseline is their mean too.
        """
        times = self.step_times_ns
        if not len(times):
            return None
        typical = np.mean if self.timeline.batches_per_optimizer_step > 1 else np.median
        return float(typical(times))

    @property
    def real_step_ns(self) -> float | None:
        """Step time as it really runs where that is known, else as profiled."""
        return self.baseline_ns or self.profiled_step_ns

    @cached_property
    def busy_ns_per_step(self) -> dict[str, float]:
        """Device time of a step, in ns: ``compute``, and exposed ``communication`` and ``copy``.

        Of the device with the most work. Overlapping work counts once, for the first of these that
        covers it.
        """
        rows = self.timeline.launches
        main = self.counted & (rows.device == self.timeline.main_device)
        copy = np.isin(self.classes, LINK_COPIES)

        def union(mask: np.ndarray) -> float:
            return union_ns(rows.ts_ns[main & mask], rows.end_ns[main & mask]) / max(self.step_count, 1)

        compute = union(~self.collective & ~copy)
        with_communication = union(~copy)
        everything = union(np.ones(len(rows), bool))
        return {
            "compute": compute,
            "communication": with_communication - compute,
            "copy": everything - with_communication,
        }

    def exposed_ns(self, rows: np.ndarray) -> np.ndarray:
        """Time of each of these launches in which its device computes nothing; float64 (n,).

        Args:
            rows: int (n,), collectives or copies over a link.
        """
        launches = self.timeline.launches
        computing = ~self.collective & ~np.isin(self.classes, LINK_COPIES)
        exposed = launches.dur_ns[rows].astype(np.float64)
        for device in np.unique(launches.device[rows]).tolist():
            work = computing & (launches.device == device)
            start, end = merged(launches.ts_ns[work], launches.end_ns[work])
            own = launches.device[rows] == device
            begins, ends = launches.ts_ns[rows[own]], launches.end_ns[rows[own]]
            exposed[own] -= covered_before(ends, start, end) - covered_before(begins, start, end)
        return exposed


def analyse_timeline(
    timeline: Timeline,
    *,
    device: str | None = None,
    devices_toml: Path | None = None,
    baseline_step_ms: float | None = None,
    roofs: str = "auto",
    reference: Timeline | None = None,
) -> Analysis:
    """Set a joined trace against its device and its baseline.

    Args:
        timeline: from `advisor.trace.link.load` or `join`.
        device: name or TOML that overrides what the trace says of its device.
        devices_toml: further device rows of the user's.
        baseline_step_ms: step time without the profiler; overrides the capture's own.
        roofs: ``"auto"`` takes what `advisor calibrate` measured on the trace's device, where it did on
            this machine and the user names no device and gives no figures, else the datasheet's;
            ``"datasheet"`` and ``"measured"`` insist.
        reference: another trace of the same program, asked for the work of kernels replayed from graphs
            which this one does not tell; see `advisor.roofline.graphs`.

    Raises:
        UsageError: no such device, or `roofs` insists on what was not measured.
        InputError: a device file that cannot be used.
    """
    if timeline.cpu_only:
        timeline = gather_host_operators(timeline)
    found = _device_of(timeline, device, devices_toml)
    if not timeline.cpu_only:
        found = choose_roofs(found, device_properties(timeline), roofs, named=device is not None)
    baseline, source = _baseline(timeline.trace.context, baseline_step_ms)
    analysis = Analysis(timeline, found, baseline, source)
    if timeline.cpu_only and device is None and found.peaks:
        analysis.device = _at_least_reached(analysis)
    return _with_replays(analysis, reference)


def _at_least_reached(analysis: Analysis) -> Device:
    """The CPU, measured while it may have had other work, with no roof under what the trace shows."""
    from advisor.roofline.cpu_roof import at_least_reached

    costs, rows = analysis.costs, analysis.timeline.launches
    return at_least_reached(
        analysis.device,
        flops=costs.flops - costs.flops_padding,
        bytes_moved=costs.bytes_read - costs.bytes_reread + costs.bytes_written,
        dur_ns=rows.dur_ns,
        pipe=costs.pipe,
        pipes=costs.pipes,
        name=rows.name,
        names=analysis.timeline.trace.names,
    )


def _with_replays(analysis: Analysis, reference: Timeline | None) -> Analysis:
    numbers = find_replays(analysis.timeline)
    if not (numbers >= 0).any():
        return analysis
    other = (reference, Analysis(reference, analysis.device).costs) if reference else None
    timeline, replays = infer_replays(analysis.timeline, numbers, analysis.costs, other)
    return replace(analysis, timeline=timeline, replays=replays)


def _device_of(timeline: Timeline, override: str | None, devices_toml: Path | None) -> Device:
    if timeline.cpu_only and override is None:
        from advisor.roofline.cpu_roof import cpu_name, measure_cpu

        context_device = timeline.trace.context.get("device")
        stated = context_device.get("name") if isinstance(context_device, Mapping) else None
        made_on = stated if isinstance(stated, str) else ""
        if made_on and made_on == cpu_name():
            return measure_cpu()
        return Device(
            name=made_on or "CPU",
            note="a CPU's roofs are measured on the machine that made the trace; analyse it there",
        )
    return find_device(device_properties(timeline), override=override, user_toml=devices_toml)


def device_properties(timeline: Timeline) -> Mapping[str, Any] | None:
    """The trace's entry for the device that did the work."""
    entries = timeline.trace.meta.get("deviceProperties")
    entries = [e for e in entries if isinstance(e, Mapping)] if isinstance(entries, list) else []
    for entry in entries:
        if entry.get("id") == timeline.main_device:
            return entry
    if entries:
        return entries[0]
    device = timeline.trace.context.get("device")
    return device if isinstance(device, Mapping) else None


def _baseline(context: Mapping[str, Any], given_ms: float | None) -> tuple[float | None, str]:
    if given_ms is not None:
        if not 0 < given_ms <= _MAX_STEP_MS:
            raise UsageError(f"a step without the profiler cannot take {given_ms:g} ms: give its time in ms")
        return given_ms * 1e6, "user"
    block = context.get("baseline")
    median = block.get("median_ms") if isinstance(block, Mapping) else None
    if isinstance(median, (int, float)) and not isinstance(median, bool) and 0 < median <= _MAX_STEP_MS:
        return median * 1e6, "capture"
    return None, ""
