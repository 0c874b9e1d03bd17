"""Quantities as people write them: ``14GB``, ``20 TFLOP/s``, ``3.35e12``, ``80GiB``."""

from __future__ import annotations

import math
import re
from typing import Any

import click

#: Any number above zero.
POSITIVE = click.FloatRange(min=0, min_open=True)

_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_TIME_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_NUMBER = r"(?P<number>[0-9][0-9_,]*\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+)"
_SUFFIX = {
    # A bit is not a byte: GB and Gb differ by eight, so the small b is refused instead of guessed at.
    "bytes": r"(?:B|bytes?)?",
    "flops": r"(?:FLOPS?|OPS?)?",
    "bytes_per_s": r"(?:(?:B|bytes?)(?:/s|ps))?",
    "flops_per_s": r"(?:(?:FLOPs?|OPs?)(?:/s|ps)|FLOPS|OPS)?",
}
_EXAMPLE = {
    "bytes": "14GB, 80GiB or 14e9",
    "flops": "2.2TFLOP or 2.2e12",
    "bytes_per_s": "3.35TB/s, 2000GB/s or 3.35e12",
    "flops_per_s": "20TFLOP/s or 20e12",
    "time": "1.7ms, 250us or 2s",
}


def parse_quantity(text: str, unit: str) -> float:
    """A quantity in its base unit: bytes, FLOPs, either per second, or ns for ``time``.

    Raises:
        ValueError: the text is not such a quantity, or is not above zero.

    Example:
        >>> parse_quantity("0.3 TB/s", "bytes_per_s")
        300000000000.0
    """
    compact = re.sub(r"\s+", "", text)
    value = _time(compact) if unit == "time" else _scaled(compact, unit)
    if value is None or not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not understood; write it like {_EXAMPLE[unit]}")
    return value


def _time(text: str) -> float | None:
    found = re.fullmatch(_NUMBER + r"(?P<unit>ns|us|µs|ms|s)", text, re.IGNORECASE)
    return _value(found["number"]) * _TIME_NS[found["unit"].lower()] if found else None


def _scaled(text: str, unit: str) -> float | None:
    prefix = r"(?P<prefix>(?:[kmgtp]i)|[kmgtpe])?"
    pattern = _NUMBER + f"(?i:{prefix})" + _SUFFIX[unit]
    # Units other than the byte are safe in any case.
    flags = 0 if unit.startswith("bytes") else re.IGNORECASE
    found = re.fullmatch(pattern, text, flags)
    if not found:
        return None
    prefix = (found["prefix"] or "").lower()
    return _value(found["number"]) * (_BINARY[prefix] if prefix in _BINARY else _SCALE[prefix])


def _value(number: str) -> float:
    return float(number.replace(",", "").replace("_", ""))


class Percent(click.ParamType):
    """A click type for a share of one, written ``3%`` or ``0.03``."""

    name = "PERCENT%"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The share, or click's own error."""
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            share = math.nan
        if not 0 <= share < 1:
            self.fail(f"{value!r} is not understood; write it like 3% or 0.03", param, ctx)
        return share


class Quantity(click.ParamType):
    """A click type for `parse_quantity`."""

    def __init__(self, unit: str) -> None:
        self.name = {"bytes": "BYTES", "flops": "FLOPS", "time": "TIME"}.get(unit, "RATE")
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The quantity, or click's own error."""
        if isinstance(value, float):
            return value
        try:
            return parse_quantity(value, self._unit)
        except ValueError as error:
            self.fail(str(error), param, ctx)
