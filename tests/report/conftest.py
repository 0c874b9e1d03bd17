"""The hand-made reports as fixtures, and a browser that is started once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from advisor.report import model
from tests.report import reports

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture
def rich_report() -> model.Report:
    return reports.rich()


@pytest.fixture
def unknown_report() -> model.Report:
    return reports.unknown()


@pytest.fixture
def hostile_report() -> model.Report:
    return reports.hostile()


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Chromium without a window; the test is skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next((found for name in names if (found := shutil.which(name))), None)
    if executable is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=list(_FLAGS))
        yield chromium
        chromium.close()
