"""Write ``docs/json.md`` from the report's model: every field, its type and what it means.

Run ``python docs/generate_json.py`` after a change to ``advisor/report/model.py``.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from advisor.report import model
from advisor.report.launches import COLUMNS

TARGET = Path(__file__).with_name("json.md")
_FIELD = re.compile(r"    (\w+): ")
_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false"}
_HEAD = """\
# The JSON report

`advisor analyze trace.json.gz --json report.json` writes it, `--json -` prints it, `advisor.analyze(path)`
returns it as objects with the same names. This page is made from `advisor/report/model.py` by
`docs/generate_json.py`.

- A figure that was not measured and could not be modelled is `null`, never 0.
- Units are in the names. Times are in milliseconds and per training step unless a name says otherwise;
  fractions run from 0 to 1.
- Step times, kernels and breakdowns are those of the steady steps: the first recorded one is left out, and so
  are those with a validation run inside or with unusually much or little device work.
- Fields may be added within a major version: ignore those that you do not know.
"""
_LAUNCHES = """\
## `--launches`

`--launches FILE` writes one row a device launch, in time order, as `.csv` or `.parquet`, for every launch in
the primary trace, steady step or not. What is not known is empty (CSV) or null (Parquet). Columns:

{columns}

`ts_ns` and `dur_ns` are on the device, in ns; `op_id` tells calls of one operator apart; `step` is the number
that the profiler counted; the others are those of `kernels`, for a single launch.
"""


def render() -> str:
    """The whole page."""
    sections = [_section(place, struct) for place, struct in _structs(model.Report)]
    columns = ", ".join(f"`{name}`" for name in COLUMNS)
    return "\n".join([_HEAD, *sections, _LAUNCHES.format(columns=columns)])


def _structs(root: type[msgspec.Struct]) -> list[tuple[str, type[msgspec.Struct]]]:
    """Each struct with the place where it stands first, outer ones first."""
    found: dict[type[msgspec.Struct], str] = {root: ""}
    queue = [root]
    for struct in queue:
        for field in msgspec.structs.fields(struct):
            for inner in _inner_structs(field.type):
                if inner not in found:
                    found[inner] = f"{found[struct]}.{field.name}".lstrip(".")
                    queue.append(inner)
    return [(place, struct) for struct, place in found.items()]


def _section(place: str, struct: type[msgspec.Struct]) -> str:
    meanings = comments(struct)
    rows = [
        f"| `{field.name}` | {_type_name(field.type)} | {meanings[field.name]} |"
        for field in msgspec.structs.fields(struct)
    ]
    title = f"## `{place}`" if place else "## The whole"
    text = inspect.cleandoc(struct.__doc__ or "")
    return "\n".join([title, "", text, "", "| field | type | meaning |", "|---|---|---|", *rows, ""])


def comments(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The ``#:`` comment above each field of a struct and of those it inherits from."""
    found: dict[str, str] = {}
    for owner in reversed(struct.__mro__):
        if not (issubclass(owner, model.Struct) and owner is not model.Struct):
            continue
        above: list[str] = []
        for line in inspect.getsource(owner).splitlines():
            if line.startswith("    #: "):
                above.append(line.removeprefix("    #: "))
                continue
            field = _FIELD.match(line)
            if field and above:
                found[field.group(1)] = " ".join(above).replace("``", "`")
            above = []
    return found


def _inner_structs(kind: Any) -> list[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for part in typing.get_args(kind) for struct in _inner_structs(part)]


def _type_name(kind: Any) -> str:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "object"
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        return f"{' or '.join(map(_type_name, parts))}, or null"
    if typing.get_origin(kind) is list:
        return f"list of {_type_name(typing.get_args(kind)[0])}"
    return "object" if typing.get_origin(kind) is dict else "any"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
