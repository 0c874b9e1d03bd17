"""Whether fp32 products may be rounded to TF32: PyTorch's flag, under its newer and its older name.

From PyTorch 2.9 on the flag is ``fp32_precision``, and reading ``allow_tf32`` raises where the two disagree.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def tf32_allowed() -> bool:
    """Whether matrix products of fp32 tensors may run in TF32."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


@contextmanager
def without_tf32() -> Iterator[None]:
    """Matrix products of fp32 tensors in fp32; the flag is put back as it was."""
    matmul = torch.backends.cuda.matmul
    name, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, name)
    setattr(matmul, name, exact)
    try:
        yield
    finally:
        setattr(matmul, name, before)
