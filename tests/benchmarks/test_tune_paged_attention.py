"""Tuning paged attention: its candidates, what the table answers meanwhile, and what counts as right."""

import pytest
import torch
from advisor.kernels import _paged_ops as ops
from advisor.kernels.bench import paged_attention as bench
from advisor.kernels.bench.paged_attention import Shape

from benchmarks.kernels import tune_paged_attention as tune

NOW = {"BLOCK_N": 64, "num_warps": 4, "num_stages": 5, "per_sm": 3, "maxnreg": 168}


@pytest.fixture(autouse=True)
def on_a_hopper(monkeypatch):
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90")


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_candidates_are_distinct_begin_with_what_is_there_and_fit(dim):
    found = [dict(row) for row in tune.candidates(NOW, dim)]
    assert found[:2] == [NOW, NOW | {"OVERLAP": 1}]
    assert len({tuple(row.items()) for row in found}) == len(found)
    for row in found[2:]:
        assert row["BLOCK_N"] >= 16
        assert row["per_sm"] * 32 * row["num_warps"] * row["maxnreg"] <= 65536
        # Keys and values of 16 bits, 2 tiles of them in 5 stages.
        tiles = (row["num_stages"] - 1) // 2 * 2 * 2 * row["BLOCK_N"] * dim
        assert row["per_sm"] * tiles < 227 << 10


def test_a_row_is_the_tables_only_one_until_the_call_ends_even_if_it_fails(monkeypatch):
    before, meanwhile = ops.SPLIT.rows, []

    def fail(*given, max_context_len):
        meanwhile.append((ops.SPLIT.rows["sm_90"], max_context_len))
        raise RuntimeError

    monkeypatch.setattr(tune, "paged_attention", fail)
    with pytest.raises(RuntimeError):
        tune.attended(tuple(NOW.items()), Shape([7, 9], 2, 1, 16, 16), [])
    assert meanwhile == [(((None, NOW),), 9)]
    assert ops.SPLIT.rows is before


def test_only_what_gives_the_first_rows_result_is_timed(monkeypatch, capsys):
    def attended(row, shape, given):
        if row == "fails":
            raise ValueError("too many registers")
        return torch.full((8,), {"now": 1.0, "right": 1.001, "wrong": 1.1}[row])

    monkeypatch.setattr(tune, "attended", attended)
    monkeypatch.setattr(tune, "dict", str, raising=False)
    assert list(tune.right(["now", "wrong", "right", "fails"], None, [None])) == ["now", "right"]
    said = capsys.readouterr().out
    assert "wrong: AssertionError" in said
    assert "fails: ValueError too many registers" in said


def test_the_floor_is_the_time_of_the_bytes_that_the_benchmark_counts():
    for shape, case in zip(reversed(tune.shapes(128)), bench.cases(True), strict=False):
        assert str(shape) == case.shape
        assert tune.floor_ms(shape, 1e12) == pytest.approx(case.bytes / 1e9)
