"""Lines of evidence: what launches are, where in the model, and how long they take."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from advisor.advice.edits import Estimate, Fuse
from advisor.advice.wording import count, duration, percent
from advisor.roofline.costs import Tensor

if TYPE_CHECKING:
    from advisor.advice.loop import Loop

_MAX_NAME, _MAX_PATH = 64, 160
#: What CUTLASS calls every kernel, with the operation as its argument.
_CUTLASS = re.compile(r"^cutlass\w*::Kernel\d?<(?=[A-Za-z])")
_INDEX = re.compile(r"\b\d+\b")


def kernel_lines(loop: Loop, rows: Iterable[int], limit: int = 4) -> list[str]:
    """The kernels that take most time, a line each: operator, kernel, count and time a step."""
    names, ops = loop.timeline.trace.names, loop.timeline.trace.ops
    time: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        if loop.counted[row]:
            op = int(loop.rows.op[row])
            key = (names[ops.name[op]] if op >= 0 else "", names[loop.rows.name[row]])
            time[key][0] += 1 / loop.steps
            time[key][1] += loop.rows.dur_ns[row] / loop.steps
    worst = sorted(time.items(), key=lambda item: -item[1][1])[:limit]
    return [
        f"{_short(op) or 'no operator'}: {count(number, 'launch')} of "
        f"{short_kernel(kernel)}, {duration(spent)} ({percent(loop.share(spent))})"
        for (op, kernel), (number, spent) in worst
    ]


def module_line(loop: Loop, rows: Iterable[int]) -> list[str]:
    """Where in the model, if the trace tells: paths without the numbers of layers."""
    paths = Counter(
        _INDEX.sub("*", path) for row in rows if (path := loop.module_of(row)) is not None and path
    )
    return [f"in {', '.join(_short(path, _MAX_PATH) for path, _ in paths.most_common(3))}"] if paths else []


def short_kernel(name: str) -> str:
    """A kernel's name without return type, namespaces and template arguments; of CUTLASS' its operation's.

    Example:
        >>> short_kernel("void at::native::reduce_kernel<128, 4>(at::native::ReduceOp)")
        'reduce_kernel'
        >>> short_kernel("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)")
        'cutlass_80_simt_sgemm_128x32_8x5_nn_align1'
    """
    bare = re.sub(r"^void\s+", "", name).replace("(anonymous namespace)::", "")
    bare = _CUTLASS.sub("", bare)
    head = re.split(r"[<(>,]", bare)[0].split("::")[-1] or bare
    return _short(head)


def _short(name: str, most: int = _MAX_NAME) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def shape(tensor: Tensor) -> str:
    """``[8192, 768] bf16``."""
    return f"{list(tensor.shape)} {tensor.dtype}"


def fused(
    groups: Sequence[Sequence[int]], times: Sequence[Estimate], *, with_host: bool = True
) -> list[Fuse]:
    """Each group of rows as one launch of its time; groups without rows are left out.

    Args:
        groups: rows of each.
        times: one for each group, plain numbers.
        with_host: as for `Fuse`.
    """
    kept = [(np.array(sorted(rows)), time) for rows, time in zip(groups, times, strict=True) if len(rows)]
    if not kept:
        return []
    return [
        Fuse(
            [rows for rows, _ in kept],
            Estimate.stacked([time for _, time in kept]),
            with_host,
        )
    ]
