"""The roof of this machine's CPU, measured in about a second, for traces that have no device in them."""

from __future__ import annotations

import functools
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from advisor.roofline.devices import Device

#: Arrays are this many times the last-level cache, so that a copy goes to memory...
_LLC_MULTIPLE = 3
#: ...within these, so that an unknown or a huge cache costs neither truth nor time.
_ARRAY_BYTES = (64 << 20, 256 << 20)
#: Small ones slip in between other work on a busy machine, large ones fill many cores.
_GEMM_SIZES = (384, 1024)
_MAX_RUNS = 200
_BUDGET_S = 0.1
#: A rate is read off an operator this long; shorter ones are told too roughly.
_RELIABLE_NS = 10_000
#: No core does more: two fused multiply-adds of 512 bits a cycle at 6 GHz, by bytes of a number.
_MOST_BYTES_PER_S = 2 * 2 * 64 * 6e9
_WIDTHS = {"vector_fp32": 4, "vector_fp64": 8}


def cpu_name() -> str:
    """The CPU's model, e.g. ``AMD EPYC 7763 64-Core Processor``."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine() or "CPU"


@functools.cache
def measure_cpu() -> Device:
    """This machine's memory bandwidth and matrix rates, measured with numpy; once a process.

    Bandwidth is that of a copy, read and written bytes counted: numpy copies on one core, so on a machine
    with many it is run on as many threads as there are cores. The fp32 and fp64 rates are those of
    numpy's BLAS on square matrices, one after the other and one a core, whichever is faster; other formats
    stay unknown.

    Only a trace that was made on this machine may be set against it: the caller decides. Other work on the
    machine makes the figures too low; `at_least_reached` sees to that.
    """
    cores = usable_cores()
    bandwidth = _copy_bytes_per_s(cores)
    single, double = _gemm_flops_per_s(np.float32), _gemm_flops_per_s(np.float64)
    # No CPU is slower in the narrower format: where it seems so, other work disturbed the measurement.
    peaks = {"vector_fp32": max(single, double), "vector_fp64": double}
    source = f"measured here: numpy {np.__version__} matrix product, best of several"
    return Device(
        name=cpu_name(),
        roofs="measured",
        peaks=peaks,
        peak_sources=dict.fromkeys(peaks, source),
        bandwidth_bytes_per_s=bandwidth,
        bandwidth_source=f"measured here: numpy copy on {cores} threads, beyond the last-level cache, best",
        memory_bytes=_memory_bytes(),
        llc_bytes=last_level_cache_bytes(),
        sms=cores,
        note="measured on the machine that ran the analysis, in about a second",
    )


def at_least_reached(
    device: Device,
    *,
    flops: np.ndarray,
    bytes_moved: np.ndarray,
    dur_ns: np.ndarray,
    pipe: np.ndarray,
    pipes: Sequence[str],
    name: np.ndarray,
    names: Sequence[str],
) -> Device:
    """The device with each roof at least at the highest rate that an operator reached; its source says so.

    A rate that no core can do is none: the operator's cost is wrong then, and the roof stays.

    Args:
        device: from `measure_cpu`.
        flops, bytes_moved: float64 (n,), of each operator; NaN where not known.
        dur_ns: (n,), time taken.
        pipe: integers (n,), index into `pipes`; -1 where not known.
        pipes: names of pipes.
        name: (n,), index into `names`.
        names: of operators.
    """
    seconds = np.where(dur_ns >= _RELIABLE_NS, dur_ns, np.nan) / 1e9
    peaks, sources = dict(device.peaks), dict(device.peak_sources)
    for number, known in enumerate(pipes):
        roof = peaks.get(known)
        rate = np.where(pipe == number, flops / seconds, np.nan)
        rate[rate > (device.sms or 1) * _MOST_BYTES_PER_S / _WIDTHS.get(known, 4)] = np.nan
        if roof and (best := _highest(rate)) is not None and rate[best] > roof:
            peaks[known] = float(rate[best])
            sources[known] = _reached(names[name[best]], f"{roof / 1e9:.3g} GFLOP/s", sources[known])
    wide, narrow = peaks.get("vector_fp64"), peaks.get("vector_fp32")
    if wide and narrow and wide > narrow:
        peaks["vector_fp32"], sources["vector_fp32"] = wide, sources["vector_fp64"]
    found = replace(device, peaks=peaks, peak_sources=sources)

    bandwidth, cache_bytes = device.bandwidth_bytes_per_s, device.llc_bytes or _ARRAY_BYTES[1]
    # What the cache may have served, on the way in and on the way out, says nothing of the memory.
    rate = (bytes_moved - 2 * cache_bytes) / seconds
    if bandwidth and (best := _highest(rate)) is not None and rate[best] > bandwidth:
        source = _reached(names[name[best]], f"{bandwidth / 1e9:.3g} GB/s", device.bandwidth_source)
        found = replace(found, bandwidth_bytes_per_s=float(rate[best]), bandwidth_source=source)
    return found


def _highest(rate: np.ndarray) -> int | None:
    return None if np.isnan(rate).all() else int(np.nanargmax(rate))


def _reached(operator: str, measured: str, source: str) -> str:
    return f"at least: reached by {operator} in this trace; {measured} {source}"


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Size of the largest cache that the kernel reports for the first core, or None."""
    sizes = []
    for path in root.glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM]?)", path.read_text("ascii").strip())
        if found:
            sizes.append(int(found[1]) << {"": 0, "K": 10, "M": 20}[found[2]])
    return max(sizes, default=None)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _copy_bytes_per_s(threads: int) -> float:
    low, high = _ARRAY_BYTES
    wanted = _LLC_MULTIPLE * (last_level_cache_bytes() or 0)
    source = np.ones(min(max(wanted, low), high) // 8)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        return 2 * source.nbytes / _best_s(lambda: list(pool.map(lambda pair: np.copyto(*pair), parts)))


def _gemm_flops_per_s(dtype: type[np.floating]) -> float:
    return max(_square_flops_per_s(size, dtype) for size in _GEMM_SIZES)


def _square_flops_per_s(size: int, dtype: type[np.floating]) -> float:
    a = np.random.default_rng(0).random((size, size)).astype(dtype)
    b, cores = a.T.copy(), usable_cores()
    outs = [np.empty_like(a) for _ in range(cores)]
    together_s = _best_s(lambda: np.matmul(a, b, out=outs[0]))
    with ThreadPoolExecutor(cores) as pool:
        # Where BLAS is held to one thread, one product a core is what fills the machine.
        apart_s = _best_s(lambda: list(pool.map(lambda out: np.matmul(a, b, out=out), outs))) / cores
    return 2 * size**3 / min(together_s, apart_s)


def _best_s(run: Callable[[], object]) -> float:
    """Shortest of a few runs after one to warm up, within a budget: other work on the machine only slows."""
    run()
    taken: list[float] = []
    while len(taken) < _MAX_RUNS and sum(taken) < _BUDGET_S:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)
