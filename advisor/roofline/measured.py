"""Measured roofs, kept per device in the user's cache folder and put in place of the datasheet's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from advisor.errors import UsageError
from advisor.roofline.devices import Device

#: Environment variable that names another folder.
FOLDER_VARIABLE = "TRAINING_ADVISOR_CACHE"


class Measured(msgspec.Struct, kw_only=True):
    """What `advisor calibrate` measured on one device.

    Attributes:
        name: as the driver names the device.
        total_memory_bytes, sms: tell it from a partition or a sibling of the same name.
        bandwidth_bytes_per_s: of a device-to-device copy, bytes read plus bytes written.
        peaks: FLOP/s of a large product, by pipe; absent where the device cannot do it.
        launch_ns: host time of one small operator when many follow each other: PyTorch's part included.
        link_bytes_per_s: by ``to_device_pinned``, ``to_device_pageable``, ``to_host_pinned`` and
            ``to_host_pageable``.
        measured_on: date, ISO.
        versions: of what measured it.
    """

    name: str
    total_memory_bytes: int
    sms: int
    bandwidth_bytes_per_s: float
    peaks: dict[str, float]
    launch_ns: float
    link_bytes_per_s: dict[str, float]
    measured_on: str
    versions: dict[str, str]


def folder() -> Path:
    """Where measured roofs are kept."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "training-advisor"


def save(measured: Measured) -> Path:
    """Keep measured roofs for later analyses on this machine; returns the file.

    Raises:
        UsageError: the folder cannot be written.
    """
    path = _file(measured.name, measured.total_memory_bytes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".tmp")
        aside.write_bytes(msgspec.json.format(msgspec.json.encode(measured)))
        aside.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}; set ${FOLDER_VARIABLE}") from error
    return path


def find(properties: Mapping[str, Any] | None) -> Measured | None:
    """Roofs measured on the device that a trace names, or None.

    Args:
        properties: an entry of a Kineto trace's ``deviceProperties``.
    """
    properties = properties or {}
    name, memory = properties.get("name"), properties.get("totalGlobalMem")
    if not isinstance(name, str) or not isinstance(memory, int):
        return None
    found = _read(_file(name, memory))
    # A partition may keep the name; it has fewer units.
    fits = found is not None and found.name == name and properties.get("numSms", found.sms) == found.sms
    return found if fits else None


def all_measured() -> list[Measured]:
    """Every device that was measured on this machine, by name."""
    found = [_read(path) for path in sorted((folder() / "roofs").glob("*.json"))]
    return [one for one in found if one is not None]


def _read(path: Path) -> Measured | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, msgspec.DecodeError):
        return None


def with_measured(device: Device, measured: Measured) -> Device:
    """The device with measured roofs in place of the datasheet's; what was not measured stays."""
    source = f"measured on this device on {measured.measured_on} (advisor calibrate)"
    link = measured.link_bytes_per_s.get("to_device_pinned")
    return replace(
        device,
        roofs="measured",
        peaks={**device.peaks, **measured.peaks},
        peak_sources={**device.peak_sources, **dict.fromkeys(measured.peaks, source)},
        datasheet_peaks=device.peaks,
        bandwidth_bytes_per_s=measured.bandwidth_bytes_per_s,
        bandwidth_source=source,
        link_bytes_per_s=link or device.link_bytes_per_s,
        link_source=source if link else device.link_source,
        measured_links={key: rate for key, rate in measured.link_bytes_per_s.items() if rate > 0},
    )


def choose_roofs(
    device: Device, properties: Mapping[str, Any] | None, roofs: str = "auto", *, named: bool = False
) -> Device:
    """The device under the datasheet's roofs or under those measured on it.

    Args:
        device: with the datasheet's roofs, or a user's.
        properties: as for `find`.
        roofs: ``"auto"``: measured where there are any, unless the user has a say in the device;
            ``"datasheet"`` or ``"measured"``: those.
        named: whether the user named the device.

    Raises:
        UsageError: `roofs` is ``"measured"`` and nothing was measured on this device here.
    """
    if roofs == "datasheet" or (roofs == "auto" and (named or device.roofs == "user")):
        return device
    measured = find(properties)
    if measured is not None:
        return with_measured(device, measured)
    if roofs == "measured":
        raise UsageError(
            f"no roofs were measured on {device.name!r} here: run `advisor calibrate` on the machine that "
            "has it, or leave --roofs out"
        )
    return device


def _file(name: str, memory_bytes: int) -> Path:
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return folder() / "roofs" / f"{plain}-{memory_bytes >> 20}mib.json"
