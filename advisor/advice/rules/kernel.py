"""Kernels that are large and far from their roof, for no reason that another rule gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from advisor.advice.edits import Estimate, Retime
from advisor.advice.evidence import kernel_lines, module_line, short_kernel
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.nchw import nchw_rows
from advisor.advice.rates import aligned
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent
from advisor.roofline.costs import roles

#: Share of the roof that a better kernel would reach, and how much of that a change of versions or a compiler
#: can be hoped to bring.
_REACHABLE = 0.7
_HOPED = (0.0, 0.2, 0.8)
_MIN_SHARE = 0.02
_EAGER_FIX = "model.compile()  # replaces generic elementwise and reduction kernels\n"
_COMPILED_FIX = 'model.compile(mode="max-autotune-no-cudagraphs")  # other tilings; is compiled already\n'
_LIBRARIES_FIX = "# for products and convolutions: newer libraries, or torch.backends.cudnn.benchmark = True"
_ELSEWHERE = ("optimizer", "communication", "memory", "loss", "attention")


@rule(
    "kernel.inefficient",
    title="Large kernels come near their roof",
    failure="Large kernels stay far below their roof",
    source="Williams, Waterman, Patterson, Roofline (2009)\nShares of the roof that kernels reach on an H200",
)
def inefficient(loop: Loop) -> Iterator[Finding]:
    """A kernel of more than 20 µs at less than half of what its FLOPs and bytes allow could be faster.

    Column sums (bias and weight gradients), unusual strides and generic elementwise kernels are typical. What
    helps depends on the kernel: another layout, a compiled version, a library's newer release.

    Recognised by the flag `inefficient`; those with most headroom are named. The range begins at nothing
    gained, and the likely saving is a fifth of the headroom, for nobody can tell whether a better kernel is
    at hand. Silent where that shortens the step by less than a fiftieth, and for kernels that other rules
    explain: attention, norms, chains, unaligned products, NCHW convolutions with the norms between them, the
    loss, the optimizer.
    """
    flagged = loop.flagged("inefficient") & loop.counted & ~np.isin(loop.family, _ELSEWHERE)
    flagged &= ~loop.in_phase("optimizer", "loss")
    explained = loop.patterns.rows() | _unaligned(loop)
    explained |= {row for rows in nchw_rows(loop) for row in rows.tolist()}
    rows = np.array([row for row in np.flatnonzero(flagged).tolist() if row not in explained], np.int64)
    rows = rows[_on_its_pipe(loop, rows)]
    taken = loop.per_step_ns(rows)
    if not len(rows) or loop.share(taken) < _MIN_SHARE:
        return
    now = loop.rows.dur_ns[rows].astype(float)
    headroom = np.maximum(now - loop.analysis.bounds.roof_ns[rows] / _REACHABLE, 0)
    edits = [Retime(rows, Estimate(*(now - part * headroom for part in _HOPED)))]
    if loop.share(loop.step_ns - loop.replay.step_ns(edits)) < _MIN_SHARE:
        return
    worst: dict[int, float] = defaultdict(float)
    for row, gain in zip(rows.tolist(), headroom.tolist(), strict=True):
        worst[int(loop.rows.name[row])] += gain / loop.steps
    gap = float(headroom.sum()) / loop.steps
    name, most = max(worst.items(), key=lambda item: item[1])
    yield Finding(
        title=f"{count(len(rows) / loop.steps, 'large kernel', 'take', what='below half of the roof')} "
        f"{duration(taken)}, {percent(loop.share(taken))} of the step, {duration(gap)} of it headroom",
        evidence=[
            f"most headroom: {short_kernel(loop.timeline.trace.names[name])}, {duration(most)} a step",
            *kernel_lines(loop, rows.tolist(), 6),
            *module_line(loop, rows.tolist()),
        ],
        edits=edits,
        fix=(_COMPILED_FIX if loop.kernels_named(r"^triton_").any() else _EAGER_FIX) + _LIBRARIES_FIX,
        confidence="heuristic",
    )


def _unaligned(loop: Loop) -> set[int]:
    return {
        matrix.row
        for matrix in loop.calls.matrices
        if not all(aligned(length, matrix.itemsize) for length in matrix.row_lengths)
    }


def _on_its_pipe(loop: Loop, rows: np.ndarray) -> np.ndarray:
    """bool (n,): not an fp32 product on plain units, which the precision rules speak of."""
    pipes, pipe = loop.analysis.costs.pipes, loop.analysis.costs.pipe[rows]
    plain = np.array([p >= 0 and pipes[p] == "vector_fp32" for p in pipe.tolist()], bool)
    matrix = loop.by_name(roles.is_matrix, bool)[rows]
    return ~(plain & matrix)
