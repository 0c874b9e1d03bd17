"""Our figures on Holistic Trace Analysis' basis, so that a difference means something.

HTA looks at the device as a whole: every stream and every device of the trace, from the start of the first
work to the end of the last. Where two or more `ProfilerStep` ranges are marked it leaves out work whose host
call is not in the trace. Our own headline figures are per steady step and are not comparable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from advisor.trace.events import KERNEL
from advisor.trace.intervals import union_ns
from advisor.trace.link import Timeline

#: What HTA takes for a collective, by the name's beginning; fewer kernels than `advisor.trace.phases` does.
_COLLECTIVE = re.compile(r"nccl|hip|hccl|.*ncclKernel")
#: Names of the figures that both have.
SPAN = "first to last device work"
IDLE = "idle time"
COMPUTE = "compute time"
NON_COMPUTE = "non-compute time"
OVERLAP = "communication overlapped by compute"
UNITS = {SPAN: "ms", IDLE: "ms", COMPUTE: "ms", NON_COMPUTE: "ms", OVERLAP: "%"}


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """How the device spent its time.

    Attributes:
        span_ns: from the start of the first work to the end of the last.
        idle_ns: part of the span in which nothing ran.
        compute_ns: part in which at least one compute kernel ran.
        non_compute_ns: part in which only communication, copies and memsets ran.
        overlap_fraction: share of the time with communication in which a compute kernel ran too;
            None without communication.
    """

    span_ns: int
    idle_ns: int
    compute_ns: int
    non_compute_ns: int
    overlap_fraction: float | None

    def figures(self) -> dict[str, float | None]:
        """The figures by name, in the units of `UNITS`; the overlap to 0.01 %, as HTA gives it."""
        overlap = None if self.overlap_fraction is None else round(100 * self.overlap_fraction, 2)
        return {
            SPAN: self.span_ns / 1e6,
            IDLE: self.idle_ns / 1e6,
            COMPUTE: self.compute_ns / 1e6,
            NON_COMPUTE: self.non_compute_ns / 1e6,
            OVERLAP: overlap,
        }


def device_time(
    start_ns: np.ndarray, end_ns: np.ndarray, compute: np.ndarray, communication: np.ndarray
) -> DeviceTime | None:
    """Split the device's time, overlapping work counted once.

    Args:
        start_ns, end_ns: int64 (n,), of the device work.
        compute: bool (n,), compute kernels.
        communication: bool (n,), collectives.

    Returns:
        None without any work.
    """
    if not len(start_ns):
        return None
    span = int(end_ns.max() - start_ns.min())
    busy = union_ns(start_ns, end_ns)
    compute_ns = union_ns(start_ns[compute], end_ns[compute])
    communication_ns = union_ns(start_ns[communication], end_ns[communication])
    either = compute | communication
    both_ns = compute_ns + communication_ns - union_ns(start_ns[either], end_ns[either])
    return DeviceTime(
        span_ns=span,
        idle_ns=span - busy,
        compute_ns=compute_ns,
        non_compute_ns=busy - compute_ns,
        overlap_fraction=both_ns / communication_ns if communication_ns else None,
    )


def in_hta_window(timeline: Timeline) -> np.ndarray:
    """bool (launches,): what HTA keeps when it is told to keep the last step."""
    rows, steps = timeline.launches, timeline.steps
    if steps.source == "profiler" and len(steps) > 1:
        return rows.launch_ts_ns >= 0
    return np.ones(len(rows), bool)


def on_hta_basis(timeline: Timeline) -> DeviceTime | None:
    """The split of a trace's device time; None where the trace has no device work."""
    if timeline.cpu_only:
        return None
    rows, names = timeline.launches, timeline.trace.names
    kept = in_hta_window(timeline)
    numbers, inverse = np.unique(rows.name, return_inverse=True)
    collective = np.array([_COLLECTIVE.match(names[i]) is not None for i in numbers.tolist()], bool)
    collective = collective[inverse.reshape(-1)]
    kernel = rows.kind == KERNEL
    return device_time(
        rows.ts_ns[kept],
        rows.end_ns[kept],
        (kernel & ~collective)[kept],
        (kernel & collective)[kept],
    )
