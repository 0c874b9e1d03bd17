"""A process that may record, and both Lightning packages."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pytorch_lightning")

from advisor.capture import session  # noqa: E402

PACKAGES = ["pytorch_lightning", "lightning.pytorch"]


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch):
    """Each test may record once, as a process may; one thread, so that step times do not fight for cores."""
    monkeypatch.setattr(session, "_spent_pid", None)
    for name in ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "TEARDOWN_CUPTI"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=PACKAGES)
def light(request) -> Any:
    """Each of the two Lightning packages."""
    return pytest.importorskip(request.param)


@pytest.fixture
def pl() -> Any:
    """One Lightning package, for what does not depend on which."""
    return importlib.import_module("pytorch_lightning")


@pytest.fixture
def ours() -> Any:
    """Collects the warnings that the advisor gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def texts() -> list[str]:
            return [str(w.message) for w in caught if w.category.__module__.startswith("advisor.")]

        yield texts
