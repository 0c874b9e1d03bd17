"""A row a launch: what is written, and how."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from advisor.errors import UsageError
from advisor.report.launches import COLUMNS, launch_rows, write_launches
from tests.report.loops import MM_FLOPS, analyse, loop
from tests.trace.builder import Builder

ISSUED = (
    "ts_ns dur_ns stream name op op_id module phase step flops bytes_read bytes_written pipe intensity bound "
    "efficiency"
)


def rows_of(builder: Builder) -> list[dict]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in launch_rows(analyse(builder))]


def test_the_columns_are_those_that_others_build_on() -> None:
    assert " ".join(COLUMNS) == ISSUED


def test_a_row_says_what_is_known_of_a_launch() -> None:
    row = rows_of(loop().range("advisor::module::fc", 10_000, 45))[0]
    assert row["ts_ns"] == 10_050_000
    assert row["dur_ns"] == 300_000
    assert (row["name"], row["op"], row["module"]) == ("sm90_xmma_gemm_bf16bf16", "aten::mm", "fc")
    assert (row["stream"], row["step"], row["phase"]) == (7, 0, "forward")
    assert (row["flops"], row["pipe"], row["bound"]) == (MM_FLOPS, "tensor_bf16", "compute")
    assert row["intensity"] == pytest.approx(row["flops"] / (row["bytes_read"] + row["bytes_written"]))
    assert 0 < row["efficiency"] <= 1


def test_every_launch_has_a_row_even_of_a_step_that_is_not_counted() -> None:
    rows = rows_of(loop())
    assert [row["step"] for row in rows] == [0, 0, 1, 1, 2, 2]


def test_what_is_not_known_is_none() -> None:
    (row,) = rows_of(Builder().work("k", 1, 5, correlation=None, stream=-1))
    known = {name for name in COLUMNS if row[name] is not None}
    assert known == {"ts_ns", "dur_ns", "name", "phase", "bound"}
    assert (row["bound"], row["phase"]) == ("unknown", "other")


def test_values_are_plain_python_ones() -> None:
    for row in launch_rows(analyse(loop())):
        assert {type(value) for value in row} <= {int, float, str, type(None)}


def test_csv_leaves_empty_what_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "launches.csv"
    write_launches(analyse(loop().work("odd, \ud800 name", 1, 5, correlation=None)), path)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    assert rows[0]["name"].startswith("odd, ")
    assert rows[0]["op"] == rows[0]["flops"] == ""


def test_parquet_keeps_types_even_of_columns_of_which_nothing_is_known(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "launches.parquet"
    write_launches(analyse(Builder().work("k", 1, 5, correlation=None)), path)
    table = parquet.read_table(path)
    assert table.column_names == list(COLUMNS)
    types = {field.name: str(field.type) for field in table.schema}
    assert (types["op_id"], types["flops"], types["module"]) == ("int64", "double", "string")
    assert table.to_pylist()[0]["ts_ns"] == 1000


def test_a_trace_without_launches_gives_a_table_without_rows(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for name in ("none.csv", "none.parquet"):
        write_launches(analyse(Builder().step(1, 0, 10)), tmp_path / name)
    assert (tmp_path / "none.csv").read_text().strip() == ",".join(COLUMNS)


def test_another_ending_is_refused(tmp_path: Path) -> None:
    for name in ("launches.xlsx", "launches"):
        with pytest.raises(UsageError, match=r"\.csv or \.parquet"):
            write_launches(analyse(loop()), tmp_path / name)
    assert list(tmp_path.iterdir()) == []
