"""The panel of memory levels."""

import pytest

from advisor.report import hierarchy, html, markdown
from advisor.report.hierarchy import meaning, memory_levels, price
from advisor.roofline.devices import find_device
from tests.report import reports


def test_a_level_is_set_against_the_nearest_one_above_whose_rate_is_known():
    levels = memory_levels(find_device(override="h200"))
    # GIVEN that nobody publishes the L2's rate
    names = [level.name for level in levels]
    l2, memory = names.index("L2 cache"), names.index("Device memory (HBM)")
    # THEN
    assert levels[l2].times_slower_than_above is None
    assert levels[memory].compared_with == "Shared memory and L1"
    assert levels[memory].times_slower_than_above == pytest.approx(33.45 / 4.8, rel=0.01)
    assert price(levels, memory) == "6.97× vs shared memory"
    assert price(levels, names.index("Disk")) == "4.00×"
    assert price(levels, 0) == "—"


def test_the_sentence_gives_the_ridge_point_and_the_share_below_it():
    report = reports.rich()
    report.summary.bound_time_fraction.memory = 0.61
    said = meaning(report)
    assert "serve 206 FLOP of bf16 tensor work" in said
    assert "61.0%" in said
    assert "6.97× cheaper" in said


def test_the_sentence_does_not_advise_fusion_to_a_compute_bound_loop():
    report = reports.rich()
    report.summary.bound_time_fraction.memory, report.summary.bound_time_fraction.compute = 0.2, 0.7
    said = meaning(report)
    assert "fused" not in said
    assert "arithmetic sets the pace" in said


def test_without_roofs_nothing_is_said():
    assert meaning(reports.unknown()) == ""
    assert "What a byte costs" not in html.render(reports.unknown())


def test_page_and_markdown_show_the_levels_with_their_sources():
    report = reports.rich()
    page = html.render(report)
    assert "What a byte costs on this device" in page
    assert "rule of thumb: four lanes" in page
    assert "Disk 16.0 GB/s" in markdown.render(report)
    assert "L2" not in hierarchy.line(report.device.hierarchy)
