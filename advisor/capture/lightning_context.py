"""What the Lightning Trainer knows about a run: its share of the context block, its folder, its profiler."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from advisor.capture.context import known, loader_context

_LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloaders",
    "test": "test_dataloaders",
    "predict": "predict_dataloaders",
}


def trainer_context(trainer: Any, stage: str) -> dict[str, Any]:
    """Precision, strategy, world size, loader and package of a Trainer of either package."""
    package = type(trainer).__module__.partition(".")[0]
    return {
        "stage": stage,
        "versions": {
            "lightning": known(lambda: str(sys.modules[package].__version__)),
            "lightning_package": package,
        },
        "precision": known(lambda: str(trainer.precision)),
        "strategy": known(lambda: type(trainer.strategy).__name__),
        "world_size": known(lambda: int(trainer.world_size)),
        "num_nodes": known(lambda: int(trainer.num_nodes)),
        "gradient_clip_val": known(lambda: trainer.gradient_clip_val),
        "automatic_optimization": known(lambda: bool(trainer.lightning_module.automatic_optimization)),
        "loader": known(lambda: loader_context(getattr(trainer, _LOADERS[stage]))),
    }


def results_folder(trainer: Any, dirpath: str | None) -> Path:
    """Where the results go. Reading the Trainer's log directory is a broadcast: call it on every rank."""
    log_dir = trainer.log_dir
    if dirpath is not None:
        return Path(dirpath)
    for folder in (log_dir, trainer.default_root_dir):
        if folder and "://" not in str(folder):  # a trace is written to local disk
            return Path(folder) / "advisor"
    return Path("advisor_logs")


def foreign_profiler(trainer: Any) -> str | None:
    """Another torch profiler that this run uses or holds, even one that is not recording yet."""
    if any(base.__name__ == "PyTorchProfiler" for base in type(trainer.profiler).__mro__):
        return "the Trainer runs with PyTorchProfiler, and two profilers at once spoil each other's traces"
    for owner in (*trainer.callbacks, trainer.lightning_module):
        for value in vars(owner).values():
            if isinstance(value, torch.profiler.profile):
                return f"{type(owner).__name__} holds a torch.profiler of its own"
    return None
