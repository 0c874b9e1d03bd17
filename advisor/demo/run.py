"""Train one of the demo's loops under the advisor."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from advisor.capture.callback import TrainingAdvisor
from advisor.demo.convnet import ConvNet, ConvNetSize, images
from advisor.demo.flavour import pl
from advisor.demo.gpt import GPT, GPTSize, tokens

#: Bytes of device memory that the larger sizes need at most, with room to spare.
LARGE_BYTES = 10 * 2**30


@dataclass(frozen=True)
class Loop:
    """A model, its data and the Trainer's precision."""

    model: Any
    data: Iterable[Any]
    precision: str


def gpt(steps: int, large: bool) -> Loop:
    """The GPT: of GPT-2's width and vocabulary where `large`, else small enough for two CPU cores."""
    if large:
        size = GPTSize(vocabulary=50257, context=512, width=768, layers=6, heads=12, batch=8)
    else:
        size = GPTSize(vocabulary=2000, context=128, width=192, layers=3, heads=6, batch=4)
    return Loop(GPT(size), tokens(size, steps), _half() if large else "32-true")


def convnet(steps: int, large: bool) -> Loop:
    """The ConvNet: images of 128 pixels where `large`, else of 32."""
    if large:
        size = ConvNetSize(pixels=128, width=64, blocks=3, batch=64)
    else:
        size = ConvNetSize(pixels=32, width=32, blocks=2, batch=16)
    return Loop(ConvNet(size), images(size, steps), _half() if large else "32-true")


LOOPS: dict[str, Callable[[int, bool], Loop]] = {"gpt": gpt, "convnet": convnet}


def has_large_gpu() -> bool:
    """Whether there is a GPU that the larger sizes fit on."""
    return torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory >= LARGE_BYTES


def train(name: str, folder: Path, steps: int | None = None) -> Path | None:
    """Train one loop under the advisor.

    Args:
        name: a key of `LOOPS`.
        folder: where the capture and its report go.
        steps: training steps; None takes enough for the warm-up to end on its own.

    Returns:
        Path of the report's page, its JSON beside it; None if the advisor gave up, having said why.
    """
    large = has_large_gpu()
    steps = steps or (120 if large else 40)
    pl.seed_everything(0, verbose=False)
    with _quiet():
        loop = LOOPS[name](steps, large)
        advisor = TrainingAdvisor(dirpath=folder)
        trainer = pl.Trainer(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=1,
            precision=loop.precision,
            max_steps=steps,
            callbacks=[advisor],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(loop.model, loop.data)
    return advisor.report_path


def _half() -> str:
    return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's remarks: the loop's flaws are there on purpose."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(pytorch_lightning|lightning)\.")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
