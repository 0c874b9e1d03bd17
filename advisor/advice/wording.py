"""Figures as rules write them."""

from __future__ import annotations

_SIZES = ("B", "kB", "MB", "GB", "TB")


def duration(ns: float) -> str:
    """A duration in the unit that suits it.

    Example:
        >>> duration(79_559_000), duration(3_700)
        ('79.6 ms', '3.7 µs')
    """
    if abs(ns) >= 1e9:
        return f"{ns / 1e9:.2f} s"
    if abs(ns) >= 1e8:
        return f"{ns / 1e6:.0f} ms"
    if abs(ns) >= 1e7:
        return f"{ns / 1e6:.1f} ms"
    return f"{ns / 1e6:.2f} ms" if abs(ns) >= 1e5 else f"{ns / 1e3:.1f} µs"


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
    """An amount of data, decimal units.

    Example:
        >>> size(38_535_168)
        '38.5 MB'
    """
    unit = 0
    while abs(nbytes) >= 1000 and unit < len(_SIZES) - 1:
        nbytes, unit = nbytes / 1000, unit + 1
    return (
        f"{nbytes:.0f} {_SIZES[unit]}" if unit == 0 or abs(nbytes) >= 100 else f"{nbytes:.1f} {_SIZES[unit]}"
    )


def rate(bytes_per_s: float) -> str:
    """A rate of data."""
    return f"{size(bytes_per_s)}/s"


def count(number: float, noun: str, does: str = "", *, what: str = "") -> str:
    """A number of things, of which there may be a fraction a step, and what they do.

    Args:
        number: how many.
        noun: one of them.
        does: a verb, as many do it.
        what: stands between noun and verb.

    Example:
        >>> count(1, "call"), count(2.5, "call"), count(3, "launch")
        ('1 call', '2.5 calls', '3 launches')
        >>> count(1, "cast", "take", what="of weights"), count(2, "cast", "take")
        ('1 cast of weights takes', '2 casts take')
    """
    text = f"{number:,.0f}" if abs(number - round(number)) < 0.05 else f"{number:,.1f}"
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
