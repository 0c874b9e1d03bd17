"""The phase of the training step that each launch belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from advisor.trace.events import MEMCPY, Events, Trace
from advisor.trace.names import coded, named
from advisor.trace.nesting import Nesting, nearest
from advisor.trace.steps import Steps

if TYPE_CHECKING:
    from advisor.trace.link import Launches

PHASES = (
    "input", "forward", "loss", "backward", "optimizer", "communication", "validation", "logging", "other",
)  # fmt: skip
_CODE = {name: i for i, name in enumerate(PHASES)}
VALIDATION = _CODE["validation"]
PHASE_PREFIX = "advisor::phase::"
#: Ranges that users write around the parts of their loop: "## forward ##", "optimizer_step", ...
_USER_RANGE = re.compile(
    r"^\W*(?:train(?:ing)?[ _])?(forward|backward|optimizer|loss|validation)(?:[ _](?:pass|step))?\W*$", re.I
)
#: Ranges of Lightning's PyTorchProfiler. Its `optimizer_step` holds the closure and says nothing.
_LIGHTNING = re.compile(
    r"^\[pl\]\[profile\].*(?:"
    r"(?P<input>\.train_dataloader_next|\[Strategy\].*\.batch_to_device)|"
    r"(?P<forward>\[Strategy\].*\.training_step)|"
    r"(?P<backward>\[Strategy\].*\.backward)|"
    r"(?P<optimizer>\.optimizer_zero_grad|\.on_before_optimizer_step|\.configure_gradient_clipping)|"
    r"(?P<validation>\[Strategy\].*\.validation_step|\.val_next)"
    r")$"
)
#: NCCL and its likes by their prefix; by a part of the name the kernels of torch's symmetric memory and of
#: serving engines' own reductions.
_COLLECTIVE = re.compile(
    r"^(?:void )?\W*(?:nccl|rccl|msccl|oneccl|nvshmem|rocshmem|deep_ep::)"
    r"|multimem_(?:all_|one_|reduce)|(?:one|two)_shot_all_|cross_device_reduce|allreduce_fusion_kernel"
    r"|oneccl_(?:all|reduce|broadcast)",
    re.I,
)
_LOSS = re.compile(r"loss|cross_entropy")
_ENGINE = re.compile(
    r"^(?:autograd::engine::evaluate_function\b|(?:struct )?torch::autograd::|\w+Backward\d*$)"
)
#: Ranges that the loop's own thread carries.
_LOOP = re.compile(r"^(?:ProfilerStep#|Optimizer\.|enumerate\(DataLoader\))")
_FUSED_OPTIMIZER = re.compile(r"::_?fused_(?:adam|sgd|adagrad)")
_FOREACH = re.compile(r"^aten::_foreach_")


def is_backward(op_name: str) -> bool:
    """Whether an operator is the autograd engine's: its own range or a backward node."""
    return _ENGINE.match(op_name) is not None


def is_collective(kernel_name: str) -> bool:
    """Whether a kernel's name is that of a collective, of a library (NCCL, NVSHMEM) or without one."""
    return _COLLECTIVE.search(kernel_name) is not None


def assign_phases(trace: Trace, launches: Launches, parent: np.ndarray, steps: Steps) -> np.ndarray:
    """Phase of each launch as an index into `PHASES`; int8 (n,).

    Ranges that the capture, Lightning's profiler or the user put around the phases decide where they
    exist; elsewhere the autograd engine's own operators, the optimizer's and the loader's ranges do.
    """
    linked = launches.launch_ts_ns >= 0
    phase = np.where(linked, _inferred(trace, launches, parent, steps), _CODE["other"]).astype(np.int8)
    stated = _stated(trace, launches.track, launches.launch_ts_ns)
    phase = np.where(stated >= 0, stated, phase)
    in_loss = nearest(launches.op, parent, named(trace.names, trace.ops.name, _LOSS.search)) >= 0
    phase[in_loss & (phase == _CODE["forward"])] = _CODE["loss"]
    phase[named(trace.names, launches.name, is_collective)] = _CODE["communication"]
    return phase


def _stated(trace: Trace, track: np.ndarray, ts_ns: np.ndarray) -> np.ndarray:
    """Phase by explicit ranges, or -1: by those of its own thread, else by time alone.

    Backward launches from a thread of its own, which has no such ranges.
    """
    codes = coded(trace.names, trace.annotations.name, _stated_code, np.int8)
    ranges = trace.annotations.take(codes >= 0)
    codes = codes[codes >= 0]
    if not len(ranges):
        return np.full(len(ts_ns), -1, np.int8)
    at = Nesting(ranges.track, ranges.ts_ns, ranges.dur_ns).innermost(track, ts_ns)
    elsewhere = at < 0
    at[elsewhere] = _innermost_of_any_thread(ranges, ts_ns[elsewhere])
    return np.where(at >= 0, codes[at], -1).astype(np.int8)


def _stated_code(name: str) -> int:
    if name.startswith(PHASE_PREFIX):
        return _CODE.get(name[len(PHASE_PREFIX) :], _CODE["other"])
    found = _USER_RANGE.match(name)
    if found:
        return _CODE[found.group(1).lower()]
    found = _LIGHTNING.match(name)
    return _CODE[found.lastgroup] if found and found.lastgroup else -1


def _inferred(trace: Trace, launches: Launches, parent: np.ndarray, steps: Steps) -> np.ndarray:
    """Phase of each linked launch without anyone having stated it."""
    ops, marks, ts = trace.ops, trace.annotations, launches.launch_ts_ns
    engine = named(trace.names, ops.name, is_backward)
    # With neither operators nor ranges on the host, nothing tells forward from backward.
    silent = not len(ops) and not len(marks)
    phase = np.full(len(ts), _CODE["other" if silent else "forward"], np.int8)

    ended = _last_end_in_step(steps, ops.ts_ns[engine], ops.end_ns[engine])
    backward_over = (launches.step >= 0) & (ended >= 0)[launches.step] & (ts >= ended[launches.step])
    phase[backward_over] = _CODE["other"]

    def under(test: Callable[[str], object]) -> np.ndarray:
        return nearest(launches.op, parent, named(trace.names, ops.name, test)) >= 0

    phase[backward_over & under(_FOREACH.match)] = _CODE["optimizer"]
    phase[under(_FUSED_OPTIMIZER.search)] = _CODE["optimizer"]

    to_device = named(trace.names, launches.name, lambda name: "HtoD" in name or "HostToDevice" in name)
    phase[(launches.kind == MEMCPY) & to_device] = _CODE["input"]
    phase[_inside(trace, marks, "enumerate(DataLoader)", ts) >= 0] = _CODE["input"]
    phase[_in_optimizer_step(trace, ops.ts_ns[engine], ops.end_ns[engine], ts)] = _CODE["optimizer"]
    phase[_inside(trace, marks, "Optimizer.zero_grad#", ts) >= 0] = _CODE["optimizer"]
    phase[under(is_backward)] = _CODE["backward"]
    # A thread other than the loop's that runs the engine does nothing else.
    loop = marks.track[named(trace.names, marks.name, _LOOP.match)]
    if len(loop):
        phase[np.isin(launches.track, np.setdiff1d(ops.track[engine], loop))] = _CODE["backward"]
    return phase


def _in_optimizer_step(
    trace: Trace, engine_start_ns: np.ndarray, engine_end_ns: np.ndarray, ts_ns: np.ndarray
) -> np.ndarray:
    """bool (m,): in an optimizer's range, and after the backward of the closure that it may hold.

    Lightning runs forward and backward in a closure inside the optimizer's own range.
    """
    prefix = "Optimizer.step#"
    marks = trace.annotations.take(named(trace.names, trace.annotations.name, lambda n: n.startswith(prefix)))
    inside = _innermost_of_any_thread(marks, ts_ns)
    begin = marks.ts_ns
    if len(engine_start_ns):
        # The last engine operator that starts inside a range, if any does.
        last = np.searchsorted(engine_start_ns, marks.end_ns) - 1
        holds = (last >= 0) & (engine_start_ns[last] >= marks.ts_ns)
        begin = np.where(holds, np.maximum.accumulate(engine_end_ns)[last], begin)
    found = inside >= 0
    found[found] = ts_ns[found] >= begin[inside[found]]
    return found


def _last_end_in_step(steps: Steps, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """Last end of the events that start in each step; -1 where none does. int64 (steps,)."""
    last = np.full(len(steps), -1, np.int64)
    step = steps.at(start_ns)
    np.maximum.at(last, step[step >= 0], end_ns[step >= 0])
    return last


def _inside(trace: Trace, marks: Events, prefix: str, ts_ns: np.ndarray) -> np.ndarray:
    """Position among the marks of this kind that hold each time, or -1."""
    chosen = marks.take(named(trace.names, marks.name, lambda name: name.startswith(prefix)))
    return _innermost_of_any_thread(chosen, ts_ns)


def _innermost_of_any_thread(ranges: Events, ts_ns: np.ndarray) -> np.ndarray:
    one_thread = np.zeros(len(ranges), np.int32)
    nesting = Nesting(one_thread, ranges.ts_ns, ranges.dur_ns)
    return nesting.innermost(np.zeros(len(ts_ns), np.int32), ts_ns)
