"""What a cost formula sees (an operator call) and what it gives back (a cost)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

#: Bytes an element takes, by the dtype names used throughout. Sub-byte types are fractions.
DTYPE_BYTES: dict[str, float] = {
    "fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 0.5,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "int4": 0.5,
    "complex128": 16, "complex64": 8, "complex32": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor argument as the trace recorded it.

    Attributes:
        shape: sizes, in elements; ``()`` for a 0-d tensor.
        dtype: a key of `DTYPE_BYTES`, or ``"unknown"``.
        strides: in elements, or None where the trace has none.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Elements of the logical shape, an expanded dimension counted in full."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> float | None:
        """Bytes an element takes; None if the dtype is unknown."""
        return DTYPE_BYTES.get(self.dtype)


#: A scalar or a list of scalars is None here; its value, where recorded, is in `OpCall.concrete`.
Arg: TypeAlias = Tensor | tuple[Tensor, ...] | None


@dataclass(frozen=True, slots=True)
class Launch:
    """One thing the call put on the device.

    Attributes:
        name: the kernel's (or copy's) name in the trace.
        grid_blocks: thread blocks launched, or None.
        bytes: bytes a copy or memset moves, as the trace states it, or None.
    """

    name: str
    grid_blocks: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class OpCall:
    """An operator call and everything it launched.

    Attributes:
        name: as in the trace, e.g. ``aten::mm``.
        inputs: one entry per positional argument; empty where shapes were not recorded.
        concrete: the arguments' values as text (``"[1, 1]"``, ``"True"``, ``""``), or empty.
        launches: device launches of this call in time order.
        parameter_shapes: shapes and dtypes of the model's parameters, for optimizers, whose tensor
            lists are recorded empty: from the capture's context block, or else the inputs of the
            trace's ``torch::autograd::AccumulateGrad`` ops (any whole number of steps of them).
        settings: what changes a cost besides the arguments: ``allow_tf32_matmul`` and
            ``allow_tf32_cudnn`` (bool) from the capture; ``l2_bytes`` and ``sm_count`` (int) of the
            device, without which no re-read is modelled.
        following: what the next operator on this thread takes first, likely this one's result; given only
            for convolutions whose values (stride, padding) were not recorded.
        partner: arguments of the other half of the same node of the autograd graph, the forward call of a
            backward one or the reverse; given only where the formula's registration names it.
    """

    name: str
    inputs: tuple[Arg, ...] = ()
    concrete: tuple[str, ...] = ()
    launches: tuple[Launch, ...] = ()
    parameter_shapes: tuple[Tensor, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict, hash=False, compare=False)
    following: Tensor | None = None
    partner: tuple[Arg, ...] = ()


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one launch.

    Attributes:
        flops: floating-point operations that the device executes; a multiply-add is two.
        bytes_read: bytes read from device memory: each distinct element once, plus `bytes_reread`.
        bytes_written: compulsory bytes written.
        pipe: the unit that does the arithmetic: ``tensor_{bf16,fp16,tf32,fp8,int8,fp4,fp64}`` for matrix
            units (NVIDIA tensor cores, AMD matrix cores), ``vector_{fp32,fp16,bf16,fp64}`` for plain
            arithmetic units, ``none`` where nothing is computed.
        bytes_reread: the part of `bytes_read` that is not compulsory: elements which this kernel
            fetches again because its working set outgrows the cache. A better kernel saves them.
        flops_padding: the part of `flops` that no result needs: the rest of the tiles at the edges of a
            matrix product, and what a mask throws away of the blocks on its border.
    """

    flops: float
    bytes_read: float
    bytes_written: float
    pipe: str = "vector_fp32"
    bytes_reread: float = 0.0
    flops_padding: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity in FLOP/byte; None when no byte is moved."""
        return self.flops / self.bytes if self.bytes > 0 else None
