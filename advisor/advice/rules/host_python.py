"""Host: Python beside the model, in the thread that launches."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from advisor.advice.finding import Finding
from advisor.advice.host_calls import Stretches
from advisor.advice.loop import Loop
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration
from advisor.trace.names import named

_WORTH = 0.02

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
    any thread. Silent where the replay shows that the device does not notice.
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
    idle = host.plain_python(at_least_ns=0.05 * loop.step_ns / loop.real_time)
    if not len(idle):
        return
    places = [
        host.frame((start + end) // 2, track)
        for start, end, track in zip(
            idle.start_ns.tolist(), idle.end_ns.tolist(), idle.track.tolist(), strict=True
        )
    ]
    yield Finding(
        title="plain Python holds the host for "
        f"{duration(idle.total_ns / loop.steps * loop.real_time)} a step",
        evidence=[
            f"{duration(end - start)} " + (f"in {place}" if place else host.between(start, end, track))
            for start, end, track, place in zip(
                idle.start_ns.tolist(), idle.end_ns.tolist(), idle.track.tolist(), places, strict=True
            )
        ][:8],
        edits=[idle.removed] if all(places) else [],
        fix=_RARER_FIX if all(places) else _LOOK_FIX,
        fix_torch=_RARER_FIX_TORCH if all(places) else _LOOK_FIX,
        risk="logs become coarser" if all(places) else "",
        confidence="heuristic",
        note="" if all(places) else "what runs there is not in the trace: Python, files, freeing memory",
    )
