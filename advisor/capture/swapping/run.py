"""Swap in a running Trainer: watch a step, try candidates between steps, compare whole steps, keep or undo.

Before the candidates are tried, their kernels are compiled while the loop trains on.

No method raises on a fault of its own: everything is put back, there is one warning, and training goes on.
What the ranks do together they do at the same batch, whatever has gone wrong on one of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from advisor.capture import lightning_ahead, notify
from advisor.capture.swapping.account import Account
from advisor.capture.swapping.engine import Engine, GivenUp
from advisor.capture.swapping.less import MOST, Part, less
from advisor.capture.swapping.patience import LIMIT_S, Patience
from advisor.capture.swapping.ranks import Order, Ranks
from advisor.capture.swapping.start import Idle
from advisor.capture.swapping.steps import Comparison, batches_compared, cycles_per_block, objection
from advisor.capture.swapping.told import counted, left_as_it_is, progress, progress_over

#: Batches between the points at which several ranks ask rank 0 whether to begin.
MEETING = 64
#: The same while rank 0 compiles.
COMPILING_MEETING = 8

_T = TypeVar("_T")


class State(enum.Enum):
    """What swap is doing."""

    WAITING = "waiting for a steady loop"
    READY = "ready to watch a step"
    WATCHING = "watching a step"
    COMPILING = "compiling while the loop trains on"
    COMPARING = "comparing whole steps"
    DONE = "done"


class Swapping(Idle):
    """One run's swaps.

    Args:
        trainer: of either Lightning package; fitting.
        module: its LightningModule.
        engine: finds, proves and applies.
        asked: kinds.
        keep: leave what was kept in the model after the run.
        max_memory_growth: share by which whole steps' peak memory may grow.
        is_steady: whether the loop is steady and nothing is being recorded.
        folder: where to leave what was done.
        unable: why nothing can be swapped on this rank; empty if something might.
        remarks: what is left alone in this run.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        engine: Engine,
        *,
        asked: Sequence[str],
        keep: bool,
        max_memory_growth: float,
        is_steady: Callable[[int], bool],
        folder: Callable[[], Path],
        unable: str = "",
        remarks: Sequence[str] = (),
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._keep = keep
        self._max_memory_growth = max_memory_growth
        self._is_steady = is_steady
        self._ranks = Ranks(trainer.strategy, trainer.global_rank, trainer.world_size)
        self._account = Account(asked, folder, first=self._ranks.first, remarks=remarks)
        self._device_type = str(module.device.type)
        self._cycle = max(1, int(trainer.accumulate_grad_batches))
        self._epochs = lightning_ahead.EpochLengths()

        self.state = State.WAITING
        self._seen = 0
        self._cycles = 0
        self._until = 0
        self._batch_idx = 0
        self._to_watch = engine.steps_to_watch
        self._patience = Patience()
        self._found = 0
        self._fault = unable
        self._comparison: Comparison | None = None
        self._closed = False
        self._in_force = False
        self._replayed = ""
        if unable and self._ranks.alone:
            self._end(unable)

    @property
    def keeps(self) -> bool:
        """Whether the run has ended, and what it swapped stays until it is asked back."""
        return self._closed and self._keep

    def epoch_start(self) -> None:
        """An epoch begins."""
        self._epochs.start()
        self.cut()

    def cut(self) -> None:
        """Something other than a step happened: it is not timed as one."""
        if self._comparison is not None:
            self._try(self._comparison.cut)

    def batch_start(self) -> None:
        """A batch is about to be trained on."""
        if self.state is State.READY:
            self.state = State.WATCHING
            if not self._fault:
                self._try(self._engine.watch)

    def batch_end(self, batch_idx: int) -> None:
        """A batch has been trained on."""
        if self.state is State.DONE:
            self._look_after()
            return
        self._seen += 1
        self._batch_idx = batch_idx
        self._epochs.count()
        if self.state is State.WAITING:
            self._meet()
        elif self.state is State.WATCHING:
            self._watched()
        elif self.state is State.COMPILING:
            self._choose()
        elif self.state is State.COMPARING:
            self._compare()

    def _look_after(self) -> None:
        """A check that finds the step wrong puts everything back; that a replay has ended is told."""
        if not self._in_force:
            return
        if why := self._engine.given_up:
            if self._ranks.alone:
                notify.warn(left_as_it_is(why, "everything is put back"))
                self._end(f"taken back later, since {why}")
            else:
                # The original serves in the step. Optimizers must go on alike, or parameters drift apart.
                self._in_force = False
                notify.warn(left_as_it_is(why, "what else was swapped stays on this rank"))
        elif self._engine.replayed != self._replayed:
            self._try(self._run_another_way)

    def _run_another_way(self) -> None:
        """The step is not replayed any more, or only now."""
        unfit = self._engine.unreplayed if self._ranks.alone else {}
        if unfit and len(unfit) == len(self._engine.parts):
            self._end(
                f"taken back later, since the step is not replayed any more: {'; '.join(unfit.values())}"
            )
            return
        line = self._engine.replayed
        if unfit:
            self._engine.drop([part.key for part in unfit])
            self._account.leave_unreplayed(unfit)
        self._replayed = self._engine.replayed
        self._account.amend(line if "not replayed" in line else "", remarks=self._engine.remarks)

    def restore(self) -> None:
        """Put everything back now; on several ranks each must be asked."""
        self._take_back()
        if self.state is not State.DONE:
            self._end("taken back on request")

    def close(self) -> None:
        """The run has ended: put everything back unless it is to stay."""
        if self.state is State.COMPARING:
            self._account.steps = self._try(self._comparison.outcome) if self._comparison else None
            self._end("the run ended before whole steps were compared")
        elif self.state is State.COMPILING:
            self._end("the run ended while kernels were being compiled")
        elif self.state is not State.DONE:
            self._end("the run ended before a steady step could be watched")
        self._closed = True
        if not self._keep:
            self._let_go()

    def interrupt(self) -> None:
        """The run was left by an exception: everything is put back."""
        if self._closed:
            return
        self._take_back()
        if self.state is not State.DONE:
            self._end("the run was interrupted")
        self._let_go()

    def refresh(self) -> None:
        """The recording and its report may be there by now: bring them up to date."""
        self._account.refresh()

    def _meet(self) -> None:
        """Whether to begin; several ranks ask at the same batches, for only rank 0 may have recorded."""
        if not self._ranks.alone and self._seen % MEETING:
            return
        order = self._hear(self._beginning)
        if order.go:
            self._cycles = order.cycles
            self.state = State.READY
        elif not order.wait:
            self._end(order.why)

    def _left(self) -> int | None:
        """Batches that the run has left; None if that is not known."""
        ahead = lightning_ahead.of_fit(self._trainer, self._batch_idx, self._epochs)
        if ahead.left_in_epoch is None or ahead.left_later is None:
            return None
        return ahead.left_in_epoch + ahead.left_later

    def _beginning(self) -> Order:
        if not self._is_steady(self._seen):
            return Order(go=False, wait=True)
        left = self._left()
        left = None if left is None else left - self._to_watch
        cycles = cycles_per_block(left, self._cycle)
        if not cycles:
            return Order(
                go=False,
                why=f"the {max(0, left or 0)} batches that are left are too few to compare whole steps",
            )
        self._patience = Patience(None if left is None else left - batches_compared(self._cycle, cycles))
        lacking = self._engine.lacks_memory()
        return Order(go=not lacking, why=lacking, cycles=cycles)

    def _watched(self) -> None:
        self._try(self._engine.unwatch)
        self._to_watch -= 1
        if self._to_watch > 0:
            self.state = State.READY
            return
        with self._account.pause():
            self._found = len(self._try(self._engine.sites) or []) if not self._fault else 0
            if self._ranks.first and (why := self._engine.unread):
                notify.warn(left_as_it_is(why, "modules and optimizers are looked at"))
            if self._found and self._ranks.first:
                self._try(self._compile)
        self._until = self._seen
        self._choose()

    def _compile(self) -> None:
        """Begin to compile; candidates are tried once that is done, or takes too long."""
        kernels = self._engine.compile()
        self._patience.start(self._seen)
        if kernels and self._may_wait():
            line = f"compiling {counted(kernels, 'kernel')} for {counted(self._found)}"
            self._account.say(f"{line} while training goes on (at most {LIMIT_S:g} s)")

    def _may_wait(self) -> bool:
        """Whether the loop is to train on while kernels are compiled; rank 0's to see."""
        until = self._seen + self._between_questions
        return self._engine.compiling and not self._engine.cramped and self._patience.lasts(until)

    @property
    def _between_questions(self) -> int:
        return 1 if self._ranks.alone else COMPILING_MEETING

    def _choose(self) -> None:
        """All was watched, and what is compiled meanwhile may be: try, on rank 0, and change, on all."""
        if self._seen < self._until:
            return
        with self._account.pause():
            order = self._hear(self._decision)
            if order.wait:
                self.state = State.COMPILING
                self._until = self._seen + self._between_questions
                return
            if order.go and not self._fault:
                self._try(lambda: self._change(order))
            self._try(self._engine.release)
        if not order.go:
            self._end(order.why)
        elif self._all_well():
            self.state = State.COMPARING
            self._begin_comparison()
            self._compare()

    def _decision(self) -> Order:
        if not self._found and not self._engine.may_replay:
            return Order(go=False, why="the step has nothing that a faster kernel is known for")
        if self._may_wait():
            return Order(go=False, wait=True)
        account = self._account
        if self._found:
            account.say(f"trying {counted(self._found)} between two steps (10 s at most, once compiled)")
        account.decided(self._engine.decide(progress))
        progress_over()
        if not account.better:
            return Order(go=False, why=f"none of {account.count} has a candidate that is right and faster")
        account.say(f"{account.better} of {account.count} can be faster; comparing whole steps")
        return Order(go=True, choices=self._engine.choices())

    def _change(self, order: Order) -> None:
        if not self._ranks.first:
            self._engine.follow(order.choices)
        self._engine.apply()

    def _begin_comparison(self) -> None:
        self._engine.time(False)  # one before it may have been left while steps were timed
        self._comparison = Comparison(
            self._engine.toggle,
            self._device_type,
            self._cycle,
            self._cycles,
            held_bytes=lambda: self._engine.held_bytes,
            loop_bytes=self._engine.loop_bytes,
            time=self._engine.time,
        )
        self._until = self._seen + self._comparison.batches

    def _without(self, at_fault: dict[Part, str]) -> None:
        """A check of the step found these parts to be wrong: compare anew with the rest, on one device."""
        self._engine.drop([part.key for part in at_fault])
        if not self._engine.parts:
            raise GivenUp("; ".join(at_fault.values()))
        self._account.find_at_fault(at_fault)
        self._begin_comparison()

    def _without_replay(self, why: dict[Part, str]) -> None:
        """The step as it is cannot be replayed, or gains nothing by it: compare the rest anew, if any."""
        self._engine.drop([part.key for part in why])
        self._account.leave_unreplayed(why)
        if self._engine.parts:
            self._begin_comparison()
        else:
            self._end("; ".join(f"the step is not replayed: {reason}" for reason in why.values()))

    def _without_patterns(self, why: str) -> None:
        """The step's graph was given up: compare anew with what else was swapped, on one device."""
        if not self._engine.drop_patterns():
            raise GivenUp(why)
        notify.warn(left_as_it_is(why, "what else was swapped is compared anew"))
        self._account.give_up_patterns(why)
        self._begin_comparison()

    def _compare(self) -> None:
        assert self._comparison is not None
        if self._ranks.alone and not self._fault and (wrong := self._engine.at_fault):
            self._try(lambda: self._without(wrong))
        elif self._ranks.alone and not self._fault and (unfit := self._engine.unreplayed):
            self._try(lambda: self._without_replay(unfit))
            if self.state is State.DONE:
                return
        elif self._ranks.alone and not self._fault and (why := self._engine.given_up):
            self._try(lambda: self._without_patterns(why))
        if not self._fault:
            self._try(self._comparison.step)
        if self._fault and self._ranks.alone:
            self._all_well()
        elif self._seen >= self._until:  # a rank at fault gets here too: the others wait for it
            self._judge(self._comparison)

    def _judge(self, comparison: Comparison) -> None:
        self._account.steps = self._try(comparison.outcome)
        order = self._hear(self._verdict)
        if order.less and not self._fault:
            self._try(lambda: self._engine.drop(order.less))
        if order.go and not order.less and not self._fault:
            self._try(lambda: self._engine.toggle(True))
        if not self._all_well():
            return
        if order.less:
            self._cycles = order.cycles
            self._begin_comparison()
            self._compare()
        else:
            if not order.go:
                self._try(self._engine.forget_recordings)
            self._end(order.why, kept=order.go)

    def _verdict(self) -> Order:
        steps, before = self._account.steps, len(self._account.against)
        if steps is None:
            return Order(go=False, why="whole steps could not be compared")
        cycles = cycles_per_block(self._left(), self._cycle)
        if unfit := self._engine.unreplayed:
            return self._unreplayed(unfit, cycles)
        why = objection(steps, self._max_memory_growth)
        if not why:
            return Order(go=True)
        # Less of it may do better.
        out = less(self._engine.parts, steps) if cycles and before < MOST else []
        if not out:
            return Order(go=False, why=f"{why} (the last of {before + 1} comparisons)" if before else why)
        self._account.leave_out(out, why)
        return Order(go=True, cycles=cycles, less=tuple(part.key for part in out))

    def _unreplayed(self, unfit: dict[Part, str], cycles: int) -> Order:
        """The step as it is is not replayed on this rank, the first of several: the rest is compared anew."""
        self._account.leave_unreplayed(unfit)
        if cycles and len(self._engine.parts) > len(unfit):
            return Order(go=True, cycles=cycles, less=tuple(part.key for part in unfit))
        return Order(go=False, why="; ".join(f"the step is not replayed: {why}" for why in unfit.values()))

    def _hear(self, make: Callable[[], Order]) -> Order:
        """Rank 0's order on each rank; a fault on rank 0 is an order to stop, for the others wait for one."""
        made = self._try(make) if self._ranks.first and not self._fault else None
        order = made or Order(go=False, why=self._fault)
        return self._try(lambda: self._ranks.hear(order)) or Order(go=False, why=self._fault)

    def _all_well(self) -> bool:
        """Whether no rank is at fault; else swap ends, on all of them."""
        if self._try(lambda: self._ranks.all_agree(not self._fault)):
            return True
        self._end(self._fault or "another rank could not follow")
        return False

    def _try(self, action: Callable[[], _T]) -> _T | None:
        """Do it; on a fault note it, put everything back, and go on."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001  training must go on whatever happens here
            self._take_back()
            if not self._fault and isinstance(error, GivenUp):
                self._fault = str(error)
                notify.warn(left_as_it_is(self._fault, "everything is put back"))
            elif not self._fault:
                self._fault = f"{type(error).__name__}: {error}"
                notify.warn(f"swap is off, training goes on as before: {self._fault}")
            return None

    def _take_back(self) -> None:
        try:
            self._engine.restore()
            self._engine.release()
        except Exception as error:  # noqa: BLE001
            notify.warn(f"swap could not put everything back: {type(error).__name__}: {error}")

    def _let_go(self) -> None:
        """Everything is as it was, for good: the callback may outlive the run, and must not hold it."""
        try:
            self._engine.close()
        except Exception as error:  # noqa: BLE001
            notify.warn(f"swap could not put everything back: {type(error).__name__}: {error}")
        self._trainer = None
        self._ranks.let_go()

    def _end(self, why: str, *, kept: bool = False) -> None:
        """Nothing more is decided: say what came of it, and leave it for the report."""
        self.state = State.DONE
        self._comparison = None
        if not kept:
            self._take_back()
        self._in_force, self._replayed = kept, self._engine.replayed
        self._account.end(why, kept=kept, remarks=self._engine.remarks)
