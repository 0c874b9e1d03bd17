"""Holistic Trace Analysis in a process of its own: it prints, logs, and may take long or fail.

Run as ``python -m advisor.report.hta_worker JOB.json RESULT.jsonl``; `advisor.report.hta` starts it. A line
of the result is a figure (file, figure, unit, value) or a failure (file, section, error).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from advisor.report.hta_basis import COMPUTE, IDLE, NON_COMPUTE, OVERLAP, SPAN, UNITS

Figure = tuple[str, str, float]
#: HTA numbers ranks; each file is read alone, as the only rank of its job.
_RANK = 0
_STREAMS_SHOWN = 3
#: What HTA calls the edges of the critical path, and what they are.
_BOUND_BY = {
    "cpu_bound": "host work",
    "data_loading": "data loading",
    "gpu_compute_bound": "compute kernels",
    "gpu_communication_bound": "communication",
    "gpu_kernel_kernel_overhead": "gaps between kernels",
    "gpu_kernel_launch_overhead": "launch latency",
}


def read(path: str, folder: str) -> Any:
    """HTA's analysis of one file, its last step kept.

    Raises:
        ValueError: HTA sees no device work in the file.
        Exception: whatever HTA raises on a file that it cannot read.
    """
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis({_RANK: path}, folder, include_last_profiler_step=True)
    frame = analysis.t.get_all_traces().get(_RANK)
    if frame is None or "stream" not in frame or not (frame["stream"] != -1).any():
        raise ValueError("it sees no device work in this trace")
    return analysis


@contextlib.contextmanager
def whole_ns(analysis: Any) -> Iterator[None]:
    """Times in whole ns instead of fractional us: sums are exact, and HTA's own assertions hold."""
    import numpy as np

    frame = analysis.t.get_trace(_RANK)
    kept = {column: frame[column].copy() for column in ("ts", "dur")}
    for column, values in kept.items():
        frame[column] = np.rint(values.to_numpy(float) * 1000).astype("int64")
    try:
        yield
    finally:
        for column, values in kept.items():
            frame[column] = values


def temporal_breakdown(analysis: Any, _step: int | None) -> Iterator[Figure]:
    """Where the device's time went; HTA labels what it was given in ns as us."""
    with whole_ns(analysis):
        row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    for figure, column in (
        (SPAN, "kernel_time(us)"),
        (IDLE, "idle_time(us)"),
        (COMPUTE, "compute_time(us)"),
        (NON_COMPUTE, "non_compute_time(us)"),
    ):
        yield figure, UNITS[figure], float(row[column]) / 1e6


def communication_overlap(analysis: Any, _step: int | None) -> Iterator[Figure]:
    """Share of communication under compute; HTA gives NaN where there is no communication."""
    with whole_ns(analysis):
        row = analysis.get_comm_comp_overlap(visualize=False).iloc[0]
    yield OVERLAP, UNITS[OVERLAP], float(row["comp_comm_overlap_pctg"])


def queue_length(analysis: Any, _step: int | None) -> Iterator[Figure]:
    """Work that waits on a stream, over its changes; the streams with the most changes."""
    summary = analysis.get_queue_length_summary(ranks=[_RANK])
    if summary is None:
        return
    lengths = summary["queue_length"].sort_values("count", ascending=False)
    for (_rank, stream), row in lengths.head(_STREAMS_SHOWN).iterrows():
        yield f"queue length on stream {stream}, mean", "launches", float(row["mean"])
        yield f"queue length on stream {stream}, longest", "launches", float(row["max"])


def critical_path(analysis: Any, step: int | None) -> Iterator[Figure]:
    """The longest chain of dependent work in one step, and what it is made of.

    Raises:
        RuntimeError: HTA finds no valid graph.
    """
    if step is None:
        return
    instance = _instance(analysis, f"ProfilerStep#{step}")
    graph, valid = analysis.critical_path_analysis(
        _RANK, "ProfilerStep", instance, data_load_events=["DataLoader"]
    )
    edges = graph.get_critical_path_breakdown() if valid else None
    if edges is None:
        raise RuntimeError("its dependency graph is not valid")
    total_us = float(edges["duration"].sum())
    yield f"critical path of step {step}", "ms", total_us / 1e3
    for kind, us in edges.groupby("bound_by")["duration"].sum().items():
        if kind and total_us:
            yield (
                f"critical path of step {step}: {_BOUND_BY.get(kind, kind)}",
                "%",
                100 * float(us) / total_us,
            )


def _instance(analysis: Any, name: str) -> int:
    """Position of the host's range of this name among all that HTA takes for steps."""
    frame, symbols = analysis.t.get_trace(_RANK), analysis.t.symbol_table.get_sym_table()
    marks = [
        (symbols[row.name_id], symbols[row.cat])
        for row in frame.rename(columns={"name": "name_id"})[["name_id", "cat"]].itertuples(index=False)
        if "ProfilerStep" in symbols[row.name_id]
    ]
    return next(i for i, mark in enumerate(marks) if mark[0] == name and not mark[1].startswith("gpu"))


#: In the order of their cost; the critical path is by far the slowest.
SECTIONS: dict[str, Callable[[Any, int | None], Iterator[Figure]]] = {
    "temporal breakdown": temporal_breakdown,
    "communication overlap": communication_overlap,
    "queue length": queue_length,
    "critical path": critical_path,
}


def examine(number: int, file: dict[str, Any], folder: str, out: TextIO) -> None:
    """Write each figure of one file, and each failure, as soon as it is known."""

    def put(**line: Any) -> None:
        out.write(json.dumps({"file": number, **line}) + "\n")
        out.flush()

    try:
        analysis = read(file["path"], folder)
    except Exception as error:  # noqa: BLE001 - another tool's failure is a remark in our report
        put(section="reading", error=reason(error))
        return
    for section, figures in SECTIONS.items():
        try:
            for figure, unit, value in figures(analysis, file["critical_path_step"]):
                if math.isfinite(value):
                    put(figure=figure, unit=unit, value=value)
        except Exception as error:  # noqa: BLE001 - one section's failure leaves the others
            put(section=section, error=reason(error))


def reason(error: Exception) -> str:
    """One short line on an exception."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200].rstrip(": ")


def main(job: Path, result: Path) -> None:
    """Examine the files of a job one after the other."""
    with result.open("w", encoding="utf-8") as out:
        for number, file in enumerate(json.loads(job.read_text(encoding="utf-8"))):
            examine(number, file, str(job.parent), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
