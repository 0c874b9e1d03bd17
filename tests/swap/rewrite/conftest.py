"""Each test traces for itself: what Dynamo remembers of code would make numbers symbols in the next one."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _nothing_traced():
    torch._dynamo.reset()
