"""Weight-only products on each way, against the dequantised weight; the gradient for x too."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import quant_matmul as family
from .probe import Probe

_OUT, _COLUMNS = 37, 300


def _weight(bits: int, device: torch.device) -> family.QuantizedWeight:
    matrix = torch.randn(_OUT, _COLUMNS, generator=torch.Generator().manual_seed(1)).to(device)
    return family.quantize_int8(matrix) if bits == 8 else family.quantize_int4(matrix, group_size=32)


def probes() -> Iterator[Probe]:
    """One row for the plain units, more for the matrix units, and more again for PyTorch's product."""
    for bits, rows in ((4, 1), (4, 19), (8, 1), (8, 300)):

        def inputs(device: torch.device, dtype: torch.dtype, rows: int = rows) -> Mapping[str, Any]:
            return {"x": torch.randn(rows, _COLUMNS, device=device).to(dtype)}

        def ours(x: Tensor, bits: int = bits) -> Tensor:
            return family.weight_only_linear(x, _weight(bits, x.device))

        def reference(x: Tensor, bits: int = bits) -> Tensor:
            return family.weight_only_linear_reference(x, _weight(bits, x.device))

        yield Probe(
            f"int{bits}_linear", f"{rows}x{_OUT}x{_COLUMNS}", ours, reference, inputs,
            dtypes=("fp16", "bf16") if rows > 1 else ("fp32", "fp16", "bf16"),
        )  # fmt: skip
