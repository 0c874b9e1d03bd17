"""The kernels' benchmark, what of it needs no GPU: rows, floors, tuning candidates, every family's cases."""

import itertools

import pytest
from advisor.kernels._launch import LaunchTable
from advisor.kernels.bench import run
from advisor.kernels.bench.in_a_row import SHORT_S, InARow
from advisor.kernels.bench.run import Roofs, cases, clocks, line, row, timed_families
from advisor.kernels.bench.timing import Case, Result, median_interval, settled

from benchmarks.kernels import tune_rows
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


def test_a_row_keeps_both_clocks_and_the_share_of_each():
    timed = result(bytes=1000)
    timed.in_a_row = InARow({"ours": 1.25, "eager": 2.0}, {"eager": "RuntimeError: no"})
    entry = row(timed, Roofs(1e6, 1e6))
    assert entry["ms"] == {"ours": 2.0, "eager": 4.0}
    assert entry["in_a_row_ms"] == {"ours": 1.25, "eager": 2.0}
    assert entry["in_a_row_share_of_roof"] == {"ours": pytest.approx(0.8), "eager": pytest.approx(0.5)}
    assert entry["in_a_row_ungraphed"] == {"eager": "RuntimeError: no"}
    assert "in a row | ours 1.2500 ( 80%) | eager 2.0000 ( 50%)" in line(entry)
    single, in_a_row = clocks(entry)
    assert single == entry
    assert (in_a_row["direction"], in_a_row["ms"]) == ("forward, in a row", entry["in_a_row_ms"])
    assert in_a_row["share_of_roof"] == entry["in_a_row_share_of_roof"]


def test_results_without_the_second_clock_are_one_row():
    older = {"direction": "forward", "ms": {}, "share_of_roof": {}}
    assert list(clocks(older)) == [older]
    assert "in a row" not in line(row(result(bytes=1000), Roofs(1e6, 1e6)))


def test_the_second_clock_runs_for_short_floors_alone(monkeypatch):
    # GIVEN a case as long as the limit and one just below it
    rate = 1e9
    sizes = [int(SHORT_S * rate), int(SHORT_S * rate) - 1]
    made = [Case("norm", f"{n}", "bf16", "forward", list, {}, bytes=n) for n in sizes]
    monkeypatch.setattr(run, "cases", lambda family, quick, only: iter(made))
    asked = []
    monkeypatch.setattr(
        run, "measure", lambda case, repeats, in_a_row: (asked.append(in_a_row), Result(case))[1]
    )
    assert len(list(run.rows("norm", True, Roofs(rate, rate)))) == 2
    assert asked == [False, True]


class Clock:
    """Gives what it was told, a number of times at once; keeps from which call on it was asked."""

    def __init__(self, **times):
        self.times, self.asked = {name: iter(ms) for name, ms in times.items()}, []

    def __call__(self, count, turn):
        self.asked.append((count, turn))
        return {name: [next(ms) for _ in range(count)] for name, ms in self.times.items()}


def test_calls_end_once_every_median_is_known_to_one_per_cent():
    steady = itertools.cycle([1.0, 1.001, 0.999])
    clock = Clock(ours=steady, eager=itertools.cycle([3.0]))
    times = settled(clock, 200)
    assert {name: len(ms) for name, ms in times.items()} == {"ours": 20, "eager": 20}
    # THEN a later round goes on where the first ended, so that all input sets have their turns
    assert clock.asked == [(10, 0), (10, 20)]
    assert max(map(median_interval, times.values())) < 0.01


def test_calls_of_a_variant_that_scatters_go_on_for_all_up_to_the_most():
    clock = Clock(ours=itertools.cycle([1.0]), eager=itertools.cycle([1.0, 2.0]))
    assert {name: len(ms) for name, ms in settled(clock, 45).items()} == {"ours": 45, "eager": 45}
    assert clock.asked[-1] == (5, 80)


def test_a_medians_interval_is_of_the_ranks_that_hold_it_with_95_per_cent():
    # GIVEN 100 times, the median of which lies between the 40th and the 61st with 95 % (a binomial law)
    assert median_interval(list(range(1, 101))) == pytest.approx((61 - 40) / 2 / 50.5)
    assert median_interval([2.0, 4.0, 3.0]) == pytest.approx(1 / 3)


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
    assert all(row.keys() <= held | {"maxnreg"} for row in trial.rows)
    assert all(trial.rows.count(row) == 1 for row in trial.rows)
    # AND begins with what the table has for Hopper, where the trials' times come from
    table = LaunchTable.known[trial.table].rows
    size = trial.size(case)
    now = next(row for limit, row in table.get("sm_90", table["default"]) if limit is None or size <= limit)
    assert {k: v for k, v in trial.rows[0].items() if v} == {k: v for k, v in now.items() if v}


def test_a_row_that_wins_is_printed_as_it_is_to_be_written_and_a_wrong_one_never():
    trial = tune_rows.Trial("norm", "norm_forward", "a case", [{"num_warps": 8}, {"num_warps": 4}])
    slow, fast = trial.rows
    won = tune_rows._better(trial, 4096, [(0.9, 1e-3, fast), (1.0, 1e-3, slow)])
    assert won == ['norm_forward, sm_90: (4096, {"num_warps": 4}),  # 1.0000 to 0.9000 ms, a case']
    # BUT not one whose result is off or no number, nor one that gains next to nothing
    assert not tune_rows._better(trial, 4096, [(0.9, float("nan"), fast), (1.0, 1e-3, slow)])
    assert not tune_rows._better(trial, 4096, [(0.9, 1.0, fast), (1.0, 1e-3, slow)])
    assert not tune_rows._better(trial, 4096, [(0.995, 1e-3, fast), (1.0, 1e-3, slow)])


def test_times_are_medians_over_orders_in_which_all_take_their_turns(monkeypatch):
    orders = []

    def timed(variants, repeats):
        orders.append(list(variants))
        return {name: 10.0 * (len(orders) == 1) + int(name) for name in variants}

    monkeypatch.setattr(tune_rows, "rotated_ms", timed)
    assert tune_rows._in_orders({"1": [], "2": [], "3": []}, 30) == {"1": 1.0, "2": 2.0, "3": 3.0}
    assert len(orders) == tune_rows.ORDERS
    assert len({tuple(order) for order in orders}) > 1
