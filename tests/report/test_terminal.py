"""The report on a terminal."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from advisor.report import terminal


def rendered(report, width=80, encoding="utf-8", colour=False):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict", newline="\n")
    system = "truecolor" if colour else None
    console = Console(
        file=file, width=width, force_terminal=colour, color_system=system, legacy_windows=False
    )
    terminal.render(report, console)
    file.flush()
    return raw.getvalue().decode(encoding)


def test_the_verdict_comes_first_and_the_figures_follow(rich_report):
    lines = [line for line in rendered(rich_report).splitlines() if line.strip()]
    assert lines[0].startswith("The GPU is busy for 39.2 of 42.6 ms a step")
    text = "\n".join(lines)
    for figure in (
        "42.6 ms",
        "64.7 ms",
        "28.7%",
        "38.2 GB",
        "exposed copy",
        "Top 15 of 60",
        "1.2% of device time",
    ):
        assert figure in text


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("which", ["rich_report", "unknown_report", "hostile_report"])
def test_no_line_is_wider_than_the_terminal(request, which, width):
    for line in rendered(request.getfixturevalue(which), width).splitlines():
        assert cell_len(line) <= width


def test_names_neither_colour_lines_nor_move_the_cursor_nor_link(hostile_report):
    plain = rendered(hostile_report, width=200)
    assert "\x1b" not in plain
    assert "\x07" not in plain
    assert "\x9b" not in plain
    assert "\u202e" not in plain
    assert "[bold red]markup[/]" in plain
    assert ":smile:" in plain
    assert "evil.example\x1b" not in rendered(hostile_report, width=200, colour=True)


def test_a_terminal_without_unicode_gets_ascii(rich_report):
    text = rendered(rich_report, encoding="ascii")
    assert "####" in text
    assert "1.52x" in text


def test_what_was_not_measured_says_how_to_get_it(unknown_report):
    text = " ".join(rendered(unknown_report, width=200).split())
    assert "Peak memory not measured capture with the TrainingAdvisor callback" in text
    assert "Top" not in text


def test_several_ranks_are_listed_and_it_is_said_whose_the_figures_are(rich_report):
    text = rendered(rich_report)
    assert "2 ranks; all other figures are rank 0's" in text
    assert "1.73 ms" in text
    # GIVEN one rank alone THEN there is nothing to tell apart
    rich_report.ranks = rich_report.ranks[:1]
    assert "ranks;" not in rendered(rich_report)


def test_another_tools_figures_are_shown_where_they_were_asked_for(rich_report):
    rows = [line.split() for line in rendered(rich_report).splitlines()]
    assert ["communication", "overlap,", "%", "37.0", "35.1", "5.4%"] in rows
    # THEN what only the other tool has is counted, not listed
    assert ["and", "1", "of", "its", "own", "in", "the", "report"] in rows
    rich_report.cross_checks = []
    assert "Checked against" not in rendered(rich_report)


def test_a_narrow_terminal_shows_operator_and_module_below_the_kernel(rich_report):
    # GIVEN a copy that could be anywhere, and one with long names around it
    longest, second = rich_report.kernels[:2]
    longest.name, longest.op, longest.module = "direct_copy_kernel_cuda", "aten::copy_", "blocks.*.attn"
    second.op, second.module = (
        "aten::_scaled_dot_product_flash_attention_backward",
        "model.layers.*.self_attn",
    )
    # WHEN there is no room for columns of their own
    lines = [line.strip() for line in rendered(rich_report, width=80).splitlines()]
    # THEN the line below the kernel says where it is from
    at = next(i for i, line in enumerate(lines) if line.startswith("direct_copy_kernel_cuda"))
    assert lines[at + 1] == "copy_ · blocks.*.attn"
    # AND of both names something is left where both do not fit
    assert any(line.startswith("_scaled_d…") and line.endswith("_attn") for line in lines)
    # AND a wide terminal has columns for them
    wide = rendered(rich_report, width=140)
    assert "aten::copy_" in wide
    assert "copy_ · blocks" not in wide


def test_what_is_above_its_roof_is_marked_and_explained(rich_report):
    plain = rendered(rich_report)
    assert "%!" not in plain
    # GIVEN one group far above its roof, one that the cache explains, one on its roof within the noise
    groups = rich_report.kernels[:3]
    groups[0].efficiency, groups[0].flags = 2.994, ["above_roof"]
    groups[1].efficiency, groups[1].flags = 761.8, ["cached"]
    groups[2].efficiency, groups[2].flags = 1.02, []
    text = rendered(rich_report)
    # THEN
    assert "299%!" in text
    assert ">999%!" in text
    assert "102.0%" in text
    assert "! above_roof: above its roof" in text
    assert "! cached: faster than device memory allows" in text
