"""The shipped figures against clocks, units and rates per clock, which come from other documents."""

import pytest

from advisor.roofline.device_table import PIPES, builtin_rows
from advisor.roofline.devices import device_of_row, find_device

#: Row: units, GHz, FLOPs per clock and unit. Clocks: product briefs and whitepapers. Rates per clock: the
#: tensor core tables of NVIDIA's architecture whitepapers and AMD's CDNA whitepapers, dense; 128 fp32 lanes
#: an SM (64 before GA10x) times two. Cards of the GeForce line run fp16 with fp32 accumulation at half rate.
DERIVED = {
    "v100-sxm2-32gb": (80, 1.530, {"tensor_fp16": 1024, "vector_fp32": 128, "vector_fp64": 64}),
    "v100-pcie-16gb": (80, 1.380, {"tensor_fp16": 1024, "vector_fp32": 128, "vector_fp64": 64}),
    "v100s-pcie-32gb": (80, 1.597, {"tensor_fp16": 1024, "vector_fp32": 128}),
    "t4": (40, 1.590, {"tensor_fp16": 1024, "tensor_int8": 2048, "vector_fp32": 128, "vector_fp64": 4}),
    "rtx-2080-ti": (68, 1.545, {"tensor_fp16": 512, "tensor_int8": 2048, "vector_fp32": 128}),
    "a100-sxm-80gb": (
        108, 1.410,
        {"tensor_bf16": 2048, "tensor_tf32": 1024, "tensor_int8": 4096, "tensor_fp64": 128,
         "vector_fp32": 128, "vector_fp16": 512, "vector_bf16": 256, "vector_fp64": 64},
    ),
    "a30": (56, 1.440, {"tensor_bf16": 2048, "tensor_tf32": 1024, "tensor_fp64": 128, "vector_fp32": 128}),
    "a10": (72, 1.695, {"tensor_bf16": 1024, "tensor_tf32": 512, "vector_fp32": 256, "vector_fp64": 4}),
    "a10g": (80, 1.710, {"tensor_bf16": 512, "tensor_tf32": 256, "tensor_int8": 1024, "vector_fp32": 256}),
    "a40": (84, 1.740, {"tensor_bf16": 1024, "tensor_tf32": 512, "vector_fp32": 256, "vector_fp64": 4}),
    "rtx-3090": (82, 1.695, {"tensor_bf16": 512, "tensor_tf32": 256, "tensor_int8": 2048}),
    "l4": (58, 2.040, {"tensor_bf16": 1024, "tensor_tf32": 512, "tensor_fp8": 2048, "vector_fp32": 256}),
    "l40": (142, 2.490, {"tensor_bf16": 512, "tensor_tf32": 256, "tensor_fp8": 1024, "vector_fp32": 256}),
    "l40s": (142, 2.520, {"tensor_bf16": 1024, "tensor_tf32": 512, "tensor_fp8": 2048, "vector_fp32": 256}),
    "rtx-6000-ada": (142, 2.505, {"tensor_bf16": 1024, "tensor_fp8": 2048, "vector_fp32": 256}),
    "rtx-4090": (128, 2.520, {"tensor_bf16": 512, "tensor_fp8": 1024, "vector_fp32": 256}),
    "rtx-5090": (170, 2.407, {"tensor_bf16": 512, "tensor_fp8": 1024, "tensor_fp4": 4096}),
    "rtx-pro-6000": (188, 2.617, {"tensor_bf16": 1024, "tensor_fp8": 2048, "vector_fp32": 256}),
    "h100-sxm": (132, 1.830, {"tensor_bf16": 4096, "tensor_tf32": 2048, "tensor_fp8": 8192}),
    "h200": (132, 1.830, {"tensor_bf16": 4096, "tensor_tf32": 2048, "tensor_fp8": 8192}),
    "h100-pcie": (114, 1.620, {"tensor_bf16": 4096, "tensor_tf32": 2048, "tensor_fp8": 8192}),
    "mi210": (104, 1.700, {"tensor_bf16": 1024, "tensor_fp32": 256, "tensor_fp64": 256, "vector_fp32": 128}),
    "mi250x": (110, 1.700, {"tensor_bf16": 1024, "tensor_fp32": 256, "tensor_fp64": 256, "vector_fp32": 128}),
    "mi300x": (
        304, 2.100,
        {"tensor_bf16": 2048, "tensor_tf32": 1024, "tensor_fp8": 4096, "tensor_fp64": 256,
         "vector_fp32": 256, "vector_fp64": 128},
    ),
    "mi325x": (304, 2.100, {"tensor_bf16": 2048, "tensor_fp8": 4096, "vector_fp32": 256}),
    "mi355x": (256, 2.4, {"tensor_bf16": 4096, "tensor_fp8": 8192, "tensor_fp4": 16384, "vector_fp64": 128}),
}  # fmt: skip

#: Hopper states what is not a tensor rate at its highest clock.
HOPPER_VECTOR = {"vector_fp32": 256, "vector_fp16": 512, "vector_fp64": 128, "tensor_fp64": 256}

#: Memory bus in bits and Gbit/s a pin.
MEMORY = {
    "v100-sxm2-16gb": (4096, 1.752), "t4": (256, 10.0), "a10": (384, 12.5), "a100-sxm-40gb": (5120, 2.43),
    "a100-sxm-80gb": (5120, 3.186), "a100-pcie-80gb": (5120, 3.024), "l4": (192, 12.5), "l40s": (384, 18.0),
    "rtx-2080-ti": (352, 14.0), "rtx-3090": (384, 19.5), "rtx-4090": (384, 21.0), "rtx-5090": (512, 28.0),
    "rtx-6000-ada": (384, 20.0), "h100-sxm": (5120, 5.23), "h200": (6144, 6.25), "b200": (8192, 8.0),
    "mi210": (4096, 3.2), "mi300x": (8192, 5.2), "mi325x": (8192, 6.0), "mi355x": (8192, 8.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "pipe"), [(row, pipe) for row, (_, _, rates) in DERIVED.items() for pipe in rates]
)
def test_a_peak_is_clock_times_units_times_rate(row: str, pipe: str) -> None:
    units, ghz, rates = DERIVED[row]
    device = find_device(None, override=row)
    assert device.sms == units
    assert device.peak(pipe) == pytest.approx(units * ghz * 1e9 * rates[pipe], rel=0.02)


@pytest.mark.parametrize(("row", "units", "ghz"), [("h100-sxm", 132, 1.98), ("h100-pcie", 114, 1.755)])
@pytest.mark.parametrize("pipe", HOPPER_VECTOR)
def test_hopper_vector_rates_are_at_the_highest_clock(row: str, units: int, ghz: float, pipe: str) -> None:
    expected = units * ghz * 1e9 * HOPPER_VECTOR[pipe]
    assert find_device(None, override=row).peak(pipe) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("row", MEMORY)
def test_bandwidth_is_bus_width_times_pin_rate(row: str) -> None:
    bits, gbit = MEMORY[row]
    expected = bits * gbit * 1e9 / 8
    # Vendors round 8.192 TB/s to 8.
    assert find_device(None, override=row).bandwidth_bytes_per_s == pytest.approx(expected, rel=0.025)


@pytest.mark.parametrize(
    ("name", "ridge"),
    [("A100", 156), ("a100-sxm-80gb", 153), ("a100-sxm-40gb", 201), ("H100", 296), ("h100-sxm", 295),
     ("h200", 206), ("b200", 281), ("mi300x", 247)],
)  # fmt: skip
def test_ridge_points_for_bf16_come_out_as_published_figures_divide(name: str, ridge: int) -> None:
    found = find_device(None, override=name).ridge("tensor_bf16")
    assert found is not None
    assert round(found) == ridge


@pytest.mark.parametrize("key", builtin_rows())
def test_every_row_is_complete_and_sourced(key: str) -> None:
    device = device_of_row(builtin_rows()[key])
    assert device.peak("tensor_fp16")
    assert device.peak("vector_fp32")
    assert device.bandwidth_source
    assert device.link_bytes_per_s
    assert "PCI" in device.link_source or "NVLink" in device.link_source
    assert all(device.peak_sources[pipe] for pipe in device.peaks)
    assert None not in (device.bandwidth_bytes_per_s, device.memory_bytes, device.sms)
    assert device.arch.startswith(("sm_", "gfx"))


@pytest.mark.parametrize("key", builtin_rows())
def test_no_rate_is_a_sparse_one_or_out_of_order(key: str) -> None:
    device = device_of_row(builtin_rows()[key])
    half = device.peak("tensor_fp16")
    single = device.peak("vector_fp32")
    assert half
    assert single
    # Dense 16-bit tensor rates are 2 to 34 times the plain fp32 rate; a sparse one would break a neighbour.
    for pipe, factor in [("tensor_tf32", 0.5), ("tensor_fp8", 2)]:
        rate = device.peak(pipe)
        assert rate is None or rate == pytest.approx(half * factor, rel=0.03)
    assert device.peak("tensor_bf16") in (None, half)


def test_l40s_is_not_l4_and_cards_without_a_format_have_no_peak_for_it() -> None:
    l4, l40s = find_device({"name": "NVIDIA L4"}), find_device({"name": "NVIDIA L40S"})
    assert l40s.peaks["tensor_bf16"] > 2.9 * l4.peaks["tensor_bf16"]
    assert l4.bandwidth_bytes_per_s == 300e9
    assert find_device(None, override="T4").peak("tensor_bf16") is None
    assert find_device(None, override="A100").peak("tensor_fp8") is None
    assert find_device(None, override="T4").ridge("tensor_bf16") is None
    assert set(find_device(None, override="h200").peaks) <= set(PIPES)
