"""What the HTML page shows, as plain values: the template and the script only lay it out."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

from advisor.report import format as fmt
from advisor.report import metrics
from advisor.report.breakdown import family_colours
from advisor.report.metrics import FLAGS
from advisor.report.model import KernelGroup, Loss, Quality, Report
from advisor.report.names import short_name

#: Rows in the page before any script runs.
STATIC_ROWS = 50
#: Rows in the page altogether; a page with more would outgrow a megabyte.
MAX_ROWS = 1500
#: Characters that full kernel names may take in the page, shared among the distinct names.
_NAME_BUDGET = 250_000
#: Entries of the context block in the page, and of one mapping in it that are told one by one.
_ENVIRONMENT_ROWS = 300
_LEVELS = ("error", "warning", "info")


@dataclass(frozen=True)
class Column:
    """A column of the kernel table: `kind` is ``text`` or ``number``; `title` explains the heading."""

    label: str
    kind: str
    title: str


COLUMNS = (
    Column("Kernel", "text", "Short name; the full one is in the tooltip and in the opened row"),
    Column("Op", "text", "Operator that launched it"),
    Column("Module", "text", "Module it ran for, layer numbers as *"),
    Column("Phase", "text", "Part of the training step"),
    Column("Calls", "number", "Launches per step"),
    Column("Time, ms", "number", "Device time per step"),
    Column("Share", "number", "Of all device time"),
    Column("FLOP", "number", "Floating-point operations executed per step"),
    Column("Bytes", "number", "Bytes read and written per step"),
    Column("FLOP/byte", "number", "Arithmetic intensity"),
    Column("Bound", "text", "What limits it: memory, compute, communication, copy"),
    Column("Efficiency", "number", "Time of the useful work at the roof, over the time taken"),
    Column("Flags", "text", "What else is remarkable; each flag says so on its own"),
)


@dataclass(frozen=True)
class Row:
    """A kernel group as the table shows it.

    Attributes:
        values: what each column sorts by; None sorts last either way.
        texts: what each column shows.
        details: what the opened row adds, as (label, text).
    """

    name: str
    family: str
    values: list[str | float | None]
    texts: list[str]
    details: list[tuple[str, str]]
    colour: int


def rows(report: Report) -> list[Row]:
    """The kernel groups, at most `MAX_ROWS`, in the report's order."""
    shown = report.kernels[:MAX_ROWS]
    distinct = len({group.name for group in shown}) or 1
    name_width = max(160, min(4000, _NAME_BUDGET // distinct))
    colours = family_colours(report)
    return [_row(group, name_width, colours[group.family]) for group in shown]


def _row(group: KernelGroup, name_width: int, colour: int) -> Row:
    moved = metrics.total_bytes(group)
    op, module = fmt.one_line(group.op or ""), fmt.one_line(group.module or "")
    flags = ", ".join(group.flags)
    short = short_name(group.name, 36)
    return Row(
        name=fmt.shorten(fmt.one_line(group.name), name_width),
        family=fmt.shorten(group.family, 40),
        values=[
            short,
            op or None,
            module or None,
            group.phase,
            _finite(group.calls_per_step),
            _finite(group.time_ms_per_step),
            _finite(group.time_fraction),
            _finite(group.flops),
            _finite(moved),
            _finite(group.intensity),
            group.bound,
            _finite(group.efficiency),
            flags or None,
        ],
        texts=[
            short,
            fmt.shorten(op, 80) or fmt.MISSING,
            fmt.shorten(module, 80) or fmt.MISSING,
            fmt.shorten(group.phase, 40),
            fmt.count(group.calls_per_step),
            fmt.milliseconds(group.time_ms_per_step),
            fmt.percent(group.time_fraction),
            fmt.number_with_prefix(group.flops),
            fmt.nbytes(moved),
            fmt.number(group.intensity),
            fmt.shorten(group.bound, 40),
            fmt.percent(group.efficiency),
            fmt.shorten(flags, 80),
        ],
        details=[
            ("Achieved", fmt.flops_per_s(metrics.flops_per_s(group))),
            ("Bandwidth", fmt.bytes_per_s(metrics.bytes_per_s(group))),
            ("Read", fmt.nbytes(group.bytes_read)),
            ("of it, read again", fmt.nbytes(group.bytes_reread)),
            ("Written", fmt.nbytes(group.bytes_written)),
            ("FLOP on padding", fmt.number_with_prefix(group.flops_padding)),
            ("Pipe", fmt.pipe(group.pipe)),
        ],
        colour=colour,
    )


def payload(table: list[Row]) -> dict[str, Any]:
    """The table for the script: rows of ``[name, family, colour, values, texts, details]``, names apart."""
    names = {name: place for place, name in enumerate(dict.fromkeys(row.name for row in table))}
    return {
        "columns": [{"label": column.label, "kind": column.kind} for column in COLUMNS],
        "flags": FLAGS,
        "details": [label for label, _ in table[0].details] if table else [],
        "names": list(names),
        "rows": [
            [
                names[row.name],
                row.family,
                row.colour,
                [_compact(value) for value in row.values],
                row.texts,
                [text for _, text in row.details],
            ]
            for row in table
        ],
    }


def script_json(value: Any) -> str:
    """JSON that can stand inside a ``<script>`` element: ASCII, and without ``<``, ``>`` and ``&``."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def environment(report: Report) -> list[tuple[str, str]]:
    """The context block as (dotted key, text); long lists and mappings by their length."""
    rows = list(itertools.islice(_flatten("", report.environment), _ENVIRONMENT_ROWS + 1))
    if len(rows) > _ENVIRONMENT_ROWS:
        rows[-1] = ("…", "further entries are in the JSON report")
    return rows


def _flatten(prefix: str, value: Any) -> Any:
    if isinstance(value, dict) and (0 < len(value) <= _ENVIRONMENT_ROWS or (value and not prefix)):
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), item)
        return
    if isinstance(value, (dict, list)) and len(value) > 12:
        text = f"{len(value)} entries"
    elif isinstance(value, list):
        text = ", ".join(map(_scalar, value)) or "none"
    else:
        text = _scalar(value)
    yield prefix, fmt.shorten(text, 300)


def _scalar(value: Any) -> str:
    if value is None or value == {}:
        return fmt.MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def losses(report: Report) -> list[tuple[str, Loss]]:
    """What could not be read, by file; without what a remark on data quality says already."""
    told = {remark.code for remark in report.data_quality}
    files = report.trace.files or [report.trace]
    return [(file.path, loss) for file in files for loss in file.losses if f"read.{loss.kind}" not in told]


def quality_by_level(report: Report) -> list[Quality]:
    """Data-quality remarks, the worst first, otherwise in the report's order."""
    rank = {level: place for place, level in enumerate(_LEVELS)}
    return sorted(report.data_quality, key=lambda remark: rank.get(remark.level, len(rank)))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _compact(value: str | float | None) -> str | float | None:
    """Numbers with the digits that sorting needs and no more."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
