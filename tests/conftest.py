"""Fixtures that every test may use, and how property tests search."""

from pathlib import Path

import hypothesis
import pytest

# The same examples each time, however long they take: neither luck nor load decides whether a change passes.
# `pytest --hypothesis-profile=search` looks for new ones.
hypothesis.settings.register_profile("search", deadline=None, max_examples=60)
hypothesis.settings.register_profile(
    "same", parent=hypothesis.settings.get_profile("search"), derandomize=True
)
hypothesis.settings.load_profile("same")

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real traces and counters beside the checkout; the test is skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("no folder ../shared with real traces")
    return SHARED


@pytest.fixture(autouse=True)
def _no_measured_roofs(tmp_path_factory, monkeypatch):
    """Roofs measured on the machine that runs the tests must not change what they see."""
    monkeypatch.setenv("TRAINING_ADVISOR_CACHE", str(tmp_path_factory.getbasetemp() / "no-cache"))
