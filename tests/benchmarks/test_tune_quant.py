"""Tuning the weight-only products: its candidates, what tables answer meanwhile, and what counts as right."""

from types import SimpleNamespace

import pytest
import torch
from advisor.kernels import _quant_launch as launches
from advisor.kernels import quant_matmul as qm
from advisor.kernels._launch import LaunchTable

from benchmarks.kernels import tune_quant as tune


@pytest.fixture(autouse=True)
def on_a_hopper(monkeypatch):
    monkeypatch.setattr(tune, "architecture", lambda device: "sm_90")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 16])
def test_candidates_are_distinct_have_what_their_tables_have_and_begin_with_what_is_there(rows, bits):
    found = tune.trials(rows, bits)
    assert len(set(found)) == len(found)
    by_table = {}
    for trial in found:
        by_table.setdefault(trial.table, []).append(dict(trial.row))
    ways = {"quant_split", *(["quant_stream"] if rows == 1 else [])} if bits == 4 else {"quant_split_int8"}
    assert by_table.keys() == ways
    for name, own in by_table.items():
        tables = LaunchTable.known[name].rows
        held = tables.get("sm_90", tables["default"])
        now = next(dict(row) for limit, row in held if limit is None or rows <= limit)
        assert own[0] == now
        assert all(row.keys() <= now.keys() | {"maxnreg"} for row in own)


def test_a_trials_row_is_its_tables_only_one_until_it_ends_even_if_it_fails():
    trial = tune.trials(1, 4)[-1]
    before = launches.STREAM.rows
    meanwhile = []

    def fail():
        with tune.chosen(trial):
            meanwhile.append(launches.STREAM.rows)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert meanwhile == [{**before, "sm_90": ((None, dict(trial.row)),)}]
    assert launches.STREAM.rows is before


def test_each_table_has_its_launch():
    names = {trial.table: trial.launch.__name__ for bits in (4, 8) for trial in tune.trials(1, bits)}
    assert names == {
        "quant_split": "launch_split",
        "quant_split_int8": "launch_split",
        "quant_stream": "launch_stream",
    }


def test_only_what_gives_the_references_result_is_timed(monkeypatch, capsys):
    # GIVEN one way that is right, one that is wrong by 1 %, one that writes nothing and one that fails
    torch.manual_seed(0)
    weight = qm.quantize_int4(torch.randn(64, 256))
    inputs = tune.Given([weight], [torch.randn(1, 256)])
    right = qm.weight_only_linear_reference(inputs.xs[0], weight)

    def fail(y):
        raise ValueError("too many registers")

    ways = [
        lambda y: y.copy_(right),
        lambda y: y.copy_(1.01 * right),
        lambda y: None,
        fail,
    ]
    given = [SimpleNamespace(way=way) for way in ways]
    monkeypatch.setattr(tune, "launched", lambda trial, x, weight, y: trial.way(y))
    assert list(tune.right(given, inputs)) == given[:1]
    said = capsys.readouterr().out
    assert said.count("WRONG") == 2
    assert "ValueError too many registers" in said


def test_variants_come_by_their_time_in_a_row_with_the_floors_share_of_both():
    found = tune.ranked((8, 8, 4), 1, {"a": (4.0, 3.0), "b": (5.0, 2.0)}, 1.0)
    assert [(t.name, t.share, t.in_a_row_share) for t in found] == [
        ("b", pytest.approx(0.2), pytest.approx(0.5)),
        ("a", pytest.approx(0.25), pytest.approx(1 / 3)),
    ]


def test_a_line_is_for_the_fastest_by_either_clock_what_is_there_and_what_competes():
    ms = {"stream a": (5.0, 1.0), "split b": (1.0, 5.0), "stream c": (2.0, 2.0), "split now": (9.0, 9.0)}
    ms |= {"eager_bf16": (20.0, 20.0), "stream d": (8.0, 8.0)}
    found = tune.worth_a_line(tune.ranked((8, 8, 4), 1, ms, 1.0), "split now", most=1)
    assert [entry.name for entry in found] == ["stream a", "split b", "split now", "eager_bf16"]


def test_a_trial_is_named_by_the_row_to_paste():
    found = tune.trials(1, 4)
    stream = next(trial for trial in found if trial.table == "quant_stream")
    assert str(stream) == "stream {'ROWS': 16, 'AHEAD': 4, 'TOGETHER': 2, 'num_warps': 4, 'maxnreg': 128}"
    assert len(set(map(str, found))) == len(found)


def test_the_bytes_are_those_of_weight_x_and_y():
    weight = qm.quantize_int4(torch.randn(64, 256).half())
    inputs = tune.Given([weight], [torch.randn(2, 256)])
    assert inputs.bytes == 64 * 128 + 64 * 2 * 2 + 2 * 2 * 256 + 2 * 2 * 64
