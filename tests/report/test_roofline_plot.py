"""Geometry of the roofline plot."""

import itertools
import math

import pytest

from advisor.report import roofline_plot as plot
from tests.report import reports


def only(report, *groups):
    """The report with these kernel groups and no others."""
    report.kernels = reports.finish(list(groups))
    return report


def group(name, time_ms, flops, nbytes, pipe="tensor_bf16"):
    return reports.kernel(
        name, "op", None, "forward", "matmul", 1, time_ms, flops, nbytes / 2, nbytes / 2, pipe
    )


def test_a_kernel_at_its_roof_touches_the_line(rich_report):
    # GIVEN one kernel at the memory roof and one at the bf16 roof
    at_memory = group("slope", 1.0, 4.8e9, 4.8e9)
    at_peak = group("flat", 1.0, 989e9, 989e9 / 1000)
    # WHEN
    drawn = plot.plot(only(rich_report, at_memory, at_peak))
    # THEN the first lies on the slope and the second on the flat roof
    slope, roof = drawn.slope, drawn.roofs[0]
    on_slope = next(dot for dot in drawn.dots if rich_report.kernels[dot.row].name == "slope")
    on_roof = next(dot for dot in drawn.dots if rich_report.kernels[dot.row].name == "flat")
    along = (on_slope.x - slope.x1) / (slope.x2 - slope.x1)
    assert on_slope.y == pytest.approx(slope.y1 + along * (slope.y2 - slope.y1), abs=0.3)
    assert on_roof.y == pytest.approx(roof.y, abs=0.2)
    assert on_roof.x > roof.x


def test_the_ridge_is_where_the_roofs_meet(rich_report):
    drawn = plot.plot(rich_report)
    assert (drawn.roofs[0].x, drawn.roofs[0].y) == (drawn.slope.x2, drawn.slope.y2)
    assert [roof.ridge_label for roof in drawn.roofs] == ["ridge 206", "ridge 14.0"]


def test_area_is_in_proportion_to_time(rich_report):
    drawn = plot.plot(only(rich_report, group("long", 4.0, 1e12, 1e9), group("short", 1.0, 1e12, 1e9)))
    long, short = sorted(drawn.dots, key=lambda dot: -dot.r)
    assert (long.r / short.r) ** 2 == pytest.approx(4.0, rel=0.02)


def test_everything_lies_inside_the_frame(rich_report):
    for dot in plot.plot(rich_report).dots:
        assert plot.FRAME.left <= dot.x <= plot.FRAME.right
        assert plot.FRAME.top <= dot.y <= plot.FRAME.bottom


def test_groups_without_arithmetic_are_counted_and_not_placed(rich_report):
    copy = reports.kernel("copy", None, None, "input", "copy", 1, 1.0, 0, 10, 10, "none")
    unknown = reports.kernel("unknown", None, None, "forward", "other", 1, 1.0)
    drawn = plot.plot(only(rich_report, group("gemm", 2.0, 1e12, 1e9), copy, unknown))
    assert (len(drawn.dots), drawn.without_flops) == (1, 2)
    assert drawn.shown_fraction == pytest.approx(0.5)


def test_roofs_of_equal_height_share_a_line(rich_report):
    rich_report.device.peaks[0].pipe = "tensor_fp16"
    rich_report.device.peaks.append(reports.rich().device.peaks[0])
    both = only(
        rich_report, group("a", 1.0, 1e12, 1e9, "tensor_fp16"), group("b", 2.0, 1e12, 1e9, "tensor_bf16")
    )
    assert [roof.label for roof in plot.plot(both).roofs] == ["bf16 tensor, fp16 tensor 989 TFLOP/s"]


def test_labels_of_close_roofs_overlap_neither_each_other_nor_a_line(rich_report):
    # GIVEN three roofs, two of them close, and their ridge points close too
    rich_report.device.peaks[1].flops_per_s = 60e12
    drawn = plot.plot(
        only(
            rich_report,
            group("a", 1.0, 1e11, 1e9),
            group("b", 1.0, 1e10, 1e9, "tensor_tf32"),
            group("c", 1.0, 1e10, 1e9, "vector_fp32"),
        )
    )
    # THEN
    assert len(drawn.roofs) == 3
    labels = [roof.label_y for roof in drawn.roofs]
    assert all(below - above >= 15 for above, below in itertools.pairwise(labels))
    for label_y in labels:
        assert not [roof for roof in drawn.roofs if label_y - 10 < roof.y < label_y]
    ridges = [roof.ridge_label_y for roof in drawn.roofs[1:]]
    assert abs(ridges[0] - ridges[1]) >= 15


def test_a_pipe_of_a_speck_gets_no_roof(rich_report):
    speck = group("speck", 0.001, 1e6, 1e6, "tensor_tf32")
    drawn = plot.plot(only(rich_report, group("a", 1.0, 1e11, 1e9), speck))
    assert [roof.label for roof in drawn.roofs] == ["bf16 tensor 989 TFLOP/s"]


def test_specks_do_not_stretch_the_axes(rich_report):
    speck = group("speck", 0.0001, 1e3, 1e6)
    drawn = plot.plot(only(rich_report, group("a", 1.0, 1e11, 1e9), speck))
    assert (len(drawn.dots), drawn.too_small) == (1, 1)


def test_an_unknown_device_still_gets_its_dots(rich_report):
    rich_report.device.peaks, rich_report.device.bandwidth_bytes_per_s = [], None
    drawn = plot.plot(rich_report)
    assert drawn.dots
    assert not drawn.roofs
    assert drawn.slope is None


@pytest.mark.parametrize("figure", [0.0, -1.0, math.nan, math.inf, 1e300])
def test_impossible_figures_have_no_place(rich_report, figure):
    odd = group("odd", 1.0, 1e12, 1e9)
    odd.flops = figure
    drawn = plot.plot(only(rich_report, odd))
    assert (drawn.dots, drawn.without_flops) == ([], 1)


def test_a_long_trace_draws_the_largest_and_counts_the_rest():
    report = reports.long(400)
    drawn = plot.plot(report)
    assert len(drawn.dots) == plot.MAX_DOTS
    assert drawn.too_small + drawn.without_flops + len(drawn.dots) == 400
