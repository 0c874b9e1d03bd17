"""The examples in the documentation run, and give what they say."""

from __future__ import annotations

import doctest
import gzip
import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.tiny_trace import tiny_trace

DOCS = Path(__file__).resolve().parents[1] / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "needs"), [("python.md", "pandas"), ("hta.md", "hta")])
def test_the_examples_of_a_page_run_as_they_stand(page, needs, tmp_path, monkeypatch):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    # GIVEN the trace that the page speaks of, in the current folder
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(json.dumps(tiny_trace()).encode()))
    monkeypatch.chdir(tmp_path)
    text = "\n".join(_BLOCK.findall((DOCS / page).read_text(encoding="utf-8")))
    example = doctest.DocTestParser().get_doctest(text, {}, page, str(DOCS / page), 0)
    said: list[str] = []

    # WHEN its blocks run one after the other
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=said.append)

    # THEN there were some, and each gave what the page shows
    assert results.attempted >= 4
    assert not results.failed, "".join(said)
