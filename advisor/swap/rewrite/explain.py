"""What was found in a step and what was not, for a reader."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from .backend import Rewriter
from .facts import Facts, Refusal
from .match import Found, find


def explain(gm: GraphModule, inputs: Sequence[object] = ()) -> str:
    """A table of a graph's sites and near misses.

    Args:
        gm: as Dynamo hands it over.
        inputs: what stands for its placeholders, as far as known.
    """
    facts = Facts(gm, inputs)
    found = find(facts)
    return _table([(f, "found") for f in found], facts.refusals)


def table(rewriter: Rewriter) -> str:
    """The same of all graphs that a rewriter has been given, with what was decided."""
    rows = []
    for graph in rewriter.graphs:
        chosen = {f: c.name for _, f, c in graph.chosen()}
        pending = {f for _, f in graph.pending()}
        for level in graph.levels:
            for found in level.found:
                state = chosen.get(found) or ("to be decided" if found in pending else "left")
                rows.append((found, state))
    return _table(rows, rewriter.refusals)


def _table(found: Sequence[tuple[Found, str]], refusals: Sequence[Refusal]) -> str:
    rows = [(f.match.pattern, f.where, f"{f.match.what}: {state}") for f, state in found]
    rows += [(r.pattern, r.where, f"not taken: {r.why}") for r in refusals]
    if not rows:
        return "nothing found"
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)
