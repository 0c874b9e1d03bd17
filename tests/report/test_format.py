"""Numbers and names as people read them."""

import msgspec
import pytest

from advisor.report import format as fmt
from advisor.report import model
from tests.report.reports import HOSTILE


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (26.44, "26.4 ms"),
        (0.4123, "412 µs"),
        (0.00041, "410 ns"),
        (1234.0, "1.23 s"),
        (0.9999, "1.00 ms"),
        (0, "0 ms"),
    ],
)
def test_a_duration_takes_the_unit_that_fits_it(milliseconds, text):
    assert fmt.duration(milliseconds) == text


def test_rates_and_amounts_have_decimal_prefixes():
    assert fmt.flops_per_s(989e12) == "989 TFLOP/s"
    assert fmt.bytes_per_s(4.8e12) == "4.80 TB/s"
    assert fmt.nbytes(141e9) == "141 GB"
    assert fmt.nbytes(512) == "512 B"
    assert fmt.nbytes(68) == "68 B"
    assert fmt.flops(999.7e9) == "1.00 TFLOP"
    assert fmt.intensity(206.04) == "206 FLOP/byte"


def test_a_trace_of_something_is_not_shown_as_nothing():
    assert fmt.percent(0.0004) == "<0.1%"
    assert fmt.percent(0.0) == "0.0%"
    assert fmt.percent(-0.0546) == "-5.5%"


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "function",
    [
        fmt.bytes_per_s,
        fmt.count,
        fmt.duration,
        fmt.flops,
        fmt.flops_per_s,
        fmt.intensity,
        fmt.milliseconds,
        fmt.nbytes,
        fmt.number,
        fmt.percent,
        fmt.ratio,
    ],
)
def test_what_is_not_known_is_a_dash_and_never_zero(function, missing):
    assert function(missing) == fmt.MISSING


def test_three_significant_digits_survive_without_exponents():
    assert [fmt.number(x) for x in (1234567.0, 26.44, 0.004123, 1e-7)] == [
        "1,230,000",
        "26.4",
        "0.00412",
        "0.000000100",
    ]


@pytest.mark.parametrize(
    ("exponent", "text"), [(-2, "0.01 B/s"), (3, "1 kB/s"), (14, "100 TB/s"), (16, "10 PB/s")]
)
def test_axis_ticks_are_whole_powers_of_ten(exponent, text):
    assert fmt.decade(exponent, "B/s") == text


def test_shortened_names_keep_both_ends_and_the_width():
    # GIVEN a name that is too long
    short = fmt.shorten("abcdefghijklmnopqrstuvwxyz", 10)
    # THEN the middle goes
    assert short == "abcdef…xyz"
    assert len(short) == 10


@pytest.mark.parametrize("text", HOSTILE)
def test_printable_text_has_no_control_or_direction_characters_and_encodes(text):
    clean = fmt.printable(text)
    clean.encode("utf-8")
    assert not set(clean) & {*map(chr, range(9)), "\x1b", "\x9b", "\u202e", "\u2066", "\u2028", "\ud800"}
    assert len(clean) == len(text)


def test_printable_reaches_every_text_of_a_report_and_leaves_the_original_alone(hostile_report):
    clean = fmt.printable(hostile_report)
    encoded = msgspec.json.encode(clean).decode()
    assert "\\u001b" not in encoded
    assert "\u202e" not in encoded
    assert any("\x1b" in text for text in hostile_report.environment)
    assert isinstance(clean.kernels[0], model.KernelGroup)
