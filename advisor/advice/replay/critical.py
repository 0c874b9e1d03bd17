"""What a step's time is made of along its critical path."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from advisor.advice.replay.change import Change
from advisor.advice.replay.debias import Speed
from advisor.advice.replay.play import period_ns
from advisor.advice.replay.tape import tape_of
from advisor.roofline.launch_class import COLLECTIVE, LINK_COPIES

#: So much shorter a part is made to see what of it the step feels; small, lest another path becomes critical.
_LITTLE = 1e-3


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Parts of a step's time, in ns, that would shorten it if they were shorter. They add up to the step.

    Attributes:
        host_ns: work of the host.
        compute_ns: kernels.
        communication_ns: collectives.
        copy_ns: copies over a link.
        input_ns: the period of the loader's workers.
        launch_ns: gaps between kernels, launch latencies and returns from waiting.
    """

    host_ns: float
    compute_ns: float
    communication_ns: float
    copy_ns: float
    input_ns: float
    launch_ns: float

    @property
    def device_ns(self) -> float:
        """Kernels, collectives and copies."""
        return self.compute_ns + self.communication_ns + self.copy_ns

    @property
    def step_ns(self) -> float:
        """All parts."""
        return self.host_ns + self.device_ns + self.input_ns + self.launch_ns

    def scaled(self, factor: float) -> CriticalPath:
        """Every part times this."""
        return CriticalPath(*(getattr(self, part) * factor for part in self.__dataclass_fields__))


def critical_path(change: Change, speed: Speed) -> CriticalPath:
    """Find the critical path of a step by making each part a little shorter.

    Step time is a maximum of sums of durations, so to shorten all of one kind by a little shortens it by
    what of that kind lies on its longest chain.

    Args:
        change: edits made to the step; none for the step as it is.
        speed: of the host.
    """
    graph = change.graph
    tape = tape_of(change, speed)
    whole = period_ns(tape)
    row = tape.row
    launches = np.flatnonzero(row >= 0)
    classes = graph.analysis.classes[row[launches]]
    dur = tape.dur_ns

    def felt(shorter: np.ndarray | None = None, host: float = 1.0, loader: float = 1.0) -> float:
        lengths = dur.copy()
        if shorter is not None:
            lengths[launches[shorter]] *= 1.0 - _LITTLE
        played = replace(
            tape,
            dur_ns=lengths,
            at_ns=tape.at_ns * host,
            host_ns=tape.host_ns * host,
            loader_ns=tape.loader_ns * loader,
        )
        return max(whole - period_ns(played), 0.0) / _LITTLE / len(graph.windows)

    copies, collectives = np.isin(classes, LINK_COPIES), classes == COLLECTIVE
    found = {
        "host_ns": felt(host=1.0 - _LITTLE),
        "compute_ns": felt(~copies & ~collectives),
        "communication_ns": felt(collectives) if collectives.any() else 0.0,
        "copy_ns": felt(copies) if copies.any() else 0.0,
        "input_ns": felt(loader=1.0 - _LITTLE) if tape.loader_ns else 0.0,
    }
    step = whole / len(graph.windows)
    known = sum(found.values())
    if known > step:
        found = {part: ns * step / known for part, ns in found.items()}
    return CriticalPath(**found, launch_ns=max(step - known, 0.0))
