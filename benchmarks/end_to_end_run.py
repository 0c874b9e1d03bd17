"""One training run of `benchmarks/end_to_end.py`, and what is measured of it."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def train(
    task: Any,
    variant: str,
    steps: int,
    folder: Path,
    seed: int,
    *,
    timed: int,
    lightning_options: dict[str, Any],
    warmup_steps: int = 20,
    to_spare: int = 0,
) -> dict[str, Any]:
    """One run of a Trainer.

    The steps that are timed are the last ones, or, with steps `to_spare`, those after swap has decided.

    Returns:
        ``step_ms`` of the `timed` steps, ``host_ms`` from each one's start to its end on the host,
        ``garbage_ms`` of Python's collector, ``peak_bytes`` in half of them and ``largest_peak_bytes`` in
        all, of which ``graph_bytes`` are what CUDA graphs hold and no allocation tells of;
        ``reserved_bytes`` in the end; ``losses``, ``seconds``, ``swaps``, ``stages`` of the trying.
    """
    import torch
    from end_to_end_models import lightning, module

    from advisor import TrainingAdvisor
    from advisor.capture.clock import StepClock
    from advisor.capture.swapping import steps as device
    from advisor.capture.swapping.run import State

    light = lightning()
    kind = "cuda" if torch.cuda.is_available() else "cpu"

    class Watch(light.Callback):
        def __init__(self) -> None:
            self.clock, self.losses = StepClock(kind), []
            self.peaks: list[int] = []
            self.graph_bytes: int | None = None
            self.reserved_bytes: int | None = None
            self.host_ms: list[float] = []
            self.garbage = Garbage()
            self.begin = steps - timed - 1

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.start_s = time.perf_counter()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.losses.append(outputs["loss"].detach())
            if batch_idx == self.begin and to_spare and advisor._swapping.state is not State.DONE:
                self.begin += 1
            if batch_idx > self.begin:
                self.host_ms.append((time.perf_counter() - self.start_s) * 1e3)
                self.peaks += [peak for peak in [device.peak_bytes(kind)] if peak is not None]
            if batch_idx == self.begin:
                self.garbage.ms = 0.0
                reserved_bytes(kind, anew=True)
            if batch_idx >= self.begin:  # before that, swap counts
                device.reset_peak(kind)
            if batch_idx >= self.begin:
                self.clock.mark()
            if batch_idx == self.begin + timed:
                device.synchronize(kind)
                self.graph_bytes, self.reserved_bytes = graph_bytes(kind), reserved_bytes(kind)
                trainer.should_stop = True

    light.seed_everything(seed, verbose=False)
    batches = made(task.batch, min(steps, 16), kind == "cuda")
    loop: Any = module(task, task.sdpa if variant == "sdpa" else None)
    if variant.endswith("compile"):
        loop = torch.compile(loop)
    watch, callbacks = Watch(), []
    if variant.startswith("swap"):
        advisor = TrainingAdvisor(folder, stages=("validate",), warmup_steps=warmup_steps, swap="auto")
        callbacks.append(advisor)
    trainer = light.Trainer(
        max_steps=steps + to_spare, max_epochs=1, callbacks=[*callbacks, watch], accelerator="auto",
        devices=1, default_root_dir=str(folder), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **lightning_options,
    )  # fmt: skip
    start_s = time.monotonic()
    with environment(variant), Stages() as stages, watch.garbage:
        trainer.fit(loop, Repeated(batches, steps + to_spare))
    held = watch.graph_bytes or 0
    found: dict[str, Any] = {
        "step_ms": watch.clock.distances_ms(),
        "host_ms": watch.host_ms,
        "garbage_ms": watch.garbage.ms,
        "peak_bytes": round(statistics.median(watch.peaks)) + held if watch.peaks else None,
        "largest_peak_bytes": max(watch.peaks) + held if watch.peaks else None,
        "graph_bytes": watch.graph_bytes,
        "reserved_bytes": watch.reserved_bytes,
        "losses": [float(loss) for loss in watch.losses],
        "seconds": round(time.monotonic() - start_s, 1),
    }
    told = next(folder.rglob("swaps.json"), None)
    if told is not None:
        found["swaps"] = json.loads(told.read_text())
        found["stages"] = stages.found
    return found


@functools.cache
def made(batch: Callable[[Any], tuple[Any, ...]], count: int, pinned: bool) -> list[tuple[Any, ...]]:
    """So many batches, the same for each variant."""
    import torch

    generator = torch.Generator().manual_seed(1)
    batches = [batch(generator) for _ in range(count)]
    return [tuple(t.pin_memory() for t in one) for one in batches] if pinned else batches


def reserved_bytes(kind: str, anew: bool = False) -> int | None:
    """What the process has of the device's memory, cached blocks included; `anew`: let go of those first."""
    if kind != "cuda":
        return None
    import torch

    if anew:
        torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())


def graph_bytes(kind: str) -> int | None:
    """Of the device's memory, what pools of CUDA graphs hold beside tensors that count as allocated.

    What the graphs compute in between lies there, and no allocation tells of it. None without a GPU.
    """
    if kind != "cuda":
        return None
    import torch

    return pooled(torch.cuda.memory_snapshot())


def pooled(segments: list[dict[str, Any]]) -> int:
    """The same of the allocator's segments."""
    of_graphs = [one for one in segments if tuple(one.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(one["total_size"] - one["allocated_size"] for one in of_graphs)


@contextlib.contextmanager
def environment(variant: str) -> Iterator[None]:
    """What a variant sets in the environment."""
    if variant != "swap_unreplayed":
        yield
        return
    from advisor.capture.swapping.engine import REPLAY

    os.environ[REPLAY] = "0"
    try:
        yield
    finally:
        del os.environ[REPLAY]


class Stages(logging.Handler):
    """What trying the sites took, in seconds, as swap logs it for debugging."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[dict[str, Any]] = []
        self._log = logging.getLogger("advisor.swap")

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "swap"):
            told = record.swap.items()
            self.found.append({k: round(v, 3) if isinstance(v, float) else v for k, v in told})

    def __enter__(self) -> Stages:
        self._level = self._log.level
        self._log.setLevel(logging.DEBUG)
        self._log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        self._log.setLevel(self._level)


class Garbage:
    """Time that Python's collector takes, within."""

    ms = 0.0

    def _tell(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._start_s = time.perf_counter()
        else:
            self.ms += (time.perf_counter() - self._start_s) * 1e3

    def __enter__(self) -> Garbage:
        gc.callbacks.append(self._tell)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._tell)


class Repeated:
    """A loader that hands out a few batches again and again."""

    def __init__(self, batches: list[Any], length: int) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return (self.batches[i % len(self.batches)] for i in range(self.length))
