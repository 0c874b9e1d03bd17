"""Swaps in the report: built from outcomes, kept beside the traces, told by every renderer."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace as Plain

import msgspec
import pytest
from rich.console import Console

from advisor.report import html, markdown, model, swaps, swaps_view, terminal
from advisor.report.build import analyze
from advisor.report.files import to_json, write_text
from tests.report.loops import loop

FUSED = "advisor.kernels.layer_norm"


def candidate(name: str = FUSED, **fields: object) -> Plain:
    return Plain(
        **{
            "name": name,
            "source": "bundled",
            "permanent": "from advisor.kernels import FusedLayerNorm\nself.norm = FusedLayerNorm(768)\n",
            "deterministic": True,
            **fields,
        }
    )


def trial(name: str = FUSED, **fields: object) -> Plain:
    known = {"refused": "", "error": 2e-3, "eager_error": 3e-3, "time_ns": 40_000.0, "original_ns": 90_000.0}
    memory = {"memory_bytes": 1_000_000, "original_memory_bytes": 2_000_000}
    return Plain(**{"candidate": name, **known, **memory, **fields})


def outcome(*trials: Plain, chosen: Plain | None = None, **fields: object) -> Plain:
    names = {one.candidate for one in trials}
    site = {
        "kind": "norm",
        "where": [f"h.{n}.ln_1" for n in range(12)],
        "mechanism": "module",
        "what": "LayerNorm",
        "candidates": [candidate(name, source="torch" if "torch" in name else "bundled") for name in names],
        "calls_per_step": 12,
        **fields,
    }
    return Plain(site=Plain(**site), chosen=chosen, reason="2.2 times as fast", trials=list(trials))


def made() -> model.Swaps:
    wrong = trial("torch F.layer_norm", refused="dW is off by 0.3", time_ns=None, original_ns=None)
    return model.Swaps(
        asked=["norm"],
        verdict="1 of 2 sites is faster: a step takes 22.0 ms instead of 30.0",
        kept=True,
        sites=swaps.swap_sites(
            [outcome(trial(refused="0.9 times as fast")), outcome(trial(), wrong, chosen=candidate())], 30.0
        ),
        steps=model.SwapSteps(
            eager_ms=[30.0, 30.2],
            swapped_ms=[22.0, 22.1, 21.9],
            eager_p50_ms=30.1,
            swapped_p50_ms=22.0,
            saving_ms=model.Saving(low=7.5, likely=8.1, high=8.4),
            eager_peak_bytes=10_000_000_000,
        ),
        remarks=["attention: its modules are compiled and were left alone"],
    )


def texts(report: model.Report) -> dict[str, str]:
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=160))
    return {"terminal": out.getvalue(), "page": html.render(report), "markdown": markdown.render(report)}


def test_a_site_that_was_kept_has_its_times_share_and_change() -> None:
    (site,) = swaps.swap_sites([outcome(trial(), chosen=candidate())], step_ms=54.0)

    assert site.chosen == FUSED
    assert site.eager_ms_per_step == pytest.approx(12 * 0.09)
    assert site.swapped_ms_per_step == pytest.approx(12 * 0.04)
    assert site.step_fraction == pytest.approx(0.02)
    assert site.trials[0].source == "bundled"
    assert site.trials[0].memory_bytes == 1_000_000
    assert site.permanent.splitlines() == [
        "@@ h.0.ln_1, h.1.ln_1, h.2.ln_1 and 9 more @@",
        "-LayerNorm",
        "+from advisor.kernels import FusedLayerNorm",
        "+self.norm = FusedLayerNorm(768)",
    ]


def test_what_was_not_measured_is_null_and_not_nought() -> None:
    nothing = trial(
        time_ns=None, original_ns=None, error=None, eager_error=None, memory_bytes=None,
        original_memory_bytes=None, refused="raised RuntimeError",
    )  # fmt: skip
    (site,) = swaps.swap_sites([outcome(nothing)], step_ms=None)

    assert site.chosen is None
    assert site.permanent == ""
    found = json.loads(to_json(site))
    for name in ("eager_ms_per_step", "swapped_ms_per_step", "step_fraction", "chosen"):
        assert found[name] is None
    for name in ("error", "eager_error", "time_ms", "eager_time_ms", "memory_bytes", "eager_memory_bytes"):
        assert found["trials"][0][name] is None


def test_an_error_that_is_no_number_does_not_break_the_file(tmp_path: Path) -> None:
    (site,) = swaps.swap_sites([outcome(trial(error=float("nan"), time_ns=float("inf")))], step_ms=0.0)
    swaps.write_swaps(model.Swaps(verdict="v", sites=[site]), tmp_path)

    back = msgspec.json.decode((tmp_path / swaps.FILE).read_bytes(), type=model.Swaps)

    assert back.sites[0].trials[0].error is None
    assert back.sites[0].trials[0].time_ms is None
    assert back.sites[0].step_fraction is None


def test_kept_sites_come_first_then_the_longest() -> None:
    sites = swaps.swap_sites(
        [
            outcome(trial(original_ns=1e3), what="short"),
            outcome(trial(original_ns=9e6), what="long"),
            outcome(trial(original_ns=1e2), what="kept", chosen=candidate()),
        ]
    )
    assert [site.what for site in sites] == ["kept", "long", "short"]


def test_a_change_that_is_a_diff_already_stays_as_it_is() -> None:
    assert swaps.as_diff("x", ["m.py:3"], "-a = f(x)\n+a = g(x)") == "@@ m.py:3 @@\n-a = f(x)\n+a = g(x)"
    assert swaps.as_diff("x", ["m.py:3"], "  \n") == ""


def test_an_analysis_takes_in_what_swap_left_beside_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "rank0.json"
    trace.write_bytes(loop().json())
    assert analyze(trace).swaps is None

    swaps.write_swaps(made(), tmp_path)

    assert analyze(trace).swaps == made()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"kept": true}', b'{"verdict": 3}', b"\xff\xfe{"])
def test_a_broken_file_is_a_remark_and_no_failure(tmp_path: Path, content: bytes) -> None:
    trace = tmp_path / "rank0.json"
    trace.write_bytes(loop().json())
    (tmp_path / swaps.FILE).write_bytes(content)

    report = analyze(trace)

    assert report.swaps is None
    assert [remark for remark in report.data_quality if remark.code == "swaps.unreadable"]


def test_fields_of_a_later_version_are_ignored(tmp_path: Path, rich_report: model.Report) -> None:
    later = json.loads(to_json(made())) | {"more": 1}
    (tmp_path / swaps.FILE).write_text(json.dumps(later))

    swaps.add_swaps(rich_report, tmp_path)

    assert rich_report.swaps == made()


def test_a_finished_report_is_brought_up_to_date_once(tmp_path: Path, rich_report: model.Report) -> None:
    # GIVEN a report that was written before swap had decided
    write_text(tmp_path / "report.json", to_json(rich_report))
    html.write(rich_report, tmp_path / "report.html")
    assert not swaps.refresh(tmp_path)
    swaps.write_swaps(made(), tmp_path)

    # WHEN it is brought up to date
    assert swaps.refresh(tmp_path)

    # THEN page and JSON tell it, what was not there is not made, and there is nothing left to do
    assert "a step takes 22.0 ms instead of 30.0" in (tmp_path / "report.html").read_text()
    stored = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=model.Report)
    assert stored.swaps == made()
    assert not (tmp_path / "report.md").exists()
    assert not swaps.refresh(tmp_path)


def test_a_page_that_is_not_ours_is_not_overwritten(tmp_path: Path, rich_report: model.Report) -> None:
    write_text(tmp_path / "report.json", to_json(rich_report))
    (tmp_path / "report.html").write_text("mine")
    swaps.write_swaps(made(), tmp_path)

    assert swaps.refresh(tmp_path)

    assert (tmp_path / "report.html").read_text() == "mine"


def test_every_renderer_tells_the_verdict_each_site_and_why(rich_report: model.Report) -> None:
    rich_report.swaps = made()

    for name, text in texts(rich_report).items():
        assert "a step takes 22.0 ms instead of 30.0" in text, name
        assert "LayerNorm" in text, name
        assert "left alone" in text, name
        assert "compiled and were left alone" in text, name
    told = texts(rich_report)
    for name in ("page", "markdown"):
        assert "dW is off by 0.3" in told[name], name
        assert "2.0e-03" in told[name], name
        assert "3.0e-03" in told[name], name
        assert "+self.norm = FusedLayerNorm(768)" in told[name], name
        assert "between 7.50 ms and 8.40 ms with 95% confidence" in told[name], name
        assert "30.1 ms of 2 steps" in told[name], name
        assert "10.0 GB and —" in told[name], name
    assert "```diff" in told["markdown"]
    assert "1.08 ms" in told["terminal"]


def test_where_nothing_was_swapped_the_reason_is_all_there_is(rich_report: model.Report) -> None:
    rich_report.swaps = model.Swaps(verdict="nothing was swapped: there is no GPU here")

    for name, text in texts(rich_report).items():
        assert "nothing was swapped: there is no GPU here" in text, name
        assert "Eager's" not in text.replace("Eager&#39;s", "Eager's"), name


def test_without_swaps_no_renderer_mentions_them(rich_report: model.Report) -> None:
    for name, text in texts(rich_report).items():
        assert "Swaps" not in text, name


def test_a_loss_is_told_as_a_loss() -> None:
    steps = model.SwapSteps(saving_ms=model.Saving(low=-3.0, likely=-2.0, high=-1.0))
    told = dict(swaps_view.figures(steps))["A step saves"]
    assert told == "a loss of 2.00 ms, up to 3.00 ms slower with 95% confidence"
    assert dict(swaps_view.figures(model.SwapSteps()))["A step saves"] == "—"


def test_hostile_names_in_swaps_add_no_markup(hostile_report: model.Report) -> None:
    # GIVEN an attack in each text of the swaps; other parts' attacks have tests of their own
    told = texts(hostile_report)

    # THEN the page's section holds them as text alone
    section = told["page"].split('id="h-swaps"')[1].split("</section>")[0]
    assert "&lt;img src=x onerror=alert(2)&gt;" in section
    for attack in ("<script", "<img", "<svg", "<b>"):
        assert attack not in section


def test_many_sites_keep_the_page_small(rich_report: model.Report) -> None:
    sites = swaps.swap_sites([outcome(*[trial(f"c{n}") for n in range(40)]) for _ in range(500)])
    rich_report.swaps = model.Swaps(verdict="v", sites=sites)

    page = html.render(rich_report)

    assert len(page.encode()) < 1_500_000
    assert "400 more sites in the JSON report" in page
