"""Where the tests of swap run: on the CPU, with the bundled kernels under Triton's interpreter."""

import os

import pytest
import torch

# Before anything imports a kernel: Triton decides at the decorator whether it interprets.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        yield
