"""The window: measure the plain loop, record a few steps, check that the loop is as fast as before."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from advisor.capture import _requirements as _requirements  # isort: skip

import torch

from advisor.capture import notify, plan
from advisor.capture.aftercheck import AfterCheck
from advisor.capture.clock import StepClock
from advisor.capture.loop import Loop
from advisor.capture.output import Files, Worker
from advisor.capture.plan import Ahead
from advisor.capture.ranges import Instrument, ModuleRanges, OpenRanges, Phases
from advisor.capture.rivals import another_profiler
from advisor.capture.session import Session, is_spent
from advisor.capture.steptime import is_stable, median_ms, noise_ms, per_cycle_ms

#: Un-profiled steps that the baseline keeps at most, and at least where there are as many.
BASELINE_KEPT = 50
BASELINE_MIN = 10


class State(enum.Enum):
    """What the window is doing."""

    BASELINE = "measuring the plain loop"
    RECORDING = "recording"
    CHECKING = "measuring the plain loop again"
    DONE = "done"


class Window:
    """Records one window of a training loop and has it analysed. Call `step` at the end of each batch.

    The loop is timed without a profiler first, then a few batches are recorded, then it is timed
    again. No method raises on a fault of its own: there is one warning, everything is taken down, and
    the loop goes on.

    Args:
        dirpath: folder for ``step_<n>/rank<r>.pt.trace.json.gz`` and the report.
        warmup_steps: batches before the window, or ``"auto"`` to wait for a stable step time.
        capture_steps: batches recorded and analysed; two more are spent on arming the profiler.
        model: its modules' names go into the trace.
        optimizers: their settings and parameter shapes go into the context block.
        loader: its settings go into the context block.
        device: where the model trains; by default the model's first parameter's device.
        modules: mark each module's forward.
        report: analyse the trace, in a process of its own.
        cycle: batches per optimizer step; whole cycles are recorded.
        rank: this process' rank.
        ranks: the ranks that record; the first of them makes the report.
        context: more entries for the context block, read when the window ends.
        allow_repeat: record even if this process has recorded before, though leading kernels may be lost.

    Raises:
        UsageError: for a count out of range.

    Example:
        >>> from advisor.capture import Window
        >>> with Window("runs/advisor", model=model, optimizers=[optimizer]) as window:  # doctest: +SKIP
        ...     for batch in loader:
        ...         with window.phase("forward"):
        ...             loss = model(batch)
        ...         with window.phase("backward"):
        ...             loss.backward()
        ...         with window.phase("optimizer"):
        ...             optimizer.step()
        ...         window.step()
    """

    def __init__(
        self,
        dirpath: str | Path = "advisor_logs",
        *,
        warmup_steps: int | Literal["auto"] = "auto",
        capture_steps: int = 3,
        model: torch.nn.Module | None = None,
        optimizers: Sequence[Any] = (),
        loader: Any = None,
        device: torch.device | str | None = None,
        modules: bool = True,
        report: bool = True,
        cycle: int = 1,
        rank: int = 0,
        ranks: Sequence[int] = (0,),
        context: Callable[[], dict[str, Any]] | None = None,
        allow_repeat: bool = False,
    ) -> None:
        plan.check_counts(warmup_steps, capture_steps)
        self._dirpath = Path(dirpath)
        self._warmup = plan.SHARED_WARMUP if warmup_steps == "auto" and len(ranks) > 1 else warmup_steps
        self._loop = Loop(model, optimizers, loader, device, cycle, context)
        self._capture = plan.whole_cycles(capture_steps, self._loop.cycle)
        self._modules = modules
        self._report = report and rank == min(ranks)
        self._rank = rank
        self._ranks = tuple(ranks)
        self._instruments: list[Instrument] = []
        self._undo: list[Callable[[], None]] = []
        self._allow_repeat = allow_repeat

        self.state = State.BASELINE
        self.ranges = OpenRanges(self.fail)
        self.phases = Phases(self.ranges)
        self._clock = StepClock(self._loop.device.type)
        self._session: Session | None = None
        self._seen = 0
        self._first_step = 0
        self._count = 0
        self._baseline_ms: list[float] = []
        self._check: AfterCheck | None = None
        self._warmed = 0
        self._target = 0
        self._reported = False
        self._context: dict[str, Any] = {}
        self._files: Files | None = None
        self._worker: Worker | None = None

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.interrupt()

    @property
    def recording(self) -> bool:
        """Whether the profiler is on."""
        return self.state is State.RECORDING

    @property
    def done(self) -> bool:
        """Whether nothing is left to measure or record."""
        return self.state is State.DONE

    @property
    def folder(self) -> Path | None:
        """Where the files of the recording are; None before it begins."""
        return self._files.folder if self._files is not None else None

    @property
    def trace_path(self) -> Path | None:
        """This rank's trace, once the worker has written it."""
        return self._files.trace if self._worker and self._files and self._files.trace.exists() else None

    @property
    def report_path(self) -> Path | None:
        """The report page, once the worker has written it in full."""
        return self._files.report if self._reported and self._files and self._files.report.exists() else None

    def add(self, instrument: Instrument) -> None:
        """Have further marks set when the window opens and removed when it ends."""
        self._instruments.append(instrument)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase of the step: forward, loss, backward, optimizer, input, validation, logging."""
        self.phases.open(name)
        try:
            yield
        finally:
            self.phases.close(name)

    def note_batch(self, batch: Any) -> None:
        """Keep the shapes of the first batch that is recorded, not the batch."""
        if self.recording:
            with self._guarded():
                self._loop.note_batch(batch)

    def cut(self) -> None:
        """Something other than a step happened (validation, a new epoch): it is not timed as one."""
        self._clock.cut()

    def step(self, ahead: Ahead | None = None, *, global_step: int | None = None) -> None:
        """A batch has ended.

        Args:
            ahead: what lies ahead; by default nothing is known.
            global_step: the loop's own count of steps, for file names; by default batches are counted.
        """
        if self.state is State.DONE:
            return
        with self._guarded():
            self._seen += 1
            here = global_step if global_step is not None else self._seen
            self._advance(ahead or Ahead(next_batch=self._seen), here)

    def end_epoch(self) -> None:
        """The epoch has ended: a window that is open ends with what it has."""
        if self.state is State.DONE:
            return
        with self._guarded():
            if self.recording:
                self._finish_early()
            self._clock.cut()

    def close(self, wait_s: float = 120.0) -> None:
        """The loop has ended: finish what is open and wait for the report.

        Args:
            wait_s: seconds to wait for it at most; it is still written afterwards.
        """
        with self._guarded():
            if self.state is State.BASELINE:
                self._give_up(
                    f"nothing was recorded: after {self._seen} batches the loop ended, before there was room "
                    f"for a window of {plan.LEAD_BATCHES + 1} batches or more within one epoch"
                )
            elif self.recording:
                self._finish_early()
            if self.state is State.CHECKING:
                self._judge()
        self._take_down()
        if self._worker is not None and wait_s > 0:
            with self._guarded():
                self._await_worker(wait_s)

    def interrupt(self) -> None:
        """The loop was left by an exception: a finished recording is kept, an open one is dropped."""
        if self.state is State.CHECKING:
            with self._guarded():
                self._judge()
                if self._files is not None:
                    notify.info(f"the recorded steps are being analysed: {self._files.folder}")
        self._take_down()

    def fail(self, error: BaseException) -> None:
        """Something of ours went wrong: say so once and switch off."""
        if self.state is not State.DONE:
            self._take_down()
            notify.warn(f"recording stopped, training goes on: {type(error).__name__}: {error}")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  training must go on whatever happens here
            self.fail(error)

    def _advance(self, ahead: Ahead, here: int) -> None:
        if self.state is State.RECORDING:
            self._advance_recording(ahead)
        elif self.state is State.CHECKING:
            if self._check is not None and self._check.step():
                self._judge()
        else:
            self._clock.mark()
            capture = plan.batches_to_capture(
                ahead,
                capture=self._capture,
                cycle=self._loop.cycle,
                ready=self._is_ready(),
                measured=self._seen - 1,
            )
            if capture:
                self._open(capture, here)

    def _is_ready(self) -> bool:
        if self._warmup != "auto":
            return self._seen >= self._warmup
        return self._seen >= plan.AUTO_CAP or is_stable(
            per_cycle_ms(self._clock.distances_ms(), self._loop.cycle)
        )

    def _open(self, capture: int, here: int) -> None:
        if is_spent() and not self._allow_repeat:
            self._take_down()
            notify.info(notify.REPEATED)
            return
        other = another_profiler()
        if other:
            self._give_up(f"nothing was recorded: {other}")
            return
        files = Files(self._dirpath / f"step_{here}", self._rank)
        try:
            files = Files(files.folder.absolute(), self._rank)  # the loop may change its working directory
            files.prepare()
        except OSError as error:
            self._give_up(f"nothing was recorded: cannot write to {files.folder} ({error}); set dirpath")
            return
        self._files, self._first_step, self._count, self._target = files, here, 0, plan.LEAD_BATCHES + capture
        self._loop.note_peak_memory()
        self._warmed = self._seen
        self.state = State.RECORDING
        self._session = Session(self._make_way)
        self._session.start()
        if self._modules and self._loop.model is not None:
            self._instruments.append(ModuleRanges(self._loop.model, self.ranges))
        for instrument in self._instruments:
            instrument.install()
        self.phases.on = True

    def _advance_recording(self, ahead: Ahead) -> None:
        self._count += 1
        self.ranges.drain()
        if self._count >= self._target:
            self._finish()
        elif ahead.left_in_epoch == 0:
            self._finish_early()
        elif self._session is not None:
            self._session.step()

    def _finish_early(self) -> None:
        if self._count > plan.LEAD_BATCHES:
            self._finish()
        else:
            self._give_up("nothing was recorded: the epoch ended right after the profiler had started")

    def _finish(self) -> None:
        """End the recording, write it out raw, and let go of everything that belongs to the loop."""
        assert self._session is not None
        assert self._files is not None
        start_ns = time.perf_counter_ns()
        self._unmark()
        self._session.stop()
        self._baseline_ms = _settled(self._clock.distances_ms(), self._loop.cycle)
        self._context = self._describe()
        self._session.write(self._files.raw)
        self._session.release()
        self._context["window"]["pause_ms"] = round((time.perf_counter_ns() - start_ns) / 1e6, 1)
        self._forget_loop()
        self._check = AfterCheck(self._clock, self._baseline_ms, self._loop.cycle)
        self.state = State.CHECKING

    def _describe(self) -> dict[str, Any]:
        cycles_ms = per_cycle_ms(self._baseline_ms, self._loop.cycle)
        return {
            **self._loop.describe(),
            "rank": self._rank,
            "global_step": self._first_step,
            "baseline": {
                "step_ms": [round(value, 4) for value in self._baseline_ms],
                "median_ms": median_ms(cycles_ms),
                "noise_ms": noise_ms(cycles_ms),
                "n": len(self._baseline_ms),
            },
            "after": None,
            "window": {
                "warmup_steps": self._warmed,
                "capture_steps": self._count - plan.LEAD_BATCHES,
                "first_step": self._first_step,
            },
        }

    def _judge(self) -> None:
        """Note how fast the loop is now, say so if it is slower, and hand the recording to the worker."""
        assert self._check is not None
        assert self._files is not None
        after = self._context["after"] = self._check.outcome()
        if after["verified"] is False and self._loop.device.type != "cpu":
            notify.warn(
                f"steps take {after['ratio'] - 1:.0%} longer after the recording than before it; "
                "restarting from a checkpoint brings the old speed back"
            )
        worker = Worker(self._files)
        worker.start(self._context, report=self._report, ranks=self._ranks)
        self._worker = worker
        self._take_down()

    def _await_worker(self, wait_s: float) -> None:
        assert self._worker is not None
        worker = self._worker
        status = worker.wait(0 if wait_s <= 0 else min(wait_s, 1.0))
        if status is None:
            notify.info(f"waiting for the analysis of the recorded steps (at most {wait_s:.0f} s)")
            status = worker.wait(wait_s)
        if status is None:
            notify.info(f"the analysis goes on; its files will be in {worker.files.folder}")
        elif status != 0:
            notify.warn(f"the analysis failed: {worker.last_line()} (see {worker.files.log})")
        else:
            self._reported = self._report

    def _make_way(self) -> None:
        self._give_up("nothing was recorded: the loop itself began to profile; its profiler goes first")

    def _give_up(self, why: str) -> None:
        self._take_down()
        notify.warn(why)

    def _unmark(self) -> None:
        self.phases.on = False
        for instrument in self._instruments:
            instrument.remove()
        self.ranges.drain()

    def _forget_loop(self) -> None:
        self._instruments = []
        self._loop.forget()

    def _take_down(self) -> None:
        """Leave nothing behind: marks, profiler, references, half-written files.

        A Ctrl-C in the middle of it leaves the rest to the next call, which `interrupt` makes.
        """
        if self.state is not State.DONE:
            marks = [instrument.remove for instrument in self._instruments]
            undo_all = [*marks, self._unmark, self._forget_loop, self._clock.clear]
            if self._session is not None:
                undo_all.append(self._session.close)
            if self._files is not None and self._worker is None:
                undo_all.append(self._files.discard)
            self._undo = undo_all
            self.state = State.DONE
            self._session = None
        while self._undo:
            undo = self._undo[0]
            try:
                undo()
            except Exception as error:  # noqa: BLE001  one failing part must not keep the others
                notify.info(f"while switching off: {type(error).__name__}: {error}")
            self._undo = [left for left in self._undo if left is not undo]


def _settled(step_ms: list[float], cycle: int) -> list[float]:
    """The latest half of the measured steps: the first ones warm caches up, compile and autotune."""
    keep = min(BASELINE_KEPT, max(BASELINE_MIN, math.ceil(len(step_ms) / 2)))
    return step_ms[-max(keep, 2 * cycle) :]
