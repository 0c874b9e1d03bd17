"""Tiles of matrix kernels, by their names, and the arithmetic that whole tiles add at the edges.

A tiled kernel computes whole tiles: where a size is no multiple of the tile's, the rest is multiplied by
zeros. Checked against the tensor-core counters of an H200 for cuBLAS, CUTLASS and cuDNN kernels.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

from advisor.roofline.costs import roles

#: Depth of a tile whose name does not tell it: CUTLASS' defaults for 16-bit tensor cores and for plain fp32.
_DEPTH, _DEPTH_PLAIN = 32, 8
_NAMES = (
    re.compile(r"nvjet_(?:sm\d+_)?[a-z]+_(\d+)x(\d+)_(\d+)x"),
    re.compile(r"tilesize(\d+)x(\d+)x(\d+)"),
    re.compile(r"_MT(\d+)x(\d+)x(\d+)"),
    re.compile(
        r"(?:gemm|fprop|dgrad|wgrad)[a-z0-9_]*?_(\d+)x(\d+)(?:(?:x|_(?:[a-z0-9_]*?stages_)?)(\d+)(?:x\d+)?)?(?=_|\b)"
    ),
)


@dataclass(frozen=True)
class Tile:
    """What one thread block computes at a time.

    Attributes:
        first, second: sides of the output's tile in the library's order. For a product that is the order of
            BLAS, whose matrices are column-major: `first` runs along our columns (n), `second` along our
            rows (m). For a convolution `first` runs along the positions (of a weight gradient: along the
            output channels).
        depth: steps of the inner size taken at once.
    """

    first: int
    second: int
    depth: int

    def product_flops(self, m: int, n: int, k: int) -> float:
        """FLOPs of ``m x k`` by ``k x n`` in whole tiles."""
        return 2.0 * whole(m, self.second) * whole(n, self.first) * whole(k, self.depth)


def whole(size: int, side: int) -> int:
    """The least multiple of `side` that holds `size`."""
    return math.ceil(size / side) * side


@functools.lru_cache(maxsize=8192)
def tile(kernel: str) -> Tile | None:
    """The tile in a matrix kernel's name, or None."""
    for pattern in _NAMES:
        found = pattern.search(kernel)
        if found and min(int(side) for side in found.groups("1")) > 0:
            depth = found[3] or (_DEPTH_PLAIN if "sgemm" in kernel else _DEPTH)
            return Tile(int(found[1]), int(found[2]), int(depth))
    return None


def product_padding(kernel: str, m: int, n: int, k: int) -> float:
    """FLOPs that a matrix kernel spends beyond ``2 m n k``; 0 where its name has no tile."""
    sides = tile(kernel)
    return sides.product_flops(m, n, k) - 2.0 * m * n * k if sides else 0.0


def convolution_flops(kernel: str, positions: int, out_channels: int, in_channels: int, taps: int) -> float:
    """FLOPs that an implicit matrix product executes for an ungrouped convolution; 0 if no name tells.

    Forward: (positions x channels x taps) by (channels x taps x filters). The data gradient swaps the two
    kinds of channels; the weight gradient sums over positions. Channels are padded at each tap, since a tile
    steps through the channels of one tap at a time; few channels (a network's first layer) are packed across
    taps by kernels of their own, and then only sides are padded.

    Args:
        kernel: name.
        positions: batch times output positions (for a data gradient: of its result, the input).
        out_channels, in_channels: of the convolution.
        taps: elements of the kernel's window.
    """
    sides, role = tile(kernel), roles.role(kernel)
    if sides is None or role not in ("convolution", "dgrad", "wgrad"):
        return 0.0
    if role == "wgrad":
        indexed = "xmma" in kernel and "indexed" in kernel
        columns = (
            taps * whole(in_channels, sides.second) if indexed else whole(taps * in_channels, sides.second)
        )
        return 2.0 * whole(out_channels, sides.first) * columns * whole(positions, sides.depth)
    columns, inner = (in_channels, out_channels) if role == "dgrad" else (out_channels, in_channels)
    depth = taps * (whole(inner, sides.depth) if inner >= sides.depth // 2 else inner)
    return 2.0 * whole(positions, sides.first) * whole(columns, sides.second) * depth
