"""The vocabulary of changes to a training step, which `advisor.advice.replay` can play.

Rows are positions in ``Timeline.launches``, ops in ``Trace.ops``, calls in ``Trace.runtime``. An edit states
what happens in every step that it names rows of; rules name those of all steps in the trace, or of the steady
ones, and the replay counts the steady ones only. Rows may be a mask over all launches as well. Host times of
what is new are as without the profiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Number: TypeAlias = "float | np.ndarray"


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A figure that is not known exactly.

    Attributes:
        pessimistic: where the change helps least.
        likely: the best guess.
        optimistic: where the change helps most.

    All three are floats, or arrays of one shape.
    """

    pessimistic: Number
    likely: Number
    optimistic: Number

    @classmethod
    def exactly(cls, value: Number) -> Estimate:
        """Known without doubt."""
        return cls(value, value, value)

    @classmethod
    def around(cls, likely: Number, *, worse: float, better: float) -> Estimate:
        """A duration that may be `worse` times as long or `better` times as long."""
        return cls(likely * worse, likely, likely * better)

    @classmethod
    def stacked(cls, estimates: Sequence[Estimate]) -> Estimate:
        """Those of n things, a number each, as one with arrays of (n,)."""
        columns = zip(*(each.cases for each in estimates), strict=True)
        return cls(*(np.array([float(figure) for figure in column]) for column in columns))

    @property
    def cases(self) -> tuple[Number, Number, Number]:
        """From pessimistic to optimistic."""
        return self.pessimistic, self.likely, self.optimistic

    def of(self, case: str) -> Number:
        """The figure in a case: ``"pessimistic"``, ``"likely"`` or ``"optimistic"``."""
        return getattr(self, case)


_NOTHING = Estimate.exactly(0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Retime:
    """Launches take another time on the device.

    Attributes:
        rows: int (n,).
        dur_ns: new durations, a number or (n,) each.
    """

    rows: np.ndarray
    dur_ns: Estimate


@dataclass(frozen=True, slots=True, eq=False)
class Remove:
    """Launches do not happen.

    Attributes:
        rows: int (n,).
        with_host: whether the host's part goes too: the calls that launch them, and the self time of each
            operator that launches nothing else (with operators around it that then launch nothing).
    """

    rows: np.ndarray
    with_host: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Fuse:
    """Each group of launches becomes a single one.

    It runs in the place of the group's last launch, on its stream. The host's part of the others goes, as
    with `Remove`; that of the last stays.

    Attributes:
        groups: m arrays of rows; each within one step.
        dur_ns: duration of each fused launch, a number or (m,).
        with_host: whether the host's part of the others goes.
        host_ns: host time that each fused launch takes besides what stays, as without the profiler: a
            custom operator's own, or a compiled region's guards.
    """

    groups: list[np.ndarray]
    dur_ns: Estimate
    with_host: bool = True
    host_ns: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Insert:
    """A launch more.

    Attributes:
        after: int (n,), rows right after which, on their streams, a new launch follows.
        dur_ns: duration on the device, a number or (n,).
        host_ns: host time of each new operator with its launch.
    """

    after: np.ndarray
    dur_ns: Estimate
    host_ns: float = 10_000.0


@dataclass(frozen=True, slots=True, eq=False)
class DropSync:
    """Host calls no longer wait for the device; their own cost of a plain call stays.

    Attributes:
        calls: int (n,), positions in ``Trace.runtime``: synchronisations, or copies that block the host.
    """

    calls: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class HostTime:
    """Operators, with all that runs inside them on the host, take another share of their host time.

    Attributes:
        ops: int (n,), positions in ``Trace.ops``; where they nest, the outermost counts.
        factor: new over old host time, without what the host waits for the device.
    """

    ops: np.ndarray
    factor: Estimate


@dataclass(frozen=True, slots=True, eq=False)
class HostRemove:
    """A stretch of host time in each step goes, wherever no operator stands for it (a gap, a Python hook).

    Attributes:
        start_ns, end_ns: int64 (n,), stretches on the trace's clock.
        track: int32 (n,), host threads.
        left: share of each stretch that stays.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    track: np.ndarray
    left: Estimate = _NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """Copies run on a stream of their own, next to the computation, and do not block the host.

    Attributes:
        rows: int (n,), copies.
        dur_ns: duration of each then, a number or (n,).
    """

    rows: np.ndarray
    dur_ns: Estimate


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """Fetching a batch takes another time.

    Attributes:
        host_ns: time of the training process in each fetch, when the batch is ready.
        period_ns: the loader's workers deliver a batch each this long; 0 where they always keep up.
    """

    host_ns: Estimate
    period_ns: Estimate


@dataclass(frozen=True, slots=True, eq=False)
class LaunchAsGraph:
    """All launches of a phase's or step's host work become the replay of one CUDA graph.

    Attributes:
        rows: int (n,), launches that go into the graph.
        host_ns: host time of one replay.
        gap_ns: between successive launches inside a graph, on the device.
    """

    rows: np.ndarray
    host_ns: Estimate
    gap_ns: float = 1_000.0


Edit: TypeAlias = (
    "Retime | Remove | Fuse | Insert | DropSync | HostTime | HostRemove | Overlap | Input | LaunchAsGraph"
)
