"""The lines that make a change permanent can be run as far as they name what they import."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import advisor

_IMPORT = re.compile(r"from (advisor\.kernels[\w.]*) import (\w+)\b(?!\{)")


def _told() -> list[tuple[str, str, str]]:
    """File, module and name of each import of a kernel that stands in a string."""
    found = []
    for path in sorted(Path(advisor.__file__).parent.rglob("*.py")):
        if "kernels" in path.parts[-2:-1]:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [(path.name, *match) for match in _IMPORT.findall(node.value)]
    return found


@pytest.mark.parametrize(("file", "module", "name"), sorted(set(_told())))
def test_what_is_to_be_imported_can_be_called(file, module, name):
    assert callable(getattr(importlib.import_module(module), name)), f"{file}: {module}.{name}"


def test_such_lines_are_found():
    assert {"attention", "CrossEntropyLoss", "bias_activation"} <= {name for _, _, name in _told()}
