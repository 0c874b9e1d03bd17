"""Lists of a report as data frames: a column per field, a field that is a struct spread over several."""

from __future__ import annotations

import types
import typing
from typing import TYPE_CHECKING, Any

import msgspec

from advisor.trace.tables import import_pandas, no_such_table

if TYPE_CHECKING:
    import pandas

    from advisor.report.model import Report

#: By name of the column: where its values are in a row, and their dtype.
Columns = dict[str, tuple[tuple[str, ...], str]]
#: How pandas is to hold a field, so that what is not known stays so.
_DTYPES = {int: "Int64", float: "float64", bool: "boolean"}


def tables(report_type: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The report's fields that are lists of structs, and of which."""
    found = {}
    for field in msgspec.structs.fields(report_type):
        item = (*typing.get_args(field.type), None)[0]
        if typing.get_origin(field.type) is list and _is_struct(item):
            found[field.name] = item
    return found


def frame(report: Report, table: str) -> pandas.DataFrame:
    """One list of a report as a data frame.

    Raises:
        UsageError: no such table.
        MissingExtraError: pandas is not installed.
    """
    known = tables(type(report))
    if table not in known:
        raise no_such_table(table, list(known))
    pd = import_pandas()
    rows = getattr(report, table)
    return pd.DataFrame(
        {
            name: pd.Series([_get(row, path) for row in rows], dtype=dtype)
            for name, (path, dtype) in _columns(known[table]).items()
        }
    )


def _columns(struct: type[msgspec.Struct], prefix: tuple[str, ...] = ()) -> Columns:
    """``saving_ms.low`` becomes ``saving_ms_low``."""
    found: Columns = {}
    for field in msgspec.structs.fields(struct):
        path, kind = (*prefix, field.name), _without_none(field.type)
        if _is_struct(kind):
            found |= _columns(kind, path)
        else:
            found["_".join(path)] = (path, _DTYPES.get(kind, "object"))
    return found


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else object
    return annotation


def _get(row: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        row = None if row is None else getattr(row, name)
    return row
