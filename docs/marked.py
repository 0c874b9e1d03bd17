"""The part of a page between two marks, made anew by the generators beside this file."""

from __future__ import annotations


def between(page: str, begin: str, end: str, content: str) -> str:
    """The page with `content` between its two marks.

    Raises:
        ValueError: the page lacks a mark.
    """
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"the page lacks {begin} or {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"
