"""What formulas ask of a call's arguments. Whatever is missing or contradicts itself raises `Unknown`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from advisor.roofline.costs.model import DTYPE_BYTES, OpCall, Tensor

#: Device memory is fetched in sectors of this size (NVIDIA since Volta; AMD's are 32 or 64).
SECTOR_BYTES = 32
#: No device holds a petabyte: a larger tensor is a broken record.
_MAX_BYTES = 1e15
#: ``c10::ScalarType`` as an integer, the way traces record a ``dtype`` argument.
_SCALAR_TYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "fp16", 6: "fp32", 7: "fp64",
    8: "complex32", 9: "complex64", 10: "complex128", 11: "bool", 15: "bf16", 23: "fp8", 24: "fp8",
    25: "fp8", 26: "fp8",
}  # fmt: skip
_FLOAT_ORDER = ("fp4", "fp8", "fp16", "bf16", "fp32", "fp64")
_INT_ORDER = ("uint8", "int4", "int8", "int16", "int32", "int64")


class Unknown(ValueError):
    """The trace does not say enough to cost this call."""


def checked(arg: object) -> Tensor:
    """The argument as a usable tensor: known dtype, positive sizes, strides that match.

    Raises:
        Unknown: if it is none of that.
    """
    if not isinstance(arg, Tensor) or arg.dtype not in DTYPE_BYTES:
        raise Unknown("not a tensor of known dtype")
    if min(arg.shape, default=1) <= 0 or arg.numel * DTYPE_BYTES[arg.dtype] > _MAX_BYTES:
        raise Unknown("empty or impossible shape")
    if arg.strides is not None and (len(arg.strides) != len(arg.shape) or any(s < 0 for s in arg.strides)):
        raise Unknown("strides contradict the shape")
    return arg


def tensor(call: OpCall, index: int) -> Tensor:
    """Positional argument `index`, which must be a tensor."""
    if not 0 <= index < len(call.inputs):
        raise Unknown("argument not recorded")
    return checked(call.inputs[index])


def optional(call: OpCall, index: int) -> Tensor | None:
    """Positional argument `index` if it is a usable tensor, else None."""
    try:
        return tensor(call, index)
    except Unknown:
        return None


def tensors(call: OpCall, *indices: int) -> list[Tensor]:
    """Those of the positional arguments that are usable tensors."""
    found = (optional(call, index) for index in indices)
    return [arg for arg in found if arg is not None]


def text(call: OpCall, index: int) -> str:
    """The recorded value of a scalar argument, ``""`` if there is none."""
    return call.concrete[index].strip() if index < len(call.concrete) else ""


def flag(call: OpCall, index: int) -> bool:
    """A recorded boolean argument."""
    value = text(call, index).lower()
    if value not in ("true", "false", "0", "1"):
        raise Unknown("boolean not recorded")
    return value in ("true", "1")


def integer(call: OpCall, index: int) -> int:
    """A recorded integer argument."""
    try:
        return int(text(call, index))
    except ValueError:
        raise Unknown("integer not recorded") from None


def integers(call: OpCall, index: int) -> tuple[int, ...]:
    """A recorded list of integers, such as ``[1, 1]``."""
    value = text(call, index)
    if not (value.startswith("[") and value.endswith("]")):
        raise Unknown("list not recorded")
    try:
        return tuple(int(item) for item in value[1:-1].split(",") if item.strip())
    except ValueError:
        raise Unknown("list not recorded") from None


def booleans(call: OpCall, index: int) -> tuple[bool, ...]:
    """A recorded list of booleans, such as ``[True, False]``."""
    items = text(call, index).strip("[]").lower().split(",")
    values = tuple(item.strip() in ("true", "1") for item in items if item.strip())
    if not values:
        raise Unknown("list not recorded")
    return values


def named_dtype(call: OpCall, index: int) -> str | None:
    """A recorded ``dtype`` argument; None if there is none."""
    value = text(call, index)
    if not value.isdigit():
        return None
    if int(value) not in _SCALAR_TYPES:
        raise Unknown("dtype not recorded")
    return _SCALAR_TYPES[int(value)]


def itemsize(dtype: str) -> float:
    """Bytes of one element."""
    if dtype not in DTYPE_BYTES:
        raise Unknown("dtype not recorded")
    return DTYPE_BYTES[dtype]


def size_bytes(shape: Sequence[int], dtype: str) -> float:
    """Bytes of a dense tensor."""
    return math.prod(shape) * itemsize(dtype)


def footprint(arg: Tensor) -> float:
    """Bytes that a kernel has to fetch to see every element of `arg` once.

    An expanded dimension (stride 0) is fetched once, overlapping windows no more than their storage;
    elements set apart by a stride cost whole sectors.
    """
    width = itemsize(arg.dtype)
    if arg.strides is None:
        return arg.numel * width
    dims = [
        (size, stride) for size, stride in zip(arg.shape, arg.strides, strict=True) if size > 1 and stride > 0
    ]
    if not dims:
        return width
    extent = 1 + sum((size - 1) * stride for size, stride in dims)
    distinct = min(math.prod(size for size, _ in dims), extent)
    spread = min(min(stride for _, stride in dims), max(1.0, SECTOR_BYTES / width))
    return min(extent, distinct * spread) * width


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that tensors of these shapes broadcast to.

    Raises:
        Unknown: if they do not.
    """
    rank = max((len(shape) for shape in shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for offset, size in enumerate(reversed(shape), start=1):
            if size != 1 and result[-offset] not in (1, size):
                raise Unknown("shapes do not broadcast")
            result[-offset] = max(result[-offset], size)
    return tuple(result)


def promote(*args: Tensor) -> str:
    """The dtype that arithmetic on these tensors gives, by PyTorch's rules.

    A 0-d tensor decides only if its category (float over integer over bool) is higher than the others'.
    Traces show a Python number as a 0-d double: beside an integer tensor it gives the default dtype, fp32.
    """
    dtypes = [arg.dtype for arg in args]
    if any(dtype.startswith("complex") for dtype in dtypes):
        return max((dtype for dtype in dtypes if dtype.startswith("complex")), key=itemsize)
    for order in (_FLOAT_ORDER, _INT_ORDER, ("bool",)):
        of_category = [arg for arg in args if arg.dtype in order]
        if of_category:
            wide = [arg.dtype for arg in of_category if arg.shape] or [arg.dtype for arg in of_category]
            if set(wide) == {"fp16", "bf16"}:
                return "fp32"
            has_shape = any(arg.shape for arg in of_category)
            if order is _FLOAT_ORDER and not has_shape and any(arg.shape for arg in args):
                return "fp32"
            return max(wide, key=order.index)
    raise Unknown("dtype not recorded")


def is_float(dtype: str) -> bool:
    """Whether arithmetic on this dtype counts as floating-point operations."""
    return dtype in _FLOAT_ORDER or dtype.startswith("complex")


def vector_pipe(dtype: str, flops: float = 1.0) -> str:
    """The plain arithmetic pipe that PyTorch's kernels use: 16-bit types are computed in fp32."""
    if flops <= 0 or not is_float(dtype):
        return "none"
    return "vector_fp64" if dtype in ("fp64", "complex128") else "vector_fp32"
