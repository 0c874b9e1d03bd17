"""A timeline as data frames: what is not known is missing, never -1 or 0."""

from __future__ import annotations

import sys

import pytest

from advisor.errors import MissingExtraError, UsageError
from advisor.trace.link import Timeline
from tests.trace.builder import Builder

pd = pytest.importorskip("pandas")


def _timeline() -> Timeline:
    """Steps 7 and 8: a product within an operator, and a kernel from before the trace."""
    trace = Builder().step(7, 1000, 100).step(8, 1100, 100)
    trace.op("aten::linear", 1010, 50).op("aten::mm", 1020, 30)
    trace.launch("gemm", 1025, at=1200, dur=40, grid=[8, 2, 1])
    trace.work("left over", 990, 20, correlation=99)
    trace.range("advisor::forward", 1005, 60)
    return trace.join()


def test_a_launch_has_its_operator_step_and_grid_spelled_out():
    table = _timeline().to_pandas()

    row = table[table["name"] == "gemm"].iloc[0]
    assert (row["ts_ns"], row["dur_ns"], row["launch_ts_ns"]) == (1_200_000, 40_000, 1_025_000)
    assert (row["kind"], row["op"], row["step"], row["stream"]) == ("kernel", "aten::mm", 7, 7)
    assert row["grid_blocks"] == 16


def test_an_orphan_has_no_launch_operator_or_step():
    table = _timeline().to_pandas("launches")

    row = table[table["name"] == "left over"].iloc[0]
    assert row[["launch_ts_ns", "op", "op_id", "module", "step", "bytes"]].isna().all()


def test_whole_numbers_stay_whole_beside_missing_ones():
    # GIVEN a column with a missing step
    table = _timeline().to_pandas()

    # THEN it is no float, and sums leave the missing one out
    assert str(table["step"].dtype) == "Int64"
    assert str(table["ts_ns"].dtype) == "int64"
    assert table["step"].sum() == 7


def test_operators_name_the_one_around_them_by_row():
    table = _timeline().to_pandas("ops")

    assert table["name"].tolist() == ["aten::linear", "aten::mm"]
    assert table["parent_id"].isna().tolist() == [True, False]
    assert table.loc[table.loc[1, "parent_id"], "name"] == "aten::linear"
    assert table["step"].tolist() == [7, 7]


def test_steps_tell_the_work_they_launched():
    table = _timeline().to_pandas("steps").set_index("number")

    assert table["launches"].to_dict() == {7: 1, 8: 0}
    assert table["device_busy_ns"].to_dict() == {7: 40_000, 8: 0}
    assert table.loc[7, "device_end_ns"] == 1_240_000
    assert table["device_end_ns"].isna().to_dict() == {7: False, 8: True}


def test_annotations_are_the_ranges_of_the_host():
    table = _timeline().to_pandas("annotations")

    assert table["name"].tolist() == ["ProfilerStep#7", "advisor::forward", "ProfilerStep#8"]
    assert table["dur_ns"].tolist() == [100_000, 60_000, 100_000]


def test_a_trace_of_runtime_calls_alone_gives_empty_tables_with_their_columns():
    timeline = Builder().call(10, correlation=1).join()

    for name in ("launches", "ops", "annotations"):
        table = timeline.to_pandas(name)
        assert len(table) == 0
        assert {"ts_ns", "dur_ns", "name"} <= set(table.columns)


def test_an_unknown_table_is_answered_with_those_there_are():
    with pytest.raises(UsageError, match="no table 'kernel': there are launches, ops, steps, annotations"):
        _timeline().to_pandas("kernel")


def test_without_pandas_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(MissingExtraError, match=r"pip install pandas$"):
        _timeline().to_pandas()
