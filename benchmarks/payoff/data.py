"""Batches: on the device where input plays no part, else from loaders that are slow in a known way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.payoff.case import Scale

_ENDLESS = 1_000_000
Batch = tuple[Tensor, Tensor]


class Resident:
    """The same few batches again and again, wherever they lie."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return _ENDLESS

    def __iter__(self) -> Iterator[Batch]:
        for i in range(_ENDLESS):
            yield self.batches[i % len(self.batches)]


class Stored(Dataset[Batch]):
    """Whole batches from storage that takes `wait_s` for each, in whichever process asks."""

    def __init__(self, batches: Sequence[Batch], wait_s: float) -> None:
        self.batches, self.wait_s = batches, wait_s

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Batch:
        time.sleep(self.wait_s)
        inputs, targets = self.batches[index % len(self.batches)]
        return inputs.clone(), targets.clone()


class Augmented(Dataset[Batch]):
    """Images that cost the CPU some milliseconds each: noise, a shift, a mirror, by the index."""

    def __init__(self, pixels: int, rounds: int) -> None:
        self.pixels, self.rounds = pixels, rounds

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        image = torch.zeros(3, self.pixels, self.pixels)
        for _ in range(self.rounds):
            image += torch.randn(image.shape, generator=generator)
            image = image.roll(int(torch.randint(8, (), generator=generator)), -1).flip(-1)
        return image, torch.randint(10, (), generator=generator)


def loader(data: Dataset[Batch], workers: int, **options: Any) -> DataLoader[Batch]:
    """A loader with workers that live as long as the fit."""
    return DataLoader(data, num_workers=workers, persistent_workers=workers > 0, **options)


def slow_storage(batches: Sequence[Batch], n: Scale, wait_s: float) -> DataLoader[Batch]:
    """One worker that waits for storage, so that the loop has a batch each `wait_s` and no sooner."""
    stored = Stored(batches, n(wait_s, 0.0))
    return loader(stored, n(1, 0), batch_size=None, pin_memory=torch.cuda.is_available())


def token_batch(batch: int, length: int, vocabulary: int) -> Batch:
    """Random tokens and those that follow them, int64 (batch, length)."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def image_batch(batch: int, pixels: int) -> Batch:
    """Noise, float32 (batch, 3, pixels, pixels), and labels of ten classes."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, pixels, pixels, generator=generator)
    return images, torch.randint(10, (batch,), generator=generator)


def feature_batch(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Noise (rows, width), and a direction (width,) that a loss may project on."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(rows, width, generator=generator).to(dtype)
    return features, torch.randn(width, generator=generator).to(dtype)


def resident(batch: Batch, n: Scale) -> Resident:
    """One batch, on the device."""
    inputs, targets = batch
    return Resident([(inputs.to(n.device), targets.to(n.device))])
