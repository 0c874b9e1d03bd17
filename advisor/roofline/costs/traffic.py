"""Bytes that a kernel fetches more than once because its working set outgrows the last-level cache.

Everything here needs the device's L2 size (``settings["l2_bytes"]``); without it nothing is re-read.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from advisor.roofline.costs.model import Launch, OpCall
from advisor.roofline.costs.tiles import tile

#: Half of the L2 holds an operand that all blocks share: the other half sits behind the chip's other
#: partition.
_SHARED = 0.5
#: Of the L2, what the data of the blocks that run may fill before it is pushed out (see `missed`): kernels
#: of a few large blocks a multiprocessor, and of many small ones.
_KEPT_OF_LARGE, _KEPT_OF_SMALL = 0.95, 0.8
#: Blocks of 1024 and of 128 threads that a multiprocessor of 2048 holds.
_LARGE_BLOCKS, _SMALL_BLOCKS = 2, 16
#: Of the L2, what the last reads and writes of rows in no order occupy before they are pushed out.
_REMEMBERED = 0.64
#: An H200 fetches two sectors of 32 bytes for a single element.
FETCH_BYTES = 64


def cache_bytes(call: OpCall) -> float | None:
    """The device's L2 size, or None."""
    size = call.settings.get("l2_bytes")
    return float(size) if isinstance(size, (int, float)) and size > 0 else None


def outgrows_cache(call: OpCall, nbytes: float) -> bool:
    """Whether data that all blocks share is pushed out of the L2 before it is visited again."""
    cache = cache_bytes(call)
    return cache is not None and nbytes > _SHARED * cache


def sm_count(call: OpCall) -> int | None:
    """Streaming multiprocessors (compute units) of the device, or None."""
    count = call.settings.get("sm_count")
    return count if isinstance(count, int) and count > 0 else None


def missed(call: OpCall, bytes_per_block: float, blocks: float, small_blocks: bool = False) -> float:
    """The share of its data that a block has to fetch again on a second visit.

    ``1 - (kept l2 / working set)^2``, fitted to an H200's counters: softmax over rows of 201 kB misses 0.68
    and its backward 0.9, over 128 kB 0.2 and 0.7; batch norm over channels of 1.6 MB 1.0; a layer norm of 128
    threads a row misses 0.65 of 20 kB rows, and none of 10 kB.

    Args:
        call: carries the device's sizes.
        bytes_per_block: read and written by a block between two visits of an element.
        blocks: the blocks there are; as many as fit the multiprocessors run at once.
        small_blocks: of 128 threads, else of 1024.
    """
    cache, processors = cache_bytes(call), sm_count(call)
    if cache is None or processors is None:
        return 0.0
    resident, kept = (_SMALL_BLOCKS, _KEPT_OF_SMALL) if small_blocks else (_LARGE_BLOCKS, _KEPT_OF_LARGE)
    working_set = bytes_per_block * min(blocks, resident * processors)
    return max(0.0, 1 - (kept * cache / working_set) ** 2)


def distinct(draws: float, population: float) -> float:
    """How many of a population are seen in so many draws, if each is as likely: values are not recorded."""
    return -population * math.expm1(-draws / population)


def looked_up(call: OpCall, draws: float, rows: float, row_bytes: float) -> tuple[float, float]:
    """Bytes fetched to look up so many rows of a table, all as likely; and those fetched again of them.

    A row is fetched if none of the draws shortly before was of it: with a mean of ``k`` draws a row, and a
    share ``w`` of all traffic (rows read, and written elsewhere) that the cache remembers,
    ``1 - exp(-k w) + k (1 - w) exp(-k w)`` times. The share of the L2 that remembers is fitted to an H200's
    counters for embeddings of 100 and 200 MB (within 2 %).
    """
    once = distinct(draws, rows) * row_bytes
    cache = cache_bytes(call)
    if cache is None:
        return once, 0.0
    remembered = min(1.0, _REMEMBERED * cache / (2 * draws * row_bytes))
    mean = draws / rows
    none_lately = math.exp(-mean * remembered)
    fetched = (1 - none_lately + mean * (1 - remembered) * none_lately) * rows * row_bytes
    return max(once, fetched), max(0.0, fetched - once)


@dataclass(frozen=True)
class Product:
    """Products whose traffic is asked for: `batch` of ``m x k`` by ``k x n``, bytes an element of each."""

    m: int
    n: int
    k: int
    width_a: float
    width_b: float
    width_out: float
    batch: int = 1


@dataclass(frozen=True)
class _Grid:
    """A product in tiles: how many along n and m, and the bytes behind one of each.

    Attributes:
        columns, rows: tiles along n and along m.
        of_column, of_row: bytes of B that a column of tiles needs, and of A that a row of tiles needs.
        of_tile: bytes of a tile's result.
    """

    columns: int
    rows: int
    of_column: float
    of_row: float
    of_tile: float

    @property
    def size_a(self) -> float:
        return self.rows * self.of_row

    @property
    def size_b(self) -> float:
        return self.columns * self.of_column

    @property
    def tiles(self) -> int:
        return self.columns * self.rows


#: Kernels whose blocks stay and take tile after tile, in an order that keeps neighbours together.
_PERSISTENT = re.compile(r"nvjet|warpgroupsize|warpspecialized")
_IDENTITY_SWIZZLE = re.compile(r"cutlass::")


def gemm_reread(call: OpCall, launch: Launch, product: Product) -> float:
    """Bytes that a kernel of tiled matrix products fetches again; 0 if no tile or no cache size is known.

    The blocks that run at once (a wave) share rows of A and columns of B. What the next wave finds in the
    cache depends on the order of the tiles, which differs by library. Derived; within 20 % of the reads that
    an H200 counts for cuBLAS' nvjet, xmma and CUTLASS kernels in fp16, bf16, TF32, fp32, fp64 and complex.
    """
    cache, processors, sides = cache_bytes(call), sm_count(call), tile(launch.name)
    if cache is None or processors is None or sides is None:
        return 0.0
    grid = _Grid(
        math.ceil(product.n / sides.first),
        math.ceil(product.m / sides.second),
        min(product.n, sides.first) * product.k * product.width_b,
        min(product.m, sides.second) * product.k * product.width_a,
        min(product.n, sides.first) * min(product.m, sides.second) * product.width_out,
    )
    room = _SHARED * cache
    splits = split_count(launch, product)
    if _PERSISTENT.search(launch.name):
        return product.batch * _compact_order(grid, processors, room)
    again = (splits - 1) * product.m * product.n * product.width_out if splits > 1 else 0.0
    if _IDENTITY_SWIZZLE.search(launch.name):
        again += _strip_order(grid, processors, room, splits)
    else:
        again += _row_order(grid, processors, room, splits)
    return product.batch * again


def split_count(launch: Launch, product: Product) -> int:
    """Slices of k that a kernel which is not persistent has in its grid: blocks over tiles."""
    sides = tile(launch.name)
    if sides is None or not launch.grid_blocks or _PERSISTENT.search(launch.name):
        return 1
    columns, rows = math.ceil(product.n / sides.first), math.ceil(product.m / sides.second)
    if _IDENTITY_SWIZZLE.search(launch.name):
        width = _strip_width(columns)
        columns = math.ceil(columns / width) * width
    return max(1, launch.grid_blocks // (columns * rows * product.batch))


def _compact_order(grid: _Grid, processors: int, room: float) -> float:
    """Each wave is a patch of the output that needs as many bytes of A as of B; waves go along strips."""
    if grid.tiles <= processors:
        return 0.0
    columns = min(grid.columns, max(1.0, math.sqrt(processors * grid.of_row / grid.of_column)))
    rows = min(grid.rows, max(1.0, processors / columns))
    columns = min(grid.columns, max(1.0, processors / rows))
    strips = grid.rows / rows
    patch = columns * grid.of_column + rows * grid.of_row + processors * grid.of_tile
    strip = grid.size_b + rows * grid.of_row + rows * grid.columns * grid.of_tile
    if strip <= room:
        return 0.0
    if patch <= room:
        return (strips - 1) * grid.size_b
    waves = grid.tiles / (columns * rows)
    fetched = waves * (columns * grid.of_column + rows * grid.of_row)
    return max(0.0, fetched - grid.size_a - grid.size_b)


def _strip_width(columns: int) -> int:
    """Tiles in a strip of CUTLASS' ``GemmIdentityThreadblockSwizzle<8>``."""
    return 8 if columns >= 6 else 4 if columns >= 3 else min(2, columns)


def _strip_order(grid: _Grid, processors: int, room: float, splits: int) -> float:
    """Strips of up to eight columns, each from the first row to the last; slices of k one after another."""
    width = _strip_width(grid.columns)
    strips, rows = grid.columns / width, min(grid.rows, max(1.0, processors / width))
    again = 0.0
    if strips > 1 and (grid.size_a + width * (grid.of_column + grid.rows * grid.of_tile)) / splits > room:
        again += (strips - 1) * grid.size_a
    if width * grid.of_column / splits + rows * grid.of_row / splits + processors * grid.of_tile > room:
        again += (grid.rows / rows - 1) * grid.size_b
    return again


def _row_order(grid: _Grid, processors: int, room: float, splits: int) -> float:
    """All rows of a column of tiles before the next column; the slices of k of a tile run together."""
    columns = min(grid.columns, max(1.0, processors / splits / grid.rows))
    sweep = grid.size_a + columns * (grid.of_column + grid.rows * grid.of_tile)
    return 0.0 if sweep <= room else (grid.columns / columns - 1) * grid.size_a
