"""From the arguments that a trace records for an operator to what formulas read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from advisor.roofline.costs.model import Arg, Tensor

#: PyTorch's spellings of element types (C++ type names in CPU events, ScalarType names elsewhere).
_DTYPES = {
    "double": "fp64", "float64": "fp64", "Double": "fp64",
    "float": "fp32", "float32": "fp32", "Float": "fp32",
    "c10::Half": "fp16", "half": "fp16", "float16": "fp16", "Half": "fp16", "__half": "fp16",
    "c10::BFloat16": "bf16", "bfloat16": "bf16", "BFloat16": "bf16", "__nv_bfloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8", "c10::Float8_e5m2fnuz": "fp8", "c10::Float8_e8m0fnu": "fp8",
    "c10::Float4_e2m1fn_x2": "fp8",  # two fp4 values to a byte: the element is the byte
    "long int": "int64", "long": "int64", "long long": "int64", "int64": "int64", "Long": "int64",
    "int": "int32", "int32": "int32", "Int": "int32", "unsigned int": "int32",
    "unsigned long": "int64", "unsigned long int": "int64",
    "short": "int16", "short int": "int16", "int16": "int16", "unsigned short": "int16",
    "signed char": "int8", "char": "int8", "int8": "int8", "unsigned char": "uint8", "uint8": "uint8",
    "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Float8_e4m3fn": "fp8", "Float8_e5m2": "fp8", "Float8_e4m3fnuz": "fp8", "Float8_e5m2fnuz": "fp8",
    "bool": "bool", "Bool": "bool",
    "c10::complex<double>": "complex128", "c10::complex<float>": "complex64",
    "c10::complex<c10::Half>": "complex32",
    "c10::qint8": "int8", "c10::quint8": "uint8", "c10::qint32": "int32",
}  # fmt: skip
#: What traces write for arguments that are no tensors; PyTorch before 2.0 wrote the tag of the value.
_NOT_A_TENSOR = frozenset({
    "", "Scalar", "ScalarList", "String", "Device", "Generator", "None", "Int", "Double", "Bool",
    "SymInt", "Layout", "GenericList", "GenericDict", "Tuple", "Object", "Stream", "Storage", "Enum",
    "Complex",
})  # fmt: skip
#: PyTorch counts elements in 64 bits.
_MOST_ELEMENTS = (1 << 63) - 1


def parse_dtype(spelling: object) -> str:
    """Our name of an element type, ``"unknown"`` if the spelling is new to us."""
    text = spelling.removeprefix("torch.") if isinstance(spelling, str) else ""
    return _DTYPES.get(text, _DTYPES.get(text.replace("at::", "c10::"), "unknown"))


def parse_inputs(
    dims: Sequence[object] | None,
    types: Sequence[object] | None = None,
    strides: Sequence[object] | None = None,
    concrete: Sequence[object] | None = None,
) -> tuple[tuple[Arg, ...], tuple[str, ...]]:
    """An event's recorded arguments, as `OpCall.inputs` and `OpCall.concrete`.

    Args:
        dims: ``Input Dims``: a list of sizes for each argument, a list of such lists for a tensor list.
        types: ``Input type``, one text for each argument.
        strides: ``Input Strides``, laid out as `dims`.
        concrete: ``Concrete Inputs``, values of the scalar arguments.

    Returns:
        The arguments, None where one is no tensor or malformed, and the scalars' values as text.
    """
    shapes = list(dims) if isinstance(dims, (list, tuple)) else []
    kinds = list(types) if isinstance(types, (list, tuple)) else []
    steps = list(strides) if isinstance(strides, (list, tuple)) else []
    inputs = tuple(
        _parse_argument(
            shape, kinds[index] if index < len(kinds) else None, steps[index] if index < len(steps) else None
        )
        for index, shape in enumerate(shapes)
    )
    values = concrete if isinstance(concrete, (list, tuple)) else ()
    return inputs, tuple(value if isinstance(value, str) else str(value) for value in values)


def _parse_argument(shape: object, kind: object, strides: object) -> Arg:
    if kind == "TensorList" or (
        isinstance(shape, (list, tuple)) and any(isinstance(s, (list, tuple)) for s in shape)
    ):
        items = shape if isinstance(shape, (list, tuple)) else ()
        steps = (
            strides
            if isinstance(strides, (list, tuple)) and len(strides) == len(items)
            else [None] * len(items)
        )
        listed = [_parse_sizes(item) for item in items]
        if any(sizes is None for sizes in listed):
            return None
        return tuple(
            Tensor(sizes, "unknown", _parse_strides(step, sizes))
            for sizes, step in zip(listed, steps, strict=True)
            if sizes is not None
        )
    sizes = _parse_sizes(shape)
    named = isinstance(kind, str)
    if sizes is None or (named and kind in _NOT_A_TENSOR) or (not named and not sizes):
        return None
    return Tensor(sizes, parse_dtype(kind), _parse_strides(strides, sizes))


def _parse_strides(value: object, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """One stride a dimension; None where there are more or fewer."""
    strides = _integers(value)
    return strides if strides is not None and len(strides) == len(sizes) else None


def _parse_sizes(value: object) -> tuple[int, ...] | None:
    sizes = _integers(value)
    if sizes is None or min(sizes, default=0) < 0 or math.prod(sizes) > _MOST_ELEMENTS:
        return None
    return sizes


def _integers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, (list, tuple)):
        return None
    if not all(type(size) is int and abs(size) <= _MOST_ELEMENTS for size in value):
        return None
    return tuple(value)
