"""The kernels' benchmark, what of it needs no GPU: rows, floors, tuning candidates, every family's cases."""

import pytest
from advisor.kernels._launch import LaunchTable
from advisor.kernels.bench.run import Roofs, cases, line, row, timed_families
from advisor.kernels.bench.timing import Case, Result

from benchmarks.kernels.tune import ELEMENTS_A_THREAD, candidates
from benchmarks.kernels.tune_rows import TRIALS


def result(**settings) -> Result:
    case = Case("norm", "4x8", "bf16", "forward", list, {}, **settings)
    return Result(case, ms={"ours": 2.0, "eager": 4.0}, failures={"liger": "ImportError: none"})


def test_the_floor_is_the_larger_of_bytes_and_flops_over_their_rates():
    # GIVEN 1000 bytes at 1e6 bytes/s, which take 1 ms, and FLOPs that take half or twice that
    assert row(result(bytes=1000, flops=500), Roofs(1e6, 1e6))["floor_ms"] == pytest.approx(1.0)
    entry = row(result(bytes=1000, flops=2000), Roofs(1e6, 1e6))
    assert entry["floor_ms"] == pytest.approx(2.0)
    assert entry["share_of_roof"] == {"ours": pytest.approx(1.0), "eager": pytest.approx(0.5)}


def test_a_line_names_times_shares_and_what_failed():
    text = line(row(result(bytes=1000), Roofs(1e6, 1e6)))
    assert "ours 2.0000 ( 50%)" in text
    assert "liger failed: ImportError" in text


def test_candidates_hold_a_sensible_number_of_elements_a_thread():
    now = {"ROWS": 1, "num_warps": 4, "BLOCK": 7}
    found = list(candidates(now, 1024))
    assert {"ROWS": 1, "num_warps": 4, "BLOCK": 7} in found
    low, high = ELEMENTS_A_THREAD
    assert all(low <= 1024 * p["ROWS"] / (32 * p["num_warps"]) <= high for p in found)
    assert all("STAGES" not in p for p in found)


@pytest.mark.parametrize("family", ["norm", "add_norm", "bias_act_norm"])
def test_a_familys_short_list_is_part_of_what_it_can_run(family):
    assert family in timed_families()
    quick = {(c.kernel, c.shape, c.direction) for c in cases(family, True)}
    full = {(c.kernel, c.shape, c.direction) for c in cases(family, False)}
    assert quick
    assert {kernel for kernel, *_ in quick} <= {kernel for kernel, *_ in full}
    assert len(full) > len(quick)
    assert all(c.bytes > 0 and "ours" in c.variants for c in cases(family, True))


@pytest.mark.parametrize("trial", TRIALS, ids=[trial.case for trial in TRIALS])
def test_a_trial_is_of_a_case_that_is_timed_and_tries_what_its_table_holds(trial):
    case = trial.find()
    assert f"{case.kernel} {case.shape} {case.direction}" == trial.case
    assert {"ours", "eager"} <= case.variants.keys()
    held = {key for rows in LaunchTable.known[trial.table].rows.values() for _, row in rows for key in row}
    assert all(row.keys() <= held | {"STREAM", "maxnreg", "programs_per_sm"} for row in trial.rows)
    assert all(trial.rows.count(row) == 1 for row in trial.rows)
