"""The page as a browser shows it."""

import re
from contextlib import contextmanager

import pytest

from advisor.report import html
from tests.report import reports

pytestmark = pytest.mark.browser
NAMELESS = """() => [...document.querySelectorAll("button, select, input, section, [role]")]
    .filter((node) => !node.getAttribute("aria-label") && !node.getAttribute("aria-labelledby")
        && !node.textContent.trim() && !node.closest("label"))
    .map((node) => node.outerHTML)"""


@contextmanager
def opened(browser, report, folder, **options):
    """The page of a report in a tab that collects what a well-behaved page never causes."""
    file = folder / "report.html"
    html.write(report, file)
    options = {"viewport": {"width": 1280, "height": 900}, **options}
    tab = browser.new_page(**options)
    tab.trouble = []
    tab.on("console", lambda message: tab.trouble.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: tab.trouble.append(f"error: {error}"))
    tab.on("dialog", lambda dialog: (tab.trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    tab.on("request", lambda request: request.url != file.as_uri() and tab.trouble.append(request.url[:80]))
    tab.goto(file.as_uri())
    try:
        yield tab
    finally:
        tab.close()


def column(tab, place):
    return tab.locator(f"#kernels tbody tr[data-row] > :nth-child({place})").all_inner_texts()


def times(tab):
    return [float(text) for text in column(tab, 6)]


@pytest.mark.parametrize("make", [reports.rich, reports.unknown, reports.hostile])
def test_no_script_of_a_trace_runs_and_nothing_is_fetched(browser, tmp_path, make):
    with opened(browser, make(), tmp_path) as tab:
        # WHEN the page is used
        for name in tab.locator("#kernels tbody button").all()[:3]:
            name.click()
        for dot in tab.locator(".dots circle").all()[:3]:
            dot.dispatch_event("click")
        tab.wait_for_load_state("networkidle")
        # THEN
        assert tab.trouble == []


def test_columns_sort_both_ways_and_unknown_figures_come_last(browser, tmp_path):
    with opened(browser, reports.rich(), tmp_path) as tab:
        head = tab.locator("#kernels thead th").nth(5)
        assert head.get_attribute("aria-sort") == "descending"
        assert times(tab) == sorted(times(tab), reverse=True)
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        assert times(tab) == sorted(times(tab))
        tab.locator("#more").click()
        efficiency = tab.locator("#kernels thead th").nth(11)
        for _ in range(2):
            efficiency.get_by_role("button").click()
            shown = column(tab, 12)
            assert "—" in shown
            assert set(shown[shown.index("—") :]) == {"—"}
        assert head.get_attribute("aria-sort") is None


def test_search_and_filters_narrow_the_table_together(browser, tmp_path):
    with opened(browser, reports.rich(), tmp_path) as tab:
        tab.fill("#search", "LN_1 layer_norm")
        assert set(column(tab, 3)) == {"blocks.*.ln_1"}
        count = len(column(tab, 1))
        tab.select_option("#phase", "forward")
        assert 0 < len(column(tab, 1)) < count
        assert set(column(tab, 4)) == {"forward"}
        assert tab.locator("#found").inner_text().startswith("1 of 60 groups")
        tab.locator("#clear").click()
        assert tab.locator("#found").inner_text().startswith("60 of 60 groups, 100.0%")


def test_a_dot_leads_to_its_row_even_when_a_filter_hides_it(browser, tmp_path):
    with opened(browser, reports.rich(), tmp_path) as tab:
        tab.fill("#search", "no such kernel")
        assert column(tab, 1) == []
        dot = tab.locator(".dots circle").nth(4)
        dot.dispatch_event("click")
        picked = tab.locator("#kernels tr.picked")
        assert picked.get_attribute("data-row") == dot.get_attribute("data-row")
        assert picked.is_visible()
        assert "picked" in dot.get_attribute("class")


def test_the_plot_works_from_the_keyboard_and_tells_what_a_dot_is(browser, tmp_path):
    with opened(browser, reports.rich(), tmp_path) as tab:
        assert tab.locator('.dots circle[tabindex="0"]').count() == 1
        tab.locator('.dots circle[tabindex="0"]').focus()
        left = float(tab.locator(".dots circle:focus").get_attribute("cx"))
        for _ in range(40):
            tab.keyboard.press("ArrowRight")
        assert float(tab.locator(".dots circle:focus").get_attribute("cx")) > left
        tip = tab.locator("#tip")
        assert tip.is_visible()
        assert re.search(r"Intensity\s+[\d.,]+ FLOP/byte", tip.inner_text())
        assert re.search(r"Achieved\s+[\d.]+ TFLOP/s, [\d.]+ \wB/s", tip.inner_text())
        tab.keyboard.press("Enter")
        assert tab.locator("#kernels tr.picked").count() == 1


def test_a_family_in_the_legend_sifts_dots_and_rows(browser, tmp_path):
    with opened(browser, reports.rich(), tmp_path) as tab:
        chip = tab.locator("#families button", has_text="attention")
        chip.click()
        assert chip.get_attribute("aria-pressed") == "true"
        assert len(column(tab, 1)) == tab.locator(".dots circle.kept").count() == 2
        chip.click()
        assert tab.locator("#found").inner_text().startswith("60 of 60")


def test_a_row_opens_to_the_full_name(browser, tmp_path):
    with opened(browser, reports.rich(), tmp_path) as tab:
        tab.fill("#search", "FusedAdamMathFunctor")
        tab.locator("#kernels tbody button").click()
        assert tab.locator("#kernels .full").inner_text() == reports.ADAM
        assert tab.locator("#kernels tbody button").get_attribute("aria-expanded") == "true"


def test_a_thousand_groups_come_in_portions(browser, tmp_path):
    with opened(browser, reports.long(1000), tmp_path) as tab:
        assert len(column(tab, 1)) == 50
        tab.locator("#more").click()
        assert len(column(tab, 1)) == 250
        tab.fill("#search", "variant_999")
        assert len(column(tab, 1)) == 1
        assert tab.trouble == []


def test_the_table_is_readable_without_scripts(browser, tmp_path):
    with opened(browser, reports.rich(), tmp_path, java_script_enabled=False) as tab:
        assert tab.locator("#kernels tbody tr").count() == 50
        assert not tab.locator("#filters").is_visible()
        assert not tab.locator("#theme").is_visible()
        assert tab.locator(".dots circle title").count() > 20


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("make", [reports.rich, reports.unknown, reports.hostile])
def test_the_page_never_scrolls_sideways(browser, tmp_path, make, width):
    with opened(browser, make(), tmp_path, viewport={"width": width, "height": 800}) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_show_and_the_button_changes_between_them(browser, tmp_path, scheme):
    with opened(browser, reports.rich(), tmp_path, color_scheme=scheme) as tab:
        paper = "getComputedStyle(document.body).backgroundColor"
        colours = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 22, 26)"}
        assert tab.evaluate(paper) == colours[scheme]
        tab.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
        assert (tmp_path / f"{scheme}.png").stat().st_size > 50_000
        tab.locator("#theme").click()
        other = "dark" if scheme == "light" else "light"
        assert tab.evaluate(paper) == colours[other]
        assert tab.trouble == []


def test_print_opens_what_is_folded_and_hides_what_cannot_be_pressed(browser, tmp_path):
    with opened(browser, reports.rich(), tmp_path, color_scheme="dark") as tab:
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        tab.emulate_media(media="print")
        assert tab.locator("details:not([open])").count() == 0
        assert not tab.locator("#filters").is_visible()
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_the_fix_is_copied_as_it_stands(browser, tmp_path):
    with opened(browser, reports.rich(), tmp_path) as tab:
        tab.evaluate(
            "navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }"
        )
        tab.locator(".copy").first.click()
        assert tab.evaluate("window.copied") == reports.findings()[0].fix


def test_every_control_and_region_has_a_name(browser, tmp_path):
    with opened(browser, reports.rich(), tmp_path) as tab:
        nameless = tab.evaluate(NAMELESS)
        assert nameless == []
        assert tab.locator("html").get_attribute("lang") == "en"
        for landmark in ("header", "main", "footer"):
            assert tab.locator(f"body > {landmark}").count() == 1
