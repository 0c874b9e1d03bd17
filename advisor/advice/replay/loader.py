"""Batch fetches of the played steps: work of the training process, or waiting for the loader's workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.advice.host_calls import HostSide
from advisor.advice.replay.window import Windows

#: A fetch without waiting takes no longer: unpickling, a pinned copy of handles.
_PLAIN_NS = 300_000.0
#: Workers set the pace where fetches wait for at least this share of the step.
_WAITING = 0.02
#: A fetch that takes less than this share of the longest finds the loader exhausted.
_WORKED = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Loader:
    """Fetches.

    Attributes:
        start_ns, end_ns: int64 (n,).
        in_process: whether the training process itself makes the batches.
        waits: whether fetches wait for workers, so that these set a pace.
        period_ns: between batches that the workers deliver; 0 where they keep up, or there are none.
        own_ns: float (n,), of a fetch without waiting.
        usual, spread: mean and standard deviation of the fetches of all steady steps, over the mean of these;
            1 and 0 with none.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    in_process: bool
    waits: bool
    period_ns: float
    own_ns: np.ndarray
    usual: float = 1.0
    spread: float = 0.0


def find_loader(side: HostSide, windows: Windows) -> Loader:
    """The fetches of these windows.

    Where workers are late, each fetch waits, and the workers' own period is the step time: it does not
    shrink with anything else. Where fetches return at once, the workers are faster than the loop, and
    nothing tells by how much.
    """
    found = side.fetches
    length = found.end_ns - found.start_ns
    worked = length >= _WORKED * length.max(initial=0)
    used = (windows.at(found.start_ns) >= 0) & worked
    every = length[worked].astype(float)
    start, end, length = found.start_ns[used], found.end_ns[used], length[used].astype(float)
    order = np.argsort(start, kind="stable")
    start, end, length = start[order], end[order], length[order]
    mean = float(length.mean()) if len(length) else 0.0
    beside = bool(found.iterator) and not found.in_process
    own = np.minimum(length, _PLAIN_NS)
    waiting = float((length - own).sum())
    waits = beside and waiting > _WAITING * windows.total_ns
    return Loader(
        start_ns=start,
        end_ns=end,
        in_process=not beside,
        waits=waits,
        period_ns=windows.total_ns / len(start) if waits else 0.0,
        own_ns=own if waits else length,
        usual=float(every.mean()) / mean if mean else 1.0,
        spread=float(every.std()) / mean if mean else 0.0,
    )
