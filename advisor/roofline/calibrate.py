"""Measure this machine's device: its memory, matrix units, launches and host link.

What a card reaches differs from its datasheet by its power limit, its cooling and its host. Rates are
medians of repeated runs on random data (zeros make matrix units run faster than real data does).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from advisor.errors import UsageError
from advisor.roofline.measured import Measured

#: Copied at a time: far more than any last-level cache.
_COPY_BYTES = 2 << 30
_GEMM_SIZE = 8192
_LINK_BYTES = 256 << 20
_RUNS = 20
#: Longest that one figure may take, in seconds.
_BUDGET_S = 1.5

#: Compute capabilities whose tensor cores do fp64, which cuBLAS then uses (A100, H100, H200, B200, B300).
_FP64_TENSOR_CORES = {(8, 0), (9, 0), (10, 0), (10, 3)}

Progress = Callable[[str], None]


def calibrate(index: int = 0, progress: Progress | None = None) -> Measured:
    """Measure device `index`; takes some ten seconds and up to 6 GB of its memory.

    Args:
        index: CUDA or ROCm device number.
        progress: called with the name of each figure before it is measured.

    Raises:
        UsageError: there is no such device, or too little of its memory is free.
    """
    if not torch.cuda.is_available():
        raise UsageError("no GPU that PyTorch can use is here; nothing to calibrate")
    if not 0 <= index < torch.cuda.device_count():
        raise UsageError(f"no device {index}: there are {torch.cuda.device_count()}")
    say = progress or (lambda _figure: None)
    properties = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index), torch.no_grad(), _tf32_restored():
        say("memory bandwidth")
        bandwidth = _copy_bytes_per_s()
        peaks = {}
        for pipe, prepare in _gemms(properties).items():
            say(pipe)
            rate = _gemm_flops_per_s(prepare)
            if rate is not None:
                peaks[pipe] = rate
        say("launches")
        launch = _launch_ns()
        say("host link")
        links = {
            f"{direction}_{memory}": _link_bytes_per_s(direction, pinned=memory == "pinned")
            for direction in ("to_device", "to_host")
            for memory in ("pinned", "pageable")
        }
        torch.cuda.empty_cache()
    return Measured(
        name=properties.name,
        total_memory_bytes=properties.total_memory,
        sms=properties.multi_processor_count,
        bandwidth_bytes_per_s=bandwidth,
        peaks=peaks,
        launch_ns=launch,
        link_bytes_per_s=links,
        measured_on=time.strftime("%Y-%m-%d"),
        versions={"torch": str(torch.__version__), "cuda": str(torch.version.cuda or torch.version.hip)},
    )


def _copy_bytes_per_s() -> float:
    """Bytes read plus bytes written, over the time of a device-to-device copy."""
    free, _total = torch.cuda.mem_get_info()
    size = min(_COPY_BYTES, free // 4)
    if size < 64 << 20:
        raise UsageError(f"only {free / 1e9:.2f} GB of the device's memory is free; stop what uses it")
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / _median_s(lambda: target.copy_(source))


def _plain(dtype: torch.dtype) -> Callable[[int], Callable[[], Any]]:
    def prepare(n: int) -> Callable[[], Any]:
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        out = torch.empty(n, n, device="cuda", dtype=dtype)
        return lambda: torch.mm(a, b, out=out)

    return prepare


def _fp32(*, tf32: bool) -> Callable[[int], Callable[[], Any]]:
    def prepare(n: int) -> Callable[[], Any]:
        name, on, off = _tf32_flag()
        setattr(torch.backends.cuda.matmul, name, on if tf32 else off)
        return _plain(torch.float32)(n)

    return prepare


def _fp8(n: int) -> Callable[[], Any]:
    # AMD's first devices with fp8 have a format of their own.
    dtype = torch.float8_e4m3fnuz if "gfx94" in _architecture() else torch.float8_e4m3fn
    a = torch.randn(n, n, device="cuda").to(dtype)
    b = torch.randn(n, n, device="cuda").to(dtype).t()
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _int8(n: int) -> Callable[[], Any]:
    a, b = (torch.randint(-128, 127, (n, n), dtype=torch.int8, device="cuda") for _ in range(2))
    transposed = b.t()
    return lambda: torch._int_mm(a, transposed)


def _gemms(properties: Any) -> dict[str, Callable[[int], Callable[[], Any]]]:
    """By pipe: given a size, prepares operands and returns the product to time."""
    fp32, fp64 = "vector_fp32", "vector_fp64"
    if torch.version.hip:
        # The matrix cores of AMD's data-centre devices take these dtypes as they are.
        if _architecture().startswith("gfx9"):
            fp32, fp64 = "tensor_fp32", "tensor_fp64"
    elif (properties.major, properties.minor) in _FP64_TENSOR_CORES:
        fp64 = "tensor_fp64"
    found: dict[str, Callable[[int], Callable[[], Any]]] = {
        "tensor_bf16": _plain(torch.bfloat16),
        "tensor_fp16": _plain(torch.float16),
        "tensor_tf32": _fp32(tf32=True),
        "tensor_fp8": _fp8,
        "tensor_int8": _int8,
        fp32: _fp32(tf32=False),
        fp64: _plain(torch.float64),
    }
    # PyTorch computes these products all the same, on other units.
    for pipe in _without_matrix_units(properties):
        found.pop(pipe)
    return found


def _without_matrix_units(properties: Any) -> list[str]:
    """Dtypes whose products this device does on plain arithmetic units."""
    if torch.version.hip:
        return [] if "gfx94" in _architecture() else ["tensor_tf32"]
    missing = [] if properties.major >= 8 else ["tensor_bf16", "tensor_tf32"]
    missing += [] if (properties.major, properties.minor) >= (7, 5) else ["tensor_int8"]
    return missing + ([] if properties.major >= 7 else ["tensor_fp16"])


def _architecture() -> str:
    """``gfx942`` and the like; empty on NVIDIA devices."""
    return str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "gcnArchName", ""))


def _gemm_flops_per_s(prepare: Callable[[int], Callable[[], Any]]) -> float | None:
    """Rate of a square product; None where this device or build cannot do it."""
    rate, n = None, _GEMM_SIZE
    try:
        # A first, small one tells how large a product fits the time.
        run = prepare(1024)
        run()
        small_s = _median_s(run, runs=5)
        while n > 1024 and small_s * (n / 1024) ** 3 > _BUDGET_S / 4:
            n //= 2
        run = prepare(n)
        rate = 2 * n**3 / _median_s(run)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError, ValueError):
        torch.cuda.synchronize()
    return rate


def _launch_ns() -> float:
    """Host time of one small operator when many follow each other, in ns."""
    tiny = torch.zeros(1, device="cuda")

    def burst() -> None:
        for _ in range(200):
            tiny.add_(1)

    burst()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        burst()
        times.append((time.perf_counter_ns() - start) / 200)
    torch.cuda.synchronize()
    return statistics.median(times)


def _link_bytes_per_s(direction: str, *, pinned: bool) -> float:
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=pinned).random_()
    device = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cuda")
    source, target = (host, device) if direction == "to_device" else (device, host)
    return _LINK_BYTES / _median_s(lambda: target.copy_(source, non_blocking=pinned), runs=8)


def _median_s(run: Callable[[], Any], runs: int = _RUNS) -> float:
    """Median time on the device, in seconds."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times, deadline = [], time.monotonic() + _BUDGET_S
    for _ in range(runs):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
        if time.monotonic() > deadline:
            break
    return statistics.median(times)


@contextmanager
def _tf32_restored() -> Iterator[None]:
    """Leaves the process's TF32 switch as it was."""
    name, _, _ = _tf32_flag()
    was = getattr(torch.backends.cuda.matmul, name)
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, name, was)


def _tf32_flag() -> tuple[str, Any, Any]:
    """Name of the flag and its values for on and off; from PyTorch 2.9 on the older name may raise."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        return "fp32_precision", "tf32", "ieee"
    return "allow_tf32", True, False
