"""Builders of operator calls for tests of cost formulas."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.roofline.costs import Launch, OpCall, Tensor, parse_inputs

BF16, FP16, FP32, INT64 = "c10::BFloat16", "c10::Half", "float", "long int"
#: An H200's sizes.
H200 = {"l2_bytes": 60 * 2**20, "sm_count": 132}


def dense_strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides


def call(
    name: str,
    *args: object,
    kernels: Sequence[str | Launch] = (),
    settings: dict | None = None,
    parameters=(),
):
    """A call as a trace would record it.

    Args:
        args: ``(shape, dtype)`` or ``(shape, dtype, strides)`` for a tensor, a list of shapes for a list,
            text for a scalar's recorded value, None for an absent argument.
    """
    dims, types, strides, concrete = [], [], [], []
    for arg in args:
        if isinstance(arg, tuple):
            shape, dtype, *rest = arg
            row = (list(shape), dtype, list(rest[0]) if rest else dense_strides(shape), "")
        elif isinstance(arg, list):
            row = (arg, "TensorList", [dense_strides(shape) for shape in arg], "")
        else:
            row = ([], "Scalar" if arg is not None else "", [], arg or "")
        for column, value in zip((dims, types, strides, concrete), row, strict=True):
            column.append(value)
    inputs, values = parse_inputs(dims, types, strides, concrete)
    launches = tuple(kernel if isinstance(kernel, Launch) else Launch(kernel) for kernel in kernels)
    return OpCall(name, inputs, values, launches, tuple(parameters), settings or {})


def parameter(*shape: int, dtype: str = "fp32") -> Tensor:
    return Tensor(shape, dtype)
