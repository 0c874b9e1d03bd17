"""One row a device launch, in time order: what `--launches` writes."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from advisor.errors import MissingExtraError, UsageError
from advisor.report.files import writing
from advisor.roofline.analysis import Analysis
from advisor.roofline.bound import BOUNDS
from advisor.roofline.counters import Counted
from advisor.trace.phases import PHASES

COLUMNS = (
    "ts_ns", "dur_ns", "stream", "name", "op", "op_id", "module", "phase", "step", "flops", "bytes_read",
    "bytes_written", "pipe", "intensity", "bound", "efficiency",
)  # fmt: skip
#: Appended where hardware counters were given.
MEASURED_COLUMNS = (
    "measured_time_ns", "measured_flops", "measured_bytes_read", "measured_bytes_written",
    "measured_dram_pct",
)  # fmt: skip
#: What a column holds, so that one of which nothing is known has its type too; the others are floats.
_KINDS = {
    **dict.fromkeys(("ts_ns", "dur_ns", "stream", "op_id", "step"), "int"),
    **dict.fromkeys(("name", "op", "module", "phase", "pipe", "bound"), "text"),
}


def launch_rows(analysis: Analysis) -> Iterator[tuple[Any, ...]]:
    """Rows of `COLUMNS`; None where something is not known."""
    timeline, rows = analysis.timeline, analysis.timeline.launches
    cost, bounds, number = analysis.costs, analysis.bounds, timeline.steps.number
    # A broken file may hold half a surrogate pair, which no output format takes.
    names = [name.encode("utf-8", "replace").decode() for name in timeline.trace.names]
    op_names = timeline.trace.ops.name.tolist()
    columns = (
        rows.ts_ns, rows.dur_ns, rows.stream, rows.name, rows.op, rows.module, rows.phase, rows.step,
        cost.flops, cost.bytes_read, cost.bytes_written, cost.pipe, bounds.bound, bounds.efficiency,
    )  # fmt: skip
    for ts, dur, stream, name, op, module, phase, step, flops, read, written, pipe, bound, efficiency in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        moved = read + written
        yield (
            ts,
            dur,
            stream if stream >= 0 else None,
            names[name],
            names[op_names[op]] if op >= 0 else None,
            op if op >= 0 else None,
            timeline.modules[module] if module >= 0 else None,
            PHASES[phase],
            int(number[step]) if step >= 0 else None,
            _known(flops),
            _known(read),
            _known(written),
            cost.pipes[pipe] if pipe >= 0 else None,
            flops / moved if moved > 0 else None,
            BOUNDS[bound],
            _known(efficiency),
        )


def check_launches_path(path: Path) -> None:
    """Check that rows can be written under this name, before any work is done.

    Raises:
        UsageError: neither ``.csv`` nor ``.parquet``.
        MissingExtraError: ``.parquet`` without pyarrow.
    """
    if path.suffix not in _WRITERS:
        ending = path.suffix or "a file without an ending"
        raise UsageError(f"{path}: --launches writes {' or '.join(_WRITERS)}, not {ending}")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("writing Parquet", "pyarrow")


def write_launches(analysis: Analysis, path: Path, counted: Mapping[int, Counted] | None = None) -> None:
    """Write the rows as ``.csv`` or ``.parquet``, by the file's name.

    Args:
        analysis: whose launches.
        path: file to write.
        counted: hardware counters by launch index; given, rows end with `MEASURED_COLUMNS`.

    Raises:
        UsageError: another ending, or the file cannot be written.
        MissingExtraError: Parquet without pyarrow.
    """
    check_launches_path(path)
    rows = launch_rows(analysis)
    if counted is None:
        _WRITERS[path.suffix](COLUMNS, rows, path)
    else:
        measured = (row + _measured(counted.get(i)) for i, row in enumerate(rows))
        _WRITERS[path.suffix](COLUMNS + MEASURED_COLUMNS, measured, path)


def _measured(counted: Counted | None) -> tuple[float | None, ...]:
    """One row's `MEASURED_COLUMNS`."""
    if counted is None:
        return (None,) * len(MEASURED_COLUMNS)
    return counted.time_ns, counted.flops, counted.bytes_read, counted.bytes_written, counted.dram_pct


def _write_csv(names: Sequence[str], rows: Iterable[tuple[Any, ...]], path: Path) -> None:
    with writing(path) as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)


def _write_parquet(names: Sequence[str], rows: Iterable[tuple[Any, ...]], path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    kinds = {"text": pyarrow.string(), "int": pyarrow.int64(), "float": pyarrow.float64()}
    schema = pyarrow.schema([(name, kinds[_KINDS.get(name, "float")]) for name in names])
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    table = pyarrow.table([list(column) for column in columns], schema=schema)
    with writing(path, binary=True) as file:
        parquet.write_table(table, file)


_Writer = Callable[[Sequence[str], Iterable[tuple[Any, ...]], Path], None]
_WRITERS: dict[str, _Writer] = {".csv": _write_csv, ".parquet": _write_parquet}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
