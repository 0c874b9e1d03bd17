"""CUDA graphs of a step: recorded in the midst of a loop, replayed, and given up without a trace.

pytest tests/swap/rewrite/test_replay_gpu.py -m gpu
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from advisor.swap import memory
from advisor.swap.rewrite.record import CudaRecorder
from advisor.swap.rewrite.replay import Replayer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


class Loop:
    """Two layers with dropout under autocast; called with their parameters as a traced step is."""

    def __init__(self, call: Any, replay: bool = True, **recorder: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=True)
        self.device = next(self.net.parameters()).device
        self.call = Replayer(call, CudaRecorder(self.device, **recorder)) if replay else call
        self.losses: list[Tensor] = []

    def step(self, i: int) -> None:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).cuda()
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.call(*self.net.parameters(), x)[0]
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def run(self, steps: int) -> Loop:
        torch.manual_seed(7)
        for i in range(steps):
            self.step(i)
        return self


def plain(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> tuple[Tensor]:
    return (F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2).float().square().mean(),)


def dropping(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> tuple[Tensor]:
    y = F.dropout(F.gelu(F.linear(x, w1, b1)), 0.3)
    return (F.linear(y, w2, b2).float().square().mean(),)


def waiting(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> tuple[Tensor]:
    loss = dropping(w1, b1, w2, b2, x)[0]
    return (loss * float(x.abs().max() > -1),)


@pytest.mark.parametrize("call", [plain, dropping])
def test_a_replayed_loop_trains_as_the_loop_does_with_the_same_random_numbers(call: Any) -> None:
    loop, expected = Loop(call).run(20), Loop(call, replay=False).run(20)
    assert loop.call.refused == ""
    assert loop.call.proven
    torch.testing.assert_close(loop.losses, expected.losses, rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(loop.net.parameters(), expected.net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("adds_up", [True, False])
def test_gradients_of_several_batches_are_added_up(adds_up: bool) -> None:
    # GIVEN a loop that lets go of gradients after a cycle's first forward, as Lightning does
    def train(loop: Loop) -> Loop:
        for i in range(40):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loop.call(*loop.net.parameters(), x)[0]
            if i % 4 == 0:
                loop.optimizer.zero_grad()
            (loss / 4).backward()
            if i % 4 == 3:
                loop.optimizer.step()
            loop.losses.append(loss.detach())
        return loop

    loop, expected = train(Loop(plain, adds_up=lambda: adds_up)), train(Loop(plain, replay=False))
    assert loop.call.refused == ""
    assert loop.call.proven
    torch.testing.assert_close(loop.losses, expected.losses, rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(loop.net.parameters(), expected.net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-4)


class Step(nn.Module):
    """A loop's step, for DistributedDataParallel."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.net, self.call = loop.net, loop.call

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.call(*self.net.parameters(), x)[0]


def _rank(rank: int, ranks: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    store = torch.distributed.FileStore(f"{folder}/store", ranks)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
    found = []
    for views in (False, True):
        for every in (1, 2):
            for replay in (True, False):
                loop = Loop(plain, replay, **({"adds_up": lambda every=every: every > 1} if replay else {}))
                ddp = nn.parallel.DistributedDataParallel(Step(loop), [rank], gradient_as_bucket_view=views)
                for i in range(40):
                    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * rank + i)).cuda()
                    last = i % every == every - 1
                    with contextlib.nullcontext() if last else ddp.no_sync():
                        loss = ddp(x)
                        if i % every == 0:
                            loop.optimizer.zero_grad()
                        (loss / every).backward()
                    if last:
                        loop.optimizer.step()
                refused = loop.call.refused if replay else ""
                found.append((refused, [p.detach().cpu() for p in loop.net.parameters()]))
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_within_ddp_a_step_is_recorded_beside_its_watchdog_and_trains_as_ever(ranks: int, tmp_path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    torch.multiprocessing.start_processes(_rank, (ranks, str(tmp_path)), nprocs=ranks, start_method="spawn")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    assert [refused for refused, _ in found[0]] == [""] * 8
    for (_, replayed), (_, unreplayed) in zip(found[0][::2], found[0][1::2], strict=True):
        torch.testing.assert_close(replayed, unreplayed, rtol=1e-2, atol=1e-4)
    for (_, mine), (_, others) in zip(found[0], found[-1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


class Normed(Loop):
    """With dropout and running statistics, of which a loop differentiates some steps again."""

    def __init__(self, replay: bool, turn: int, differentiate: Any) -> None:
        super().__init__(self.normed, replay)
        self.turn, self.differentiate = turn, differentiate
        self.norm = nn.BatchNorm1d(256).cuda()

    @staticmethod
    def normed(
        w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor, mean: Tensor, var: Tensor, count: Tensor
    ) -> tuple[Tensor]:
        count.add_(1)
        y = F.dropout(F.batch_norm(F.gelu(F.linear(x, w1, b1)), mean, var, training=True), 0.3)
        return (F.linear(y, w2, b2).float().square().mean() / count.sqrt(),)

    def step(self, i: int) -> None:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).cuda()
        buffers = (self.norm.running_mean, self.norm.running_var, self.norm.num_batches_tracked)
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.call(*self.net.parameters(), x, *buffers)[0]
        if i < self.turn:
            loss.backward()
        else:
            self.differentiate(self, loss)
        self.optimizer.step()
        self.losses.append(loss.detach())


def again(loop: Loop, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


def twice_over(loop: Loop, loss: Tensor) -> None:
    found = torch.autograd.grad(loss, list(loop.net.parameters()), create_graph=True)
    (loss + 0.1 * sum(g.float().square().sum() for g in found)).backward()


@pytest.mark.parametrize("differentiate", [again, twice_over])
def test_a_replayed_step_that_is_differentiated_again_is_computed_with_the_same_random_numbers(
    differentiate: Any,
) -> None:
    loop, expected = Normed(True, 10, differentiate).run(20), Normed(False, 10, differentiate).run(20)
    words = "more than one backward" if differentiate is again else "gradients of its gradients"
    assert words in loop.call.refused
    torch.testing.assert_close(loop.losses, expected.losses, rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(loop.net.parameters(), expected.net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-4)
    for mine, theirs in zip(loop.norm.buffers(), expected.norm.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_the_gradients_of_a_second_backward_are_those_of_the_first() -> None:
    # GIVEN a replayed step with dropout: other random numbers would give others
    loop = Normed(True, 99, again).run(8)
    assert loop.call.proven
    loop.step_gradients = []

    def note(loop: Any, loss: Tensor) -> None:
        loop.optimizer.zero_grad()
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in loop.net.parameters()]
        loop.optimizer.zero_grad()
        loss.backward()
        loop.step_gradients = [(a, p.grad.clone()) for a, p in zip(first, loop.net.parameters(), strict=True)]

    loop.turn, loop.differentiate = 0, note
    loop.step(8)
    assert "more than one backward" in loop.call.refused
    for first, second in loop.step_gradients:
        torch.testing.assert_close(second, first, rtol=1e-2, atol=1e-6)
        assert first.any()


def test_a_step_that_waits_for_the_device_is_not_recorded_and_goes_on_to_the_bit() -> None:
    loop, expected = Loop(waiting).run(8), Loop(waiting, replay=False).run(8)
    assert loop.call.refused == "the host waits for the device within it"
    assert torch.equal(torch.stack(loop.losses), torch.stack(expected.losses))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_recording_that_breaks_in_the_middle_leaves_stream_and_random_numbers() -> None:
    # GIVEN a fault that comes while CUDA records, after random numbers were drawn
    def broken(*args: Tensor) -> tuple[Tensor]:
        loss = dropping(*args)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("planted")
        return loss

    loop, expected = Loop(broken).run(8), Loop(dropping, replay=False).run(8)
    assert "planted" in loop.call.refused
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.testing.assert_close(loop.losses, expected.losses, rtol=1e-3, atol=1e-5)
    torch.rand(4, device="cuda")


def test_a_recording_for_which_there_is_no_room_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WORKSPACES_BYTES", 0)
    loop = Loop(plain, loop_bytes=1).run(6)
    assert "memory would grow" in loop.call.refused


def test_nothing_of_a_recording_stays_on_the_device() -> None:
    Loop(plain, replay=False).run(4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loop = Loop(plain).run(8)
    assert loop.call.proven
    loop.call.close()
    del loop
    assert torch.cuda.memory_allocated() - before < 2**22


def test_the_host_takes_a_fraction_of_the_time_for_a_replayed_step() -> None:
    import time

    def long(*args: Tensor) -> tuple[Tensor]:
        w1, b1, w2, b2, x = args
        for _ in range(60):
            x = F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
        return (x.float().square().mean(),)

    def host_s(loop: Loop) -> float:
        loop.run(8)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loop.step(9)
        took = time.perf_counter() - start
        torch.cuda.synchronize()
        return took

    assert host_s(Loop(long)) < 0.5 * host_s(Loop(long, replay=False))
