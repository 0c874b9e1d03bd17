"""Where the host waits for the device, and what in the user's code asks it to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from advisor.advice.wording import count, duration, one_line
from advisor.roofline.launch_class import PAGEABLE_COPY
from advisor.trace.nesting import Nesting

if TYPE_CHECKING:
    from advisor.advice.loop import Loop

_WAITS = (
    r"^(cuda|hip|cu|acl|musa)\w*(Stream|Device|Event|Ctx)_?Synchronize|^hipMemcpyWithStream$|^cudaMemcpy$"
)
#: Ranges in which the framework itself waits, for its own timing or its communication.
_FRAMEWORK = r"^DistributedDataParallel\.|^nccl:|^advisor::"
#: Where neither a module nor a phase tells the place.
_UNMARKED = "code outside the marked phases"
CONDITION = "a tensor used as a condition"
#: The first that any operator around the call matches; operators innermost first.
_CAUSES = (
    (r"^aten::is_nonzero$", CONDITION),
    (r"^aten::(nonzero|argwhere)", "nonzero or a boolean index"),
    (r"^aten::(masked_select|index|index_put_|_index_put_impl_)$", "a boolean index"),
    (r"^aten::_?unique|^aten::repeat_interleave|^aten::bincount", "a result of unknown size"),
    (r"^aten::(item|_local_scalar_dense)$", ".item()"),
    (r"^aten::(equal|allclose|is_same_size)$", "a comparison that Python reads"),
    (r"^aten::(to|_to_copy|copy_)$", ".cpu() or print of a tensor"),
)
#: Causes whose operator goes with the wait, and what it consists of.
_GOES = (".item()", ".cpu() or print of a tensor", CONDITION)
_FETCHES = re.compile(r"^aten::(is_nonzero|item|_local_scalar_dense|to|_to_copy|copy_)$")
_COMPARES = re.compile(
    r"^aten::(isfinite|isnan|isinf|isclose|all|any|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|__\w+__)$"
)
_BARE = (
    ("Device", "torch.cuda.synchronize()"),
    ("Event", "event.synchronize()"),
    ("Stream", "stream.synchronize()"),
)
_COPYING = ("aten::to", "aten::_to_copy", "aten::copy_")
_UNSCALE, _UPDATE = r"_amp_(foreach_)?non_finite_check_and_unscale_$", r"^aten::_amp_update_scale_$"

#: What to write in place of each cause of a wait.
_CURES = {
    ".item()": 'self.log("train_loss", loss)     # the tensor, not loss.item(); add up on the device\n'
    "Trainer(log_every_n_steps=50, callbacks=[TQDMProgressBar(refresh_rate=50)])",
    ".cpu() or print of a tensor": "self.outputs.append(y.detach())   # on the device; .cpu() once an epoch",
    "nonzero or a boolean index": "x = torch.where(mask, x, 0.0)     # in place of x[mask] = 0 or x[mask]",
    "a boolean index": "x = torch.where(mask, x, 0.0)     # in place of x[mask] = 0 or x[mask]",
    "a result of unknown size": "torch.repeat_interleave(x, n, output_size=total)   # of fixed size",
    CONDITION: "loss = torch.where(bad, 0.0, loss)   # in place of `if bad:`; "
    "clip_grad_norm_(..., error_if_nonfinite=False)",
    "a comparison that Python reads": "(a == b).all()     # stays on the device",
    "torch.cuda.synchronize()": "# without torch.cuda.synchronize(): record torch.cuda.Event, read it later",
    "event.synchronize()": "if event.query(): ...     # read an event's time a step later, when it is done",
}
_CURES_IN_TORCH = {
    ".item()": "running = running + loss.detach()     # on the device\n"
    "if step % 50 == 0:\n    print(running.item() / 50)        # one wait in fifty steps",
    ".cpu() or print of a tensor": "host = y.detach().to('cpu', non_blocking=True)   # read it a step later",
}


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of the host in a steady step.

    Attributes:
        call: position in ``Trace.runtime``.
        dur_ns: of the call.
        cause: what asks for it, in the user's terms; ``GradScaler`` for its flag.
        place: Python frame or module, where the trace tells; else the phase.
        op: position in ``Trace.ops`` of the operator that does nothing but fetch the value, or -1.
        checks: of those right before it that work out what the condition is, and nothing else.
    """

    call: int
    dur_ns: int
    cause: str
    place: str
    op: int = -1
    checks: tuple[int, ...] = ()


def host_waits(loop: Loop) -> list[Wait]:
    """Waits of steady steps that the user's code asks for.

    Left out are waits for copies from the host, those within a batch's fetch and within ranges of the
    framework's own.
    """
    host, trace, rows = loop.host, loop.timeline.trace, loop.rows
    calls = trace.runtime
    blocking = host.calls_named(_WAITS)
    # A copy into pageable memory returns when it is done, by itself.
    launching = np.flatnonzero(host.row >= 0)
    to_pageable = loop.to_host & (loop.analysis.classes == PAGEABLE_COPY)
    blocking[launching[to_pageable[host.row[launching]]]] = True
    sending = {
        above
        for op in np.unique(rows.op[loop.to_device & (rows.op >= 0)]).tolist()
        for above in (op, *_copying_around(loop, op))
    }
    blocking &= host.counted & ~np.isin(host.op, list(sending))
    blocking &= ~host.fetches.around(calls.ts_ns, calls.track)
    frame = host.ranges(_FRAMEWORK)
    in_framework = Nesting(frame.track, frame.ts_ns, frame.dur_ns).innermost(calls.track, calls.ts_ns) >= 0
    blocking &= ~(in_framework & (host.op < 0))
    if loop.timeline.steps.source == "trace" and len(rows):
        # With nothing to mark steps, what lies beyond the launches is the profiler's start and stop.
        launched = rows.launch_ts_ns[rows.launch_ts_ns >= 0]
        inside = (calls.ts_ns > launched.min(initial=0)) & (calls.ts_ns < launched.max(initial=0))
        blocking &= inside | ~host.calls_named(r"(Device|Ctx)Synchronize")
    scaled = _between(loop, _UNSCALE, _UPDATE)
    found = []
    for call in np.flatnonzero(blocking).tolist():
        chain = host.chain(int(host.op[call]))
        cause = cause_of(trace.names[calls.name[call]], chain)
        if cause == ".item()" and scaled(int(calls.ts_ns[call])):
            cause = "GradScaler"
        op = _fetching(loop, int(host.op[call])) if cause in _GOES else -1
        checks = _checks(loop, op) if cause == CONDITION else ()
        found.append(Wait(call, int(calls.dur_ns[call]), cause, _place(loop, call), op, checks))
    return found


def _fetching(loop: Loop, op: int) -> int:
    """The outermost of the operators around one that only fetch a value for Python."""
    outermost = -1
    while op >= 0 and _FETCHES.search(loop.timeline.op_name(op) or ""):
        outermost, op = op, int(loop.timeline.op_parent[op])
    return outermost


def _checks(loop: Loop, op: int) -> tuple[int, ...]:
    """The outermost operators right before one that reads a truth value, as far as they make it."""
    ops, parent = loop.timeline.trace.ops, loop.timeline.op_parent
    if op < 0:
        return ()
    beside = np.flatnonzero(
        (parent == parent[op]) & (ops.track == ops.track[op]) & (ops.ts_ns < ops.ts_ns[op])
    )
    found = []
    for one in beside[np.argsort(-ops.ts_ns[beside], kind="stable")].tolist():
        if not _COMPARES.search(loop.timeline.op_name(one) or ""):
            break
        found.append(one)
    return tuple(found)


def cause_of(call: str, chain: Sequence[str]) -> str:
    """What asks for a wait: by the operators around it, innermost first, or the call itself without any."""
    for pattern, cause in _CAUSES:
        if any(re.search(pattern, name) for name in chain):
            return cause
    if chain:
        return one_line(chain[-1])
    return next((cause for part, cause in _BARE if part in call), call)


def _copying_around(loop: Loop, op: int) -> Iterator[int]:
    """The operators around one that belong to the same copy."""
    while (op := int(loop.timeline.op_parent[op])) >= 0 and loop.timeline.op_name(op) in _COPYING:
        yield op


def _between(loop: Loop, first: str, last: str):  # type: ignore[no-untyped-def]
    """A test whether a time lies after an operator of one name and before the next one of another."""
    ops = loop.timeline.trace.ops
    begins, ends = np.sort(ops.end_ns[loop.ops_named(first)]), np.sort(ops.ts_ns[loop.ops_named(last)])

    def holds(ts_ns: int) -> bool:
        after = int(np.searchsorted(begins, ts_ns, "right"))
        if not after:
            return False
        closing = int(np.searchsorted(ends, begins[after - 1]))
        return closing < len(ends) and ts_ns < ends[closing]

    return holds


def _place(loop: Loop, call: int) -> str:
    calls = loop.timeline.trace.runtime
    frame = loop.host.frame(int(calls.ts_ns[call]), int(calls.track[call]))
    if frame:
        return frame
    # The operator's own copy, launched just before, has the module and the phase.
    op = int(loop.host.op[call])
    step = int(loop.timeline.steps.at(calls.ts_ns[call : call + 1])[0])
    if calls.ts_ns[call] < loop.first_kernel_ns[step]:
        return "a callback, logger or progress bar between two steps"
    row = int(loop.host.row[call])
    if row < 0 and op >= 0:
        own = np.flatnonzero(loop.rows.op == op)
        row = int(own[-1]) if len(own) else -1
    if row < 0:
        return ""
    phase = loop.phase_of(row)
    return loop.module_of(row) or (_UNMARKED if phase == "other" else f"the {phase} phase")


def worst_cause(waits: Sequence[Wait]) -> str:
    """The cause that waits longest."""
    return _causes(waits)[0]


def cure(waits: Sequence[Wait], *, plain_torch: bool = False) -> str:
    """Code that does without, a piece for each cause, the worst first."""
    known = _CURES | _CURES_IN_TORCH if plain_torch else _CURES
    return "\n".join(
        dict.fromkeys(
            known.get(cause, f"# {one_line(cause)}: every n-th step only") for cause in _causes(waits)
        )
    )


def wait_lines(waits: Sequence[Wait], steps: int, most: int = 8) -> list[str]:
    """Waits by cause and place, worst first, as figures of one step."""
    times, numbers = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for wait in waits:
        times[wait.cause, wait.place] += wait.dur_ns
        numbers[wait.cause, wait.place] += 1
    lines = [
        f"{cause}{f' in {place}' if place else ''}: "
        f"{count(numbers[cause, place] / steps, 'wait')} a step, {duration(took / steps)}"
        for (cause, place), took in times.most_common()
    ]
    return lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else [])


def _causes(waits: Sequence[Wait]) -> list[str]:
    times = Counter[str]()
    for wait in waits:
        times[wait.cause] += max(1, wait.dur_ns)
    return [cause for cause, _ in times.most_common()]
