"""Where the kernels' tests run: on CPU tensors under Triton's interpreter, or on a GPU.

pytest tests/kernels -m 'not gpu'                   without a GPU, or TRITON_INTERPRET=1 beside one
pytest tests/kernels -m gpu                         everything, on a GPU
pytest tests/kernels/test_norm.py -m 'gpu and quick'  the short subset of a family
"""

import os
import sys
from pathlib import Path

import pytest
import torch

# Before anything imports a kernel: Triton decides at the decorator whether it interprets.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import advisor.kernels
except ImportError:
    # A checkout that is not installed: let the package find the folder that an installation maps into it.
    import advisor

    advisor.__path__.append(str(Path(__file__).resolve().parents[2]))
    sys.modules.pop("advisor.kernels", None)

from advisor.kernels._tf32 import without_tf32
from advisor.kernels._triton import INTERPRETED, available
from advisor.kernels.verify.judge import poisoned_memory


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
def device(request) -> torch.device:
    """Each test runs under the interpreter and, marked gpu, on the GPU: one of the two in one process."""
    if not available():
        pytest.skip("Triton is not installed")
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("kernels are compiled in this process: set TRITON_INTERPRET=1")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("no GPU, or TRITON_INTERPRET is set")
    torch.manual_seed(0)
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def poisoned():
    """Memory that `torch.empty` hands out holds NaN (the largest value, for integers) within the test."""
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True)
def _no_tf32():
    """fp32 references are compared at fp32."""
    with without_tf32():
        yield


@pytest.fixture(autouse=True)
def _products_and_sums_are_fused(monkeypatch):
    """As on every GPU."""
    if INTERPRETED:
        from tests.kernels import hardware

        hardware.fuse(monkeypatch)
