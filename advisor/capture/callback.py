"""`TrainingAdvisor`, the Lightning callback: a thin adapter over `advisor.capture.window.Window`."""
# ruff: noqa: D102  Lightning documents its hooks

from __future__ import annotations

import contextlib
import functools
import os
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from advisor.capture import _requirements as _requirements
from advisor.capture import lightning_ahead, lightning_context, loggers, notify
from advisor.capture.lightning_bases import Root, adopt_late_packages, lightning_bases
from advisor.capture.lightning_marks import STEP_METHODS, LightningMarks
from advisor.capture.plan import check_counts
from advisor.capture.session import is_spent
from advisor.capture.swapping import start as swapping_start
from advisor.capture.window import Window
from advisor.errors import UsageError

Stage = Literal["fit", "validate", "test", "predict"]

_Hook = TypeVar("_Hook", bound=Callable[..., None])


def _guarded(hook: _Hook) -> _Hook:
    """Keep a fault of ours out of training: one warning, then the callback is off."""

    @functools.wraps(hook)
    def guarded(self: TrainingAdvisor, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  training must go on whatever happens here
            self._fail(error)

    return guarded  # type: ignore[return-value]


def _stage_hooks(stage: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """The start and end hooks of an evaluation stage."""

    def start(self: TrainingAdvisor, trainer: Any, pl_module: Any) -> None:
        self._begin(trainer, pl_module, stage)

    def end(self: TrainingAdvisor, trainer: Any, pl_module: Any) -> None:
        self._end_epoch(stage)

    return _guarded(start), _guarded(end)


def _batch_hooks(stage: str, batches: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """The batch hooks of an evaluation stage, whose batches the Trainer counts in ``batches``."""

    def start(
        self: TrainingAdvisor,
        trainer: Any,
        pl_module: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._note(stage, batch)

    def end(
        self: TrainingAdvisor,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._busy(stage):
            ahead = lightning_ahead.of_evaluation(getattr(trainer, batches), batch_idx, dataloader_idx)
            self._window.step(ahead)  # type: ignore[union-attr]

    return _guarded(start), _guarded(end)


class TrainingAdvisor(Root, *lightning_bases(import_any=True)):  # type: ignore[misc]
    """Records a few steps of a run and reports what bounds them.

    Works with the Trainers of ``lightning.pytorch`` and of ``pytorch_lightning``. The steps before the
    window are timed as a baseline, the steps after it are checked to be as fast again, and the analysis
    runs in a separate process. Training is never changed or stopped: on any fault there is one warning
    and the callback is off.

    Args:
        dirpath: folder for the results; by default ``advisor`` inside the Trainer's log directory.
        warmup_steps: batches before the window, or ``"auto"`` to wait until the step time is stable.
            Clamped to the batches that exist.
        capture_steps: batches to record and analyse, rounded up to whole accumulation cycles. Two more are
            spent on starting the profiler.
        ranks: which ranks record: ``"first"``, ``"all"`` or a list of global ranks.
        stages: which Trainer calls to record: ``fit``, ``validate``, ``test``, ``predict``. The first
            that occurs is recorded.
        modules: mark the forward of each module, so that work is attributed to it.
        report: analyse the trace and write ``report.html``, ``report.json`` and ``report.md`` beside it.
        open_report: open the page in a browser when the run ends.
        report_timeout_s: seconds to wait for the analysis at the end of the run.
        allow_repeat: record again in a process that has recorded before; kernels at the window's front may
            be lost.
        swap: None, ``"auto"`` or a list of `advisor.swap.site.KINDS`: in a fit, after the recording, try
            faster kernels on the loop's own tensors, keep those that make whole steps faster, and put
            everything back when the run ends. See ``docs/swap.md``.
        swap_keep: leave the model as it was swapped when the run ends.
        swap_max_memory_growth: share by which a step's peak memory may grow for a swap to be kept.

    Raises:
        UsageError: for a value out of range.
        MissingExtraError: if no Lightning package is installed.

    Example:
        >>> trainer = Trainer(callbacks=[TrainingAdvisor()])  # doctest: +SKIP
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        warmup_steps: int | Literal["auto"] = "auto",
        capture_steps: int = 3,
        ranks: Literal["first", "all"] | list[int] = "first",
        stages: Sequence[Stage] = ("fit",),
        modules: bool = True,
        report: bool = True,
        open_report: bool = False,
        report_timeout_s: float = 120.0,
        allow_repeat: bool = False,
        swap: str | list[str] | None = None,
        swap_keep: bool = False,
        swap_max_memory_growth: float = 0.0,
    ) -> None:
        adopt_late_packages(TrainingAdvisor)
        swapping_start.check_swap(swap, swap_max_memory_growth)
        check_counts(warmup_steps, capture_steps)
        unknown = [stages] if isinstance(stages, str) else [s for s in stages if s not in STEP_METHODS]
        if unknown:
            raise UsageError(f"stages={stages!r}: give a list of {', '.join(STEP_METHODS)}")
        if ranks not in ("first", "all") and (
            isinstance(ranks, str) or not ranks or not all(isinstance(rank, int) for rank in ranks)
        ):
            raise UsageError(f"ranks={ranks!r}: give 'first', 'all' or a list of ranks")
        super().__init__()
        self.dirpath = None if dirpath is None else os.fspath(dirpath)
        self.warmup_steps = warmup_steps
        self.capture_steps = capture_steps
        self.ranks = ranks
        self.stages = tuple(stages)
        self.modules = modules
        self.report = report
        self.open_report = open_report
        self.report_timeout_s = report_timeout_s
        self.allow_repeat = allow_repeat
        self.swap = swap
        self.swap_keep = swap_keep
        self.swap_max_memory_growth = swap_max_memory_growth
        self._settings = tuple(vars(self))
        self._start_afresh()

    def _start_afresh(self) -> None:
        window = getattr(self, "_window", None)
        if window is not None:
            window.interrupt()  # a run inside the run that it recorded
        swapping: swapping_start.Idle | None = getattr(self, "_swapping", None)
        if swapping is not None:
            swapping.interrupt()  # likewise; of a run that has ended, nothing
        self._window: Window | None = None
        # What it keeps may be asked back later.
        self._swapping = swapping if swapping is not None and swapping.keeps else swapping_start.Idle()
        self._folder: Path | None = None
        self._results: Path | None = None
        self._stage: str | None = None
        self._epochs = lightning_ahead.EpochLengths()

    def __getstate__(self) -> dict[str, Any]:
        """Settings alone: a copy, or the callback in a spawned process, starts afresh."""
        return {name: getattr(self, name) for name in (*self._settings, "_settings")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        adopt_late_packages(TrainingAdvisor)
        self.__dict__.update(state)
        self._start_afresh()

    @property
    def trace_path(self) -> Path | None:
        """The trace of this rank, once it is written."""
        return None if self._window is None else self._window.trace_path

    @property
    def report_path(self) -> Path | None:
        """The report page, once it is written; on the first recorded rank only."""
        return None if self._window is None else self._window.report_path

    def restore(self) -> None:
        """Put back whatever was swapped, now; on several ranks call it on each, at the same batch."""
        self._swapping.restore()

    # The names and arguments of the hooks below are Lightning's.

    @_guarded
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find the folder, on every rank since the log directory is broadcast, and see whether to record."""
        self._start_afresh()
        if stage not in self.stages and (stage != "fit" or self.swap is None):
            return
        folder = self._results = lightning_context.results_folder(trainer, self.dirpath)
        if stage not in self.stages:
            return
        if trainer.fast_dev_run:
            if trainer.is_global_zero:
                notify.info("nothing is recorded under fast_dev_run")
            return
        ranks = self._recording_ranks(trainer)
        if not ranks and trainer.is_global_zero:
            notify.info(f"nothing is recorded: none of ranks={self.ranks} is among {trainer.world_size}")
        if trainer.global_rank not in ranks:
            return
        self._folder, self._stage = folder, stage

    @_guarded
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(trainer, pl_module, "fit")
        self._begin_swap(trainer, pl_module)

    @_guarded
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        self._swapping.cut()
        if self._stage == "fit":
            self._interruption(started=True)
        else:
            self._begin(trainer, pl_module, "validate")

    @_guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        self._swapping.cut()
        if self._stage == "fit":
            self._interruption(started=False)
        else:
            self._end_epoch("validate")

    @_guarded
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._swapping.epoch_start()
        if self._busy("fit"):
            self._epochs.start()
            self._window.cut()  # type: ignore[union-attr]

    @_guarded
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._end_epoch("fit")

    @_guarded
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._swapping.batch_start()
        self._note("fit", batch)

    @_guarded
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # First, and it raises nothing: ranks may meet here, whatever befalls the recording on one of them.
        self._swapping.batch_end(batch_idx)
        if self._busy("fit"):
            self._epochs.count()
            ahead = lightning_ahead.of_fit(trainer, batch_idx, self._epochs)
            self._window.step(ahead, global_step=trainer.global_step)  # type: ignore[union-attr]

    @_guarded
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._phase("backward", opens=True)

    @_guarded
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._phase("backward", opens=False)

    @_guarded
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._phase("optimizer", opens=True)

    on_validation_batch_start, on_validation_batch_end = _batch_hooks("validate", "num_val_batches")
    on_test_batch_start, on_test_batch_end = _batch_hooks("test", "num_test_batches")
    on_predict_batch_start, on_predict_batch_end = _batch_hooks("predict", "num_predict_batches")
    on_test_start, on_test_end = _stage_hooks("test")
    on_predict_start, on_predict_end = _stage_hooks("predict")

    @_guarded
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The only hook that runs after an exception or Ctrl-C."""
        self._swapping.interrupt()
        if self._window is not None:
            self._window.interrupt()
        self._swapping.refresh()

    @_guarded
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Finish, and pass the report on while the loggers are still open."""
        if stage == "fit":
            self._swapping.close()
        if self._window is None or self._stage != stage:
            return
        self._window.close(self.report_timeout_s)
        self._swapping.refresh()
        report = self._window.report_path
        if report is not None:
            print(f"advisor: report: {report}", flush=True)
            loggers.hand_over(trainer.loggers, report, trainer.global_step)
            if self.open_report:
                webbrowser.open(report.resolve().as_uri())
        elif self._window.trace_path is not None and trainer.is_global_zero:
            notify.info(f"trace: {self._window.trace_path}")

    def _recording_ranks(self, trainer: Any) -> list[int]:
        if self.ranks == "first":
            return [0]
        if self.ranks == "all":
            return list(range(trainer.world_size))
        return sorted(rank for rank in self.ranks if rank < trainer.world_size)  # type: ignore[operator]

    def _begin(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._stage != stage or self._folder is None or self._window is not None:
            return
        if is_spent() and not self.allow_repeat:
            notify.info(notify.REPEATED)
            return
        other = lightning_context.foreign_profiler(trainer)
        if other:
            notify.warn(f"nothing is recorded: {other}")
            return
        fit = stage == "fit"
        ranks = self._recording_ranks(trainer)
        window = Window(
            self._folder,
            warmup_steps=self.warmup_steps,
            capture_steps=self.capture_steps,
            model=pl_module,
            optimizers=trainer.optimizers if fit else (),
            device=pl_module.device,
            modules=self.modules,
            report=self.report,
            cycle=trainer.accumulate_grad_batches if fit else 1,
            rank=trainer.global_rank,
            ranks=ranks,
            context=functools.partial(lightning_context.trainer_context, trainer, stage),
            allow_repeat=self.allow_repeat,
        )
        window.add(LightningMarks(trainer, window.phases, stage))
        self._window = window

    def _begin_swap(self, trainer: Any, pl_module: Any) -> None:
        asking = [c for c in trainer.callbacks if isinstance(c, TrainingAdvisor) and c.swap is not None]
        if self.swap is not None and asking[0] is not self:
            # What two change in turns, neither could take back.
            if trainer.is_global_zero:
                notify.info("swap: nothing is swapped by a second callback; the first one does")
            return
        self._swapping.restore()  # what an earlier run has left
        self._swapping = swapping_start.begin(
            trainer,
            pl_module,
            self.swap,
            keep=self.swap_keep,
            max_memory_growth=self.swap_max_memory_growth,
            window=lambda: self._window,
            shared=self.ranks != "first",
            warmup_steps=self.warmup_steps,
            results=self._results or Path("advisor_logs"),
        )

    def _busy(self, stage: str) -> bool:
        return self._window is not None and self._stage == stage and not self._window.done

    def _note(self, stage: str, batch: Any) -> None:
        if self._window is not None and self._window.recording and self._stage == stage:
            self._window.note_batch(batch)

    def _phase(self, name: str, *, opens: bool) -> None:
        if self._window is not None and self._window.recording:
            (self._window.phases.open if opens else self._window.phases.close)(name)

    def _interruption(self, *, started: bool) -> None:
        """Validation within fit: marked in the trace, left out of the step times."""
        if self._busy("fit"):
            self._window.cut()  # type: ignore[union-attr]
            self._phase("validation", opens=started)

    def _end_epoch(self, stage: str) -> None:
        if self._busy(stage):
            self._window.end_epoch()  # type: ignore[union-attr]

    def _fail(self, error: BaseException) -> None:
        self._stage = None
        if self._window is None:
            notify.warn(f"recording is off, training goes on: {type(error).__name__}: {error}")
            return
        with contextlib.suppress(Exception):  # nothing is left to turn to
            self._window.fail(error)
