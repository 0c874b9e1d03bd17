"""A process group of one process."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch

#: Groups outlive their tests: Gloo's waits, with Python's lock held, for a thread that may want that lock to
#: drop the last reduction.
_HELD: list[Any] = []


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A group of one process, which waits for nobody: neither files nor addresses are needed."""
    store = torch.distributed.HashStore()
    seconds = datetime.timedelta(seconds=30)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=seconds)
    _HELD.append(torch.distributed.group.WORLD)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
