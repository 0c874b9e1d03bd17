"""The levels of memory that a device works from, from registers to disk: size, bandwidth and price of a byte.

Rates of caches are stated per clock; the clock is that of the datasheet's fp32 peak: peak / (2 × multiply-
adds per clock and multiprocessor × multiprocessors). Registers are told by what that peak takes: three
operands of 4 bytes read and one written per multiply-add, so 8 bytes a FLOP.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.roofline.devices import Device

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Bytes that an fp32 multiply-add takes from and gives to registers, per FLOP.
_REGISTER_BYTES_PER_FLOP = 8
_DRIVER = "size as the driver reports it"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of memory. What is not known is None.

    Attributes:
        name: for people.
        size_bytes: of the whole device.
        bandwidth_bytes_per_s: of the whole device; of a link in one direction.
        source: of the size and of the bandwidth.
    """

    name: str
    size_bytes: float | None
    bandwidth_bytes_per_s: float | None
    source: str


def hierarchy(device: Device) -> list[Level]:
    """The levels of a device's memory, fastest first; empty where nothing at all is known of it.

    Example:
        >>> from advisor.roofline.devices import find_device
        >>> [level.name for level in hierarchy(find_device(override="a100-sxm-80gb"))][:3]
        ['Registers', 'Shared memory and L1', 'L2 cache']
    """
    arch = _architectures().get(device.arch, {})
    levels = [_registers(device, arch), _shared(device, arch), _l2(device, arch)]
    if device.llc_bytes:
        levels.append(_llc(device))
    levels += [_memory(device, arch), _link(device), _disk(device)]
    known = any(level.size_bytes or level.bandwidth_bytes_per_s for level in levels)
    return levels if known else []


@functools.cache
def _architectures() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("architectures.toml").read_text("utf-8"))


def _clock_hz(device: Device, arch: Mapping[str, Any]) -> float | None:
    peak, per_clk = device.datasheet_peak("vector_fp32"), arch.get("fp32_fma_per_clk")
    # The table's count: a device with some multiprocessors fewer runs at the same clock.
    count = device.figures["sms"].value if "sms" in device.figures else None
    return peak / (2 * per_clk * count) if peak and per_clk and count else None


def _registers(device: Device, arch: Mapping[str, Any]) -> Level:
    size, source = _per_multiprocessor(
        device, device.registers_per_sm and 4 * device.registers_per_sm, arch, "registers_kib"
    )
    peak = device.datasheet_peak("vector_fp32") if device.sms and device.arch else None
    rate = peak and _REGISTER_BYTES_PER_FLOP * peak
    how = "bandwidth: what the fp32 peak takes, 16 bytes a multiply-add" if rate else ""
    return Level("Registers", size, rate, _join(source, how))


def _shared(device: Device, arch: Mapping[str, Any]) -> Level:
    size, source = _per_multiprocessor(device, device.shared_bytes_per_sm, arch, "shared_kib")
    clock, per_clk = _clock_hz(device, arch), arch.get("shared_bytes_per_clk")
    rate = per_clk * device.sms * clock if clock and per_clk and device.sms else None
    how = (
        f"bandwidth: {per_clk} bytes per clock × {device.sms} × {clock / 1e9:.2f} GHz"
        if clock and rate
        else ""
    )
    if rate and source == _DRIVER:
        how += f" ({arch['source']})"
    return Level("Shared memory and L1", size, rate, _join(source, how))


def _l2(device: Device, arch: Mapping[str, Any]) -> Level:
    clock, per_clk = _clock_hz(device, arch), device.figures.get("l2_bytes_per_clk")
    rate = per_clk.value * clock if clock and per_clk else None
    size = device.figures.get("l2_mib")
    how = "bandwidth: none known with a source"
    if clock and per_clk:
        how = f"bandwidth: {per_clk.value:.0f} bytes per clock × {clock / 1e9:.2f} GHz ({per_clk.source})"
    return Level("L2 cache", device.l2_bytes, rate, _join(size.source if size else "", how))


def _llc(device: Device) -> Level:
    rate = device.figures.get("llc_bytes_per_s")
    size = device.figures.get("llc_mib")
    return Level(
        "Last-level cache",
        device.llc_bytes,
        rate.value if rate else None,
        rate.source if rate else size.source if size else "",
    )


def _memory(device: Device, arch: Mapping[str, Any]) -> Level:
    kind = arch.get("memory")
    return Level(
        f"Device memory ({kind})" if kind else "Device memory",
        device.memory_bytes,
        device.bandwidth_bytes_per_s,
        device.bandwidth_source,
    )


def _link(device: Device) -> Level:
    return Level("Host memory (link)", None, device.link_bytes_per_s, device.link_source)


def _disk(device: Device) -> Level:
    rate = device.figures.get("disk_bytes_per_s")
    return Level("Disk", None, rate.value if rate else None, rate.source if rate else "")


def _per_multiprocessor(
    device: Device, reported_bytes: int | None, arch: Mapping[str, Any], key: str
) -> tuple[float | None, str]:
    """Bytes on the whole device, and where they come from."""
    if not device.sms:
        return None, ""
    if reported_bytes:
        return float(reported_bytes * device.sms), _DRIVER
    if key in arch:
        return float(arch[key] * 1024 * device.sms), arch["source"]
    return None, ""


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
