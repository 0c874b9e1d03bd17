"""The page as text: what it says, what it lets in, how large it is."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from advisor.errors import UsageError
from advisor.report import format as fmt
from advisor.report import html, metrics, page
from advisor.report.files import to_json
from tests.report import reports


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.text = [], [], []
        self.in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.in_script = tag == "script"
        if self.in_script:
            self.scripts.append((dict(attrs), []))

    def handle_endtag(self, tag):
        self.in_script = False

    def handle_data(self, data):
        if self.in_script:
            self.scripts[-1][1].append(data)
        else:
            self.text.append(data)

    def words(self):
        return " ".join(" ".join(self.text).split())


def data_block(text):
    return json.loads(re.search(r'id="kernel-data">(.*?)</script>', text, re.S).group(1))


@pytest.mark.parametrize("make", [reports.rich, reports.unknown, reports.hostile, lambda: reports.long(1000)])
def test_the_page_is_valid_utf8_without_control_characters_and_under_a_megabyte(make):
    encoded = html.render(make()).encode("utf-8")
    assert len(encoded) < 1_000_000
    assert not re.search(rb"[\x00-\x08\x0b-\x1f]", encoded)


def test_a_page_of_a_thousand_groups_with_enormous_names_stays_under_a_megabyte():
    report = reports.long(1000)
    for place, group in enumerate(report.kernels):
        group.name = f"void kernel_{place}<{'long::template::argument, ' * 100}>(int)"
    assert len(html.render(report).encode()) < 1_000_000


def test_more_groups_than_the_page_can_hold_are_counted():
    text = Page(html.render(reports.long(page.MAX_ROWS + 7))).words()
    assert re.search(r"7 more groups, <?0\.\d% of device time, are in the JSON report only", text)


def test_the_verdict_is_the_first_heading_and_the_title(rich_report):
    text = html.render(rich_report)
    assert re.search(r"<h1>The GPU is busy for 39\.2 of 42\.6 ms a step", text)
    assert re.search(r"<title>The GPU is busy", text)


def test_hostile_names_add_no_elements(rich_report, hostile_report):
    # GIVEN the elements that the templates write
    ours = {tag for tag, _ in Page(html.render(rich_report)).tags}
    # WHEN every text is an attack
    attacked = Page(html.render(hostile_report))
    # THEN there are no others, two scripts, and no attribute that runs or fetches
    assert {tag for tag, _ in attacked.tags} <= ours
    assert len(attacked.scripts) == 2
    for tag, attributes in attacked.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("src") is None
        if tag in ("a", "link"):
            assert attributes["href"] in ("#main", "data:,")


def test_the_policy_forbids_requests_and_allows_the_one_script_by_its_hash(hostile_report):
    found = Page(html.render(hostile_report))
    policy = next(a["content"] for t, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    attributes, source = found.scripts[-1]
    digest = base64.b64encode(hashlib.sha256("".join(source).encode()).digest()).decode()
    assert attributes == {}
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}';" in policy
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]


def test_style_and_script_load_nothing():
    for name in (*html._STYLES, *html._SCRIPTS):
        source = html._asset(name)
        assert not re.search(
            r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttp|innerHTML|insertAdjacent|\beval\b", source
        ), name


@pytest.mark.parametrize("make", [reports.rich, reports.hostile])
def test_the_data_block_gives_back_every_name(make):
    report = make()
    text = html.render(report)
    block = data_block(text)
    raw = re.search(r'id="kernel-data">(.*?)</script>', text, re.S).group(1)
    assert not re.search("[<>&\u2028\u2029]", raw)
    clean = metrics.by_time(fmt.printable(report).kernels)
    assert len(block["rows"]) == len(clean)
    for row, group in zip(block["rows"], clean, strict=True):
        assert block["names"][row[0]] == fmt.shorten(fmt.one_line(group.name), 4000)


def test_json_for_a_script_element_survives_the_trip():
    value = {"</script>": ["<!--", "\u2028", "\ud800", "&lt;", "\x00", 1e-9, None]}
    text = page.script_json(value)
    assert json.loads(text) == value
    assert text.isascii()
    assert not set("<>&") & set(text)


def test_the_first_fifty_rows_are_there_without_a_script():
    text = html.render(reports.long(120))
    table = text[text.index('id="kernels"') :]
    body = table[table.index("<tbody>") : table.index("</tbody>")]
    assert body.count("<tr>") == page.STATIC_ROWS
    assert "70 more groups are listed when scripts may run" in text


def test_rows_are_in_order_of_time_whatever_the_order_of_the_report(rich_report):
    rich_report.kernels.reverse()
    block = data_block(html.render(rich_report))
    times = [row[3][5] for row in block["rows"]]
    assert times == sorted(times, reverse=True)


def test_what_was_not_measured_is_said_with_the_way_to_it(unknown_report):
    text = Page(html.render(unknown_report)).words()
    assert text.count("not measured To get it:") == 8
    assert "No kernel has both FLOPs and bytes" in text
    assert "Name the device with --device" in text


def test_sections_without_content_are_left_out(unknown_report, rich_report):
    rich = html.render(rich_report)
    for heading in ("What to change", "Where the step goes", "Ranks", "Checked against other tools"):
        assert heading in rich
        assert heading not in html.render(unknown_report)


def test_doubts_stand_under_the_verdict_and_mere_remarks_do_not(rich_report):
    text = html.render(rich_report)
    banner = text[text.index('class="doubts"') : text.index("</section>")]
    assert "1.2% of device time was launched before" in banner
    assert "first profiled step" not in banner


def test_percentages_have_their_denominators_with_a_source(rich_report):
    footer = Page(html.render(rich_report)).words().split("What the percentages are of")[1]
    assert "bf16 tensor 989 TFLOP/s ridge 206 FLOP/byte; NVIDIA H200 datasheet, dense" in footer
    assert "fp32 vector" in footer
    assert "tf32" not in footer


def test_a_loss_is_told_once(rich_report):
    told = "3 × lone surrogate in a name"
    assert told in html.render(rich_report)
    rich_report.data_quality.append(
        reports.model.Quality(level="warning", code="read.lone surrogate in a name", message="replaced (3)")
    )
    assert told not in html.render(rich_report)


def test_long_lists_of_the_environment_are_counted(rich_report):
    text = Page(html.render(rich_report)).words()
    assert "parameters 148 entries" in text
    assert "optimizer.fused yes" in text
    assert "optimizer.foreach —" in text


@pytest.mark.parametrize("inside", ["", "modules"])
def test_an_environment_without_end_is_counted_and_does_not_fill_the_page(rich_report, inside):
    endless = {f"key{i}": i for i in range(100_000)}
    rich_report.environment = {inside: endless} if inside else endless
    page = html.render(rich_report)
    assert len(page.encode()) < 1_000_000
    assert ("100000 entries" if inside else "further entries are in the JSON report") in Page(page).words()


def test_rendering_twice_gives_the_same_page_and_leaves_the_report_alone(rich_report):
    before = to_json(rich_report)
    assert html.render(rich_report) == html.render(rich_report)
    assert to_json(rich_report) == before


def test_a_page_is_written_whole(rich_report, tmp_path):
    html.write(rich_report, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == html.render(rich_report)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_folder_that_is_not_there_is_named(rich_report, tmp_path):
    with pytest.raises(UsageError, match="nowhere"):
        html.write(rich_report, tmp_path / "nowhere" / "report.html")


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_marks_have_enough_contrast(theme):
    tokens = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", html._asset("advisor.css"))
    colours = {name: pair[theme] for name, *pair in tokens}
    for text in ("ink", "muted", "accent", "warn", "error"):
        for paper in ("paper", "raised"):
            assert contrast(colours[text], colours[paper]) >= 4.5, (text, paper)
    for text in ("ink", "muted", "warn", "error"):
        assert contrast(colours[text], colours["warn-paper"]) >= 4.5, text
    assert contrast(colours["ink"], colours["mark"]) >= 4.5
    assert contrast(colours["muted"], colours["mark"]) >= 4.5
    for number in range(8):
        assert contrast(colours[f"c{number}"], colours["paper"]) >= 3, number


def test_ranks_are_listed_with_their_waiting(rich_report):
    page = html.render(rich_report)
    table = page[page.index('id="h-ranks"') :]
    assert "of it waiting" in table
    assert '<td class="number">1.73 ms</td>' in table
