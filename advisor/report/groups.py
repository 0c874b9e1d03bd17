"""Kernel groups: launches of one kernel by one operator, in one kind of module and one phase."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from advisor.report.analysis import Analysis
from advisor.report.model import KernelGroup
from advisor.roofline import costs
from advisor.roofline.bound import BOUNDS, FLAGS
from advisor.trace.phases import PHASES

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
#: A flag is shown on a group when launches with this share of its time have it.
_FLAG_SHARE = 0.5


def kernel_groups(analysis: Analysis) -> list[KernelGroup]:
    """Groups of the steady steps' launches, by time, longest first."""
    timeline, rows = analysis.timeline, analysis.timeline.launches
    counted = np.flatnonzero(analysis.counted)
    if not len(counted) or not analysis.step_count:
        return []
    modules, module_of = _generic_modules(timeline.modules)
    ops = timeline.trace.ops
    op_name = np.where(rows.op >= 0, ops.name[np.maximum(rows.op, 0)] if len(ops) else -1, -1)
    module = np.where(rows.module >= 0, module_of[np.maximum(rows.module, 0)], -1)
    columns = np.stack([rows.name, op_name, module, rows.phase.astype(np.int64)], axis=1)[counted]
    keys, group = np.unique(columns, axis=0, return_inverse=True)
    sums = _Sums(analysis, counted, group.ravel(), len(keys))
    total_ns = float(rows.dur_ns[counted].sum())
    names = timeline.trace.names
    found = []
    for i, (name, op, module_index, phase) in enumerate(keys.tolist()):
        op_text = names[op] if op >= 0 else None
        found.append(
            KernelGroup(
                name=names[name],
                op=op_text,
                module=modules[module_index] if module_index >= 0 else None,
                phase=PHASES[phase],
                family=costs.family(op_text or "", names[name]),
                time_fraction=float(sums.time_ns[i] / total_ns) if total_ns else 0.0,
                **sums.of(i),
            )
        )
    return sorted(found, key=lambda g: (-g.time_ms_per_step, g.name, g.op or "", g.module or "", g.phase))


def _generic_modules(paths: list[str]) -> tuple[list[str], np.ndarray]:
    """Paths with layer numbers as ``*``, and for each path the index of its generic one."""
    generic = [_LAYER_NUMBER.sub("*", path) for path in paths]
    distinct = sorted(set(generic))
    index = {path: i for i, path in enumerate(distinct)}
    return distinct, np.array([index[path] for path in generic] or [-1], np.int64)


class _Sums:
    """Per-group sums over the launches counted."""

    def __init__(self, analysis: Analysis, counted: np.ndarray, group: np.ndarray, n: int) -> None:
        rows, costs_, bounds = analysis.timeline.launches, analysis.costs, analysis.bounds
        self._steps = analysis.step_count
        self._pipes = costs_.pipes
        dur = rows.dur_ns[counted].astype(np.float64)
        known = costs_.known[counted]

        def total(values: np.ndarray) -> np.ndarray:
            return np.bincount(group, values, minlength=n)

        self.calls = total(np.ones(len(counted)))
        self.time_ns = total(dur)
        self._known_ns = total(np.where(known, dur, 0.0))
        self._known = total(known)
        self._flops, self._read, self._written = (
            total(np.nan_to_num(column[counted]))
            for column in (costs_.flops, costs_.bytes_read, costs_.bytes_written)
        )
        self._roof_ns = total(np.nan_to_num(bounds.roof_ns[counted]))
        has_roof = np.isfinite(bounds.roof_ns[counted])
        self._timed_ns = total(np.where(has_roof, dur, 0.0))
        self._pipe = _mode(group, costs_.pipe[counted], dur, n, len(costs_.pipes))
        self._bound = _mode(group, bounds.bound[counted], dur, n, len(BOUNDS))
        self._flags = [
            total(np.where(bounds.flags[counted] & (1 << bit), dur, 0.0)) for bit in range(len(FLAGS))
        ]

    def of(self, i: int) -> dict[str, Any]:
        steps, costed = self._steps, self._known[i] == self.calls[i]
        moved = self._read[i] + self._written[i]
        pipe = int(self._pipe[i])
        return {
            "calls_per_step": float(self.calls[i] / steps),
            "time_ms_per_step": float(self.time_ns[i] / steps / 1e6),
            # A sum with a hole in it is no sum: all launches of the group are costed, or none count.
            "flops": float(self._flops[i] / steps) if costed else None,
            "bytes_read": float(self._read[i] / steps) if costed else None,
            "bytes_written": float(self._written[i] / steps) if costed else None,
            "intensity": float(self._flops[i] / moved) if costed and moved > 0 else None,
            "pipe": self._pipes[pipe] if costed and pipe >= 0 else None,
            "bound": BOUNDS[int(self._bound[i])],
            "efficiency": float(self._roof_ns[i] / self._timed_ns[i]) if self._timed_ns[i] > 0 else None,
            "flags": [
                flag
                for bit, flag in enumerate(FLAGS)
                if self.time_ns[i] > 0 and self._flags[bit][i] >= _FLAG_SHARE * self.time_ns[i]
            ],
        }


def _mode(group: np.ndarray, value: np.ndarray, weight: np.ndarray, n: int, values: int) -> np.ndarray:
    """The value with the most weight in each group; -1 is a value too. int64 (n,)."""
    table = np.zeros((n, values + 1))
    np.add.at(table, (group, value.astype(np.int64) + 1), weight + 1e-9)
    return table.argmax(axis=1) - 1
