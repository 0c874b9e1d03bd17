"""A replayed call within DistributedDataParallel, whose reducer sees the gradients that it would see."""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advisor.swap.rewrite.alike import Checked
from advisor.swap.rewrite.replay import Replayer
from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.site import Outcome
from tests.swap.alone import alone
from tests.swap.rewrite.recorder import OnCpu

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
STEPS = 24


class Step(nn.Module):
    """Two layers, and a weight that is given to the call and gets no gradient where `idle` is asked for."""

    def __init__(self, replay: bool, idle: bool, adds_up: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8, affine=False)  # buffers that DDP broadcasts; they do not take part
        if idle:
            self.idle = nn.Parameter(torch.ones(3))
        self.recorder = OnCpu(adds_up=adds_up)
        self.call = Replayer(self.plain, self.recorder) if replay else self.plain

    @staticmethod
    def plain(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor, *idle: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w1.t() + b1).tanh() @ w2.t() + b2
        return (y.square().mean() + sum(i.detach().mean() for i in idle),)

    def forward(self, x: Tensor) -> Tensor:
        idle = [self.idle] if hasattr(self, "idle") else []
        return self.call(*self.first.parameters(), *self.last.parameters(), x, *idle)[0]


def dist_reduce(value: Tensor) -> Tensor:
    torch.distributed.all_reduce(value)
    return value


def functional_reduce(value: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as collectives

    return collectives.all_reduce(value, "sum", torch.distributed.group.WORLD)


def train(replay: bool, rank: int = 0, every: int = 1, sizes: Any = lambda i: 5, **options: Any) -> Step:
    """As Lightning does: gradients go between forward and backward, ranks talk in a cycle's last batch."""
    idle = options.get("find_unused_parameters", False)
    step = Step(replay, idle, adds_up=every > 1)
    ddp = nn.parallel.DistributedDataParallel(step, **options)
    optimizer = torch.optim.AdamW(step.parameters(), lr=0.01, weight_decay=0.5)
    for i in range(STEPS):
        x = torch.randn(sizes(i), 4, generator=torch.Generator().manual_seed(100 * rank + i))
        last = i % every == every - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss = ddp(x)
            if i % every == 0:
                optimizer.zero_grad()
            (loss / every).backward()
        if last:
            optimizer.step()
    return step


def assert_same(one: Step, other: Step) -> None:
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize(
    ("every", "more"),
    [
        (1, {}),
        (3, {}),
        (1, {"static_graph": True}),  # which DDP has not with `no_sync` in the first step
        (1, {"find_unused_parameters": True}),
        (3, {"find_unused_parameters": True}),
    ],
    ids=str,
)
def test_it_trains_as_unreplayed_to_the_bit(every: int, views: bool, more: dict[str, bool]) -> None:
    options = {"gradient_as_bucket_view": views, **more}
    with alone():
        step = train(True, every=every, **options)
        assert step.call.refused == ""
        assert step.recorder.replays > STEPS - 4
        assert_same(step, train(False, every=every, **options))


def test_a_parameters_gradient_is_the_recordings_own_memory_unless_it_is_a_bucket() -> None:
    with alone():
        for views in (False, True):
            step = train(True, gradient_as_bucket_view=views)
            mine = {g.data_ptr() for g in step.call._recording._gradients}
            assert {
                p.grad.data_ptr() in mine for p in (*step.first.parameters(), *step.last.parameters())
            } == {not views}


@pytest.mark.parametrize("reduce", [dist_reduce, functional_reduce])
def test_a_step_in_which_ranks_talk_is_neither_recorded_nor_computed_twice(reduce: Any) -> None:
    class Model(nn.Module):
        """A norm, of which there is something to replace, and a loss that all ranks know."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            y = self.head(self.norm(x))
            return nn.functional.cross_entropy(y, target) + 0 * reduce(y.detach().mean())

    made = OnCpu()
    with alone():
        for recorder in (lambda: made, None):
            step = StepRewrite(Model(), "forward", recorder=recorder)
            assert step.install() == ""
            x, target = torch.randn(4, 16), torch.randint(5, (4,))
            with step.collecting():
                step.module(x, target).backward()
            step.decide([Outcome(site, site.candidates[-1], "planted") for site in step.sites()])
            for _ in range(6):
                step.module(x, target).backward()
            (graph,) = step.rewriter.graphs
            assert graph.chosen()
            assert not isinstance(graph._rewritten, Checked)
            refused = [replayer.refused for replayer in step.rewriter.replayers()]
            assert refused == (["ranks talk within it"] if recorder else [])
            step.close()
    assert made.recordings == 0


def _rank(rank: int, folder: str) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    seconds = datetime.timedelta(seconds=30)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=seconds)
    torch.set_num_threads(1)

    def sizes(i: int) -> int:
        # Rank 1 cannot replay these two batches, and rank 0 another.
        return 3 if i in ((9, 14) if rank else (11,)) else 5

    steps = [train(replay, rank, every, sizes) for every in (1, 2) for replay in (True, False)]
    replays = [step.recorder.replays for step in steps]
    torch.save(([step.state_dict() for step in steps], replays), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_train_as_unreplayed_where_a_batch_of_one_is_not_like_the_recorded(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="spawn")
    (mine, replays), (others, _) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)
    )
    assert replays[0] > STEPS - 5
    assert replays[1] == 0
    for replayed, unreplayed in ((0, 1), (2, 3)):
        for name, value in mine[replayed].items():
            assert torch.equal(value, mine[unreplayed][name]), name
            assert torch.equal(value, others[replayed][name]), name
