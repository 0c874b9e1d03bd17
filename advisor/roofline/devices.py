"""The device a trace was made on, and its roofs."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.errors import InputError, UsageError
from advisor.roofline.device_table import PIPES, Figure, Row, builtin_rows, user_rows

#: Environment variable that names a user's device table.
USER_TABLE_VARIABLE = "TRAINING_ADVISOR_DEVICES"

#: What a driver reports of the memory, over its nominal GiB: error correction and firmware take a part.
_MEMORY_FRACTION = (0.85, 1.03)
#: A partition has far fewer units than the whole device; steppings of one product differ by a few.
_SMS_FRACTION = (0.9, 1.1)

_BRANDS = re.compile(r"\b(nvidia|amd|tesla|geforce|quadro|instinct)\b")
_MIG = re.compile(r"\bmig\b")


@dataclass(frozen=True, slots=True)
class Device:
    """A device and its roofs. What is not known is None or absent, never a guess.

    Attributes:
        name: as the trace or the driver names it.
        matched: key of the row in the device table, or None.
        roofs: ``datasheet``, ``measured`` (on this device), ``user`` (a user's table) or ``unknown``.
        peaks: dense FLOP/s by pipe (see `Cost.pipe`).
        peak_sources: by pipe, where the peak comes from.
        datasheet_peaks: the datasheet's FLOP/s by pipe, where `peaks` has measured ones in their place.
        bandwidth_bytes_per_s: of the device's memory.
        memory_bytes: as the driver reported it, else nominal.
        l2_bytes: L2 cache.
        llc_bytes: a larger cache between the L2 and the memory, where there is one.
        sms: streaming multiprocessors, compute units, or cores of a CPU.
        link_bytes_per_s: between host and device, in one direction.
        peer_bytes_per_s: between devices (NVLink, Infinity Fabric), in one direction.
        peer_fabric: how devices are joined: ``switch``, ``mesh`` (each with each of eight), ``bridge``
            (pairs, where one was bought) or empty.
        measured_links: measured rates of the host link by class and direction of copy: ``to_device_pinned``,
            ``to_device_pageable``, ``to_host_pinned``, ``to_host_pageable``.
        arch: ``sm_90``, ``gfx942``; empty if not known.
        registers_per_sm, shared_bytes_per_sm: 32-bit registers and bytes of shared memory of one
            multiprocessor, as the driver reported them.
        figures: the row's figures, each with its source, by the keys of the device table.
        note: what a reader of the figures must know; for an unknown device, why and what to do.
    """

    name: str
    matched: str | None = None
    roofs: str = "unknown"
    peaks: Mapping[str, float] = field(default_factory=dict)
    peak_sources: Mapping[str, str] = field(default_factory=dict)
    datasheet_peaks: Mapping[str, float] = field(default_factory=dict)
    bandwidth_bytes_per_s: float | None = None
    bandwidth_source: str = ""
    memory_bytes: int | None = None
    l2_bytes: int | None = None
    llc_bytes: int | None = None
    sms: int | None = None
    link_bytes_per_s: float | None = None
    link_source: str = ""
    peer_bytes_per_s: float | None = None
    peer_source: str = ""
    peer_fabric: str = ""
    measured_links: Mapping[str, float] = field(default_factory=dict)
    arch: str = ""
    registers_per_sm: int | None = None
    shared_bytes_per_sm: int | None = None
    figures: Mapping[str, Figure] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def unknown(cls, name: str, note: str = "") -> Device:
        """A device without roofs: only its name is known."""
        return cls(name, note=note)

    def peak(self, pipe: str) -> float | None:
        """Dense FLOP/s of a pipe; None where the device has none, or it is not known."""
        return self.peaks.get(pipe)

    def datasheet_peak(self, pipe: str) -> float | None:
        """The datasheet's FLOP/s of a pipe, also where another was measured: what utilisation is told of."""
        return self.datasheet_peaks.get(pipe, self.peaks.get(pipe))

    def ridge(self, pipe: str) -> float | None:
        """Arithmetic intensity, in FLOP/byte, where the pipe's roof meets the memory's."""
        peak = self.peak(pipe)
        if peak is None or self.bandwidth_bytes_per_s is None:
            return None
        return peak / self.bandwidth_bytes_per_s


def find_device(
    properties: Mapping[str, Any] | None = None,
    override: str | None = None,
    user_toml: Path | None = None,
) -> Device:
    """The device of a trace, with the roofs that are known for it.

    Args:
        properties: an entry of a Kineto trace's ``deviceProperties`` (``name``, ``totalGlobalMem``,
            ``numSms``), or None.
        override: what the user says it is: a row of the table, a driver's or a marketing name, or the
            path of a TOML with a row of its own. Wins over `properties`.
        user_toml: a table whose rows are added to, and win over, the shipped ones. Left out, the file
            that ``$TRAINING_ADVISOR_DEVICES`` names or ``~/.config/training-advisor/devices.toml``.

    Returns:
        The device; without peaks, and with the reason in `Device.note`, if it is not known.

    Raises:
        UsageError: `override` names no known device.
        InputError: a user's table cannot be used.

    Example:
        >>> find_device({"name": "NVIDIA H200", "totalGlobalMem": 150109880320}).matched
        'h200'
    """
    rows = device_rows(user_toml)
    if override is not None:
        row = _row_of_file(Path(override), properties) if _is_path(override) else _row_of_name(rows, override)
        return _device(row, properties)
    name = str((properties or {}).get("name") or "")
    if not name:
        return Device(name="unknown", note="the trace does not name its device; give --device NAME")
    found, reason = _match(rows, properties or {"name": name})
    if found is not None:
        return _device(found, properties)
    return Device(
        name=name,
        memory_bytes=_whole(properties, "totalGlobalMem"),
        sms=_whole(properties, "numSms"),
        registers_per_sm=_whole(properties, "regsPerMultiprocessor"),
        shared_bytes_per_sm=_shared(properties),
        note=f"{reason}; give --device NAME (`advisor devices` lists them) or a TOML with its figures",
    )


def device_rows(user_toml: Path | None = None) -> Mapping[str, Row]:
    """All rows by key, a user's table on top of the shipped one.

    Raises:
        InputError: a user's table cannot be used.
    """
    path = user_toml or _default_user_table()
    return builtin_rows() if path is None else {**builtin_rows(), **user_rows(path)}


def device_of_row(row: Row) -> Device:
    """The device that a row describes, under the row's own name."""
    return _device(row, None)


def _default_user_table() -> Path | None:
    named = os.environ.get(USER_TABLE_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise InputError(f"{named}: no such file, named by ${USER_TABLE_VARIABLE}")
        return Path(named)
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = config / "training-advisor" / "devices.toml"
    return path if path.is_file() else None


def _is_path(text: str) -> bool:
    return text.lower().endswith(".toml") or Path(text).is_file()


def _normalise(name: str) -> str:
    words = re.sub(r"[\s_/()-]+", " ", _BRANDS.sub(" ", name.lower()))
    return words.strip()


def _names(row: Row) -> set[str]:
    return {_normalise(name) for name in (row.key, row.title, *row.aliases)}


def _solid(name: str) -> str:
    """A name as people type it: ``rtx5090``."""
    return re.sub(r"[\s-]", "", name)


def _matches(row: Row, name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in row.match)


def _row_of_name(rows: Mapping[str, Row], override: str) -> Row:
    name = _normalise(override)
    named = [row for row in rows.values() if name in _names(row)]
    # `_names` comes first: "h100" is an alias, and a pattern of no other row may claim it.
    found = (
        named
        or [row for row in rows.values() if _matches(row, name)]
        or [row for row in rows.values() if _solid(name) in map(_solid, _names(row))]
        # "4090": the number alone, where only one row's name ends in it.
        or [row for row in rows.values() if any(one.endswith(f" {name}") for one in _names(row))]
    )
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"device {override!r} may be {_list(found)}: give one of these")
    known = sorted({*rows, *(alias for row in rows.values() for alias in row.aliases)})
    close = difflib.get_close_matches(name.replace(" ", "-"), known, n=4, cutoff=0.4)
    hint = f"; the closest are {', '.join(close)}" if close else ""
    raise UsageError(f"device {override!r} is not known{hint}; `advisor devices` lists all")


def _row_of_file(path: Path, properties: Mapping[str, Any] | None) -> Row:
    rows = user_rows(path)
    if not rows:
        raise InputError(f"{path}: holds no [device.NAME] table")
    if len(rows) == 1:
        return next(iter(rows.values()))
    found, reason = _match(rows, properties or {})
    if found is None:
        listed = ", ".join(rows)
        raise UsageError(
            f"--device {path} has several devices ({listed}) and {reason}; leave one in the file"
        )
    return found


def _match(rows: Mapping[str, Row], properties: Mapping[str, Any]) -> tuple[Row | None, str]:
    """The one row that fits, or the reason why there is none."""
    raw = str(properties.get("name", ""))
    name = _normalise(raw)
    candidates = [row for row in rows.values() if name in _names(row) or _matches(row, name)]
    if not candidates and _MIG.search(name):
        return None, f"{raw!r} is a slice (MIG) of a device: the whole device's roofs do not hold for it"
    if not candidates:
        return None, f"no row of the device table matches {raw!r}"
    fitting = [row for row in candidates if _fits(row, properties)]
    if not fitting:
        return (
            None,
            f"{raw!r} has not the memory or the units of {_list(candidates)}: a partition or a variant",
        )
    # A user's row wins, then a row that carries the very name, then one that a pattern fits.
    for preferred in (
        [row for row in fitting if row.user and _matches(row, name)],
        [row for row in fitting if name in _names(row)],
        fitting,
    ):
        if len(preferred) == 1:
            return preferred[0], ""
    return None, f"{raw!r} may be {_list(fitting)}"


def _fits(row: Row, properties: Mapping[str, Any]) -> bool:
    memory, sms = _whole(properties, "totalGlobalMem"), _whole(properties, "numSms")
    if memory and "memory_gib" in row.figures:
        fraction = memory / (row.figures["memory_gib"].value * 2**30)
        if not _MEMORY_FRACTION[0] <= fraction <= _MEMORY_FRACTION[1]:
            return False
    if sms and "sms" in row.figures:
        fraction = sms / row.figures["sms"].value
        return _SMS_FRACTION[0] <= fraction <= _SMS_FRACTION[1]
    return True


def _list(rows: list[Row]) -> str:
    return " or ".join(row.key for row in rows)


def _whole(properties: Mapping[str, Any] | None, key: str) -> int | None:
    value = (properties or {}).get(key)
    return int(value) if isinstance(value, (int, float)) and value > 0 else None


def _shared(properties: Mapping[str, Any] | None) -> int | None:
    # HIP spells it in its own way.
    return _whole(properties, "sharedMemPerMultiprocessor") or _whole(
        properties, "maxSharedMemoryPerMultiProcessor"
    )


def _device(row: Row, properties: Mapping[str, Any] | None) -> Device:
    figures = row.figures

    def value(name: str, scale: float = 1) -> float | None:
        return figures[name].value * scale if name in figures else None

    def whole(name: str, scale: int = 1) -> int | None:
        number = value(name, scale)
        return None if number is None else round(number)

    def source(name: str) -> str:
        return figures[name].source if name in figures else ""

    pipes = [pipe for pipe in PIPES if pipe in figures]
    return Device(
        name=str((properties or {}).get("name") or row.title),
        matched=row.key,
        roofs="user" if row.user else "datasheet",
        peaks={pipe: figures[pipe].value for pipe in pipes},
        peak_sources={pipe: figures[pipe].source for pipe in pipes},
        bandwidth_bytes_per_s=value("bandwidth_bytes_per_s"),
        bandwidth_source=source("bandwidth_bytes_per_s"),
        memory_bytes=_whole(properties, "totalGlobalMem") or whole("memory_gib", 2**30),
        l2_bytes=whole("l2_mib", 2**20),
        llc_bytes=whole("llc_mib", 2**20),
        sms=_whole(properties, "numSms") or whole("sms"),
        link_bytes_per_s=value("host_bytes_per_s"),
        link_source=source("host_bytes_per_s"),
        peer_bytes_per_s=value("peer_bytes_per_s"),
        peer_source=source("peer_bytes_per_s"),
        peer_fabric=row.peer_fabric,
        arch=row.arch,
        registers_per_sm=_whole(properties, "regsPerMultiprocessor"),
        shared_bytes_per_sm=_shared(properties),
        figures=figures,
        note=row.note,
    )
