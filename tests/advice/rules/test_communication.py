"""Collectives that hold up the step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.advice.rules.steps import Step, applies, audit, loop_of, saving, training
from tests.trace.builder import Builder

SIDE, REDUCE = 20, "ncclDevKernel_AllReduce"
#: Of the link: NVLink of an H100, in one direction.
LINK = 450e9
MODEL = {"world_size": 8, "num_nodes": 1, "precision": "bf16-mixed", "strategy": "DDPStrategy"}


def distributed(*, dur: float = 400, copies: int = 0, dtype: str = "Float", hidden: bool = False):
    def script(step: Step) -> None:
        at = training(step)
        if hidden:
            step.run("aten::mm", at, on_device=0, dur=dur + 50, kernel="gemm")
            at += 20
        begin = at if not hidden else at - 15
        on_device = begin + 10 if hidden else max(begin + 5, step.free_at())
        message = _message(50_000_000, dtype)
        step.launch(REDUCE, begin + 2, on_device=on_device, dur=dur, stream=SIDE, **message)
        for i in range(copies):
            step.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", at + 20 + i * 20, 18)
            step.run("aten::copy_", at + 22 + i * 20, on_device=step.free_at(SIDE), dur=30)
        step.call(
            "cudaDeviceSynchronize", at + 20 + copies * 20, max(step.free_at(SIDE), step.free_at()) - at
        )

    return script


def _message(elements: int, dtype: str = "Float", kind: str = "allreduce", out: int | None = None) -> dict:
    return {
        "Collective name": kind, "In msg nelems": elements, "Out msg nelems": out or elements, "dtype": dtype,
        "Group size": 8, "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
    }  # fmt: skip


def test_a_loop_of_one_rank_has_no_collectives():
    loop = loop_of(training)
    for name in ("exposed", "dtype", "small_buckets", "stragglers", "fsdp"):
        assert not applies(f"communication.{name}", loop)


# exposed


def test_an_all_reduce_after_backward_is_exposed_and_copies_out_of_buckets_can_go():
    loop = loop_of(distributed(copies=4), **MODEL)

    (found,) = audit("communication.exposed", loop)

    assert "exposed for 400 µs" in found.title
    assert "gradient_as_bucket_view=True" in found.fix
    assert "# was DDPStrategy" in found.fix
    assert any(
        "4 kernels a step copy gradients back from the buckets: 120 µs" in line for line in found.evidence
    )
    assert len(found.edits[0].rows) == 4 * loop.steps


def test_copies_into_the_buckets_stay_where_gradients_are_dropped():
    def script(step: Step) -> None:
        step.op("torch::distributed::reducer::mul_out", 0, 18)
        step.run("aten::mul", 2, on_device=10, dur=30)
        distributed(copies=1)(Step(step.builder, step.start + 50, step.number + 500))

    loop = loop_of(script, step_us=1_500, **MODEL)
    (found,) = audit("communication.exposed", loop)

    assert len(found.edits[0].rows) == loop.steps


def test_exposed_collectives_are_told_though_sparing_the_copies_gains_nothing():
    # GIVEN one copy of 30 µs after a collective of 20 ms
    loop = loop_of(distributed(dur=20_000, copies=1), step_us=21_000, **MODEL)

    (found,) = audit("communication.exposed", loop)

    assert found.edits == []
    assert "not told" in found.note
    assert any("copy gradients back" in line for line in found.evidence)


def test_an_all_reduce_beside_computation_is_hidden():
    assert audit("communication.exposed", loop_of(distributed(hidden=True), **MODEL)) == []


# dtype


def test_fp32_gradients_of_bf16_training_are_halved():
    # GIVEN 200 MB in fp32 that take 400 µs, of which 17 % are bytes on the link
    loop = loop_of(distributed(dur=1_500), step_us=2_500, **MODEL)

    (found,) = audit("communication.dtype", loop)

    assert "200 MB of gradients" in found.title
    assert "bf16_compress_hook" in found.fix
    transfer = 15_000 + 200e6 * 2 * 7 / 8 / (0.75 * LINK) * 1e9
    assert float(found.edits[0].dur_ns.likely[0]) == pytest.approx(1_500_000 - transfer / 2, rel=0.01)
    # THEN at worst the hook's casts cost more than it saves
    assert saving(found, loop).low_ns < 0 < saving(found, loop).likely_ns


def test_gradients_cross_in_fp16_where_the_device_has_no_bf16():
    volta = Builder(device="Tesla V100-SXM2-32GB")
    loop = loop_of(distributed(dur=1_500), step_us=2_500, builder=volta, **{**MODEL, "precision": "16-mixed"})

    (found,) = audit("communication.dtype", loop)

    assert "fp16_compress_hook" in found.fix
    assert "bf16" not in found.fix_torch


def test_sixteen_bit_messages_pass():
    assert audit("communication.dtype", loop_of(distributed(dtype="BFloat16"), **MODEL)) == []


def test_fp32_training_keeps_fp32_gradients():
    assert audit("communication.dtype", loop_of(distributed(), **MODEL | {"precision": "32-true"})) == []


def test_hidden_gradients_gain_nothing_from_fewer_bytes():
    assert audit("communication.dtype", loop_of(distributed(hidden=True), **MODEL)) == []


# small buckets


def many(number: int, elements: int):
    def script(step: Step) -> None:
        at = training(step)
        for i in range(number):
            step.launch(REDUCE, at + i * 15, on_device=at + 5, dur=20, stream=SIDE, **_message(elements))

    return script


def test_many_small_collectives_become_one():
    loop = loop_of(many(12, 1_000), **MODEL)

    (found,) = audit("communication.small_buckets", loop)

    assert "12 collectives under 1 MiB" in found.title
    assert [len(group) for group in found.edits[0].groups] == [12] * loop.steps
    # THEN one of 48 kB takes little more than one of 4
    assert float(found.edits[0].dur_ns.likely[0]) == pytest.approx(20_000 + 48_000 / 10e9 * 1e9)


@pytest.mark.parametrize(("number", "elements"), [(7, 1_000), (12, 1_000_000)])
def test_few_or_large_collectives_pass(number, elements):
    assert audit("communication.small_buckets", loop_of(many(number, elements), **MODEL)) == []


# stragglers


def test_a_collective_that_takes_far_longer_than_its_bytes_is_waiting():
    # GIVEN 200 MB, whose bytes take about a millisecond, in 5
    loop = loop_of(distributed(dur=6_000), step_us=7_000, **MODEL, rank=3)

    (found,) = audit("communication.stragglers", loop)

    assert found.title.startswith("rank 3 waits for others in collectives: 4.9")
    # AND that is what stays of the waiting, not all of it, which the ranks' table has
    assert "beyond what its computation hides" in found.title
    assert found.edits == []
    assert 'ranks="all"' in found.fix


def test_a_collective_at_the_links_rate_is_not():
    assert audit("communication.stragglers", loop_of(distributed(dur=1_200), step_us=2_200, **MODEL)) == []


# fsdp


GATHER = _message(1_000_000, "BFloat16", "_allgather_base", 8_000_000)


def test_gathering_parameters_before_each_block_is_exposed():
    def script(step: Step) -> None:
        for at in (0, 40, 80):
            step.launch(
                "ncclDevKernel_AllGather", at + 2, on_device=step.free_at(), dur=100, stream=SIDE, **GATHER
            )
            step.run("aten::mm", at + 12, on_device=step.free_at(SIDE), dur=200)
        step.wait(130)

    loop = loop_of(script, step_us=920, **MODEL)

    (found,) = audit("communication.fsdp", loop)

    assert "300 µs" in found.title
    assert "reshard_after_forward=False" in found.fix
    dur = found.edits[0].dur_ns
    assert np.allclose(dur.pessimistic, 100_000)
    assert np.allclose(dur.likely, 50_000, rtol=0.05)


def test_gathering_ahead_of_the_blocks_use_is_not_worth_a_word():
    def script(step: Step) -> None:
        step.run("aten::mm", 0, on_device=5, dur=600)
        step.launch("ncclDevKernel_AllGather", 22, on_device=30, dur=100, stream=SIDE, **GATHER)

    assert audit("communication.fsdp", loop_of(script, **MODEL)) == []
