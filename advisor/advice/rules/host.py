"""Host: what keeps the process from launching the next kernel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from advisor.advice.edits import DropSync, Edit, Estimate, HostRemove, LaunchAsGraph, Remove, Retime
from advisor.advice.finding import Finding
from advisor.advice.host_calls import Stretches
from advisor.advice.loop import Loop
from advisor.advice.rule import rule
from advisor.advice.waits import cure, host_waits, wait_lines, worst_cause
from advisor.advice.wording import count, duration, percent
from advisor.trace.names import named
from advisor.trace.nesting import Nesting

#: With less idle time than this the device is the limit. Without the un-profiled step time, the profiler's
#: own cost (1.5 to 2 times the host time) looks like idle time.
_IDLE, _IDLE_AS_PROFILED = 0.12, 0.35
#: Host time of a compiled region that replays its graph: guards, copies into static inputs, autograd's part.
_REPLAY_NS = Estimate(1_200_000.0, 400_000.0, 150_000.0)
#: What the compiler's fusion leaves of pointwise time, beside the graph.
_FUSED_LIKELY, _FUSED_BEST = 0.85, 0.5
_POINTWISE = ("pointwise", "norm", "dropout", "reduction", "softmax", "copy")
_WORTH = 0.02
_MOSTLY_PYTHON = 0.3

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
_RARER_FIX_TORCH = """\
if step % 50 == 0:
    log(...)      # metrics: update on the device, compute() once an epoch"""


@rule(
    "host.sync",
    title="The host runs ahead of the device",
    failure="The step makes the host wait for the device",
    source="PyTorch Performance Tuning Guide: avoid unnecessary CPU-GPU synchronization",
)
def sync(loop: Loop) -> Iterator[Finding]:
    """A value of a device tensor that Python asks for (`.item()`, `float(t)`, `.cpu()`, `print(t)`, `if t:`)
    or a result whose size depends on data (`nonzero`, `x[mask]`, `unique`) makes the host wait until the
    device has caught up. Meanwhile nothing is launched, and afterwards the device idles until the host is
    ahead again.

    Recognised by the calls that wait (`cudaStreamSynchronize` and its kin) in steady steps, told apart by
    the operators around them. A GradScaler's look at its found-inf flag is a finding of its own, since it
    has another cure. Silent about waits for copies from pageable memory, which `input.pageable_copy` tells
    of, about those inside batch fetches, and where the host catches up without loss (the step is then the
    device's).
    """
    waits = host_waits(loop)
    loop.require(len(loop.timeline.trace.runtime), "the trace has no runtime calls")
    own = [wait for wait in waits if wait.cause != "GradScaler"]
    if own:
        each, held = len(own) / loop.steps, sum(wait.dur_ns for wait in own) / loop.steps
        yield Finding(
            title=f"{count(each, 'sync')} a step make the host wait {duration(held)} for the device, "
            f"first of all {worst_cause(own)}",
            evidence=wait_lines(own, loop.steps),
            edits=[DropSync(np.array([wait.call for wait in own], np.int64))],
            fix=cure(own),
            fix_torch=cure(own, plain_torch=True),
            risk="values are seen later, and a loop that stops on NaN stops some steps later",
            confidence="measured",
        )
    scaler = [wait for wait in waits if wait.cause == "GradScaler"]
    if scaler:
        held = sum(wait.dur_ns for wait in scaler) / loop.steps
        yield Finding(
            title=f"GradScaler's sync on its found-inf flag holds the host for {duration(held)} a step",
            evidence=wait_lines(scaler, loop.steps),
            edits=[DropSync(np.array([wait.call for wait in scaler], np.int64))],
            fix='Trainer(precision="bf16-mixed")     # needs no scaler; from compute capability 8.0\n'
            "# or keep fp16 with AdamW(..., fused=True): it takes the flag on the device and nothing is read",
            fix_torch="torch.autocast('cuda', dtype=torch.bfloat16)     # without GradScaler",
            risk="bf16 has 8 bits of precision to fp16's 11",
            confidence="measured",
        )


@rule(
    "host.launch_bound",
    title="Kernels are launched faster than they run",
    failure="The device idles because launches come too slowly",
    source="CUDA Graphs in PyTorch (torch.cuda.graphs)\ntorch.compile documentation: mode='reduce-overhead'",
)
def launch_bound(loop: Loop) -> Iterator[Finding]:
    """Each kernel costs the host some microseconds of Python, dispatcher and driver. Where kernels run
    shorter than that, the device waits for the host, and no faster kernel helps.

    A CUDA graph replays all launches by one call: `torch.compile(mode="reduce-overhead")` records them by
    itself and fuses pointwise work too; a larger batch gives each launch more to do. Played: forward and
    backward as one graph each, with 0.15 to 1.2 ms of host time left for either, the optimizer as it is.

    Silent where the device is busy for most of the step outside batch fetches (measured against the step
    time without the profiler: the profiler makes the host 1.5 to 2 times slower), or where kernels come from
    graphs already.
    """
    loop.require(loop.timeline.steps.source != "trace", "the trace marks no steps")
    known = loop.analysis.baseline_ns is not None
    kernels = loop.counted & loop.in_phase("forward", "loss", "backward") & ~loop.analysis.collective
    kernels &= (loop.rows.kind == 0) | (loop.rows.kind == 2)
    loop.require((loop.counted & kernels).any(), "no kernel was launched by a steady step")
    if loop.analysis.replayed[kernels].mean() > 0.5:
        return
    threshold = _IDLE if known else _IDLE_AS_PROFILED
    fetches = loop.host.fetches
    fetching = fetches.typical_ns * len(fetches) / loop.steps * loop.real_time
    # Device work that runs beside a fetch leaves less of it for the rest of the step.
    if loop.busy_share * loop.step_ns > (1 - threshold) * max(loop.step_ns - fetching, 1.0):
        return
    # Long Python between two launches is no matter of launching.
    plain = loop.host.plain_python(at_least_ns=0.05 * loop.step_ns / loop.real_time)
    if plain.total_ns / loop.steps * loop.real_time > _MOSTLY_PYTHON * loop.step_ns:
        return
    idle = 1 - loop.busy_share
    backward = loop.in_phase("backward")
    graphs = [np.flatnonzero(kernels & part) for part in (~backward, backward)]
    edits: list[Edit] = [LaunchAsGraph(rows, _REPLAY_NS) for rows in graphs if len(rows)]
    eager = kernels & np.isin(loop.family, _POINTWISE) & ~loop.kernels_named(r"^triton_")
    rows = np.flatnonzero(eager)
    if len(rows):
        now = loop.rows.dur_ns[rows].astype(float)
        edits.append(Retime(rows, Estimate(now, _FUSED_LIKELY * now, _FUSED_BEST * now)))
    each = int((loop.counted & (loop.rows.kind == 0)).sum()) / loop.steps
    compiled = _compiled(loop)
    yield Finding(
        title=f"launch-bound: the device idles {percent(idle)} of the step while the host launches "
        f"{count(each, 'kernel')}",
        evidence=[
            f"the device works {duration(loop.busy_share * loop.step_ns)} of a {duration(loop.step_ns)} step",
            f"a kernel runs {duration(float(np.median(loop.rows.dur_ns[kernels])))} (median); the host takes "
            f"{duration(loop.step_ns / max(each, 1))} a launch",
            f"{count(kernels.sum() / loop.steps, 'kernel')} of forward and backward would go into graphs",
            *([f"compiled already: {compiled}"] if compiled else []),
        ],
        edits=edits,
        fix='self.net = torch.compile(self.net, mode="reduce-overhead")   # in configure_model(); '
        + ("was compiled without a mode" if compiled else "was eager")
        + "\n# shapes must not change from step to step, and nothing inside may wait for the device\n"
        "# or a larger batch, as far as memory and the learning rate allow",
        fix_torch='model = torch.compile(model, mode="reduce-overhead")\n'
        "# or torch.cuda.make_graphed_callables(model, (sample,)) for eager code",
        risk="compilation takes tens of seconds; a graph keeps memory of its own, and the next replay "
        "overwrites its outputs; the compiler's fusion rounds differently in the last bits",
        confidence="modelled" if known else "heuristic",
        note=""
        if known
        else "the step time without the profiler is not known, and profiling slows the host: an upper bound",
    )


@rule(
    "host.allocator",
    title="Memory comes from the caching allocator",
    failure="The step allocates from the driver",
    source="PyTorch CUDA semantics: memory management, PYTORCH_CUDA_ALLOC_CONF",
)
def allocator(loop: Loop) -> Iterator[Finding]:
    """In a steady loop PyTorch's caching allocator serves every tensor from blocks that it holds. Calls of
    `cudaMalloc` and `cudaFree` in steady steps show that it does not: shapes that change from batch to
    batch, `torch.cuda.empty_cache()` in the loop, or a device so full that cached blocks are given back and
    taken anew. Either call costs from tens of microseconds to milliseconds, and `cudaFree` waits for the
    device.

    Silent below one such call in two steps.
    """
    calls = loop.host.calls_named(
        r"^(cuda|hip)(Malloc|Free|HostAlloc|MallocHost|HostMalloc|HostFree|FreeHost)$|^(cu|hip)Mem(Create|Map|Unmap|Release)$"
    )
    chosen = np.flatnonzero(calls & loop.host.counted)
    if len(chosen) < max(1, 0.5 * loop.steps):
        return
    runtime, names = loop.timeline.trace.runtime, loop.timeline.trace.names
    took = runtime.dur_ns[chosen]
    by_name = Counter(names[name] for name in runtime.name[chosen].tolist())
    frees = chosen[named(names, runtime.name[chosen], re.compile("Free|Unmap|Release").search)]
    total = loop.setting("device", "total_memory_bytes") or loop.device.memory_bytes
    peak = loop.setting("peak_memory_bytes", "in_window")
    full = []
    if peak and total and peak > 0.85 * total:
        full = [
            f"peak memory is {percent(peak / total)} of the device's: blocks are given back for want of room"
        ]
    yield Finding(
        title=f"{count(len(chosen) / loop.steps, 'driver allocation')} or releases a step take "
        f"{duration(took.sum() / loop.steps)}",
        evidence=[
            *(f"{name}: {count(n / loop.steps, 'call')} a step" for name, n in by_name.most_common()),
            *_called_from(loop, chosen),
            *full,
        ],
        edits=[
            HostRemove(runtime.ts_ns[chosen], runtime.end_ns[chosen], runtime.track[chosen]),
            *([DropSync(frees)] if len(frees) else []),
        ],
        fix="# before Python starts:\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
        "# and: no torch.cuda.empty_cache() in the loop; pad or bucket batches to few shapes"
        + ("; a smaller batch or activation checkpointing" if full else ""),
        confidence="measured",
    )


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
        fix=_RARER_FIX,
        fix_torch=_RARER_FIX_TORCH,
        risk="logs become coarser",
        confidence="heuristic",
        note="" if all(places) else "what runs there is not in the trace: Python, files, freeing memory",
    )


@rule(
    "host.zero_grad",
    title="Gradients are dropped, not filled with zeros",
    failure="Gradients are filled with zeros each step",
    source="PyTorch Performance Tuning Guide: optimizer.zero_grad(set_to_none=True)",
)
def zero_grad(loop: Loop) -> Iterator[Finding]:
    """`zero_grad(set_to_none=False)` writes zeros to every gradient, and backward then reads and adds to
    them. With None, the default, backward stores its result without either.

    Recognised by fills launched inside `Optimizer.zero_grad`, or by `_foreach_zero_`; the additions under
    AccumulateGrad go as well, unless gradients are accumulated over batches. Silent where nothing is
    filled.
    """
    inside = loop.host.ranges(r"^Optimizer\.zero_grad#|\.optimizer_zero_grad$")
    nesting = Nesting(inside.track, inside.ts_ns, inside.dur_ns)
    fills = nesting.innermost(loop.rows.track, loop.rows.launch_ts_ns) >= 0
    fills |= loop.under(loop.ops_named(r"^aten::_foreach_zero_$")) >= 0
    fills &= loop.counted
    if not fills.any():
        return
    added = np.zeros(len(loop.rows), bool)
    if loop.timeline.batches_per_optimizer_step == 1:
        added = loop.counted & (loop.under(loop.ops_named(r"torch::autograd::AccumulateGrad$")) >= 0)
    rows = np.flatnonzero(fills | added)
    filling, adding = (
        f"{count(part.sum() / loop.steps, 'kernel')}, {duration(loop.per_step_ns(part))}"
        for part in (fills, added)
    )
    yield Finding(
        title=f"zero_grad fills gradients: {filling} a step",
        evidence=[f"filling: {filling} a step", f"adding to what was filled: {adding} a step"],
        edits=[Remove(rows)],
        fix="def optimizer_zero_grad(self, epoch, batch_idx, optimizer):     # or drop it: the default\n"
        "    optimizer.zero_grad(set_to_none=True)",
        fix_torch="optimizer.zero_grad(set_to_none=True)",
        risk="p.grad is None, not zero, between steps: code that reads it must check",
        confidence="measured",
    )


@rule(
    "host.recompile",
    title="Compiled code is compiled once",
    failure="torch.compile compiles within the loop, or breaks the graph",
    source="PyTorch documentation: torch.compile troubleshooting, recompilation and graph breaks",
)
def recompile(loop: Loop) -> Iterator[Finding]:
    """A guard that fails (another shape, another Python number) makes Dynamo compile anew, for seconds.
    After eight times it gives up and runs the function eagerly. What Dynamo cannot trace breaks the graph:
    each part is a region of its own, with guards to check and nothing fused across.

    Recognised by the compiler's own ranges in steady steps, and by compiled regions: their number is
    `frame/times compiled`. Not applicable without compiled code. Many regions are told without a saving.
    """
    trace = loop.timeline.trace
    stages = re.compile(
        r"dynamo_timed|compile_inner|compile_fx_inner|backend_compile|call_user_compiler|benchmark_all_configs"
    )
    compiling = [
        table.take(named(trace.names, table.name, stages.search) & loop.host.in_steady_step(table.ts_ns))
        for table in (trace.annotations, trace.ops)
    ]
    stretches = Stretches.join([Stretches.of(part) for part in compiling])
    regions = loop.ops_named(r"^Torch-Compiled Region: ") & loop.host.in_steady_step(trace.ops.ts_ns)
    loop.require(len(stretches) or regions.any(), "nothing in the loop is compiled")
    if len(stretches):
        yield Finding(
            title=f"torch.compile takes {duration(stretches.total_ns / loop.steps)} a step: "
            "code is compiled anew",
            evidence=[
                f"{count(len(stretches), 'compilation')} in {count(loop.steps, 'steady step')}",
                *_regions(loop, regions),
            ],
            edits=[stretches.removed],
            fix="# TORCH_LOGS=recompiles python train.py   tells which guard failed\n"
            "torch.compile(net, dynamic=True)   # or torch._dynamo.mark_dynamic(x, 1) for one dimension\n"
            "DataLoader(..., drop_last=True)    # the last, smaller batch is another shape",
            confidence="measured",
        )
    each = regions.sum() / loop.steps
    if each >= 4 and 1 - loop.busy_share > _IDLE_AS_PROFILED:
        yield Finding(
            title=f"{count(each, 'compiled region')} a step: graph breaks, or many parts compiled one by one",
            evidence=_regions(loop, regions),
            edits=[],
            fix="# TORCH_LOGS=graph_breaks python train.py   tells where and why\n"
            "torch.compile(net, fullgraph=True)           # an error in place of a silent break",
            confidence="heuristic",
            note="what one graph would save is not told: it depends on what breaks it",
        )


def _compiled(loop: Loop) -> str:
    listed = loop.setting("compiled_modules")
    if isinstance(listed, list) and listed:
        return ", ".join(str(path) or "the whole module" for path in listed[:3])
    return "yes" if loop.ops_named("^Torch-Compiled Region: ").any() else ""


def _called_from(loop: Loop, calls: np.ndarray, most: int = 3) -> list[str]:
    """The operators that call, most frequent first."""
    found = Counter(
        (loop.host.chain(int(op)) or ["outside any operator"])[-1] for op in loop.host.op[calls].tolist()
    )
    return [
        f"called by {name} ({count(n / loop.steps, 'time')} a step)" for name, n in found.most_common(most)
    ]


def _regions(loop: Loop, regions: np.ndarray, most: int = 6) -> list[str]:
    found = Counter(loop.timeline.op_name(int(op)) or "" for op in np.flatnonzero(regions).tolist())
    return [f"{name}: {count(n / loop.steps, 'call')} a step" for name, n in found.most_common(most)]
