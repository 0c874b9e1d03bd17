"""Several ranks: rank 0 decides, all do the same at the same batch, whatever goes wrong on one of them."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace as Plain

import pytest
import torch

from advisor import TrainingAdvisor
from advisor.capture.swapping import run as swapping
from advisor.capture.swapping import steps as swapping_steps
from advisor.capture.swapping.less import Part
from advisor.capture.swapping.run import MEETING, State, Swapping
from advisor.swap.modules import MARK
from advisor.swap.site import Candidate, Outcome, Site
from tests.capture.tiny import make_trainer, rows

from . import planted
from .planted import SlowScale, plant, slow_model

BATCHES = 2 * MEETING + 60
RANKS = 2


class Bus:
    """A strategy whose ranks are threads; a rank that is not met within two seconds breaks it for all."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS, timeout=2)
        self.slots = [None] * RANKS
        self.said = []

    def strategy(self, rank):
        def exchange(value):
            self.slots[rank] = value
            self.barrier.wait()
            found = list(self.slots)
            self.barrier.wait()
            return found

        def broadcast(value):
            order = exchange(value)[0]
            if rank == 0:
                self.said.append(order)
            return order

        return Plain(
            broadcast=broadcast, reduce_boolean_decision=lambda well, all: sum(exchange(well)) == RANKS
        )


class Engine:
    """Notes what it is told; one site with one candidate."""

    def __init__(self, fault=""):
        self.fault, self.log, self.remarks, self.on = fault, [], [], False
        self.held_bytes, self.loop_bytes = 0, None
        self.given_up, self.may_replay, self.unreplayed = "", False, {}
        self.cramped, self.replayed, self.unread = False, "", ""
        self.kernels = self.asked = 0
        self.gone, self.timed = [], []
        self.steps_to_watch = 2

    def _do(self, what):
        self.log.append(what)
        if what == self.fault:
            raise ValueError(f"planted in {what}")

    def watch(self):
        self._do("watch")

    def lacks_memory(self):
        return ""

    def unwatch(self):
        self._do("unwatch")

    def sites(self):
        self._do("sites")
        return [Plain()]

    def compile(self):
        self._do("compile")
        return self.kernels

    @property
    def compiling(self):
        """For some questions after the first, which is whether to tell of it."""
        self.asked += "compile" in self.log
        return 0 < self.asked <= self.kernels

    def decide(self, progress):
        self._do("decide")
        candidate = Candidate("planted", lambda x: x, "bundled")
        site = Site("norm", ["net.1"], "module", "Norm", lambda x: x, [], [candidate])
        return [Outcome(site, candidate, "twice as fast")]

    def choices(self):
        return (("net.1", "planted"),)

    def follow(self, choices):
        self._do("follow")
        self.followed = choices

    def apply(self):
        self._do("apply")
        self.on = True

    @property
    def parts(self):
        return [
            Part(key, "module", "Norm", (key,), 1e9, 0) for key in ("net.1", "net.2") if key not in self.gone
        ]

    def drop(self, keys):
        self._do("drop")
        self.gone += keys

    def forget_recordings(self):
        self._do("forget")

    def time(self, on):
        self.timed.append(on)

    def toggle(self, on):
        self._do(f"toggle {on}")
        self.on = on

    def restore(self):
        self.on = False

    def release(self):
        pass


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(swapping_steps, "MOST", 4)
    monkeypatch.setattr(swapping, "objection", lambda *_: "")
    monkeypatch.setattr(swapping.notify, "warn", lambda *_: None)


def run(tmp_path, faults=("", ""), steady_after=0, batches=BATCHES, unable=("", ""), kernels=0):
    """All ranks to their end; gives engines, the bus, and the runs."""
    bus, engines, runs, errors = Bus(), [Engine(fault) for fault in faults], [None] * RANKS, []
    for engine in engines:
        engine.kernels = kernels

    def train(rank):
        trainer = Plain(
            strategy=bus.strategy(rank), global_rank=rank, world_size=RANKS, accumulate_grad_batches=1,
            num_training_batches=batches, max_epochs=1, current_epoch=0, max_steps=-1, global_step=0,
            is_last_batch=False, should_stop=False, enable_validation=False,
        )  # fmt: skip
        try:
            one = Swapping(
                trainer, Plain(device=torch.device("cpu")), engines[rank], asked=["norm"], keep=True,
                max_memory_growth=0.0, is_steady=lambda seen: seen > steady_after,
                folder=lambda: tmp_path / str(rank), unable=unable[rank],
            )  # fmt: skip
            runs[rank] = one
            for batch in range(batches):
                one.batch_start()
                one.batch_end(batch)
            one.close()
        except BaseException as error:  # noqa: BLE001  told by the main thread
            errors.append(error)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert not bus.barrier.broken
    return engines, bus, runs


def test_all_ranks_do_what_rank_0_decides_and_only_it_tries_and_writes(tmp_path):
    engines, bus, runs = run(tmp_path)

    assert [engine.on for engine in engines] == [True, True]
    assert engines[0].log[:5] == engines[1].log[:5] == ["watch", "unwatch", "watch", "unwatch", "sites"]
    assert "decide" in engines[0].log
    assert "decide" not in engines[1].log
    assert engines[1].followed == (("net.1", "planted"),)
    toggles = [[what for what in engine.log if what.startswith("toggle")] for engine in engines]
    assert toggles[0] == toggles[1]
    assert [engine.timed for engine in engines] == [[False, *4 * [True, False]]] * 2
    assert all(one.state is State.DONE for one in runs)
    assert json.loads((tmp_path / "0" / "swaps.json").read_text())["kept"] is True
    assert not (tmp_path / "1").exists()
    assert len(bus.said) == 3  # begin, what, whether to keep


def test_a_check_that_fails_on_one_rank_after_the_verdict_is_told_there_once_and_the_others_go_on(
    tmp_path, monkeypatch
):
    warned = []
    monkeypatch.setattr(swapping.notify, "warn", warned.append)
    engines, _, runs = run(tmp_path)
    engines[1].given_up = "a check found it wrong: planted"
    for batch in range(3):
        for one in runs:
            one.batch_end(batch)
    (line,) = warned
    assert "training_step runs as it is written, since a check found it wrong: planted" in line
    assert "what else was swapped stays on this rank" in line
    assert [engine.on for engine in engines] == [True, True]


def test_ranks_ask_again_until_rank_0_is_done_recording(tmp_path):
    _, bus, _ = run(tmp_path, steady_after=MEETING + 10)
    assert [order.wait for order in bus.said] == [True, False, False, False]


def test_while_rank_0_compiles_all_train_on_and_begin_to_compare_at_one_batch(tmp_path):
    engines, bus, runs = run(tmp_path, batches=3 * BATCHES, kernels=4)

    # THEN rank 0 alone compiled; it was asked every few batches, and all were told to wait three times
    assert ["compile" in engine.log for engine in engines] == [True, False]
    assert [order.wait for order in bus.said] == [False, True, True, True, False, False]
    assert [engine.on for engine in engines] == [True, True]
    assert runs[0]._until == runs[1]._until > MEETING + 2 + 3 * swapping.COMPILING_MEETING


def test_with_no_batches_to_spare_no_rank_waits_for_a_compiler(tmp_path):
    needed = MEETING + 2 + swapping_steps.batches_compared(1, 4)
    _, bus, _ = run(tmp_path, batches=needed + 2 * swapping.COMPILING_MEETING - 1, kernels=10**9)
    assert [order.wait for order in bus.said] == [False, False, False]


def test_a_compiler_that_is_never_done_is_left_after_half_the_batches_to_spare(tmp_path):
    needed = MEETING + 2 + swapping_steps.batches_compared(1, 4)
    _, bus, _ = run(tmp_path, batches=needed + 6 * swapping.COMPILING_MEETING, kernels=10**9)
    assert [order.wait for order in bus.said] == [False, True, True, True, False, False]


@pytest.mark.parametrize(("rank", "place"), [(0, "compile"), (1, "follow"), (1, "apply")])
def test_a_fault_while_compiling_or_after_it_puts_everything_back_on_all(tmp_path, rank, place):
    faults = ["", ""]
    faults[rank] = place
    engines, _, runs = run(tmp_path, faults, batches=3 * BATCHES, kernels=4)
    assert place in engines[rank].log
    assert [engine.on for engine in engines] == [False, False]
    assert all(one.state is State.DONE for one in runs)


def objections(monkeypatch, *whys):
    """Of one comparison after the other."""
    left = list(whys)
    monkeypatch.setattr(swapping, "objection", lambda *_: left.pop(0))


def test_where_all_of_it_is_no_gain_all_ranks_compare_anew_with_the_same_part(tmp_path, monkeypatch):
    objections(monkeypatch, "no gain", "")
    engines, bus, runs = run(tmp_path)

    assert [engine.gone for engine in engines] == [["net.2"], ["net.2"]]
    assert [engine.on for engine in engines] == [True, True]
    toggles = [[what for what in engine.log if what.startswith("toggle")] for engine in engines]
    assert toggles[0] == toggles[1]
    assert [order.less for order in bus.said] == [(), (), ("net.2",), ()]
    assert runs[0]._until == runs[1]._until == MEETING + 2 + 2 * swapping_steps.batches_compared(1, 4)
    found = json.loads((tmp_path / "0" / "swaps.json").read_text())
    assert found["kept"] is True
    assert "with 1 site, no gain" in found["verdict"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_in_leaving_something_out_puts_everything_back_on_all(tmp_path, monkeypatch, rank):
    objections(monkeypatch, "no gain", "")
    faults = ["", ""]
    faults[rank] = "drop"
    engines, _, runs = run(tmp_path, faults)
    assert [engine.on for engine in engines] == [False, False]
    assert all(one.state is State.DONE for one in runs)


def test_with_too_few_batches_for_another_comparison_all_is_put_back(tmp_path, monkeypatch):
    objections(monkeypatch, "no gain")
    batches = MEETING + 2 + swapping_steps.batches_compared(1, 4) + 20
    engines, _, _ = run(tmp_path, batches=batches)
    assert [engine.gone for engine in engines] == [[], []]
    assert [engine.on for engine in engines] == [False, False]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", ["watch", "unwatch", "sites", "apply", "toggle True", "toggle False"])
def test_a_fault_on_one_rank_puts_everything_back_on_all(tmp_path, rank, place):
    faults = ["", ""]
    faults[rank] = place

    engines, _, runs = run(tmp_path, faults)

    assert place in engines[rank].log
    assert [engine.on for engine in engines] == [False, False]
    assert all(one.state is State.DONE for one in runs)
    assert json.loads((tmp_path / "0" / "swaps.json").read_text())["kept"] is False


@pytest.mark.parametrize(("rank", "place"), [(0, "decide"), (1, "follow")])
def test_a_fault_in_deciding_or_following_puts_everything_back_on_all(tmp_path, rank, place):
    faults = ["", ""]
    faults[rank] = place
    engines, _, _ = run(tmp_path, faults)
    assert [engine.on for engine in engines] == [False, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_can_swap_nothing_none_does(tmp_path, rank):
    unable = ["", ""]
    unable[rank] = "nothing can be swapped here: planted"
    engines, _, runs = run(tmp_path, unable=unable)
    assert [engine.on for engine in engines] == [False, False]
    assert all(one.state is State.DONE for one in runs)


def test_too_few_batches_are_rank_0s_to_see(tmp_path):
    _, bus, _ = run(tmp_path, batches=MEETING + 20)
    (order,) = bus.said
    assert "too few" in order.why


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_processes_of_ddp_swap_alike_and_save_plain_checkpoints(pl, tmp_path, monkeypatch):
    # GIVEN two forked processes, and a planted candidate that is exact
    monkeypatch.setattr(swapping, "MEETING", 8)
    plant(monkeypatch, planted.fast())

    class Notes(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 70:
                swapped = [hasattr(type(m), MARK) for m in pl_module.modules() if isinstance(m, SlowScale)]
                (tmp_path / f"seen{trainer.global_rank}").write_text(json.dumps(swapped))
                trainer.save_checkpoint(tmp_path / "swapped.ckpt")

    callback = TrainingAdvisor(stages=("validate",), warmup_steps=6, swap=["norm"])
    trainer = make_trainer(pl, tmp_path, callback, Notes(), devices=2, strategy="ddp_fork")

    # WHEN they train
    trainer.fit(slow_model(pl), rows(160))  # 80 on each

    # THEN both were swapped, and the checkpoint is a plain model's, bit for bit
    assert [json.loads((tmp_path / f"seen{rank}").read_text()) for rank in (0, 1)] == [[True, True]] * 2
    assert json.loads((tmp_path / "advisor" / "swaps.json").read_text())["kept"] is True
    saved = torch.load(tmp_path / "swapped.ckpt", weights_only=False)["state_dict"]
    model = slow_model(pl)
    model.load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
