"""Tiny Lightning runs on the CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch


class Rows(torch.utils.data.Dataset):
    """``length`` rows of eight numbers and a class."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.randint(2, (), generator=generator)


class Stream(torch.utils.data.IterableDataset):
    """The same without a length."""

    def __init__(self, length: int) -> None:
        self.rows = Rows(length)

    def __iter__(self) -> Any:
        return (self.rows[i] for i in range(len(self.rows)))


def rows(batches: int, *, stream: bool = False) -> Any:
    """A loader of ``batches`` batches of two rows."""
    return torch.utils.data.DataLoader((Stream if stream else Rows)(2 * batches), batch_size=2)


def make_model(light: Any, **methods: Any) -> Any:
    """A LightningModule with dropout that keeps its losses; ``methods`` override its own."""

    class Tiny(light.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 2)
            )
            self.losses: list[float] = []

        def _loss(self, batch: Any) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self._loss(batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self._loss(batch)

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    for name, method in methods.items():
        setattr(Tiny, name, method)
    light.seed_everything(7, verbose=False)
    return Tiny()


def make_trainer(light: Any, folder: Path, *callbacks: Any, **options: Any) -> Any:
    """A quiet CPU Trainer."""
    options = {"max_epochs": 1, "logger": False, "accelerator": "cpu", "devices": 1, **options}
    return light.Trainer(
        callbacks=list(callbacks),
        default_root_dir=str(folder),
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **options,
    )


def read_trace(path: Path | None) -> dict[str, Any]:
    """The whole trace file."""
    assert path is not None
    with gzip.open(path) as file:
        return json.load(file)


def names(trace: dict[str, Any], prefix: str) -> list[str]:
    """Names of the events that start with ``prefix``, in order of time."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["name"].startswith(prefix)]
    return [e["name"] for e in sorted(events, key=lambda e: e["ts"])]
