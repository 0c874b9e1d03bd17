"""Write ``docs/rules.md`` from the rules' own words.

Run ``python docs/generate_rules.py`` after a change to ``advisor/advice/rules/``.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from advisor.advice.rule import Rule, all_rules

TARGET = Path(__file__).with_name("rules.md")
_HEAD = """\
# The rules

What advice comes from. `advisor explain RULE` shows the same. How a saving is told: [advice.md](advice.md).
This page is made from `advisor/advice/rules/` by `docs/generate_rules.py`.
"""


def render() -> str:
    """The whole page."""
    rules = all_rules()
    listed = [f"- [`{rule.id}`](#{_anchor(rule.id)}): {rule.failure}" for rule in rules]
    families = itertools.groupby(rules, key=lambda rule: rule.family)
    return "\n".join([_HEAD, *listed, "", *(_family(name, list(rules)) for name, rules in families)])


def _anchor(id: str) -> str:
    """Of a heading, as Markdown's usual renderers make it."""
    return id.replace(".", "")


def _family(name: str, rules: list[Rule]) -> str:
    return "\n".join([f"## {name}", "", *map(_rule, rules)])


def _rule(rule: Rule) -> str:
    lines = [
        f"### `{rule.id}`",
        "",
        f"**{rule.failure}.** Where all is well: {rule.title}.",
        "",
        rule.explanation,
        "",
    ]
    sources = [f"- {line}" for line in rule.source.splitlines()]
    return "\n".join([*lines, *(["Sources:", "", *sources, ""] if sources else [])])


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
