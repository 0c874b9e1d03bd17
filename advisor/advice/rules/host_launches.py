"""Host: launches that cost more than they start, and code that is compiled badly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from advisor.advice.edits import Edit, Estimate, LaunchAsGraph, Remove, Retime
from advisor.advice.finding import Finding
from advisor.advice.host_calls import Stretches
from advisor.advice.loop import Loop
from advisor.advice.replay.graph import LAUNCH
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent
from advisor.trace.events import KERNEL, MEMSET
from advisor.trace.intervals import merged
from advisor.trace.names import named
from advisor.trace.nesting import Nesting

#: With less idle time than this the device is the limit. Without the un-profiled step time, the profiler's
#: own cost (2 to 3 times the host time) looks like idle time.
_IDLE, _IDLE_AS_PROFILED = 0.12, 0.35
#: Host time of a compiled region that replays its graph: guards, copies into static inputs, autograd's part.
_REPLAY_NS = Estimate(1_200_000.0, 400_000.0, 150_000.0)
#: The same of each further graph where waits of the host cut one into pieces.
_PIECE_NS = Estimate(400_000.0, 150_000.0, 80_000.0)
#: What the compiler's fusion leaves of pointwise time, beside the graph.
_FUSED_LIKELY, _FUSED_BEST = 0.85, 0.5
_POINTWISE = ("pointwise", "norm", "dropout", "reduction", "softmax", "copy")
#: Pieces of host work this much longer than what usually lies between two launches have another cause; from
#: this share of the step on, they are what holds it up.
_LONG, _LONG_SHARE, _MOSTLY_LONG = 10.0, 0.05, 0.3
#: A host whose work is less of the critical path does not set the pace.
_PACES = 0.2


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
    time without the profiler: the profiler makes the host 2 to 3 times slower), where the step would not be
    shorter if the host were faster, where a few long pieces of host work take its time, or where kernels come
    from graphs already.
    """
    loop.require(loop.timeline.steps.source != "trace", "the trace marks no steps")
    known = loop.analysis.baseline_ns is not None
    kernels = loop.counted & loop.in_phase("forward", "loss", "backward") & ~loop.analysis.collective
    kernels &= (loop.rows.kind == KERNEL) | (loop.rows.kind == MEMSET)
    loop.require((loop.counted & kernels).any(), "no kernel was launched by a steady step")
    if loop.analysis.replayed[kernels].mean() > 0.5:
        return
    kernels &= ~loop.analysis.replayed
    fetches = loop.host.fetches
    fetching_ns = fetches.typical_ns * len(fetches) / loop.steps * loop.real_time
    # Device work that runs beside a fetch leaves less of it for the rest of the step.
    rest_ns = max(loop.step_ns - fetching_ns, 1.0)
    busy_ns = loop.busy_share * loop.step_ns
    if busy_ns > (1 - (_IDLE if known else _IDLE_AS_PROFILED)) * rest_ns:
        return
    if _long_pieces_ns(loop) > _MOSTLY_LONG * rest_ns:
        return
    if loop.replay.critical_path().host_ns - fetching_ns < _PACES * rest_ns:
        return
    backward = loop.in_phase("backward")
    graphs = [np.flatnonzero(kernels & part) for part in (~backward, backward)]
    breaks = [_waits_among(loop, rows) for rows in graphs]
    edits: list[Edit] = [
        LaunchAsGraph(rows, _replay_ns(waits))
        for rows, waits in zip(graphs, breaks, strict=True)
        if len(rows)
    ]
    eager = kernels & np.isin(loop.family, _POINTWISE) & ~loop.kernels_named(r"^triton_")
    rows = np.flatnonzero(eager)
    if len(rows):
        now = loop.rows.dur_ns[rows].astype(float)
        edits.append(Retime(rows, Estimate(now, _FUSED_LIKELY * now, _FUSED_BEST * now)))
    each = int((loop.counted & (loop.rows.kind == KERNEL)).sum()) / loop.steps
    compiled = _compiled(loop)
    beside = fetching_ns > _IDLE * loop.step_ns
    where = f"{duration(rest_ns)} outside batch fetches" if beside else f"a {duration(loop.step_ns)} step"
    both = "forward and backward" if len(graphs[1]) else "the forward"
    yield Finding(
        title=f"launch-bound: the device idles {percent(1 - busy_ns / rest_ns)} of "
        f"{where if beside else 'the step'} while the host launches {count(each, 'kernel')}",
        evidence=[
            f"the device works {duration(busy_ns)} of {where}",
            f"a kernel runs {duration(float(np.median(loop.rows.dur_ns[kernels])))} (median); the host takes "
            f"{duration(rest_ns / max(each, 1))} a launch",
            f"{_kinds(loop, kernels)} of {both} would go into graphs",
            *(
                [f"{count(sum(breaks), 'wait')} a step among them cut the graphs into pieces"]
                if sum(breaks)
                else []
            ),
            *([f"compiled already: {compiled}"] if compiled else []),
        ],
        edits=edits,
        fix='self.net.compile(mode="reduce-overhead")   # in configure_model(); keeps the state_dict; '
        + ("was compiled without a mode" if compiled else "was eager")
        + "\n# shapes must not change from step to step, and nothing inside may wait for the device\n"
        "# or a larger batch, as far as memory and the learning rate allow",
        fix_torch='model.compile(mode="reduce-overhead")\n'
        "# or torch.cuda.make_graphed_callables(model, (sample,)) for eager code",
        risk="compilation takes tens of seconds; a graph keeps memory of its own, and the next replay "
        "overwrites its outputs; the compiler's fusion rounds differently in the last bits",
        confidence="modelled" if known else "heuristic",
        note=""
        if known
        else "the step time without the profiler is not known, and profiling slows the host: an upper bound",
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
    edits: list[Edit] = [Remove(rows)]
    host_ns, taken_ns = loop.host_gain_ns(edits), loop.per_step_ns(rows)
    yield Finding(
        title=f"zero_grad fills gradients: {filling} a step"
        + (f"; adding to them takes {duration(loop.per_step_ns(added))}" if added.any() else "")
        + (f", and the host takes {duration(host_ns)} to launch all that" if host_ns > taken_ns else ""),
        evidence=[f"filling: {filling} a step", f"adding to what was filled: {adding} a step"],
        edits=edits,
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


def _kinds(loop: Loop, rows: np.ndarray) -> str:
    """How many kernels and memsets a step these launches (bool (launches,)) are."""
    pairs = ((KERNEL, "kernel"), (MEMSET, "memset"))
    numbers = [(int((rows & (loop.rows.kind == kind)).sum()) / loop.steps, name) for kind, name in pairs]
    return " and ".join(count(number, name) for number, name in numbers if number)


def _waits_among(loop: Loop, rows: np.ndarray) -> float:
    """Waits of the host a step between the first and the last of these launches."""
    wait_ns = np.sort(loop.timeline.trace.runtime.ts_ns[[wait.call for wait in loop.waits]])
    found, step = 0, loop.rows.step[rows]
    for number in np.unique(step).tolist():
        launched = loop.rows.launch_ts_ns[rows[step == number]]
        found += int(np.diff(np.searchsorted(wait_ns, [launched.min(), launched.max()]))[0])
    return found / loop.steps


def _replay_ns(waits: float) -> Estimate:
    """Host time of a phase's graphs: one more after each wait."""
    pairs = zip(_REPLAY_NS.cases, _PIECE_NS.cases, strict=True)
    return Estimate(*(whole + waits * piece for whole, piece in pairs))


def _long_pieces_ns(loop: Loop) -> float:
    """Host time a step in pieces too long to be launches: Python, a module being loaded, one slow call."""
    graph = loop.replay.graph
    done_ns = np.concatenate([[0.0], np.cumsum(graph.work_ns)])
    between_ns = np.diff(done_ns[np.unique(graph.items.position[graph.items.kind == LAUNCH])])
    least_ns = _LONG_SHARE * loop.step_ns / loop.real_time
    if len(between_ns):
        least_ns = max(least_ns, _LONG * float(np.median(between_ns)))
    fetches = loop.host.fetches
    in_fetch = graph.host.covered(*merged(fetches.start_ns, fetches.end_ns)) > 0
    pieces_ns = float(graph.work_ns[(graph.work_ns >= least_ns) & ~in_fetch].sum()) / len(graph.windows)
    return pieces_ns * loop.real_time


def _compiled(loop: Loop) -> str:
    listed = loop.setting("compiled_modules")
    if isinstance(listed, list) and listed:
        return ", ".join(str(path) or "the whole module" for path in listed[:3])
    return "yes" if loop.ops_named("^Torch-Compiled Region: ").any() else ""


def _regions(loop: Loop, regions: np.ndarray, most: int = 6) -> list[str]:
    found = Counter(loop.timeline.op_name(int(op)) or "" for op in np.flatnonzero(regions).tolist())
    return [f"{name}: {count(n / loop.steps, 'call')} a step" for name, n in found.most_common(most)]
