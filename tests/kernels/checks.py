"""The judge that the package itself uses (`advisor.kernels.verify.judge`), and what only tests need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from advisor.kernels.verify.judge import assert_as_accurate, assert_bit_equal, check, run

__all__ = ["assert_as_accurate", "assert_bit_equal", "cases", "check", "run", "skip_unless_runnable"]


def cases(quick: Sequence[Any], full: Sequence[Any] = ()) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: those in `quick` form the short GPU subset."""
    return [pytest.param(value, marks=[pytest.mark.quick]) for value in quick] + list(full)


def skip_unless_runnable(device: torch.device, dtype: torch.dtype) -> None:
    """The interpreter's bfloat16 arithmetic is wrong and it has no float8; nor have older GPUs."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("bfloat16 is tested on the GPU")
    if dtype == torch.float8_e4m3fn and device.type == "cpu":
        pytest.skip("the interpreter has no float8_e4m3fn")
    if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("no float8 on this GPU")
