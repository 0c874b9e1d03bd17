"""Each rule has a test in which it fires, and one, as close as can be, in which it does not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.advice.rule import all_rules

#: How tests of this folder say that a rule has found something, and that it has nothing to say.
FIRES = re.compile(r"\((?:found|advice|\w+),\) = |\)\[0\]|\.advice\b|likely_ms\(|saving\(")
SILENT = re.compile(r"== \[\]|\.passed|\.not_applicable|not applies\(")


def _tests() -> Iterator[tuple[str, str]]:
    """Name and source of each test of the folder, but for those of all rules at once."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield node.name, ast.get_source_segment(source, node) or ""


TESTS = list(_tests())


def _of(rule: str, says: re.Pattern[str]) -> list[str]:
    quoted = f'"{rule}"'
    return [name for name, source in TESTS if quoted in source and says.search(source)]


@pytest.mark.parametrize("rule", [one.id for one in all_rules()])
def test_rule_has_a_test_in_which_it_fires_and_one_in_which_it_is_silent(rule):
    fires, silent = _of(rule, FIRES), _of(rule, SILENT)

    assert fires, f"no test of this folder lets {rule} fire"
    assert silent, f"no test of this folder lets {rule} be silent"
