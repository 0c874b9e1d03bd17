"""One row a device launch, in time order: what `--launches` writes."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from advisor.errors import MissingExtraError, UsageError
from advisor.report.analysis import Analysis
from advisor.report.files import writing
from advisor.roofline.bound import BOUNDS
from advisor.trace.phases import PHASES

COLUMNS = (
    "ts_ns", "dur_ns", "stream", "name", "op", "op_id", "module", "phase", "step", "flops", "bytes_read",
    "bytes_written", "pipe", "intensity", "bound", "efficiency",
)  # fmt: skip


def launch_rows(analysis: Analysis) -> Iterator[tuple[Any, ...]]:
    """Rows of `COLUMNS`; None where something is not known."""
    timeline, rows = analysis.timeline, analysis.timeline.launches
    cost, bounds, names = analysis.costs, analysis.bounds, analysis.timeline.trace.names
    number = timeline.steps.number
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
            timeline.op_name(op),
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


def write_launches(analysis: Analysis, path: Path) -> None:
    """Write the rows as ``.csv`` or ``.parquet``, by the file's name.

    Raises:
        UsageError: another ending, or the file cannot be written.
        MissingExtraError: Parquet without pyarrow.
    """
    if path.suffix == ".csv":
        with writing(path) as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(launch_rows(analysis))
    elif path.suffix == ".parquet":
        _write_parquet(analysis, path)
    else:
        raise UsageError(
            f"{path}: --launches writes .csv or .parquet, not {path.suffix or 'a file without ending'}"
        )


def _write_parquet(analysis: Analysis, path: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError("writing Parquet", "tables") from error
    columns = list(zip(*launch_rows(analysis), strict=True)) or [()] * len(COLUMNS)
    table = pyarrow.table({name: list(column) for name, column in zip(COLUMNS, columns, strict=True)})
    with writing(path, binary=True) as file:
        parquet.write_table(table, file)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
