"""Time a loop with and without its fault, and record the one with it: one case in this process."""

from __future__ import annotations

import gc
import logging
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from advisor.capture.callback import TrainingAdvisor
from advisor.demo.flavour import pl
from benchmarks.payoff.case import Case, Loop, Scale, all_cases

#: Steps after the window, by which the capture sees that the loop is as fast as before.
_AFTER = 14
_CAPTURED = 3
#: Un-profiled steps before the window; half of them are the capture's own baseline.
_BEFORE_WINDOW = 25


@dataclass(frozen=True)
class Plan:
    """How long a case is measured.

    Attributes:
        rounds: fits of each of the two, in turns.
        blocks: timed blocks in a fit.
        block_steps: steps in a block; the device is waited for at its ends.
        tiny: small sizes, to try a case where there is no GPU.
    """

    rounds: int = 3
    blocks: int = 3
    block_steps: int = 10
    tiny: bool = False


QUICK = Plan(rounds=2, blocks=2, block_steps=8)
TINY = Plan(rounds=1, blocks=1, block_steps=2, tiny=True)


class BlockTimes(pl.Callback):
    """Milliseconds a step, of each block of steps after the warm-up."""

    def __init__(self, warmup: int, block_steps: int) -> None:
        self.warmup, self.block_steps = warmup, block_steps
        self.marks_s: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1
        if done >= self.warmup and (done - self.warmup) % self.block_steps == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.marks_s.append(time.perf_counter())

    def step_ms(self) -> list[float]:
        marks = zip(self.marks_s, self.marks_s[1:], strict=False)
        return [(end - start) * 1e3 / self.block_steps for start, end in marks]


class StaysOnDevice(pl.strategies.SingleDeviceStrategy):
    """Leaves model and states where they are at a fit's end: the next fit of the same loop is near."""

    def teardown(self) -> None:
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def train(loop: Loop, steps: int, *callbacks: Any) -> None:
    """Fit a loop for so many steps, without what would take time beside it."""
    options = dict(loop.trainer)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    with loop.around():
        trainer = pl.Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices=1,
            strategy=StaysOnDevice(device),
            precision=loop.precision,
            max_epochs=1,
            max_steps=steps,
            callbacks=[*options.pop("callbacks", []), *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(loop.module, loop.batches)


def timed(loop: Loop, plan: Plan, warmup: int) -> list[float]:
    """Milliseconds a step, of each block of one fit."""
    times = BlockTimes(1 if plan.tiny else warmup, plan.block_steps)
    train(loop, times.warmup + plan.blocks * plan.block_steps, times)
    return times.step_ms()


def build(case: Case, fixed: bool, n: Scale) -> Loop:
    """The loop with its fault or without, with the same weights as the other."""
    torch.manual_seed(0)
    return case.build(fixed, n)


def measure(case: Case, plan: Plan, trace: Path) -> dict[str, Any]:
    """Time both loops in turns, then record the faulty one.

    Args:
        case: a pair, or a well-tuned loop, which is timed alone.
        plan: how long.
        trace: where the trace goes.

    Returns:
        Medians over all blocks (``before_ms``, ``after_ms``: null for a well-tuned loop), each round's
        median, and what the case says of itself.
    """
    n = Scale(plan.tiny)
    loops = {"before": build(case, False, n)}
    if case.rule:
        loops["after"] = build(case, True, n)
    rounds: dict[str, list[list[float]]] = {name: [] for name in loops}
    for i in range(plan.rounds):
        for name in loops:
            # The first fit compiles and tunes besides.
            rounds[name].append(timed(loops[name], plan, case.warmup + (0 if i else 10)))
    loops.pop("after", None)  # the trace's peak memory is that of one loop
    record(loops["before"], plan, trace)
    found: dict[str, Any] = {
        f"{name}_ms": round(statistics.median(ms for one in blocks for ms in one), 4)
        for name, blocks in rounds.items()
    }
    found.setdefault("after_ms", None)
    found["rounds_ms"] = {
        name: [round(statistics.median(one), 4) for one in blocks] for name, blocks in rounds.items()
    }
    return {**found, "precision": loops["before"].precision, "plan": asdict(plan), **case.about()}


def record(loop: Loop, plan: Plan, trace: Path) -> None:
    """Train once more under the advisor and keep its trace."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    warmup = 3 if plan.tiny else _BEFORE_WINDOW
    with tempfile.TemporaryDirectory() as folder:
        advisor = TrainingAdvisor(folder, warmup_steps=warmup, capture_steps=_CAPTURED, report=False)
        train(loop, warmup + _CAPTURED + 2 + _AFTER, advisor)
        if advisor.trace_path is None:
            raise RuntimeError("the advisor recorded nothing")
        trace.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(advisor.trace_path, trace)


def has_gpu() -> bool:
    """Whether there is a GPU, asked without starting its driver, which would not outlive a fork."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.is_available()


def machine() -> dict[str, Any]:
    """What it ran on, and the versions that matter."""
    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "lightning": pl.__version__,
        },
    }


def in_child(name: str, plan: Plan, folder: Path, answer: Any) -> None:
    """Measure one case, as the target of a process: sends ``(machine, outcome)``, or an error's text."""
    quiet()
    try:
        outcome = measure(all_cases()[name], plan, folder / f"{name}.json.gz")
        answer.send((machine(), outcome))
    except Exception as error:  # noqa: BLE001  the driver reports it and goes on with the next case
        import traceback

        traceback.print_exc()
        answer.send(f"{type(error).__name__}: {error}")


def quiet() -> None:
    """Without Lightning's remarks: the faults are there on purpose."""
    for name in ("pytorch_lightning", "lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(pytorch_lightning|lightning|torch)\.")
