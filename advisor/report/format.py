"""Numbers and names as people read them; every renderer writes figures through here.

Three significant digits, decimal prefixes, no locale: the same figure reads the same everywhere.
None and non-finite numbers become `MISSING`, never 0.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from advisor.advice import wording

#: Stands in a table where there is no figure.
MISSING = "—"
#: Stands in prose where there is no figure.
NOT_MEASURED = "not measured"

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

T = TypeVar("T")


def known(value: float | None) -> bool:
    """Whether there is a finite figure."""
    return value is not None and math.isfinite(value)


def number(value: float | None) -> str:
    """Three significant digits and no exponent: ``1,230``, ``26.4``, ``0.00412``."""
    if value is None or not math.isfinite(value):
        return MISSING
    return wording.three_digits(value)


def count(value: float | None) -> str:
    """A count, with a decimal only where it is not whole: ``1,204``, ``12.5``."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.0f}" if abs(value - round(value)) < 0.05 else f"{value:,.1f}"


def duration(milliseconds: float | None) -> str:
    """A time with its own unit: ``26.4 ms``, ``412 µs``, ``1.20 s``."""
    if milliseconds is None or not math.isfinite(milliseconds):
        return MISSING
    return wording.duration(milliseconds * 1e6)


def milliseconds(value: float | None) -> str:
    """A time in ms for a column whose heading has the unit: ``12.410``."""
    return f"{value:,.3f}" if value is not None and math.isfinite(value) else MISSING


def flops(value: float | None) -> str:
    """An amount of arithmetic: ``1.23 TFLOP``."""
    return _scaled(value, "FLOP")


def flops_per_s(value: float | None) -> str:
    """A rate of arithmetic: ``989 TFLOP/s``."""
    return _scaled(value, "FLOP/s")


def number_with_prefix(value: float | None) -> str:
    """An amount whose unit stands elsewhere, in a heading or on an axis: ``832 G``."""
    return _scaled(value, "").strip()


def decade(exponent: int, unit: str = "") -> str:
    """A power of ten for an axis: ``0.01``, ``100``, ``10 TFLOP/s``."""
    if not unit and -4 < exponent < 4:
        return f"{10.0**exponent:g}" if exponent < 3 else "1,000"
    step = min(max(exponent // 3, 0), 5)
    return f"{10.0 ** (exponent - 3 * step):g} {('', 'k', 'M', 'G', 'T', 'P')[step]}{unit}"


def nbytes(value: float | None) -> str:
    """An amount of memory in decimal units: ``1.23 GB``."""
    return MISSING if value is None or not math.isfinite(value) else wording.size(value)


def bytes_per_s(value: float | None) -> str:
    """A bandwidth in decimal units: ``4.80 TB/s``."""
    return _scaled(value, "B/s")


def intensity(value: float | None) -> str:
    """An arithmetic intensity: ``206 FLOP/byte``."""
    return f"{number(value)} FLOP/byte" if known(value) else MISSING


def percent(fraction: float | None) -> str:
    """A fraction as a percentage: ``41.2%``; a trace of something is ``<0.1%``, not 0."""
    if fraction is None or not math.isfinite(fraction):
        return MISSING
    if 0 < abs(fraction) < 0.0005:
        return "<0.1%" if fraction > 0 else ">-0.1%"
    return f"{100 * fraction:.1f}%"


def change(fraction: float | None) -> str:
    """A change as a signed percentage: ``+3.2%``, ``−21.8%``."""
    return (
        MISSING if fraction is None or not math.isfinite(fraction) else f"{fraction:+.1%}".replace("-", "−")
    )


def ratio(value: float | None) -> str:
    """A ratio: ``1.53×``."""
    return f"{value:.2f}×" if value is not None and math.isfinite(value) else MISSING


def pipe(name: str | None) -> str:
    """A pipe by dtype and unit: ``tensor_bf16`` reads ``bf16 tensor``."""
    if not name or name == "none":
        return MISSING
    unit, _, dtype = name.partition("_")
    return f"{dtype} {unit}" if dtype else name


def one_line(text: str) -> str:
    """The text with each run of white space made one space."""
    return " ".join(text.split())


def sentence(text: str) -> str:
    """The text with a capital at its start."""
    return text[:1].upper() + text[1:]


def few(names: Sequence[str], shown: int = 2) -> str:
    """The first of several names, and how many there are besides: ``a, b and 3 more``."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def shorten(text: str, width: int) -> str:
    """At most `width` characters, the middle left out: kernel names differ at both ends."""
    if len(text) <= width:
        return text
    head = (width - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def printable(value: T) -> T:
    """A copy of a report, or of a part of one, whose every text is safe to show.

    Control characters, lone surrogates and invisible direction marks become U+FFFD, so that no name
    in a trace can move a cursor, reverse a line or break the encoding. Line feeds and tabs stay.
    """
    return _printable(value)  # type: ignore[no-any-return]


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else "".join(map(_printable_char, value))
    if isinstance(value, msgspec.Struct):
        return type(value)(**{name: _printable(getattr(value, name)) for name in value.__struct_fields__})
    if isinstance(value, dict):
        return {_printable(str(key)): _printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    return value


def _printable_char(char: str) -> str:
    if char in "\n\t":
        return char
    category = unicodedata.category(char)
    if char == "\r" or category in ("Zl", "Zp"):
        return " "
    return "\ufffd" if category in ("Cc", "Cf", "Cs", "Cn") else char


def _scaled(value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = float(f"{value:.3g}")
    for size, prefix in _PREFIXES:
        if abs(rounded) >= size:
            return f"{number(value / size)} {prefix}{unit}"
    return f"{count(value) if abs(value) >= 1 else number(value)} {unit}"
