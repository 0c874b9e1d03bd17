"""Host: calls in which the process stands still."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from advisor.advice.edits import DropSync, Edit, Estimate, HostRemove, HostTime, Retime
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rule import rule
from advisor.advice.waits import Wait, cure, wait_lines, worst_cause
from advisor.advice.wording import count, duration, percent
from advisor.trace.names import named

#: From this share of the step on, waits that cost nothing now are worth a word.
_LONG_WAIT = 0.05
#: What is left of the host time of fetching a value: adding it up on the device takes an operator as well.
_FETCHING_LEFT = Estimate(1.0, 0.15, 0.0)
_SEGMENTS_FIX = """\
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"     # before torch is imported
"""


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
    the operators around them. A GradScaler's look at its found-inf flag has another cure: with bf16 matrix
    units it is `precision.grad_scaler` that tells of it, without them a finding of its own. Silent about
    waits for copies from pageable memory, which `input.pageable_copy` tells of, about those inside batch
    fetches, about the profiler's own at either end of a trace without steps, and where the host catches up
    without loss (the step is then the device's).
    """
    waits = loop.waits
    loop.require(len(loop.timeline.trace.runtime), "the trace has no runtime calls")
    own = [wait for wait in waits if wait.cause != "GradScaler"]
    if own:
        each, held = len(own) / loop.steps, sum(wait.dur_ns for wait in own) / loop.steps
        edits = [
            DropSync(np.array([wait.call for wait in own], np.int64)),
            *_fetching(own),
            *_checking(loop, own),
        ]
        host_ns = loop.host_gain_ns(edits)
        fetching = f", and {duration(host_ns)} of its own time to fetch" if host_ns > held else ""
        for_nothing = loop.share(held) >= _LONG_WAIT and loop.hides(edits)
        yield Finding(
            title=f"{count(each, 'sync', 'make', what='a step')} the host wait {duration(held)} "
            f"for the device{fetching}, first of all {worst_cause(own)}",
            evidence=wait_lines(own, loop.steps),
            edits=edits,
            fix=cure(own),
            fix_torch=cure(own, plain_torch=True),
            risk="values are seen later, and a loop that stops on NaN stops some steps later",
            confidence="measured",
            note="the device is behind and sets the pace: the waits cost time only once it is faster"
            if for_nothing
            else "",
        )
    scaler = [wait for wait in waits if wait.cause == "GradScaler"]
    if scaler and not loop.device.peak("tensor_bf16"):
        held = sum(wait.dur_ns for wait in scaler) / loop.steps
        yield Finding(
            title=f"GradScaler's sync on its found-inf flag holds the host for {duration(held)} a step",
            evidence=wait_lines(scaler, loop.steps),
            edits=[DropSync(np.array([wait.call for wait in scaler], np.int64))],
            fix="torch.optim.AdamW(..., fused=True)     # takes the flag on the device, and nothing is read\n"
            "# Lightning then refuses gradient_clip_val: clip in on_before_optimizer_step",
            fix_torch="torch.optim.AdamW(..., fused=True)     # takes the flag on the device",
            risk="a step that overflows is skipped inside the optimizer's kernel",
            confidence="measured",
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
    peak, total = loop.peak_memory_bytes, loop.memory_bytes
    full = []
    if peak and total and peak > 0.85 * total:
        full = [
            f"peak memory is {percent(peak / total)} of the device's: blocks are given back for want of room"
        ]
    yield Finding(
        title=f"{count(len(chosen) / loop.steps, 'driver call', 'take', what='for memory a step')} "
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
        fix=("" if loop.device.arch.startswith("gfx") else _SEGMENTS_FIX)
        + "# no torch.cuda.empty_cache() in the loop; pad or bucket batches to few shapes"
        + ("; a smaller batch or activation checkpointing" if full else ""),
        confidence="measured",
    )


def _fetching(waits: Sequence[Wait]) -> list[Edit]:
    """Host time of the operators that fetch the values; at worst others come in their place."""
    ops = np.array(sorted({wait.op for wait in waits if wait.op >= 0}), np.int64)
    return [HostTime(ops, _FETCHING_LEFT)] if len(ops) else []


def _checking(loop: Loop, waits: Sequence[Wait]) -> list[Edit]:
    """What a condition is worked out by: it is asked for every n-th step only, or at worst as now."""
    ops = np.array(sorted({op for wait in waits for op in wait.checks}), np.int64)
    if not len(ops):
        return []
    chosen = np.zeros(len(loop.timeline.trace.ops), bool)
    chosen[ops] = True
    rows = np.flatnonzero(loop.under(chosen) >= 0)
    now_ns = loop.rows.dur_ns[rows].astype(float)
    return [HostTime(ops, _FETCHING_LEFT), Retime(rows, Estimate(now_ns, 0.02 * now_ns, 0.0 * now_ns))]


def _called_from(loop: Loop, calls: np.ndarray, most: int = 3) -> list[str]:
    """The operators that call, most frequent first."""
    found = Counter(
        (loop.host.chain(int(op)) or ["outside any operator"])[-1] for op in loop.host.op[calls].tolist()
    )
    return [
        f"called by {name} ({count(n / loop.steps, 'time')} a step)" for name, n in found.most_common(most)
    ]
