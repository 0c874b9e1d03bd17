"""Reads device tables: the one that ships with the package, and a user's."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Names of the units that do arithmetic, as `Cost.pipe` has them. ``tensor_fp32`` exists on AMD only.
PIPES = (
    "tensor_bf16", "tensor_fp16", "tensor_tf32", "tensor_fp8", "tensor_int8", "tensor_fp4", "tensor_fp32",
    "tensor_fp64", "vector_fp32", "vector_fp16", "vector_bf16", "vector_fp64",
)  # fmt: skip

_FIGURES = (
    "bandwidth_bytes_per_s", "peer_bytes_per_s", "memory_gib", "l2_mib", "l2_bytes_per_clk", "llc_mib",
    "llc_bytes_per_s", "sms",
)  # fmt: skip
_TEXTS = ("title", "arch", "host_link", "peer_fabric", "source", "note", "like")
#: How devices are joined: all behind a switch, each with each of eight, or perhaps by a bridge.
_FABRICS = ("switch", "mesh", "bridge")
_LISTS = ("match", "aliases", "unknown")
_HOST, _DISK = "host_bytes_per_s", "disk_bytes_per_s"
_DISK_RULE = (
    "rule of thumb, not measured: an NVMe drive at the rate of four lanes of the host link's generation"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Row:
    """One device of a table.

    Attributes:
        key: the table's name, e.g. ``a100-sxm-80gb``.
        title: the device's name for people.
        match: patterns for a whole normalised driver name.
        aliases: names that a person may give, in the manner of `key`.
        figures: by the keys of the TOML and the names in `PIPES`; the host link is ``host_bytes_per_s``, and
            a drive that keeps up with it ``disk_bytes_per_s``.
        arch: ``sm_80``, ``gfx942``; empty if not given.
        peer_fabric: ``switch``, ``mesh`` or ``bridge``; empty if not given.
        note: what a reader of the figures must know.
        user: whether a user's file made or changed it.
    """

    key: str
    title: str
    match: tuple[re.Pattern[str], ...] = ()
    aliases: tuple[str, ...] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    arch: str = ""
    peer_fabric: str = ""
    source: str = ""
    note: str = ""
    user: bool = False
    derived: Mapping[str, str] = field(default_factory=dict)


@functools.cache
def builtin_rows() -> Mapping[str, Row]:
    """The rows that ship with the package, by key."""
    return read_rows(Path(__file__).with_name("devices.toml"), {}, user=False)


def user_rows(path: Path) -> Mapping[str, Row]:
    """The rows of a user's file alone, each on top of the shipped row of the same name, if any.

    Raises:
        InputError: the file cannot be read, or a key or value in it is not understood.
    """
    return read_rows(path, builtin_rows(), user=True)


def read_rows(path: Path, base: Mapping[str, Row], *, user: bool) -> Mapping[str, Row]:
    """Read a device table.

    Args:
        path: a TOML file with tables ``[device.NAME]`` and ``[link.NAME]``.
        base: rows that `like` may name and that a row of the same name overrides.
        user: whether the file is a user's: figures that it does not give keep the source they had.

    Raises:
        InputError: the file cannot be read, or a key or value in it is not understood.
    """
    return _Reader(path, base, user).rows()


#: Figures of devices lie well between these.
_SMALLEST, _LARGEST = 1e-6, 1e24
_LONGEST_CHAIN = 32


class _Reader:
    def __init__(self, path: Path, base: Mapping[str, Row], user: bool) -> None:
        self._path, self._base, self._user = path, base, user
        content = self._load()
        self._devices = self._table(content, "device")
        self.links = self._read_links(self._table(content, "link"))
        for key in content:
            if key not in ("device", "link"):
                raise self._error("", key, "is not known; tables are [device.NAME] and [link.NAME]")
        self._done: dict[str, Row] = {}

    def rows(self) -> Mapping[str, Row]:
        for key in self._devices:
            self._row(key, ())
        return self._done

    def _load(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self._path.read_text("utf-8"))
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot read the device table: {error.strerror or error}"
            ) from error
        except RecursionError as error:
            raise InputError(f"{self._path}: not a TOML file: nested too deep") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"{self._path}: not a TOML file: {error}") from error

    def _error(self, table: str, key: str, problem: str) -> InputError:
        where = f" [{table}]" if table else ""
        return InputError(f"{self._path}:{where} {key}: {problem}")

    def _table(self, content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        table = content.get(key, {})
        if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
            raise self._error("", key, f"must hold tables: [{key}.NAME]")
        return table

    def _number(self, table: str, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self._error(table, key, f"must be a number above zero, not {value!r}")
        if not _SMALLEST <= value <= _LARGEST:
            raise self._error(table, key, f"is no figure of a device: {str(value)[:40]}")
        return float(value)

    def _read_links(self, tables: Mapping[str, Any]) -> dict[str, dict[str, Figure]]:
        links: dict[str, dict[str, Figure]] = dict(_builtin_links()) if self._user else {}
        for name, raw in tables.items():
            table = f"link.{name}"
            for key in raw:
                if key not in ("bytes_per_s", _DISK, "source"):
                    raise self._error(table, key, f"is not known; a link has bytes_per_s, {_DISK} and source")
            if "bytes_per_s" not in raw:
                raise self._error(table, "bytes_per_s", "is missing")
            rate = self._number(table, "bytes_per_s", raw["bytes_per_s"])
            links[name] = {_HOST: Figure(rate, str(raw.get("source", self._path)))}
            if _DISK in raw:
                links[name][_DISK] = Figure(self._number(table, _DISK, raw[_DISK]), _DISK_RULE)
        return links

    def _row(self, key: str, seen: tuple[str, ...]) -> Row:
        if key in self._done:
            return self._done[key]
        table, raw = f"device.{key}", self._devices[key]
        if key in seen:
            raise self._error(table, "like", "leads back to itself: " + " → ".join((*seen, key)))
        if len(seen) > _LONGEST_CHAIN:
            raise self._error(table, "like", f"is the end of a chain of more than {_LONGEST_CHAIN} devices")
        self._check(table, raw)
        overridden = self._base.get(key)
        parent = self._parent(table, raw, (*seen, key)) or overridden
        source = raw.get("source") or (str(self._path) if self._user else parent.source if parent else "")
        derived = self._texts(f"{table}.derived", raw.get("derived"), (*_FIGURES, *PIPES))
        if derived is None:
            derived = dict(parent.derived) if parent and not self._user else {}
        figures = self._inherited(raw, parent, source, derived)
        figures.update(self._own(table, raw, source, derived))
        same = overridden or Row(key, raw.get("title", key))
        row = Row(
            key=key,
            title=raw.get("title", same.title),
            match=self._patterns(table, raw["match"]) if "match" in raw else same.match,
            aliases=tuple(raw.get("aliases", same.aliases)),
            figures=figures,
            arch=raw.get("arch", parent.arch if parent else ""),
            peer_fabric=raw.get("peer_fabric", parent.peer_fabric if parent else ""),
            source=source,
            note=raw.get("note", same.note),
            user=self._user,
            derived=derived,
        )
        self._done[key] = row
        return row

    def _check(self, table: str, raw: Mapping[str, Any]) -> None:
        for key, value in raw.items():
            if key in _TEXTS:
                if not isinstance(value, str):
                    raise self._error(table, key, f"must be text, not {value!r}")
                if key == "peer_fabric" and value not in _FABRICS:
                    raise self._error(table, key, f"must be one of {', '.join(_FABRICS)}, not {value!r}")
            elif key in _LISTS:
                if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                    raise self._error(table, key, f"must be a list of texts, not {value!r}")
            elif key in ("peaks", "derived"):
                if not isinstance(value, dict):
                    raise self._error(table, key, f"must be a table, not {value!r}")
            elif key not in _FIGURES:
                known = ", ".join((*_TEXTS, *_LISTS, *_FIGURES, "peaks", "derived"))
                raise self._error(table, key, f"is not known; known are {known}")

        for name in raw.get("unknown", ()):
            if name not in (*_FIGURES, *PIPES, _HOST, _DISK):
                raise self._error(table, "unknown", f"names no figure: {name!r}")

    def _parent(self, table: str, raw: Mapping[str, Any], seen: tuple[str, ...]) -> Row | None:
        like = raw.get("like")
        if like is None:
            return None
        if like in self._devices and like not in seen[-1:]:
            return self._row(like, seen)
        if like in self._base:
            return self._base[like]
        raise self._error(table, "like", f"names no device: {like!r}")

    def _inherited(
        self, raw: Mapping[str, Any], parent: Row | None, source: str, derived: Mapping[str, str]
    ) -> dict[str, Figure]:
        if parent is None:
            return {}
        dropped = set(raw.get("unknown", ())) | ({_HOST, _DISK} if "host_link" in raw else set())
        kept = {name: figure for name, figure in parent.figures.items() if name not in dropped}
        if self._user:
            return kept
        return {name: self._recited(name, figure, source, derived) for name, figure in kept.items()}

    def _recited(self, name: str, figure: Figure, source: str, derived: Mapping[str, str]) -> Figure:
        # A link's source is the bus standard's, whatever device it serves.
        return figure if name in (_HOST, _DISK) else Figure(figure.value, _cite(source, derived.get(name)))

    def _own(
        self, table: str, raw: Mapping[str, Any], source: str, derived: Mapping[str, str]
    ) -> dict[str, Figure]:
        own = {}
        for name in _FIGURES:
            if name in raw:
                own[name] = Figure(self._number(table, name, raw[name]), _cite(source, derived.get(name)))
        for pipe, value in raw.get("peaks", {}).items():
            if pipe not in PIPES:
                raise self._error(f"{table}.peaks", pipe, f"is not known; known are {', '.join(PIPES)}")
            own[pipe] = Figure(self._number(f"{table}.peaks", pipe, value), _cite(source, derived.get(pipe)))
        if "host_link" in raw:
            link = self.links.get(raw["host_link"])
            if link is None:
                known = ", ".join(self.links)
                raise self._error(table, "host_link", f"{raw['host_link']!r} is not known; known are {known}")
            own.update(link)
        return own

    def _texts(self, table: str, raw: Any, known: tuple[str, ...]) -> dict[str, str] | None:
        if raw is None:
            return None
        for key, value in raw.items():
            if key not in known:
                raise self._error(table, key, f"is not known; known are {', '.join(known)}")
            if not isinstance(value, str):
                raise self._error(table, key, f"must be text, not {value!r}")
        return dict(raw)

    def _patterns(self, table: str, texts: list[str]) -> tuple[re.Pattern[str], ...]:
        try:
            return tuple(re.compile(text, re.IGNORECASE) for text in texts)
        except re.error as error:
            raise self._error(table, "match", f"is not a regular expression: {error}") from error


def _cite(source: str, derivation: str | None) -> str:
    return f"{source}; here: {derivation}" if derivation else source


@functools.cache
def _builtin_links() -> Mapping[str, dict[str, Figure]]:
    return _Reader(Path(__file__).with_name("devices.toml"), {}, user=False).links
