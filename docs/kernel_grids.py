"""Tables of kernels over grids of sizes: shares of copy bandwidth, the best of the others, where ours win."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WAYS = {"forward": "forward", "forward+backward": "with backward"}
#: What is shown as 1.00x or more counts as no slower.
AS_FAST = 0.995
INTRODUCTION = """\
### Over grids of sizes

Single calls in bf16, forward, and forward with backward: the share of copy bandwidth that ours reach, and
the time of the best of the others over ours, in bold where ours is slower. What shows as 1.00× counts as no
slower. MB is what the forward must move. Below some tens of MB a call's fixed µs are much of its time, for
all alike."""


@dataclass(frozen=True)
class Size:
    """A kernel at a size: its rows of results by direction."""

    kernel: str
    shape: str
    rows: Mapping[str, Mapping[str, Any]]

    @property
    def moved_mb(self) -> float:
        """What the forward must move, in 1e6 bytes."""
        return min(row["bytes"] for row in self.rows.values()) / 1e6

    def best_other(self, way: str) -> tuple[str, float] | None:
        """Which of the others is fastest, and its time over ours."""
        ms = self.rows[way]["ms"] if way in self.rows else {}
        others = {name: time for name, time in ms.items() if not name.startswith("ours")}
        if "ours" not in ms or not others:
            return None
        name = min(others, key=lambda other: others[other])
        return name, others[name] / ms["ours"]


def sizes(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Size]]:
    """By kernel, its sizes from the smallest to the largest."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["kernel"], row["shape"]), {})[row["direction"]] = row
    by_kernel: dict[str, list[Size]] = {}
    for (kernel, shape), directions in found.items():
        by_kernel.setdefault(kernel, []).append(Size(kernel, shape, directions))
    return {kernel: sorted(own, key=lambda size: size.moved_mb) for kernel, own in by_kernel.items()}


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of a family's grid, what follows from it, and what it lacks."""
    kernels = sizes(result["rows"])
    head = ["kernel", "size", "MB", *(cell for way in WAYS.values() for cell in (way, "best other"))]
    yield _line(head)
    yield _line(["---"] * len(head))
    for own in kernels.values():
        yield from (_line(_cells(size)) for size in own)
    yield ""
    for kernel, own in kernels.items():
        yield (
            f"- **{kernel}**: " + "; ".join(f"{said} {verdict(own, way)}" for way, said in WAYS.items()) + "."
        )
    if lacking := result.get("left_out"):
        yield f"- Not timed, for lack of time: {', '.join(lacking)}."
    yield from ("", _certainty(result["rows"]))


def verdict(own: Sequence[Size], way: str) -> str:
    """From which size on ours are no slower than the best of the others, and where not.

    Args:
        own: a kernel's sizes, the smallest first.
        way: a direction.
    """
    judged = [(size, best) for size in own if (best := size.best_other(way))]
    if not judged:
        return "not timed beside others"
    slower = [(size, ratio, name) for size, (name, ratio) in judged if ratio < AS_FAST]
    if not slower:
        return f"no slower than the best other at all {len(judged)} sizes"
    said = ", ".join(f"{size.shape} ({ratio:.2f}× {name})" for size, ratio, name in slower)
    if len(slower) == len(judged):
        return f"slower at all {len(judged)} sizes: {said}"
    beyond = [size.moved_mb for size, _ in judged if size.moved_mb > slower[-1][0].moved_mb]
    if beyond:
        return f"no slower from {_megabytes(beyond[0])} MB on; slower at {said}"
    return f"slower at {len(slower)} of {len(judged)} sizes, the largest among them: {said}"


def _cells(size: Size) -> Iterator[str]:
    yield from (size.kernel, size.shape, _megabytes(size.moved_mb))
    for way in WAYS:
        row = size.rows.get(way)
        if row is None:
            yield "–"
        elif "ours" in row["share_of_roof"]:
            yield f"{row['share_of_roof']['ours'] * 100:.0f} %"
        else:
            yield f"failed: {row['failures'].get('ours', 'unknown')}"
        best = size.best_other(way)
        if best is None:
            yield "–"
        else:
            name, ratio = best
            yield f"{ratio:.2f}× {name}" if ratio >= AS_FAST else f"**{ratio:.2f}×** {name}"


def _certainty(rows: Sequence[Mapping[str, Any]]) -> str:
    half = [share for row in rows for share in row["interval"].values()]
    calls = [row["repeats"] for row in rows if row["repeats"]]
    if not half or not calls:
        return ""
    within = sum(share <= 0.01 for share in half) / len(half)
    return (
        f"Medians of at most {max(calls)} calls; half the 95 % interval is within 1 % for {within:.0%} of "
        f"them, {max(half):.1%} at worst."
    )


def _megabytes(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
