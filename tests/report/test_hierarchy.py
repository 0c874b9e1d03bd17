"""The panel of memory levels."""

import pytest

from advisor.report import hierarchy, html, markdown
from advisor.report.hierarchy import meaning, memory_levels, price
from advisor.roofline.devices import find_device
from tests.report import reports


def near_the_roof(*, memory: float, compute: float):
    """A report with these shares of its time and kernels that reach most of their roofs."""
    report = reports.rich()
    report.summary.bound_time_fraction.memory = memory
    report.summary.bound_time_fraction.compute = compute
    for group in report.kernels:
        group.efficiency = 0.8
    return report


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
    report = near_the_roof(memory=0.61, compute=0.2)
    said = meaning(report)
    assert "serve 206 FLOP of bf16 tensor work" in said
    assert "61.0%" in said
    assert "6.97× cheaper" in said


@pytest.mark.parametrize("bound", ["memory", "compute"])
def test_the_sentence_agrees_with_the_verdict_far_from_the_roof(bound):
    # GIVEN a loop whose time is under one bound, at a fifth of that roof
    report = near_the_roof(**{"memory": 0.2, "compute": 0.2, bound: 0.7})
    for group in report.kernels:
        group.efficiency = 0.2
    # THEN neither bytes nor arithmetic are said to set the pace
    said = meaning(report)
    assert f"{bound}-bound ones reach 20.0% of their roof: slow or small kernels set the pace" in said
    assert "arithmetic sets the pace" not in said
    assert "cheaper" not in said


def test_the_sentence_does_not_advise_fusion_to_a_compute_bound_loop():
    report = near_the_roof(memory=0.2, compute=0.7)
    said = meaning(report)
    assert "fused" not in said
    assert "arithmetic sets the pace" in said


def test_without_roofs_nothing_is_said():
    assert meaning(reports.unknown()) == ""
    assert "What a byte costs" not in html.render(reports.unknown())


def test_the_page_leaves_out_levels_of_which_nothing_is_known():
    report = reports.rich()
    nothing = [level for level in report.device.hierarchy if level.name == "Registers"]
    assert ">Registers<" in html.render(report)
    for level in nothing:
        level.size_bytes = level.bandwidth_bytes_per_s = None
    assert ">Registers<" not in html.render(report)


def test_page_and_markdown_show_the_levels_with_their_sources():
    report = reports.rich()
    page = html.render(report)
    assert "What a byte costs on this device" in page
    assert "rule of thumb: four lanes" in page
    assert "Disk 16.0 GB/s" in markdown.render(report)
    assert "L2" not in hierarchy.line(report.device.hierarchy)
