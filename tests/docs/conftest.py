"""Loads the scripts that write pages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="session")
def load_generator() -> Callable[[str], ModuleType]:
    """Gives ``docs/NAME.py`` as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # What they share lies beside them, where Python finds it when they are run.
        sys.path.insert(0, str(DOCS))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(DOCS))
        return module

    return load
