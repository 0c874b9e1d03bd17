"""The undecoded arguments of many events, packed: a million of them cost little more than their text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from msgspec import Raw


class Arguments(Sequence[Raw]):
    """A read-only sequence of raw JSON values; empty where an event had none.

    Args:
        blocks: texts, each the values of some events one after the other.
        block: int32 (n,), which text each value lies in.
        start: int32 (n,), where in it the value begins.
        end: int32 (n,), where it ends.
    """

    __slots__ = ("_block", "_blocks", "_end", "_start")

    def __init__(self, blocks: list[bytes], block: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        self._blocks, self._block, self._start, self._end = blocks, block, start, end

    @classmethod
    def pack(cls, batches: Iterable[tuple[bytes, np.ndarray]]) -> Arguments:
        """Pack batches of (joined values, int32 lengths)."""
        blocks, block, start, end = [], [], [], []
        for index, (text, lengths) in enumerate(batches):
            stops = np.cumsum(lengths, dtype=np.int32)
            blocks.append(text)
            block.append(np.full(len(lengths), index, np.int32))
            start.append(stops - lengths.astype(np.int32))
            end.append(stops)
        return cls(blocks, *(_joined(column) for column in (block, start, end)))

    def __len__(self) -> int:
        return len(self._block)

    @overload
    def __getitem__(self, index: int) -> Raw: ...
    @overload
    def __getitem__(self, index: slice) -> Arguments: ...
    def __getitem__(self, index: int | slice) -> Raw | Arguments:
        if isinstance(index, slice):
            return self._selected(index)
        return Raw(self._blocks[self._block[index]][self._start[index] : self._end[index]])

    def __iter__(self) -> Iterator[Raw]:
        blocks = self._blocks
        for first in range(0, len(self), 1 << 16):
            some = slice(first, first + (1 << 16))
            places = zip(
                self._block[some].tolist(), self._start[some].tolist(), self._end[some].tolist(), strict=True
            )
            for block, start, end in places:
                yield Raw(blocks[block][start:end])

    def take(self, index: np.ndarray) -> Arguments:
        """The values at these positions, in that order; the texts are shared."""
        return self._selected(index)

    def _selected(self, index: np.ndarray | slice) -> Arguments:
        return Arguments(self._blocks, self._block[index], self._start[index], self._end[index])


def _joined(columns: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(columns) if columns else np.zeros(0, np.int32)
