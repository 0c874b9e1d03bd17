"""Kernel groups: launches of one kernel by one operator, in one kind of module and one phase."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from advisor.report.model import KernelGroup
from advisor.roofline import costs
from advisor.roofline.analysis import Analysis
from advisor.roofline.bound import BOUNDS, FLAGS
from advisor.trace.phases import PHASES

#: The number of a layer: ``3`` in paths of our ranges, ``Block[3]`` in those of Python frames.
_NUMBER = re.compile(r"^\d+$|(?<=\[)\d+(?=\]$)")
#: A flag is shown on a group when launches with this share of its time have it.
_FLAG_SHARE = 0.5


def kernel_groups(analysis: Analysis) -> list[KernelGroup]:
    """Groups of the steady steps' launches, by time, longest first.

    Launches of a kernel that differ in bound or pipe (by their shapes), or of which only some are
    costed, are groups of their own.
    """
    timeline, rows = analysis.timeline, analysis.timeline.launches
    counted = np.flatnonzero(analysis.counted)
    if not len(counted) or not analysis.step_count:
        return []
    modules, generic = _distinct_modules(timeline.modules)
    ops = timeline.trace.ops
    keys, group = _distinct(
        rows.name[counted],
        _of(ops.name, rows.op[counted]),
        _of(generic, rows.module[counted]),
        rows.phase[counted],
        analysis.bounds.bound[counted],
        analysis.costs.pipe[counted],
    )
    sums = _Sums(analysis, counted, group, len(keys))
    names = timeline.trace.names
    found = []
    for i, (name, op, module, phase, bound, pipe) in enumerate(keys.tolist()):
        op_text = names[op] if op >= 0 else None
        found.append(
            KernelGroup(
                name=names[name],
                op=op_text,
                module=modules[module] if module >= 0 else None,
                phase=PHASES[phase],
                family=costs.family(op_text or "", names[name]),
                bound=BOUNDS[bound],
                pipe=analysis.costs.pipes[pipe] if pipe >= 0 else None,
                **sums.of(i, costed=pipe >= 0),
            )
        )
    return sorted(
        found, key=lambda g: (-g.time_ms_per_step, g.name, g.op or "", g.module or "", g.phase, g.bound)
    )


def generic_modules(paths: list[str]) -> list[str]:
    """Each path with its layer numbers as ``*``.

    What has parts of its own is a layer, one of several alike; the number of a part without parts tells it
    from its neighbours and stays.

    Example:
        >>> generic_modules(["blocks.0", "blocks.0.mlp.2", "blocks.11.mlp.0"])
        ['blocks.*', 'blocks.*.mlp.2', 'blocks.*.mlp.0']
    """
    split = [path.split(".") for path in paths]
    # A place is a part under another place, by number: paths as tuples would be hashed anew at each level.
    places: dict[tuple[int, str], int] = {}
    layers: set[int] = set()
    ways: list[list[int]] = []
    for parts in split:
        way, at = [], -1
        for part in parts:
            layers.add(at)
            at = places.setdefault((at, part), len(places))
            way.append(at)
        ways.append(way)
    return [
        ".".join(
            _NUMBER.sub("*", part) if at in layers else part for part, at in zip(parts, way, strict=True)
        )
        for parts, way in zip(split, ways, strict=True)
    ]


def _distinct_modules(paths: list[str]) -> tuple[list[str], np.ndarray]:
    """Distinct generic paths, and for each path the index of its own."""
    generic = generic_modules(paths)
    index = {path: i for i, path in enumerate(dict.fromkeys(generic))}
    return list(index), np.array([index[path] for path in generic], np.int64)


def _of(table: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``table[index]``, -1 where the index is negative."""
    found = np.full(len(index), -1, np.int64)
    found[index >= 0] = table[index[index >= 0]]
    return found


def _distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows of these integer columns (values from -1 up), and for each row which one it is."""
    # One number a row as long as it fits, since sorting rows is slow: each column is renumbered first.
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, number = np.unique(column, return_inverse=True)
        _, key = np.unique(key * (int(number.max()) + 1) + number.reshape(-1), return_inverse=True)
        key = key.reshape(-1)
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return np.stack([column[first].astype(np.int64) for column in columns], axis=1), group.reshape(-1)


class _Sums:
    """Per-group sums over the launches counted."""

    def __init__(self, analysis: Analysis, counted: np.ndarray, group: np.ndarray, n: int) -> None:
        found, bounds = analysis.costs, analysis.bounds
        self._steps = analysis.step_count
        dur = analysis.timeline.launches.dur_ns[counted].astype(np.float64)
        roof_ns, flags = bounds.roof_ns[counted], bounds.flags[counted]

        def total(values: np.ndarray) -> list[float]:
            return np.bincount(group, np.nan_to_num(values), minlength=n).tolist()

        self._calls = total(np.ones(len(counted)))
        self._time_ns = total(dur)
        self._all_ns = float(dur.sum())
        self._figures = {name: total(getattr(found, name)[counted]) for name in found.FIGURES}
        self._roof_ns = total(roof_ns)
        self._timed_ns = total(np.where(np.isfinite(roof_ns), dur, 0.0))
        self._flagged_ns = [total(np.where(flags & (1 << bit), dur, 0.0)) for bit in range(len(FLAGS))]

    def of(self, i: int, *, costed: bool) -> dict[str, Any]:
        """Figures of one group, as fields of `KernelGroup`."""
        steps, time_ns = self._steps, self._time_ns[i]
        figures = {name: sums[i] for name, sums in self._figures.items()}
        moved = figures["bytes_read"] + figures["bytes_written"]
        return {
            "calls_per_step": self._calls[i] / steps,
            "time_ms_per_step": time_ns / steps / 1e6,
            "time_fraction": time_ns / self._all_ns if self._all_ns else 0.0,
            **{name: figure / steps if costed else None for name, figure in figures.items()},
            "intensity": figures["flops"] / moved if costed and moved > 0 else None,
            "efficiency": self._roof_ns[i] / self._timed_ns[i] if self._timed_ns[i] > 0 else None,
            "flags": [
                flag
                for flag, flagged_ns in zip(FLAGS, self._flagged_ns, strict=True)
                if time_ns > 0 and flagged_ns[i] >= _FLAG_SHARE * time_ns
            ],
        }
