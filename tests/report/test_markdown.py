"""The report as Markdown, read back by a Markdown parser."""

import re

import pytest
from markdown_it import MarkdownIt

from advisor.report import markdown
from tests.report.reports import HOSTILE

PARSER = MarkdownIt("commonmark").enable("table")


def cells(line):
    """Cells of a table row as GitHub splits it: at pipes that no backslash precedes."""
    return re.split(r"(?<!\\)\|", line.strip().strip("|"))


def test_the_figures_of_the_report_are_in_it(rich_report):
    text = markdown.render(rich_report)
    assert text.startswith("### The GPU is busy for 39.2 of 42.6 ms a step")
    for figure in (
        "**42.6 ms**",
        "**64.7 ms**",
        "saves 9.40 ms a step (22.8%), between 7.10 ms and 10.2 ms",
        "5.4% **differs**",
    ):
        assert figure in text
    assert (
        "| `nvjet_sm90_tst_192x128_64x5_2x1_v_bz_coopB_NTT` | `aten::mm` | `blocks.*.mlp.down` | backward |"
        in text
    )


def test_hostile_names_add_no_markup(hostile_report):
    html = PARSER.render(markdown.render(hostile_report))
    tags = set(re.findall(r"<([a-zA-Z][a-zA-Z0-9]*)", html))
    assert tags <= {
        "h3", "p", "blockquote", "strong", "em", "br", "table", "thead", "tbody", "tr", "th", "td",
        "ul", "li", "pre", "code", "details", "summary", "sub",
    }  # fmt: skip
    assert "href" not in html


def test_hostile_names_mention_nobody_and_break_no_table(hostile_report):
    text = markdown.render(hostile_report)
    outside_code = re.sub(r"^````+\w+.*?^````+$|`[^`]*`", "", text, flags=re.S | re.M)
    assert not re.search(r"@\w", outside_code)
    widths = {}
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            widths.setdefault(len(cells(line)), 0)
    assert set(widths) == {3, 9, 8, 6}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_code_span_shows_the_name_as_it_is(text):
    from advisor.report import format as fmt

    clean = fmt.printable(text)
    html = PARSER.renderInline(f"x {markdown.code(clean, 20_000)} y")
    shown = re.fullmatch(r"x <code>(.*)</code> y", html, re.S)
    expected = fmt.one_line(clean)
    if not expected:
        assert markdown.code(clean) == fmt.MISSING
        return
    import html as entities

    assert entities.unescape(shown.group(1)) == expected


@pytest.mark.parametrize("text", HOSTILE)
def test_prose_shows_the_text_as_it_is(text):
    import html as entities

    from advisor.report import format as fmt

    clean = fmt.one_line(fmt.printable(text))
    html = PARSER.renderInline(markdown.prose(clean, 20_000))
    assert entities.unescape(html).replace("\u2060", "") == clean


def test_the_fence_is_longer_than_any_in_the_fix(hostile_report):
    text = markdown.render(hostile_report)
    assert "`````python\n```\n" in text


def test_what_was_not_measured_says_how_to_get_it(unknown_report):
    text = markdown.render(unknown_report)
    assert (
        "| Peak memory | *not measured* | to get it: capture with the TrainingAdvisor callback on a GPU |"
        in text
    )
    assert "Top kernels" not in text


def test_ranks_are_listed_with_their_waiting(rich_report):
    row = next(line for line in markdown.render(rich_report).splitlines() if line.startswith("| 1 |"))
    assert cells(row)[-1].strip() == "1.73 ms"


def test_what_is_above_its_roof_is_marked_and_explained(rich_report):
    assert "%!" not in markdown.render(rich_report)
    rich_report.kernels[0].efficiency, rich_report.kernels[0].flags = 2.994, ["above_roof"]
    text = markdown.render(rich_report)
    assert "| 299%! |" in text
    assert "above\\_roof: above its roof" in text
