"""Communication: collectives that computation does not hide, and bytes that need not cross the link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from advisor.advice.edits import Edit, Estimate, Fuse, Insert, Remove, Retime
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, one_line, percent, size
from advisor.roofline.messages import link_bytes_per_s

#: Shares of the step from which a finding is worth a word.
_WORTH = 0.02
_SMALL_BYTES, _MANY = 1 << 20, 8
#: Of the link's rate, what large collectives reach (nccl-tests on NVLink and PCIe machines: 0.7 to 0.9).
_REACHED = 0.75
#: A collective of a few bytes takes some 10 to 30 µs within a node.
_LATENCY_NS = 15_000.0
#: One that takes this many times its transfer is waiting for others.
_WAITS = 2.0


@rule(
    "communication.exposed",
    title="Gradients are reduced while backward computes",
    failure="Collectives hold up the step",
    source="Li et al., PyTorch Distributed, VLDB 2020\nPyTorch documentation: DistributedDataParallel, "
    "gradient_as_bucket_view, static_graph",
)
def exposed(loop: Loop) -> Iterator[Finding]:
    """Data-parallel gradients are reduced in buckets while backward computes the next ones. What is left
    over at the end, or waits for a rank that is late, is exposed: the device computes nothing meanwhile.

    Recognised by collectives beside which no kernel of the same device computes. The saving counts what is
    certain: with `gradient_as_bucket_view=True` gradients stay in the buckets and are not copied back (into
    them they still are, where `zero_grad` drops them). Bucket sizes and `static_graph` are a matter of
    trying. Silent under 5 % of the step, and for sharded parameters, of which `communication.fsdp` tells.
    """
    rows = _rows(loop, "all_reduce", "reduce", "broadcast")
    loop.require(len(_rows(loop)), "the loop has no collectives")
    if not len(rows):
        return
    bare = loop.analysis.exposed_ns(rows)
    total_ns, bare_ns = float(loop.rows.dur_ns[rows].sum()) / loop.steps, float(bare.sum()) / loop.steps
    copies = np.flatnonzero(loop.counted & (loop.under(loop.ops_named(r"reducer::copy_bucket_to_grad")) >= 0))
    copied_ns = loop.per_step_ns(copies)
    if loop.share(bare_ns) < 0.05 and loop.share(copied_ns) < _WORTH:
        return
    moving = []
    spared: list[Edit] = [Remove(copies)] if len(copies) else []
    if loop.hides(spared):
        spared = []
    if len(copies):
        kernels = count(len(copies) / loop.steps, "kernel")
        moving = [f"{kernels} a step copy gradients back from the buckets: {duration(copied_ns)}"]
    yield Finding(
        title=f"collectives are exposed for {duration(bare_ns)} a step, {percent(loop.share(bare_ns))} "
        f"of it: {percent(1 - bare_ns / max(total_ns, 1.0))} of their time is hidden",
        evidence=[
            *_kinds(loop, rows, bare),
            *moving,
        ],
        edits=spared,
        fix="Trainer(strategy=DDPStrategy(gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=50))"
        f"   # was {one_line(loop.setting('strategy') or 'DDP')}\n"
        "# with accumulate_grad_batches=n gradients are reduced every n-th batch only",
        fix_torch="DistributedDataParallel(\n"
        "    model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=50\n)",
        risk="static_graph wants the same parameters in each step; gradients must not be detached in place",
        confidence="modelled",
        note="" if spared else "what other bucket sizes would hide is not told",
    )


@rule(
    "communication.dtype",
    title="Gradients cross the link in 16 bits",
    failure="Gradients of 16-bit training are reduced in fp32",
    source="PyTorch documentation: DDP communication hooks, bf16_compress_hook",
)
def dtype(loop: Loop) -> Iterator[Finding]:
    """Under autocast parameters and gradients are fp32, and so are the all-reduces, though the computation
    has 16 bits. A hook that casts each bucket to bf16 halves the bytes on the link.

    Played: half of the transfer goes, waiting for other ranks stays, and the casts (three times the
    bucket's bytes) are added. Silent where training is fp32 throughout, where the collectives are hidden,
    and for 16-bit messages.
    """
    rows = _rows(loop, "all_reduce", "reduce_scatter")
    loop.require(len(rows), "no gradients are reduced")
    messages = loop.analysis.messages
    wide = np.array([row for row in rows.tolist() if messages[row].dtype == "fp32"], np.int64)
    precision = str(loop.setting("precision") or "")
    pipes = loop.analysis.costs.pipes
    tensor = [i for i, pipe in enumerate(pipes) if pipe in ("tensor_bf16", "tensor_fp16")]
    low = loop.per_step_ns(np.isin(loop.analysis.costs.pipe, tensor) & loop.counted)
    if not len(wide) or not (
        precision.startswith(("16", "bf16")) or low > 0.1 * loop.per_step_ns(loop.counted)
    ):
        return
    bare_ns = float(loop.analysis.exposed_ns(wide).sum()) / loop.steps
    if loop.share(bare_ns) < _WORTH:
        return
    now = loop.rows.dur_ns[wide].astype(float)
    transfer = np.minimum(_transfer_ns(loop, wide), now)
    known = ~np.isnan(transfer)
    likely = np.where(known, now - transfer / 2, 0.7 * now)
    best = np.where(known, np.maximum(likely - transfer / 4, now / 2), 0.5 * now)
    payload = np.array([messages[row].payload_bytes or 0.0 for row in wide.tolist()])
    bandwidth = loop.device.bandwidth_bytes_per_s
    edits: list[Edit] = [Retime(wide, Estimate(now, likely, np.minimum(best, likely)))]
    if bandwidth:
        edits.append(
            Insert(wide, Estimate.around(3 * payload / (0.7 * bandwidth) * 1e9, worse=1.5, better=0.7))
        )
    to = "bf16" if loop.device.peak("tensor_bf16") else "fp16"
    yield Finding(
        title=f"{size(payload.sum() / loop.steps)} of gradients are reduced in fp32 a step, "
        f"exposed for {duration(bare_ns)}",
        evidence=[
            f"{count(len(wide) / loop.steps, 'fp32 collective')} a step, {duration(now.sum() / loop.steps)}",
            f"the computation is in 16 bits ({precision or 'by its kernels'})",
            *([] if known.any() else ["the link between ranks is not known: half the time at best"]),
        ],
        edits=edits,
        fix="from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        f"Trainer(strategy=DDPStrategy(ddp_comm_hook=default_hooks.{to}_compress_hook))",
        fix_torch="from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        f"model.register_comm_hook(None, default_hooks.{to}_compress_hook)",
        risk="gradients are summed in bf16: 8 bits of precision, less with many ranks"
        if to == "bf16"
        else "gradients are summed in fp16, which overflows beyond 65504",
        confidence="modelled" if known.any() else "heuristic",
    )


@rule(
    "communication.small_buckets",
    title="Collectives are large enough for the link",
    failure="Many small collectives pay for their latency",
    source="nccl-tests: bus bandwidth by message size",
)
def small_buckets(loop: Loop) -> Iterator[Finding]:
    """A collective takes some 15 µs however little it moves, and reaches the link's rate from tens of
    megabytes on.

    Recognised by eight or more collectives of one kind and dtype under 1 MiB in a step. Played as one
    message of all their bytes. Silent below that number, and where they take under 2 % of the step.
    """
    rows = _rows(loop)
    loop.require(len(rows), "the loop has no collectives")
    messages = loop.analysis.messages
    groups: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
    for row in rows.tolist():
        message = messages[row]
        if message.payload_bytes is not None and message.payload_bytes < _SMALL_BYTES:
            step, stream = int(loop.rows.step[row]), int(loop.rows.stream[row])
            groups[message.kind, message.dtype, step, stream].append(row)
    many = [np.array(group, np.int64) for group in groups.values() if len(group) >= _MANY]
    if not many:
        return
    every = np.concatenate(many)
    took_ns = loop.per_step_ns(every)
    if loop.share(took_ns) < _WORTH:
        return
    fastest = np.array([float(loop.rows.dur_ns[group].min()) for group in many])
    moved = np.array([sum(messages[row].payload_bytes or 0.0 for row in group.tolist()) for group in many])
    together = fastest + moved / 10e9 * 1e9
    yield Finding(
        title=f"{count(len(every) / loop.steps, 'collective', 'take', what='under 1 MiB a step')} "
        f"{duration(took_ns)}",
        evidence=_kinds(loop, every, loop.analysis.exposed_ns(every)),
        edits=[Fuse(many, Estimate.around(together, worse=1.5, better=0.8))],
        fix="Trainer(strategy=DDPStrategy(bucket_cap_mb=50))\n"
        "self.log_dict(metrics, sync_dist=False)     # or reduce metrics once an epoch",
        fix_torch="torch.distributed.all_reduce(torch.stack(values))     # one message for all values",
        confidence="modelled",
    )


@rule(
    "communication.stragglers",
    title="Ranks come to their collectives together",
    failure="This rank waits for others in its collectives",
    source="docs/communication.md",
)
def stragglers(loop: Loop) -> Iterator[Finding]:
    """A collective ends when the last rank has come. On the ranks that came early its kernel takes long and
    moves nothing. The late rank has the shortest kernels: there lies the cause (more data, a slower input,
    a colder node).

    Recognised by collectives that take over twice their bytes' time on the link, where the link is known.
    One rank's trace shows the waiting, not the cause, so no saving is told. Silent under 5 % of the step.
    """
    rows = _rows(loop)
    loop.require(len(rows), "the loop has no collectives")
    transfer = _transfer_ns(loop, rows)
    known = ~np.isnan(transfer)
    loop.require(known.any(), "the link between ranks, or what crosses it, is not known")
    now = loop.rows.dur_ns[rows].astype(float)
    waiting = np.where(known & (now > _WAITS * transfer), now - transfer, 0.0)
    bare = np.minimum(waiting, loop.analysis.exposed_ns(rows))
    waits_ns = float(bare.sum()) / loop.steps
    if loop.share(waits_ns) < 0.05:
        return
    worst = rows[np.argsort(-waiting, kind="stable")][:3]
    rank = loop.timeline.trace.rank
    yield Finding(
        title=f"{'this rank' if rank is None else f'rank {rank}'} waits for others in collectives: "
        f"{duration(waits_ns)} a step beyond what its computation hides",
        evidence=[
            f"{loop.analysis.messages[row].kind} of {size(loop.analysis.messages[row].payload_bytes or 0)}: "
            f"{duration(loop.rows.dur_ns[row])} where its bytes take "
            f"{duration(float(_transfer_ns(loop, np.array([row]))[0]))}"
            for row in worst.tolist()
        ],
        edits=[],
        fix='TrainingAdvisor(ranks="all")      # and look at the rank with the shortest collectives\n'
        "# usual causes: batches of unequal length, work on rank 0 alone (logging, checkpoints), input, gc",
        confidence="modelled",
        note="what it would save depends on why another rank is late, which this trace does not show",
    )


@rule(
    "communication.fsdp",
    title="Sharded parameters are gathered ahead of their use",
    failure="Gathering sharded parameters holds up the step",
    source="Zhao et al., PyTorch FSDP, VLDB 2023",
)
def fsdp(loop: Loop) -> Iterator[Finding]:
    """Fully sharded training gathers each block's parameters before its forward and again before its
    backward, and scatters gradients after it. Prefetching the next block's hides that behind computation;
    keeping parameters after the forward (`reshard_after_forward=False`) drops the second gathering where
    memory has room.

    Recognised by exposed all-gathers and reduce-scatters over 5 % of the step. Played: likely half of what
    is exposed goes, none at worst, nine tenths at best. Silent where they are hidden.
    """
    rows = _rows(loop, "all_gather", "reduce_scatter")
    loop.require(len(rows), "no parameters are gathered")
    bare = loop.analysis.exposed_ns(rows)
    bare_ns = float(bare.sum()) / loop.steps
    if loop.share(bare_ns) < 0.05:
        return
    now = loop.rows.dur_ns[rows].astype(float)
    yield Finding(
        title=f"gathering and scattering parameters is exposed for {duration(bare_ns)} a step",
        evidence=_kinds(loop, rows, bare),
        edits=[Retime(rows, Estimate(now, now - 0.5 * bare, now - 0.9 * bare))],
        fix="fully_shard(block, reshard_after_forward=False)   # in configure_model()\n"
        "# FSDPStrategy(sharding_strategy='SHARD_GRAD_OP', forward_prefetch=True, limit_all_gathers=False)",
        fix_torch="fully_shard(block, reshard_after_forward=False)\n"
        "block.set_modules_to_forward_prefetch([following])",
        risk="full parameters stay in memory between forward and backward",
        confidence="heuristic",
    )


def _rows(loop: Loop, *kinds: str) -> np.ndarray:
    """Collectives of steady steps, of these kinds; of any without."""
    rows = np.flatnonzero(loop.counted & loop.analysis.collective)
    messages = loop.analysis.messages
    return np.array([row for row in rows.tolist() if not kinds or messages[row].kind in kinds], np.int64)


def _transfer_ns(loop: Loop, rows: np.ndarray) -> np.ndarray:
    """Time that each message's bytes take on its link; NaN where link or bytes are not known."""
    found = np.full(len(rows), np.nan)
    for i, row in enumerate(rows.tolist()):
        message = loop.analysis.messages[row]
        link = link_bytes_per_s(loop.device, loop.timeline, message)
        if link and message.bus_bytes is not None:
            found[i] = _LATENCY_NS + message.bus_bytes / (_REACHED * link) * 1e9
    return found


def _kinds(loop: Loop, rows: np.ndarray, bare: np.ndarray, most: int = 4) -> list[str]:
    """Collectives by kind and dtype, with their time and what of it is exposed, longest first."""
    figures: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(4))
    for row, exposed_ns in zip(rows.tolist(), bare.tolist(), strict=True):
        message = loop.analysis.messages[row]
        figures[message.kind, message.dtype] += (
            1, float(loop.rows.dur_ns[row]), exposed_ns, message.payload_bytes or 0.0,
        )  # fmt: skip
    lines = []
    for (kind, dtype), (number, took, shown, moved) in sorted(figures.items(), key=lambda item: -item[1][1])[
        :most
    ]:
        what = f"{kind} {dtype}" if dtype != "unknown" else kind
        lines.append(
            f"{what}: {number / loop.steps:.0f} a step, "
            f"{size(moved / loop.steps) if moved else 'size unknown'}, "
            f"{duration(took / loop.steps)}, of which {duration(shown / loop.steps)} exposed"
        )
    return lines
