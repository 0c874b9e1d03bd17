"""The clock and its cases, under the name that a case file in this folder may import them by."""

from advisor.kernels.bench.timing import (
    Case,
    Result,
    Variant,
    backward,
    compiled,
    copy_bandwidth,
    forward,
    forward_backward,
    matmul_rate,
    measure,
)

__all__ = [
    "Case",
    "Result",
    "Variant",
    "backward",
    "compiled",
    "copy_bandwidth",
    "forward",
    "forward_backward",
    "matmul_rate",
    "measure",
]
