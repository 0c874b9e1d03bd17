"""A timeline as data frames. A table is a function here that gives its columns; `tables()` lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from advisor.errors import MissingExtraError, UsageError
from advisor.trace.events import KIND_NAMES, Events, Trace
from advisor.trace.phases import PHASES

if TYPE_CHECKING:
    import pandas

    from advisor.trace.link import Timeline


class Known(NamedTuple):
    """Whole numbers of which those below zero are not known; a nullable column."""

    values: np.ndarray


Columns = dict[str, Any]
_TABLES: dict[str, Callable[[Timeline], Columns]] = {}


def _table(name: str) -> Callable[[Callable[[Timeline], Columns]], Callable[[Timeline], Columns]]:
    def register(function: Callable[[Timeline], Columns]) -> Callable[[Timeline], Columns]:
        _TABLES[name] = function
        return function

    return register


def tables() -> list[str]:
    """Names of the tables."""
    return list(_TABLES)


def frame(timeline: Timeline, table: str) -> pandas.DataFrame:
    """One table as a data frame.

    Raises:
        UsageError: no such table.
        MissingExtraError: pandas is not installed.
    """
    if table not in _TABLES:
        raise no_such_table(table, tables())
    pd = import_pandas()

    def series(column: Any) -> Any:
        if isinstance(column, Known):
            values = column.values.astype(np.int64)
            return pd.arrays.IntegerArray(values, values < 0)
        return pd.Series(column, dtype=object) if isinstance(column, list) else column

    return pd.DataFrame({name: series(column) for name, column in _TABLES[table](timeline).items()})


def import_pandas() -> Any:
    """The module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("to_pandas", "pandas") from error
    return pandas


def no_such_table(table: str, known: list[str]) -> UsageError:
    """The error for a table that does not exist."""
    return UsageError(f"no table {table!r}: there are {', '.join(known)}")


@_table("launches")
def _launches(timeline: Timeline) -> Columns:
    """Device work in time order, with what it was joined to; CPU operators where there is no device work."""
    rows, kinds = timeline.launches, (*KIND_NAMES, "cpu_op")
    return {
        "ts_ns": rows.ts_ns,
        "dur_ns": rows.dur_ns,
        "device": Known(rows.device),
        "stream": Known(rows.stream),
        "name": _names(timeline.trace, rows.name),
        "kind": [kinds[i] for i in rows.kind.tolist()],
        "bytes": Known(rows.bytes),
        "grid_blocks": Known(rows.grid_blocks),
        "launch_ts_ns": Known(rows.launch_ts_ns),
        "op": [timeline.op_name(i) for i in rows.op.tolist()],
        "op_id": Known(rows.op),
        "module": [timeline.modules[i] if i >= 0 else None for i in rows.module.tolist()],
        "phase": [PHASES[i] for i in rows.phase.tolist()],
        "step": _step_numbers(timeline, rows.step),
    }


@_table("ops")
def _ops(timeline: Timeline) -> Columns:
    """Operators on the host in time order; `parent_id` is the row of the operator directly around each."""
    events = timeline.trace.ops
    return {
        **_common(timeline.trace, events),
        "parent_id": Known(timeline.op_parent),
        "step": _step_numbers(timeline, timeline.steps.at(events.ts_ns)),
    }


@_table("steps")
def _steps(timeline: Timeline) -> Columns:
    """Training steps on the host, and the device work that each launched."""
    device_end_ns, device_busy_ns = timeline.device_work_of_steps()
    launched = timeline.launches.step[timeline.launches.step >= 0]
    return {
        "number": timeline.steps.number,
        "start_ns": timeline.steps.start_ns,
        "end_ns": timeline.steps.end_ns,
        "steady": timeline.steady,
        "launches": np.bincount(launched, minlength=len(timeline.steps)),
        "device_busy_ns": device_busy_ns,
        "device_end_ns": Known(device_end_ns),
    }


@_table("annotations")
def _annotations(timeline: Timeline) -> Columns:
    """Ranges on the host: `record_function`, profiler steps, the capture's phases and modules."""
    return _common(timeline.trace, timeline.trace.annotations)


def _common(trace: Trace, events: Events) -> Columns:
    return {
        "ts_ns": events.ts_ns,
        "dur_ns": events.dur_ns,
        "name": _names(trace, events.name),
        "pid": [trace.tracks[i][0] for i in events.track.tolist()],
        "tid": [trace.tracks[i][1] for i in events.track.tolist()],
    }


def _names(trace: Trace, index: np.ndarray) -> list[str]:
    return [trace.names[i] for i in index.tolist()]


def _step_numbers(timeline: Timeline, step: np.ndarray) -> Known:
    number = timeline.steps.number
    return Known(np.where(step >= 0, number[np.maximum(step, 0)], -1) if len(number) else step)
