"""Lists of a report as data frames."""

from __future__ import annotations

import math
import sys

import pytest

from advisor.errors import MissingExtraError, UsageError
from advisor.report import model

pd = pytest.importorskip("pandas")


def _report(**lists) -> model.Report:
    return model.Report(
        tool_version="0",
        created="2026-01-01T00:00:00+00:00",
        trace=model.TraceInfo(path="t.json", size_bytes=None, events=0),
        device=model.DeviceInfo(name="H100"),
        summary=model.Summary(
            verdict="",
            steps=0,
            step_time_ms=model.StepTime(p50=None, p95=None),
            bound_time_fraction=model.BoundTimeFraction(),
            coverage=model.Coverage(),
        ),
        breakdown=model.Breakdown(),
        **lists,
    )


def _kernel(**known) -> model.KernelGroup:
    base = {"op": None, "module": None, "phase": "forward", "family": "matmul", "calls_per_step": 1.0}
    return model.KernelGroup(**{**base, "time_ms_per_step": 1.0, "time_fraction": 0.5, **known})


def test_kernels_are_the_default_and_one_row_a_group():
    report = _report(kernels=[_kernel(name="gemm", flops=2e9, flags=["latency"]), _kernel(name="copy")])

    table = report.to_pandas()

    assert table["name"].tolist() == ["gemm", "copy"]
    assert table["flags"].tolist() == [["latency"], []]


def test_what_is_not_known_is_neither_zero_nor_text():
    report = _report(kernels=[_kernel(name="gemm", flops=2e9), _kernel(name="copy")])

    table = report.to_pandas("kernels")

    assert table["flops"].dtype == "float64"
    assert table["flops"].iloc[0] == 2e9
    assert math.isnan(table["flops"].iloc[1])
    assert table["op"].tolist() == [None, None]


def test_a_column_of_unknown_numbers_is_still_one_of_numbers():
    table = _report(kernels=[_kernel(name="copy")]).to_pandas()

    assert table["efficiency"].dtype == "float64"


def test_the_saving_of_a_finding_is_three_columns():
    saved = model.Finding(rule="a", title="A", saving_ms=model.Saving(low=1, likely=2, high=3))
    report = _report(findings=[saved, model.Finding(rule="b", title="B")])

    table = report.to_pandas("findings")

    assert table.loc[0, ["saving_ms_low", "saving_ms_likely", "saving_ms_high"]].tolist() == [1, 2, 3]
    assert table.loc[1, ["saving_ms_low", "saving_ms_likely", "saving_ms_high"]].isna().all()


def test_a_rank_that_is_not_known_leaves_the_others_whole_numbers():
    def rank(number: int | None) -> model.RankSummary:
        return model.RankSummary(
            rank=number,
            path="t.json",
            device="H100",
            step_time_ms=None,
            gpu_busy_fraction=None,
            kernel_time_ms_per_step=None,
            communication_ms_per_step=None,
            exposed_communication_ms_per_step=None,
        )

    table = _report(ranks=[rank(3), rank(None)]).to_pandas("ranks")

    assert table["rank"].iloc[0] == 3
    assert str(table["rank"].dtype) == "Int64"
    assert table["rank"].isna().tolist() == [False, True]


@pytest.mark.parametrize("table", ["kernels", "findings", "data_quality", "ranks", "cross_checks"])
def test_an_empty_list_keeps_its_columns(table):
    frame = _report().to_pandas(table)

    assert len(frame) == 0
    assert len(frame.columns) >= 3


def test_an_unknown_table_is_answered_with_those_there_are():
    with pytest.raises(UsageError, match="no table 'summary': there are kernels, findings"):
        _report().to_pandas("summary")


def test_without_pandas_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(MissingExtraError, match=r"pip install pandas$"):
        _report().to_pandas()


def test_a_report_prints_as_one_line_with_its_verdict():
    report = _report()
    report.summary.verdict = "All is well."
    assert repr(report) == "<Report on t.json: All is well.>"
