"""Hardware counters as the renderers show them: the figures as a whole, and a row a kernel group."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.report import format as fmt
from advisor.report import metrics
from advisor.report.model import CounterSummary, KernelGroup, Report
from advisor.report.names import short_name

#: Kernel groups shown, the longest.
SHOWN = 40
#: A ratio of modelled to counted bytes or FLOPs beyond this is marked.
_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel group, formatted; per launch.

    Attributes:
        read_ratio, flops_ratio: modelled over counted.
        differs: whether the bytes read, the FLOPs or the bound contradict each other.
    """

    kernel: str
    op: str
    launches: str
    time: str
    read: str
    modelled_read: str
    read_ratio: str
    written: str
    flops: str
    modelled_flops: str
    flops_ratio: str
    dram: str
    bound: str
    modelled_bound: str
    differs: bool


def figures(counters: CounterSummary) -> list[tuple[str, str]]:
    """Label and value of what is known of a file of counters as a whole."""
    spread = fmt.MISSING
    if counters.read_ratio_p50 is not None:
        spread = (
            f"{fmt.ratio(counters.read_ratio_p50)}, mostly {fmt.ratio(counters.read_ratio_p5)} "
            f"to {fmt.ratio(counters.read_ratio_p95)}"
        )
    joined = f"{fmt.count(counters.joined)} of {fmt.count(counters.launches)}"
    return [
        ("Launches in the file that were found in the trace", joined),
        ("Kernel time of the trace that they cover", fmt.percent(counters.joined_time_fraction)),
        ("Matrix units' FLOPs within 2%", fmt.percent(counters.flops_agree_time_fraction)),
        ("Bytes read within 1.25×, kernels over 64 MB", fmt.percent(counters.read_within_1_25_time_fraction)),
        ("Bytes read within 1.5×, kernels over 64 MB", fmt.percent(counters.read_within_1_5_time_fraction)),
        ("Modelled over counted bytes read", spread),
        ("Bound as the counted intensity says", fmt.percent(counters.bound_agrees_time_fraction)),
    ]


def rows(report: Report) -> list[Row]:
    """The groups that have counters, the longest first."""
    return [_row(group) for group in metrics.by_time(report.kernels) if group.measured][:SHOWN]


def _row(group: KernelGroup) -> Row:
    found = group.measured
    assert found is not None
    read = _ratio(found.modelled_bytes_read, found.bytes_read)
    flops = _ratio(found.modelled_flops, found.flops)
    other_bound = found.bound is not None and found.bound != group.bound
    # What fits a cache is read less often than modelled, and a few FLOPs of index arithmetic are none.
    large = (found.bytes_read or 0) > 64e6
    return Row(
        kernel=short_name(group.name),
        op=group.op or fmt.MISSING,
        launches=fmt.count(found.launches),
        time=fmt.duration(found.time_ms),
        read=fmt.nbytes(found.bytes_read),
        modelled_read=fmt.nbytes(found.modelled_bytes_read),
        read_ratio=fmt.ratio(read),
        written=fmt.nbytes(found.bytes_written),
        flops=fmt.flops(found.flops),
        modelled_flops=fmt.flops(found.modelled_flops),
        flops_ratio=fmt.ratio(flops),
        dram=fmt.percent(found.dram_fraction),
        bound=found.bound or fmt.MISSING,
        modelled_bound=group.bound,
        differs=other_bound or (large and _is_off(read)) or (group.family == "matmul" and _is_off(flops)),
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _is_off(ratio: float | None) -> bool:
    return ratio is not None and not 1 / _FACTOR <= ratio <= _FACTOR
