"""The page on the rules says what the rules say."""

from __future__ import annotations

import re

import pytest

from advisor.advice.rule import all_rules


@pytest.fixture(scope="module")
def generator(load_generator):
    return load_generator("generate_rules")


def test_the_page_is_the_one_that_the_rules_give(generator):
    stored = generator.TARGET.read_text(encoding="utf-8")
    assert stored == generator.render(), "run: python docs/generate_rules.py"


def test_every_rule_has_a_heading_and_a_link_to_it(generator):
    page = generator.render()
    ids = [rule.id for rule in all_rules()]
    assert re.findall(r"^### `(.+)`$", page, re.MULTILINE) == ids
    assert re.findall(r"^- \[`(.+)`\]\(#(.+)\): ", page, re.MULTILINE) == [
        (id, id.replace(".", "")) for id in ids
    ]


def test_each_source_has_a_line_of_its_own(generator):
    page = generator.render()
    for rule in all_rules():
        for line in rule.source.splitlines():
            assert f"\n- {line}\n" in page
