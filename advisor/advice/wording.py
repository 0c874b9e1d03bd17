"""Figures as rules write them."""

from __future__ import annotations

import math

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_SIZES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def duration(ns: float) -> str:
    """A duration in the unit that suits it, here and in every view of a report.

    Example:
        >>> duration(79_559_000), duration(280_000), duration(3_700), duration(0)
        ('79.6 ms', '280 µs', '3.70 µs', '0 ms')
    """
    if not math.isfinite(ns):
        return "unknown"
    if not ns:
        return "0 ms"
    rounded = abs(float(f"{ns:.3g}"))
    per, unit = next((one for one in _TIMES if rounded >= one[0]), _TIMES[-1])
    return f"{three_digits(ns / per)} {unit}"


def three_digits(value: float) -> str:
    """Three significant digits of a finite figure, and no exponent.

    Example:
        >>> three_digits(1234), three_digits(26.4), three_digits(0.004123), three_digits(0)
        ('1,230', '26.4', '0.00412', '0')
    """
    if not value:
        return "0"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.{min(max(2 - math.floor(math.log10(abs(rounded))), 0), 9)}f}"


def percent(share: float) -> str:
    """A share of one.

    Example:
        >>> percent(0.934), percent(0.021), percent(0.0001)
        ('93%', '2.1%', '<0.1%')
    """
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share * 100:.0f}%" if abs(share) >= 0.0995 else f"{share * 100:.1f}%"


def size(nbytes: float) -> str:
    """An amount of data in decimal units, as in every view of a report.

    Example:
        >>> size(38_535_168), size(3_117_000_000), size(12)
        ('38.5 MB', '3.12 GB', '12 B')
    """
    if not math.isfinite(nbytes):
        return "unknown"
    rounded = abs(float(f"{nbytes:.3g}"))
    per, unit = next((one for one in _SIZES if rounded >= one[0]), (1.0, "B"))
    return f"{nbytes:.0f} B" if unit == "B" else f"{three_digits(nbytes / per)} {unit}"


def rate(bytes_per_s: float) -> str:
    """A rate of data."""
    return f"{size(bytes_per_s)}/s"


def count(number: float, noun: str, does: str = "", *, what: str = "") -> str:
    """A number of things, of which there may be a fraction a step, and what they do.

    A fraction is told of few alone.

    Args:
        number: how many.
        noun: one of them.
        does: a verb, as many do it.
        what: stands between noun and verb.

    Example:
        >>> count(1, "call"), count(2.5, "call"), count(71.3, "launch")
        ('1 call', '2.5 calls', '71 launches')
        >>> count(1, "cast", "take", what="of weights"), count(2, "cast", "take")
        ('1 cast of weights takes', '2 casts take')
    """
    whole = abs(number) >= 10 or abs(number - round(number)) < 0.05
    text = f"{number:,.0f}" if whole else f"{number:,.1f}"
    one = text == "1"
    noun = noun if one else noun + ("es" if noun.endswith(("ch", "s", "x")) else "s")
    return " ".join(filter(None, (text, noun, what, does + "s" if one and does else does)))


def one_line(value: object) -> str:
    """A value out of a trace on one line, for a comment in code; what cannot be shown is left out.

    Example:
        >>> one_line("DDP\\nimport os\\0")
        'DDP import os'
    """
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())[:80]
