"""`advisor roofline`: what bounds a piece of work, from its FLOPs and bytes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from advisor.cli._units import Quantity

if TYPE_CHECKING:
    from advisor.roofline.devices import Device

#: Formats on the command line and the pipe that multiplies matrices in them, best first.
_PIPES = {
    "bf16": ("tensor_bf16",),
    "fp16": ("tensor_fp16",),
    "tf32": ("tensor_tf32",),
    "fp8": ("tensor_fp8",),
    "int8": ("tensor_int8",),
    "fp4": ("tensor_fp4",),
    "fp32": ("tensor_fp32", "vector_fp32"),
    "fp64": ("tensor_fp64", "vector_fp64"),
}


@click.command()
@click.option("--flops", type=Quantity("flops"), help="Floating-point operations; a multiply-add is two.")
@click.option("--bytes", "nbytes", type=Quantity("bytes"), help="Bytes read and written.")
@click.option(
    "--gemm",
    nargs=3,
    type=click.IntRange(min=1, max=1 << 40),
    metavar="M N K",
    help="A matrix product, (M, K) by (K, N), each element moved once.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(_PIPES)),
    help="Format of the operands: which peak of the device counts, and the bytes of --gemm; fp32 is without "
    "TF32.  [default: bf16, or fp16 where the device lacks it]",
)
@click.option("--device", "device_name", metavar="NAME", help="Take the roofs of this device, or TOML file.")
@click.option("--peak", type=Quantity("flops_per_s"), help="Peak rate, instead of the device's.")
@click.option("--bandwidth", type=Quantity("bytes_per_s"), help="Memory bandwidth, instead of the device's.")
@click.option("--time", "time_ns", type=Quantity("time"), help="Time taken: adds what was achieved.")
@click.option(
    "--model-bytes", type=Quantity("bytes"), help="Size of a model's weights: the ceiling of generation."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    flops: float | None,
    nbytes: float | None,
    gemm: tuple[int, int, int] | None,
    dtype: str | None,
    device_name: str | None,
    peak: float | None,
    bandwidth: float | None,
    time_ns: float | None,
    model_bytes: float | None,
    as_json: bool,
) -> None:
    """Intensity, ridge point and verdict of a piece of work; or the ridge point of a device alone.

    Work whose intensity (FLOP/byte) lies below the ridge point (peak / bandwidth) is bound by memory,
    above it by compute. Generating one token reads all weights once, so bandwidth over model size is the
    most tokens/s that one sequence can have.

    \b
    advisor roofline --device A100                             ridge point, 156 FLOP/byte
    advisor roofline --peak 20TFLOP/s --bandwidth 0.3TB/s      ridge point, 67 FLOP/byte
    advisor roofline --gemm 1024 1024 1024 --device H100       341.3 FLOP/byte, compute-bound
    advisor roofline --flops 1e9 --bytes 400MB --device L4     2.5 FLOP/byte, memory-bound
    advisor roofline --model-bytes 14GB --bandwidth 2000GB/s   143 tokens/s
    """
    import json

    from advisor.errors import UsageError
    from advisor.roofline.devices import find_device

    work = _work(flops, nbytes, gemm, dtype)
    device = find_device(None, override=device_name) if device_name else None
    if model_bytes is not None:
        if work is not None or peak is not None or dtype is not None or time_ns is not None:
            raise UsageError("--model-bytes goes with --bandwidth or --device alone")
        result = _generation(model_bytes, bandwidth, device)
    else:
        result = _roofline(work, dtype, device, peak, bandwidth, time_ns)
    click.echo(json.dumps(result, indent=2) if as_json else _describe(result))


def _work(
    flops: float | None, nbytes: float | None, gemm: tuple[int, int, int] | None, dtype: str | None
) -> tuple[float, float] | None:
    from advisor.errors import UsageError

    if gemm is not None:
        if flops is not None or nbytes is not None:
            raise UsageError("give --gemm, or --flops and --bytes, not both")
        return gemm_work(*gemm, dtype or "bf16")
    if (flops is None) != (nbytes is None):
        missing = "--bytes" if nbytes is None else "--flops"
        raise UsageError(f"intensity is FLOPs over bytes: {missing} is missing")
    return None if flops is None or nbytes is None else (flops, nbytes)


def gemm_work(m: int, n: int, k: int, dtype: str) -> tuple[float, float]:
    """FLOPs and compulsory bytes of an (m, k) by (k, n) product with all three matrices in `dtype`."""
    from advisor.roofline.costs.model import DTYPE_BYTES

    itemsize = DTYPE_BYTES["fp32" if dtype == "tf32" else dtype]
    return 2.0 * m * n * k, (m * k + k * n + m * n) * itemsize


def _generation(model_bytes: float, bandwidth: float | None, device: Device | None) -> dict[str, Any]:
    from advisor.errors import UsageError

    rate = bandwidth if bandwidth is not None else device.bandwidth_bytes_per_s if device else None
    if rate is None:
        raise UsageError("--model-bytes needs --bandwidth, or a --device whose bandwidth is known")
    return {
        "device": device.name if device else None,
        "model_bytes": model_bytes,
        "bandwidth_bytes_per_s": rate,
        "tokens_per_s": rate / model_bytes,
    }


def _roofline(
    work: tuple[float, float] | None,
    dtype: str | None,
    device: Device | None,
    peak: float | None,
    bandwidth: float | None,
    time_ns: float | None,
) -> dict[str, Any]:
    from advisor.errors import UsageError

    pipe = None
    if device is not None:
        if peak is None:
            pipe, peak = _device_peak(device, dtype)
        bandwidth = bandwidth if bandwidth is not None else device.bandwidth_bytes_per_s
    if (peak is None) != (bandwidth is None):
        missing = "--bandwidth" if bandwidth is None else "--peak"
        raise UsageError(f"a roof needs a peak and a bandwidth: {missing} is missing (or give --device)")
    if work is None and peak is None:
        raise UsageError(
            "nothing to work out: give --gemm or --flops and --bytes, --device, or --peak and --bandwidth"
        )
    if time_ns is not None and work is None:
        raise UsageError("--time needs work: --gemm, or --flops and --bytes")
    result: dict[str, Any] = {
        "device": device.name if device else None,
        "note": (device.note or None) if device else None,
        "pipe": pipe,
        "peak_flops_per_s": peak,
        "bandwidth_bytes_per_s": bandwidth,
        "ridge_flops_per_byte": None if peak is None or bandwidth is None else peak / bandwidth,
    }
    if work is not None:
        result.update(_verdict(*work, peak, bandwidth, time_ns))
    return result


def _device_peak(device: Device, dtype: str | None) -> tuple[str, float]:
    from advisor.errors import UsageError

    # Without a format the device's own 16-bit one: cards before Ampere have no bf16.
    wanted = _PIPES[dtype] if dtype else ("tensor_bf16", "tensor_fp16", "vector_fp32")
    for pipe in wanted:
        rate = device.peak(pipe)
        if rate is not None:
            return pipe, rate
    known = ", ".join(device.peaks) or "none"
    raise UsageError(f"{device.name} has no known {wanted[0]} peak; known: {known}")


def _verdict(
    flops: float, nbytes: float, peak: float | None, bandwidth: float | None, time_ns: float | None
) -> dict[str, Any]:
    intensity = flops / nbytes
    result: dict[str, Any] = {"flops": flops, "bytes": nbytes, "intensity_flops_per_byte": intensity}
    achieved = None if time_ns is None else flops / time_ns * 1e9
    if achieved is not None:
        result["achieved_flops_per_s"] = achieved
    if peak is None or bandwidth is None:
        return result
    attainable = min(peak, intensity * bandwidth)
    result["bound"] = "memory" if intensity < peak / bandwidth else "compute"
    result["attainable_flops_per_s"] = attainable
    result["attainable_fraction_of_peak"] = attainable / peak
    result["time_at_roof_us"] = flops / attainable * 1e6
    if achieved is not None:
        result["efficiency"] = achieved / attainable
    return result


def _describe(result: dict[str, Any]) -> str:
    if "tokens_per_s" in result:
        tokens = result["tokens_per_s"]
        return (
            f"{_si(result['model_bytes'], 'B')} of weights at {_si(result['bandwidth_bytes_per_s'], 'B/s')}: "
            f"at most {tokens:.{0 if tokens >= 10 else 2}f} tokens/s for one sequence"
        )
    lines = []
    ridge = result["ridge_flops_per_byte"]
    if ridge is not None:
        owner = f"{result['device']}, {result['pipe']}" if result["pipe"] else result["device"] or "roof"
        peak, rate = _si(result["peak_flops_per_s"], "FLOP/s"), _si(result["bandwidth_bytes_per_s"], "B/s")
        lines.append(f"{owner}: {peak} ÷ {rate} = ridge point {_per_byte(ridge, 0)}")
        if result["note"]:
            lines.append(f"  note: {result['note']}")
    if "flops" in result:
        lines.append(
            f"work: {_si(result['flops'], 'FLOP')} ÷ {_si(result['bytes'], 'B')}"
            f" = intensity {_per_byte(result['intensity_flops_per_byte'], 1)}"
        )
    if "bound" in result:
        rate = _si(result["attainable_flops_per_s"], "FLOP/s")
        share, time_us = result["attainable_fraction_of_peak"], result["time_at_roof_us"]
        lines.append(
            f"{result['bound']}-bound: at most {rate} ({share:.1%} of peak), {time_us:,.4g} µs at the roof"
        )
    if "achieved_flops_per_s" in result:
        share = f", {result['efficiency']:.0%} of attainable" if "efficiency" in result else ""
        lines.append(f"achieved: {_si(result['achieved_flops_per_s'], 'FLOP/s')}{share}")
    return "\n".join(lines)


def _per_byte(value: float, digits: int) -> str:
    # A ridge of 3 or an intensity of 0.08 would lose its meaning to rounding.
    text = f"{value:.{digits}f}" if value >= 10 else f"{value:.3g}"
    return f"{text} FLOP/byte"


def _si(value: float, unit: str) -> str:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"
