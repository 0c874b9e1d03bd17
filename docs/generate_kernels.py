"""Write the tables of speed in ``docs/kernels.md`` from ``benchmarks/results/kernels_*.json``.

Run ``python docs/generate_kernels.py`` after a benchmark, or after a change to a kernel, whose times are then
of an earlier version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_grids
from advisor.kernels._family import families, fingerprint
from advisor.kernels.bench.run import clocks

TARGET = Path(__file__).with_name("kernels.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
START = "<!-- tables of speed: made by docs/generate_kernels.py -->"
STOP = "<!-- end of the tables of speed -->"


def render(results: Path = RESULTS) -> str:
    """All tables, a section a family, then those over grids; what was not timed is named at the end."""
    found = {name: best(name, results) for name in families()}
    grids = {name: read(name, results, "_grid") for name in families()}
    sections = [section(name, result) for name, result in found.items() if result]
    if over_sizes := [grid_section(name, grid) for name, grid in grids.items() if grid]:
        sections += [kernel_grids.INTRODUCTION, *over_sizes]
    lacking = [name for name in found if not found[name] and not grids[name]]
    if lacking:
        sections.append(f"Not timed yet: {', '.join(lacking)}.")
    return "\n\n".join(sections)


def best(family: str, results: Path) -> dict[str, Any] | None:
    """The family's results to show: of the kernels as they are before older ones, all sizes before few."""
    there = (read(family, results, "_quick" * quick) for quick in (False, True))
    return max(filter(None, there), key=lambda result: result["current"], default=None)


def read(family: str, results: Path, which: str) -> dict[str, Any] | None:
    """A file of the family's results, if it is there.

    Args:
        family: its name.
        results: the folder.
        which: ``_quick``, ``_grid`` or nothing, as at the end of the file's name.
    """
    path = results / f"kernels_{family}{which}.json"
    if not path.is_file():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    current = stored.get("sources") == fingerprint(family)
    return {**stored, "file": path.name, "quick": which == "_quick", "current": current}


def grid_section(family: str, result: dict[str, Any]) -> str:
    """A family over its grid of sizes."""
    table = "\n".join(kernel_grids.lines(result))
    return f"#### {family}\n\n{_provenance(result)}\n\n{table}".rstrip()


def section(family: str, result: dict[str, Any]) -> str:
    """A family's heading, where and when it was timed, and its rows."""
    rows = result["rows"]
    others = list(dict.fromkeys(name for row in rows for name in row["ms"] if name != "ours"))
    head = ["kernel", "shape", "direction", "floor", "ours", *others, "against the best"]
    lines = [f"### {family}", "", _provenance(result), "", _line(head), _line(["---"] * len(head))]
    lines += [_line(_cells(clock, others)) for row in rows for clock in clocks(row)]
    return "\n".join(lines)


def _provenance(result: dict[str, Any]) -> str:
    date = result["date"].split("T")[0]
    text = (
        f"{result['device']}, {date}, torch {result['torch']}, Triton {result['triton']}; "
        f"{result['copy_bytes_per_s'] / 1e12:.2f} TB/s copied, "
        f"{result['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s in bf16; stored in "
        f"`benchmarks/results/{result['file']}`."
    )
    if result["quick"]:
        text += " Quick: one or two sizes a kernel."
    if not result["current"]:
        text += " **Of an earlier version of these kernels**: their sources have changed since."
    return text


def _cells(row: dict[str, Any], others: list[str]) -> Iterator[str]:
    ms = row["ms"]
    yield from (row["kernel"], row["shape"], row["direction"], f"{row['floor_ms']:.3f}")
    if "ours" in ms:
        yield f"**{ms['ours']:.3f}** ({row['share_of_roof']['ours']:.0%})"
    else:
        yield f"failed: {row['failures'].get('ours', 'unknown')}"
    yield from (f"{ms[name]:.3f}" if name in ms else "–" for name in others)
    rivals = [ms[name] for name in others if name in ms and not name.startswith("ours")]
    yield f"{min(rivals) / ms['ours']:.2f}×" if rivals and "ours" in ms else "–"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def inserted(page: str, tables: str) -> str:
    """The page with `tables` between its marks.

    Raises:
        ValueError: the page lacks a mark.
    """
    before, start, rest = page.partition(START)
    _, stop, after = rest.partition(STOP)
    if not start or not stop:
        raise ValueError(f"the page lacks {START!r} or {STOP!r} after it")
    return f"{before}{START}\n\n{tables}\n\n{STOP}{after}"


if __name__ == "__main__":
    TARGET.write_text(inserted(TARGET.read_text(encoding="utf-8"), render()), encoding="utf-8")
