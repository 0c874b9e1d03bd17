"""A cache of keys and values in blocks, with the tables that say whose they are.

Which block belongs to whom is known to the host alone, which hands the device what a step needs in one
direction: nothing is ever read back, so no step waits for the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class CacheFullError(RuntimeError):
    """There are not enough free blocks; nothing was changed."""


class PagedKVCache:
    """Keys and values of many sequences, all layers alike, in blocks that are handed out on demand.

        cache = PagedKVCache(layers=32, blocks=4096, block_size=16, heads=8, head_dim=128)
        sequence = cache.allocate()
        step = cache.append([sequence], tokens=1)            # once a step
        step.write(layer, key, value)                        # in each layer
        out = step.attend(layer, query)
        cache.free(sequence)

    Args:
        layers: of the model; they share tables.
        blocks: in each layer.
        block_size: tokens a block.
        heads: of keys, in each layer.
        head_dim: elements of one head.
        dtype: of keys and values; not one of 8 bits, whose scales depend on the layer.
        device: where they lie.

    Attributes:
        k: (layers, blocks, block_size, heads, head_dim), not initialised.
        v: the same.
    """

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_size: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> None:
        shape = (layers, blocks, block_size, heads, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.block_size = block_size
        self._free = list(range(blocks - 1, -1, -1))
        self._unused_rows: list[int] = []
        self._alive: set[int] = set()
        # Of each row, that is sequence, its blocks in order and its tokens: on the host.
        self._table = torch.zeros((0, 1), dtype=torch.int32, device="cpu")
        self._lengths = torch.zeros(0, dtype=torch.int32, device="cpu")

    @property
    def free_blocks(self) -> int:
        """Blocks that belong to no sequence."""
        return len(self._free)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        self._check([sequence])
        return int(self._lengths[sequence])

    def allocate(self) -> int:
        """A new sequence without tokens, which takes no block yet; its number."""
        if not self._unused_rows:
            rows = self._table.shape[0]
            self._table = _grown(self._table, rows + max(rows, 8), self._table.shape[1])
            self._lengths = torch.cat([self._lengths, self._lengths.new_zeros(len(self._table) - rows)])
            self._unused_rows = list(range(len(self._table) - 1, rows - 1, -1))
        sequence = self._unused_rows.pop()
        self._lengths[sequence] = 0
        self._alive.add(sequence)
        return sequence

    def free(self, sequence: int) -> None:
        """Give a sequence's blocks back. What the stream holds already still finds them whole."""
        self._check([sequence])
        held = -(-int(self._lengths[sequence]) // self.block_size)
        self._free += reversed(self._table[sequence, :held].tolist())
        self._alive.remove(sequence)
        self._unused_rows.append(sequence)

    def append(self, sequences: Sequence[int], tokens: int | Sequence[int] = 1) -> "PagedBatch":
        """Make room for new tokens and hand out what the kernels need to know of these sequences.

        Args:
            sequences: numbers that `allocate` gave, each once; the order is that of the batch.
            tokens: new ones of each sequence, or one number for all of them.

        Raises:
            CacheFullError: the new tokens need more blocks than are free.
            KeyError: a sequence is not allocated.
            ValueError: a sequence stands there twice, or numbers of tokens do not fit.
        """
        rows = torch.tensor(list(sequences), dtype=torch.int64, device="cpu")
        each = [tokens] * len(rows) if isinstance(tokens, int) else list(tokens)
        counts = torch.tensor(each, dtype=torch.int64, device="cpu")
        self._check(sequences)
        if len(set(sequences)) < len(rows) or counts.shape != rows.shape or bool((counts < 0).any()):
            raise ValueError(
                f"sequences {list(sequences)} with {tokens} tokens: each once, with a number >= 0"
            )
        before = self._lengths[rows].long()
        after = before + counts
        held, needed = (-(-n // self.block_size) for n in (before, after))
        self._take(rows, held, needed)
        self._lengths[rows] = after.int()

        # Each new token's row and place within its sequence, those of a sequence side by side.
        place = torch.arange(int(counts.sum()), device="cpu") + (after - counts.cumsum(0)).repeat_interleave(
            counts
        )
        block = self._table[rows.repeat_interleave(counts), place // self.block_size].long()
        width = max(int(needed.max()) if len(rows) else 0, 1)
        return PagedBatch(
            self,
            self._sent(self._table[rows, :width]),
            self._sent(after.int()),
            self._sent(block * self.block_size + place % self.block_size),
            int(after.max()) if len(rows) else 0,
            int(after.sum()),
        )

    def _take(self, rows: Tensor, held: Tensor, needed: Tensor) -> None:
        missing = int((needed - held).sum())
        if missing > len(self._free):
            raise CacheFullError(
                f"{missing} more blocks of {self.block_size} tokens are needed, {len(self._free)} are free: "
                "free sequences, or make the cache with more blocks"
            )
        if missing and int(needed.max()) > self._table.shape[1]:
            width = max(int(needed.max()), 2 * self._table.shape[1])
            self._table = _grown(self._table, self._table.shape[0], width)
        for row, first, end in zip(rows.tolist(), held.tolist(), needed.tolist(), strict=True):
            for at in range(first, end):
                self._table[row, at] = self._free.pop()

    def _check(self, sequences: Sequence[int]) -> None:
        unknown = sorted(set(sequences) - self._alive)
        if unknown:
            raise KeyError(
                f"no sequence {', '.join(map(str, unknown))} in this cache: allocate() gives numbers"
            )

    def _sent(self, values: Tensor) -> Tensor:
        """`values` on the cache's device; the copy is queued, and its source kept until it is done."""
        if self.k.device.type != "cuda":
            return values.clone()
        return values.contiguous().pin_memory().to(self.k.device, non_blocking=True)


def _grown(table: Tensor, rows: int, cols: int) -> Tensor:
    larger = table.new_zeros((rows, cols))
    larger[: table.shape[0], : table.shape[1]] = table
    return larger


@dataclass(frozen=True)
class PagedBatch:
    """Some sequences of a cache, as they are after new tokens: arguments for the kernels.

    Attributes:
        cache: whose they are.
        block_table: (batch, most blocks) int32.
        context_lens: (batch,) int32, the new tokens included.
        slots: (new tokens,) int64, those of a sequence side by side.
        max_context_len: of these sequences.
        total_context_len: the sum of their lengths.
    """

    cache: PagedKVCache
    block_table: Tensor
    context_lens: Tensor
    slots: Tensor
    max_context_len: int
    total_context_len: int

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put the new tokens' keys and values, (..., heads, head_dim), into a layer of the cache."""
        # The module with these functions hands out this one's classes.
        from .paged_attention import write_to_cache

        slots = self.slots.reshape(key.shape[:-2])
        write_to_cache(key, value, self.cache.k[layer], self.cache.v[layer], slots)

    def attend(self, layer: int, q: Tensor, **options: Any) -> Any:
        """`paged_attention` of q over a layer of the cache.

        Args:
            layer: whose keys and values.
            q: (batch, heads, head_dim), or (batch, queries, heads, head_dim) for each sequence's last tokens.
            options: of `paged_attention`.
        """
        from .paged_attention import paged_attention

        return paged_attention(
            q, self.cache.k[layer], self.cache.v[layer], self.block_table, self.context_lens,
            max_context_len=self.max_context_len, total_context_len=self.total_context_len, **options,
        )  # fmt: skip
