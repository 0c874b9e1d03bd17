"""Hardware counters in the report: joined to launches and groups, judged, written and shown."""

from __future__ import annotations

import csv
import io
import json

import pytest
from rich.console import Console

from advisor.cli import main
from advisor.report import counter_view, html, markdown, model, terminal
from advisor.report.build import analyze, build_report
from advisor.report.counters import add_counters, join_counters
from advisor.report.launches import COLUMNS, MEASURED_COLUMNS, write_launches
from advisor.roofline.counters import Counted, CounterFile
from tests.report.loops import MM_BYTES, MM_FLOPS, analyse, loop
from tests.report.reports import HOSTILE

READ = 2 * MM_BYTES / 3


def counters(steps: int = 3, *, gemm: str = "sm90_xmma_gemm_bf16bf16", read: float = READ) -> CounterFile:
    """What Nsight Compute might say of `loop`, both kernels a step."""
    product = Counted(
        gemm,
        time_ns=310_000.0,
        bytes_read=read,
        bytes_written=READ / 2,
        instructions={"ffma": 7.0},
        tensor_flops={"bf16": float(MM_FLOPS)},
        dram_pct=12.0,
    )
    addition = Counted(
        "void native::vectorized_elementwise_kernel<4, T1>(int)",
        time_ns=42_000.0,
        bytes_read=READ,
        bytes_written=READ / 2,
        instructions={"fadd": float(4096**2)},
    )
    return CounterFile("ncu.csv", [product, addition] * steps)


@pytest.fixture
def table(tmp_path):
    """The counters of `loop` as a file."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(
        ["launch", "kernel", "time_ns", "dram_read_bytes", "dram_write_bytes", "tensor_flops_bf16"]
    )
    for i, one in enumerate(counters().launches):
        flops = one.tensor_flops.get("bf16", 0.0)
        writer.writerow([i, one.kernel, one.time_ns, one.bytes_read, one.bytes_written, flops])
    path = tmp_path / "ncu.csv"
    path.write_text(text.getvalue())
    return path


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(loop().json())
    return path


def reported(file: CounterFile) -> model.Report:
    analysis = analyse(loop())
    report = build_report(analysis)
    add_counters(report, analysis, file)
    return report


def test_groups_get_means_per_launch_with_the_models_beside() -> None:
    report = reported(counters())

    product, addition = report.kernels
    assert product.measured == model.Measured(
        launches=2,
        time_ms=0.31,
        bytes_read=READ,
        bytes_written=READ / 2,
        flops=MM_FLOPS,
        dram_fraction=0.12,
        modelled_bytes_read=product.bytes_read,
        modelled_bytes_written=product.bytes_written,
        modelled_flops=MM_FLOPS,
        bound="compute",
    )
    assert addition.measured is not None
    assert (addition.measured.flops, addition.measured.bound) == (4096**2, "memory")
    assert addition.measured.dram_fraction is None


def test_the_whole_is_judged_over_all_launches_joined() -> None:
    found = reported(counters()).counters

    assert found is not None
    assert (found.launches, found.joined, found.joined_launch_fraction) == (6, 6, 1.0)
    assert found.costed_time_fraction == 1.0
    assert found.flops_agree_time_fraction == 1.0
    assert found.bound_agrees_time_fraction == 1.0
    assert found.disagreements == []


def test_a_kernel_that_reads_twice_what_was_modelled_is_listed() -> None:
    report = reported(counters(read=2 * READ))

    found = report.counters
    assert found is not None
    assert found.read_within_1_5_time_fraction == pytest.approx(42 / 352)
    assert {d.what for d in found.disagreements} == {"bytes read"}
    assert [row.differs for row in counter_view.rows(report)] == [True, False]


def test_one_step_of_counters_stands_for_each_of_the_equal_steps() -> None:
    joined = join_counters(analyse(loop()), counters(steps=1))

    assert sorted(joined.counted) == [0, 1]


def test_what_cannot_be_joined_is_said_and_counted() -> None:
    report = reported(counters(gemm="another_gemm"))

    assert report.counters is not None
    assert report.counters.joined == 3
    assert report.kernels[0].measured is None
    remark = next(q for q in report.data_quality if q.code == "counters.unjoined")
    assert remark.level == "warning"
    assert "3 of 6" in remark.message


def test_launches_end_with_measured_columns_only_where_counters_were_given(tmp_path) -> None:
    analysis = analyse(loop())
    joined = join_counters(analysis, counters(gemm="another_gemm"))

    write_launches(analysis, tmp_path / "with.csv", joined.counted)
    write_launches(analysis, tmp_path / "without.csv")

    with (tmp_path / "with.csv").open() as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0]) == COLUMNS + MEASURED_COLUMNS
    assert rows[1][-len(MEASURED_COLUMNS) :] == [""] * len(MEASURED_COLUMNS)
    assert rows[2][-len(MEASURED_COLUMNS) :] == ["42000.0", str(4096.0**2), str(READ), str(READ / 2), ""]
    assert (tmp_path / "without.csv").read_text().splitlines()[0] == ",".join(COLUMNS)


def test_the_command_line_and_the_function_take_a_file_of_counters(trace, table, tmp_path, capsys) -> None:
    out = tmp_path / "report.json"

    main(
        ["analyze", str(trace), "--counters", str(table), "--json", str(out), "-o", str(tmp_path / "r.html")]
    )

    assert json.loads(out.read_text())["counters"]["joined"] == 6
    assert "6 of 6" in capsys.readouterr().out
    report = analyze(trace, counters=table)
    assert report.counters is not None
    assert report.counters.joined == 6


def test_a_file_without_counters_is_refused_before_any_output(trace, tmp_path, capsys) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("a,b\n1,2\n")

    with pytest.raises(SystemExit) as stop:
        main(["analyze", str(trace), "--counters", str(wrong), "-o", str(tmp_path / "r.html")])

    assert stop.value.code == 3
    assert "ncu --csv --page raw" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_every_renderer_shows_the_counters() -> None:
    report = reported(counters(read=2 * READ))
    console = Console(file=io.StringIO(), width=120)

    terminal.render(report, console)
    page = html.render(report)
    text = markdown.render(report)

    assert "Hardware counters against the model" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "Measured against modelled" in page
    assert "134 MB" in page
    assert "Measured against modelled" in text
    assert "**differs**" in text


def test_without_counters_no_renderer_mentions_them(rich_report) -> None:
    assert "Measured against modelled" not in html.render(rich_report)
    assert "Measured against modelled" not in markdown.render(rich_report)


def test_hostile_names_in_counters_add_no_markup(hostile_report) -> None:
    hostile_report.counters = model.CounterSummary(
        path=HOSTILE[0], launches=1, joined=1, joined_launch_fraction=None, joined_time_fraction=None
    )
    for group in hostile_report.kernels:
        group.measured = model.Measured(launches=1, bound=HOSTILE[1], bytes_read=float("nan"))

    page = html.render(hostile_report)

    assert "<script>alert" not in page
    assert "<img src" not in page
    section = markdown.render(hostile_report).split("<summary>Measured against modelled")[1]
    assert "<script" not in section.split("</details>")[0]
