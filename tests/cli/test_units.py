"""Quantities are read as people write them, and never guessed at."""

import pytest

from advisor.cli._units import parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("14GB", "bytes", 14e9),
        ("14 GB", "bytes", 14e9),
        ("14e9", "bytes", 14e9),
        ("80GiB", "bytes", 80 * 2**30),
        ("1.5kB", "bytes", 1500),
        ("512", "bytes", 512),
        ("1,000,000", "bytes", 1e6),
        ("0.3TB/s", "bytes_per_s", 0.3e12),
        (".3TB/s", "bytes_per_s", 0.3e12),
        ("2000GB/s", "bytes_per_s", 2e12),
        ("2000GBps", "bytes_per_s", 2e12),
        ("3.35e12", "bytes_per_s", 3.35e12),
        ("20TFLOP/s", "flops_per_s", 20e12),
        ("20TFLOPS", "flops_per_s", 20e12),
        ("20 tflops", "flops_per_s", 20e12),
        ("2.25P", "flops_per_s", 2.25e15),
        ("624TOPS", "flops_per_s", 624e12),
        ("2.2TFLOP", "flops", 2.2e12),
        ("1e9", "flops", 1e9),
        ("1.7ms", "time", 1.7e6),
        ("250us", "time", 250e3),
        ("2s", "time", 2e9),
    ],
)
def test_a_quantity_comes_out_in_its_base_unit(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("14Gb", "bytes"),  # bits
        ("14GB/s", "bytes"),
        ("14GB", "bytes_per_s"),
        ("20TFLOP/s", "flops"),
        ("20TB/s", "flops_per_s"),
        ("-3GB", "bytes"),
        ("0", "bytes"),
        ("", "bytes"),
        ("many", "bytes"),
        ("nan", "bytes"),
        ("1e999", "bytes"),
        ("5", "time"),
    ],
)
def test_a_wrong_unit_or_no_quantity_is_refused_with_an_example(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_quantity(text, unit)
