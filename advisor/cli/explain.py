"""`advisor explain`: what a rule looks for, why it costs time and where it is silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from advisor.advice.rule import Rule


@click.command(short_help="List and explain the rules that advice comes from.")
@click.argument("rule", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(rule: str | None, as_json: bool) -> None:
    """List the rules that advice comes from; with RULE, explain it: why it costs time, how it is seen.

    The change as code depends on the loop: it is in the report, with each finding.

    RULE is an id as a report gives it, or a family of them.

    \b
    advisor explain
    advisor explain attention.explicit
    advisor explain input
    """
    import json

    from advisor.advice.rule import all_rules, find_rule

    rules = all_rules()
    chosen = [one for one in rules if one.family == rule] if rule else rules
    if rule and not chosen:
        chosen = [find_rule(rule)]
    if as_json:
        click.echo(json.dumps([_as_dict(one) for one in chosen], indent=2))
    elif rule:
        click.echo("\n\n".join(map(_page, chosen)))
    else:
        width = max(len(one.id) for one in chosen)
        for one in chosen:
            click.echo(f"{one.id:<{width}}  {one.failure}")


def _as_dict(rule: Rule) -> dict[str, Any]:
    return {
        "rule": rule.id,
        "title": rule.title,
        "failure": rule.failure,
        "explanation": rule.explanation,
        "source": rule.source or None,
    }


def _page(rule: Rule) -> str:
    parts = [f"{rule.id}: {rule.failure}", rule.explanation]
    if rule.source:
        parts.append("\n".join(["Sources:", *(f"- {line}" for line in rule.source.splitlines())]))
    parts.append(f"Where it finds nothing, the report says: {rule.title}.")
    return "\n\n".join(parts)
