"""Where the step goes, as stacked bars."""

import pytest

from advisor.report import breakdown


def titled(report):
    return {bar.title: bar for bar in breakdown.bars(report)}


def test_each_bar_adds_up_to_its_whole(rich_report):
    bars = breakdown.bars(rich_report)
    assert [bar.title for bar in bars] == ["The step", "By bound", "By phase", "By family"]
    for bar in bars:
        assert sum(part.fraction for part in bar.segments) == pytest.approx(1.0)


def test_a_bar_says_whether_it_is_of_the_real_or_of_the_profiled_step(rich_report):
    assert titled(rich_report)["The step"].whole.endswith("wall time of a real step")
    rich_report.summary.baseline_step_ms = None
    assert titled(rich_report)["The step"].whole.endswith("wall time of a profiled step")


def test_phases_come_in_the_order_of_a_step(rich_report):
    rich_report.breakdown.phase.sort(key=lambda part: -part.time_ms_per_step)
    names = [part.name for part in titled(rich_report)["By phase"].segments]
    assert names == ["input", "forward", "loss", "backward", "optimizer", "communication"]


def test_nothing_measured_gives_no_bars(unknown_report):
    assert breakdown.bars(unknown_report) == []


def test_a_colour_stands_for_one_busy_family(rich_report):
    colours = breakdown.family_colours(rich_report)
    busiest = [part.name for part in rich_report.breakdown.family[:6]]
    assert len({colours[name] for name in busiest}) == 6
    assert set(colours) == {group.family for group in rich_report.kernels}
