"""The roof of this machine's CPU, measured in about a second, for traces that have no device in them."""

from __future__ import annotations

import functools
import os
import platform
import re
import time
from collections.abc import Callable
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
_BUDGET_S = 0.2


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
    numpy's BLAS on square matrices; other formats stay unknown.

    Only a trace that was made on this machine may be set against it: the caller decides.
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
    from concurrent.futures import ThreadPoolExecutor

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
    b, out = a.T.copy(), np.empty_like(a)
    return 2 * size**3 / _best_s(lambda: np.matmul(a, b, out=out))


def _best_s(run: Callable[[], object]) -> float:
    """Shortest of a few runs after one to warm up, within a budget: other work on the machine only slows."""
    run()
    taken: list[float] = []
    while len(taken) < _MAX_RUNS and sum(taken) < _BUDGET_S:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)
