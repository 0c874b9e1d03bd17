"""PyTorch's TF32 flag is read by whichever name it was set, and put back as it was."""

from __future__ import annotations

import pytest
import torch
from advisor.kernels._tf32 import tf32_allowed, without_tf32

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def flag_as_it_was():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("precision", "allowed"), [("highest", False), ("high", True), ("medium", True)])
def test_the_older_name_is_read_and_put_back(precision: str, allowed: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    assert tf32_allowed() is allowed
    with without_tf32():
        assert tf32_allowed() is False
    assert tf32_allowed() is allowed
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="this PyTorch has one flag for TF32")
def test_the_newer_name_is_read_where_the_older_one_raises() -> None:
    before = MATMUL.fp32_precision
    try:
        torch.set_float32_matmul_precision("high")
        MATMUL.fp32_precision = "ieee"
        assert tf32_allowed() is False
    finally:
        MATMUL.fp32_precision = before
