"""Host: Python beside the model, in the thread that launches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from advisor.advice.edits import Estimate
from advisor.advice.finding import Finding
from advisor.advice.host_calls import Stretches
from advisor.advice.loop import Loop
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration
from advisor.roofline.launch_class import PAGEABLE_COPY
from advisor.trace.names import named

_WORTH = 0.02
#: Plain Python from this share of the step on is told.
_LONG = 0.05
#: Of plain Python what any loop has in one place: a progress bar's turn, bookkeeping, Lightning's connectors.
_ANY_LOOP_NS = 500_000.0
#: Share of plain Python that may be needed, where nothing in the trace explains it.
_PERHAPS_NEEDED = 0.5
#: Stretches are alike if none is longer or shorter than the usual by this factor. So many steps must show it.
_ALIKE, _SURE_STEPS = 2.0, 3
#: A batch of more bytes takes its time to be freed, once its copy is through, this long after it at most.
_FREED_BYTES, _FREED_WITHIN_NS = 1 << 20, 300_000

_COLLECT_FIX = """\
class CollectNowAndThen(Callback):
    def on_train_start(self, trainer, module):
        gc.collect()
        gc.freeze()      # what lives now is never walked again
        gc.disable()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % 1000 == 0:
            gc.collect(1)"""
_COLLECT_FIX_TORCH = """\
gc.collect(); gc.freeze(); gc.disable()
for i, batch in enumerate(loader):
    ...
    if i % 1000 == 0:
        gc.collect(1)      # on all ranks at the same step"""
_RARER_FIX = """\
Trainer(log_every_n_steps=50)
def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
    if batch_idx % 50:          # was: every batch
        return"""
_LOOK_FIX = """\
# py-spy record --native -o profile.svg --pid PID     shows what runs there, without slowing it
torch.profiler.profile(..., with_stack=True)        # or a second capture, with stacks"""
_RARER_FIX_TORCH = """\
if step % 50 == 0:
    log(...)      # metrics: update on the device, compute() once an epoch"""


@rule(
    "host.gc",
    title="Garbage collection does not hold up the step",
    failure="Python's garbage collector runs within the step",
    source="Python documentation: gc.freeze, gc.set_threshold",
)
def garbage(loop: Loop) -> Iterator[Finding]:
    """A full collection walks every object of the process, often millions: 0.1 s is not rare. When it
    strikes inside a step the device runs dry, and with several ranks all wait for the unlucky one.

    Recognised where the trace shows it: events of the collector that newer profilers record, or frames of
    `gc.collect` in a trace with stacks. Not applicable to a trace with neither.
    """
    python, names = loop.timeline.trace.python, loop.timeline.trace.names
    collecting = named(
        names, python.name, re.compile(r"^Python GC|<built-in (function|method) collect\b|^gc\.py").search
    )
    loop.require(len(python), "the trace has no Python frames")
    chosen = np.flatnonzero(collecting & loop.host.in_steady_step(python.ts_ns))
    if not len(chosen):
        return
    stretches = Stretches.of(python.take(chosen))
    explicit = any("collect" in names[name] for name in python.name[chosen].tolist())
    yield Finding(
        title=f"garbage collection takes {duration(stretches.total_ns / loop.steps)} a step",
        evidence=[
            f"{count(len(chosen), 'collection')} in {count(loop.steps, 'step')}, the longest "
            f"{duration(python.dur_ns[chosen].max())}",
            *(["gc.collect() is called by hand"] if explicit else []),
        ],
        edits=[stretches.removed],
        fix=_COLLECT_FIX,
        fix_torch=_COLLECT_FIX_TORCH,
        risk="objects in reference cycles live longer, and with them any tensors they hold",
        confidence="measured",
    )


@rule(
    "host.hooks",
    title="Hooks, metrics and logging cost little",
    failure="Hooks, metrics or logging hold up the step",
    source="Lightning documentation: speed up model training, logging frequency",
)
def hooks(loop: Loop) -> Iterator[Finding]:
    """Callbacks, loggers and metrics run on the thread that launches kernels. What they take every step is
    missing there, unless the host is far enough ahead.

    Recognised by Lightning's own ranges around hooks, by the capture's logging phase, and by single
    stretches of pure Python over 5 % of the step: no operator, no call to the device and no batch fetch on
    any thread. One that comes back at the same place in each step, and is longer than what any loop needs
    there, carries a saving: at worst half of it is needed. Other ones whose frames the trace does not tell
    are told without. Silent where the replay shows that the device does not notice.
    """
    host = loop.host
    marks = host.ranges(
        r"^\[pl\]\[profile\]\[(Callback|LightningModule|LightningDataModule)\].*\.on_train_batch_(start|end)|^advisor::phase::logging$"
    )
    names = loop.timeline.trace.names
    marks = marks.take(~named(names, marks.name, re.compile("TrainingAdvisor").search))
    in_hooks = Stretches.of(marks)
    took_ns = in_hooks.total_ns / loop.steps * loop.real_time
    if took_ns >= _WORTH * loop.step_ns:
        by_name = np.bincount(marks.name, marks.dur_ns)
        worst = [i for i in np.argsort(-by_name, kind="stable")[:6].tolist() if by_name[i]]
        yield Finding(
            title=f"hooks and logging hold the host for {duration(took_ns)} a step",
            evidence=[
                f"{names[i].removeprefix('[pl][profile]')}: {duration(by_name[i] / loop.steps)} a step"
                for i in worst
            ],
            edits=[in_hooks.removed],
            fix=_RARER_FIX,
            fix_torch=_RARER_FIX_TORCH,
            risk="logs become coarser",
            confidence="measured",
        )
    idle = host.plain_python(at_least_ns=_LONG * loop.step_ns / loop.real_time)
    repeated = _in_each_step(loop, idle)
    for places in (repeated, ~repeated):
        if places.any() and (found := _plain_python(loop, idle.take(places), bool(places is repeated))):
            yield found


def _plain_python(loop: Loop, idle: Stretches, each_step: bool) -> Finding | None:
    """A finding on stretches in which nothing but Python, or nothing at all, runs; None if it hides."""
    host = loop.host
    bounds = list(zip(idle.start_ns.tolist(), idle.end_ns.tolist(), idle.track.tolist(), strict=True))
    frames = [host.frame((start + end) // 2, track) for start, end, track in bounds]
    known = all(frames)
    if known:
        edits, note = [idle.removed], ""
    elif each_step:
        needed = min(_ANY_LOOP_NS * len(idle) / idle.total_ns, _PERHAPS_NEEDED)
        edits = [replace(idle.removed, left=Estimate(_PERHAPS_NEEDED, needed, 0.0))]
        if loop.hides(edits):
            return None
        note = "what runs there is not in the trace; the saving is what goes if most of it is not needed"
    else:
        edits, note = [], "what runs there is not in the trace: Python, files, freeing memory"
    # Only what is recorded frame by frame swells under the profiler.
    took_ns = idle.total_ns / loop.steps * (loop.real_time if known else 1.0)
    where = ", at the same place in each" if each_step else ""
    return Finding(
        title=f"plain Python holds the host for {duration(took_ns)} a step{where}",
        evidence=[
            f"{duration(end - start)} " + (f"in {frame}" if frame else host.between(start, end, track))
            for (start, end, track), frame in zip(bounds, frames, strict=True)
        ][:8],
        edits=edits,
        fix=_RARER_FIX if known else _LOOK_FIX,
        fix_torch=_RARER_FIX_TORCH if known else _LOOK_FIX,
        risk="logs become coarser" if known else "",
        confidence="heuristic",
        note=note,
    )


def _in_each_step(loop: Loop, idle: Stretches) -> np.ndarray:
    """bool (n,): stretches that come back in each steady step behind the same operator, about as long.

    Left out are those that are short beside what any loop needs there, and the freeing of a batch.
    """
    found = np.zeros(len(idle), bool)
    worth_ns = 2 * _ANY_LOOP_NS + _LONG * loop.step_ns
    step = loop.timeline.steps.at(idle.start_ns)
    behind = np.array([_behind(loop, start, track) for start, track in zip(
        idle.start_ns.tolist(), idle.track.tolist(), strict=True)], object)  # fmt: skip
    took_ns = (idle.end_ns - idle.start_ns).astype(float)
    for name in set(behind.tolist()) - {""}:
        own = behind == name
        usual_ns = float(np.median(took_ns[own]))
        alike = (took_ns[own] < _ALIKE * usual_ns) & (took_ns[own] > usual_ns / _ALIKE)
        if usual_ns >= worth_ns and alike.all() and len(np.unique(step[own])) == loop.steps >= _SURE_STEPS:
            found |= own
    return found


def _behind(loop: Loop, start_ns: int, track: int) -> str:
    """Name of the operator that a stretch follows; empty behind the copy of a batch that is then freed."""
    ops, rows = loop.timeline.trace.ops, loop.rows
    before = np.flatnonzero((ops.track == track) & (ops.end_ns <= start_ns))
    if not len(before):
        return ""
    copies = np.flatnonzero((loop.analysis.classes == PAGEABLE_COPY) & (rows.bytes >= _FREED_BYTES))
    done_ns = loop.timeline.trace.runtime.end_ns[loop.host.call_of[copies[loop.host.call_of[copies] >= 0]]]
    if ((done_ns <= start_ns) & (done_ns > start_ns - _FREED_WITHIN_NS)).any():
        return ""
    return loop.timeline.op_name(int(before[ops.end_ns[before].argmax()])) or ""
