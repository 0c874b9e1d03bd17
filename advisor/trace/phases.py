"""The phase of the training step that each launch belongs to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from advisor.trace.events import MEMCPY, Trace
from advisor.trace.nesting import Nesting, nearest
from advisor.trace.steps import Steps

if TYPE_CHECKING:
    from advisor.trace.link import Launches

PHASES = (
    "input", "forward", "loss", "backward", "optimizer", "communication", "validation", "logging", "other",
)  # fmt: skip
_CODE = {name: i for i, name in enumerate(PHASES)}
PHASE_PREFIX = "advisor::phase::"
#: Ranges that users write around the parts of their loop: "## forward ##", "optimizer_step", ...
_USER_RANGE = re.compile(
    r"^\W*(?:train(?:ing)?[ _])?(forward|backward|optimizer|loss|validation)(?:[ _](?:pass|step))?\W*$", re.I
)
_COLLECTIVE = re.compile(r"^(?:void )?\W*(?:nccl|rccl|msccl)", re.I)
_LOSS = re.compile(r"loss|cross_entropy")
_BACKWARD = re.compile(r"^(?:autograd::engine::evaluate_function|\w+Backward\d*$)")


def is_backward(op_name: str) -> bool:
    """Whether an operator is the autograd engine's: its own range or a backward node."""
    return _BACKWARD.match(op_name) is not None


def is_collective(kernel_name: str) -> bool:
    """Whether a kernel's name is that of a collective (NCCL, RCCL, MSCCL)."""
    return _COLLECTIVE.match(kernel_name) is not None


def assign_phases(trace: Trace, launches: Launches, parent: np.ndarray, steps: Steps) -> np.ndarray:
    """Phase of each launch as an index into `PHASES`; int8 (n,).

    Ranges that the capture or the user put around the phases decide where they exist; elsewhere the
    autograd engine's own operators, the optimizer's and the loader's ranges do.
    """
    phase = np.full(len(launches), _CODE["other"], np.int8)
    linked = launches.launch_ts_ns >= 0
    inferred = _inferred(trace, launches, parent, steps)
    phase[linked] = inferred[linked]
    stated = _stated(trace, launches.launch_ts_ns)
    phase = np.where(stated >= 0, stated, phase).astype(np.int8)
    in_loss = nearest(launches.op, parent, _named(trace, trace.ops.name, _LOSS.search)) >= 0
    phase[in_loss & (phase == _CODE["forward"])] = _CODE["loss"]
    collective = np.array([is_collective(name) for name in trace.names], bool)
    if len(collective):
        phase[collective[launches.name]] = _CODE["communication"]
    return phase


def _stated(trace: Trace, ts_ns: np.ndarray) -> np.ndarray:
    """Phase by explicit ranges, or -1. Time alone decides: backward launches from a thread of its own."""
    marks = trace.annotations
    codes = np.array([_stated_code(name) for name in trace.names], np.int8)
    if not len(marks) or not (codes[marks.name] >= 0).any():
        return np.full(len(ts_ns), -1, np.int8)
    ranges = marks.take(codes[marks.name] >= 0)
    nesting = Nesting(np.zeros(len(ranges), np.int32), ranges.ts_ns, ranges.dur_ns)
    at = nesting.innermost(np.zeros(len(ts_ns), np.int32), ts_ns)
    return np.where(at >= 0, codes[ranges.name[np.maximum(at, 0)]], -1).astype(np.int8)


def _stated_code(name: str) -> int:
    if name.startswith(PHASE_PREFIX):
        return _CODE.get(name[len(PHASE_PREFIX) :], _CODE["other"])
    found = _USER_RANGE.match(name)
    return _CODE[found.group(1).lower()] if found else -1


def _named(trace: Trace, name_index: np.ndarray, test) -> np.ndarray:
    """bool, per event: whether its name passes."""
    hit = np.array([bool(test(name)) for name in trace.names], bool)
    return hit[name_index] if len(hit) else np.zeros(len(name_index), bool)


def _inferred(trace: Trace, launches: Launches, parent: np.ndarray, steps: Steps) -> np.ndarray:
    ops, ts = trace.ops, launches.launch_ts_ns
    engine = _named(trace, ops.name, is_backward)
    phase = np.full(len(ts), _CODE["forward"], np.int8)

    begin, end = _span_per_step(steps, ops.ts_ns[engine], ops.end_ns[engine])
    step = launches.step
    has_backward = (step >= 0) & (begin[np.maximum(step, 0)] >= 0)
    first, last = begin[np.maximum(step, 0)], end[np.maximum(step, 0)]
    phase[has_backward & (ts >= first)] = _CODE["backward"]
    phase[has_backward & (ts >= last)] = _CODE["other"]

    marks = trace.annotations
    to_device = np.array(["HtoD" in name for name in trace.names], bool)
    if len(to_device):
        phase[(launches.kind == MEMCPY) & to_device[launches.name]] = _CODE["input"]
    phase[_inside(trace, marks, "enumerate(DataLoader)", ts)] = _CODE["input"]
    stepping = _inside(trace, marks, "Optimizer.step#", ts)
    # A closure runs forward and backward inside the optimizer's range: only what follows is its own.
    phase[stepping & (~has_backward | (ts >= last))] = _CODE["optimizer"]
    phase[_inside(trace, marks, "Optimizer.zero_grad#", ts)] = _CODE["optimizer"]
    phase[nearest(launches.op, parent, engine) >= 0] = _CODE["backward"]
    return phase


def _span_per_step(steps: Steps, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First start and last end of these events in each step; -1 where it has none."""
    first = np.full(len(steps), -1, np.int64)
    last = np.full(len(steps), -1, np.int64)
    step = steps.at(start)
    for i in np.unique(step[step >= 0]).tolist():
        first[i], last[i] = start[step == i].min(), end[step == i].max()
    return first, last


def _inside(trace: Trace, marks, prefix: str, ts_ns: np.ndarray) -> np.ndarray:
    chosen = marks.take(_named(trace, marks.name, lambda name: name.startswith(prefix)))
    nesting = Nesting(np.zeros(len(chosen), np.int32), chosen.ts_ns, chosen.dur_ns)
    return nesting.innermost(np.zeros(len(ts_ns), np.int32), ts_ns) >= 0
