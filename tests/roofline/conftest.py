"""Fixtures for the roofline's tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_table_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINING_ADVISOR_DEVICES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
