"""How weight-only quantised matrices are made and packed, in plain PyTorch.

A weight W (out, in) becomes integers q and scales s, W = s (q - z):

    int8   one s a row, z = 0, q in -127..127,               s = max|W| / 127
    int4   one s for `group_size` columns of a row:
           symmetric   z = 0, q in -8..7,                    s = max|W| / 7
           asymmetric  q and z in 0..15,                     s = (max(W, 0) - min(W, 0)) / 15

Rounding to the nearest leaves |W - s (q - z)| <= s / 2, but for the rounding of s itself.

Packed, an element is an unsigned u = q (+ 128, + 8 where symmetric). Columns go in blocks of `BLOCK` = 128,
the last one filled up with zero weights. A block of a row is L halfwords of 16 bits: 32 of 4 int4 each, or
64 of 2 int8. Element i of halfword j, its bits from `bits` i on, is column i L + j: the i-th elements of
neighbouring halfwords are neighbouring columns, and those of the two halfwords in a register make a pair of
16-bit operands for the matrix units. Two halfwords make a word, the first of them the lower.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Columns of a packed block.
BLOCK = 128
GROUP_SIZES = (32, 64, 128)


class QuantizedWeight(NamedTuple):
    """A packed weight.

    Attributes:
        packed: (out, blocks * BLOCK * bits / 32) int32.
        scale: (out, 1) for int8; (out, blocks * BLOCK / group size) for int4, 1 beyond the last column.
            In memory a group's scales are neighbours, strides (1, out); with others each product copies them.
        zero: uint8 of scale's shape and strides where int4 is asymmetric, else None.
        bits: 4 or 8.
        in_features: columns before filling up.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    in_features: int

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.packed.shape[0]

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale; None where a row does."""
        return None if self.bits == 8 else blocks_of(self.in_features) * BLOCK // max(self.scale.shape[1], 1)

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales and zero points."""
        parts = [t for t in (self.packed, self.scale, self.zero) if t is not None]
        return sum(t.numel() * t.element_size() for t in parts)


def blocks_of(in_features: int) -> int:
    """Packed blocks of a row."""
    return -(-in_features // BLOCK)


def words_of(in_features: int, bits: int) -> int:
    """Packed words of a row."""
    return blocks_of(in_features) * BLOCK * bits // 32


def _checked(weight: Tensor) -> Tensor:
    """`weight` in fp32.

    Raises:
        ValueError: not a matrix of finite floating-point numbers.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)}, {weight.dtype}: (out, in), floating-point"
        )
    wide = weight.detach().float()
    if not bool(wide.isfinite().all()):
        raise ValueError("the weight has infinite or NaN entries, which no scale can hold")
    return wide


def _scale(extent: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """``extent / levels`` in `dtype`, 1 where all weights are 0; never 0 by underflow."""
    if float(extent.max() if extent.numel() else 0.0) / levels > torch.finfo(dtype).max:
        raise ValueError(f"the weight is too large for scales in {dtype}: give scale_dtype=torch.float32")
    scale = (extent / levels).clamp_min(torch.finfo(dtype).tiny).to(dtype)
    return torch.where(extent == 0, torch.ones_like(scale), scale)


def _by_group(scale: Tensor) -> Tensor:
    """The same (out, groups) with the scales of a group side by side."""
    return scale.t().contiguous().t()


def _filled(matrix: Tensor, value: float) -> Tensor:
    """`matrix` with columns of `value` up to whole blocks."""
    columns = matrix.shape[1]
    return F.pad(matrix, (0, blocks_of(columns) * BLOCK - columns), value=value)


def quantize_int8(weight: Tensor, *, scale_dtype: torch.dtype | None = None) -> QuantizedWeight:
    """Symmetric int8 with one scale a row.

    Args:
        weight: (out, in), any floating-point dtype, finite.
        scale_dtype: of the scales; the weight's unless given (fp32 for float64).

    Raises:
        ValueError: not such a weight, or one too large for `scale_dtype`.
    """
    wide = _checked(weight)
    dtype = scale_dtype or _scale_dtype(weight)
    extent = wide.abs().amax(1, keepdim=True) if wide.shape[1] else wide.new_zeros(wide.shape[0], 1)
    scale = _scale(extent, 127, dtype)
    q = torch.round(wide / scale.float()).clamp(-127, 127)
    return QuantizedWeight(_pack(_filled(q, 0) + 128, 8), scale, None, 8, weight.shape[1])


def quantize_int4(
    weight: Tensor, *, group_size: int = 128, symmetric: bool = True, scale_dtype: torch.dtype | None = None
) -> QuantizedWeight:
    """Group-wise int4.

    Args:
        weight: (out, in), any floating-point dtype, finite.
        group_size: neighbouring columns of a row that share a scale: 32, 64 or 128.
        symmetric: without zero points.
        scale_dtype: of the scales; the weight's unless given (fp32 for float64).

    Raises:
        ValueError: not such a weight or group size, or a weight too large for `scale_dtype`.
    """
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size {group_size}: one of {', '.join(map(str, GROUP_SIZES))}")
    wide = _filled(_checked(weight), 0.0)
    dtype = scale_dtype or _scale_dtype(weight)
    groups = wide.view(wide.shape[0], wide.shape[1] // group_size, group_size)
    if symmetric:
        scale = _scale(groups.abs().amax(2), 7, dtype)
        u = torch.round(groups / scale.float()[..., None]).clamp(-8, 7) + 8
        zero = None
    else:
        low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
        scale = _scale(high - low, 15, dtype)
        zero = torch.round(-low / scale.float()).clamp(0, 15)
        u = (torch.round(groups / scale.float()[..., None]) + zero[..., None]).clamp(0, 15)
        zero = zero.to(torch.uint8)
    zero = None if zero is None else _by_group(zero)
    return QuantizedWeight(_pack(u.reshape_as(wide), 4), _by_group(scale), zero, 4, weight.shape[1])


def dequantize(weight: QuantizedWeight, dtype: torch.dtype | None = None) -> Tensor:
    """The matrix that a packed weight stands for.

    Args:
        weight: from `quantize_int4` or `quantize_int8`.
        dtype: of the result, the scales' unless given; computed in it or fp32, whichever is finer.

    Returns:
        (out, in), contiguous.
    """
    dtype = dtype or weight.scale.dtype
    wide = torch.promote_types(dtype, torch.float32)
    u = _unpack(weight.packed, weight.bits, blocks_of(weight.in_features)).to(wide)
    scale = weight.scale.to(wide)
    if weight.bits == 8:
        matrix = (u - 128) * scale
    else:
        groups = u.view(*scale.shape, weight.group_size or BLOCK)
        zero = 8 if weight.zero is None else weight.zero.to(wide)[..., None]
        matrix = ((groups - zero) * scale[..., None]).reshape_as(u)
    return matrix[:, : weight.in_features].to(dtype).contiguous()


def _scale_dtype(weight: Tensor) -> torch.dtype:
    return torch.float32 if weight.dtype == torch.float64 else weight.dtype


def _pack(u: Tensor, bits: int) -> Tensor:
    """Words of unsigned elements (out, blocks * BLOCK) given as floating-point numbers."""
    rows, columns = u.shape
    elements = 16 // bits
    planes = u.view(rows, columns // BLOCK, elements, BLOCK // elements).to(torch.int32)
    shifts = bits * torch.arange(elements, device=u.device, dtype=torch.int32)
    half = (planes << shifts[:, None]).sum(2, dtype=torch.int32).reshape(rows, columns * bits // 32, 2)
    return (half[..., 0] | (half[..., 1] << 16)).contiguous()


def _unpack(packed: Tensor, bits: int, blocks: int) -> Tensor:
    """The inverse of `_pack`, as int32."""
    rows, elements = packed.shape[0], 16 // bits
    half = torch.stack((packed, packed >> 16), 2).view(rows, blocks, 1, BLOCK // elements)
    shifts = bits * torch.arange(elements, device=packed.device, dtype=torch.int32)
    return ((half >> shifts[:, None]) & (2**bits - 1)).reshape(rows, blocks * BLOCK)
