"""The payoff benchmark: its pairs differ in their fault alone, and its verdicts are reckoned rightly."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.advice.rule import all_rules
from advisor.capture import session
from advisor.demo.flavour import pl
from benchmarks.payoff import __main__ as driver
from benchmarks.payoff import judge, measure
from benchmarks.payoff.case import BEHIND_INPUT, Case, Loop, Scale, all_cases, pair
from benchmarks.payoff.processes import Processes
from benchmarks.payoff.store import Store, write_results
from tests.benchmarks import payoff_targets

CASES = all_cases()
PAIRS = {name: case for name, case in CASES.items() if case.rule}
MACHINE = {"device": "Toy", "versions": {"torch": "2.0"}}


@pytest.fixture(autouse=True)
def _quiet():
    measure.quiet()


def test_there_are_pairs_enough():
    assert len(PAIRS) >= 20
    assert len({case.rule for case in PAIRS.values()}) >= 12
    assert sum(not case.gains for case in PAIRS.values()) >= 5
    assert len(CASES) > len(PAIRS)


@pytest.mark.parametrize("case", PAIRS.values(), ids=PAIRS)
def test_a_pair_names_rules_that_exist(case):
    rules = {rule.id for rule in all_rules()} | {rule.family for rule in all_rules()}
    assert {case.rule, *case.nothing_from} <= rules
    assert "." in case.rule
    assert case.gains == (not case.nothing_from)


def test_what_waits_for_input_gains_by_input_rules_alone():
    families = {rule.family for rule in all_rules()}
    assert families - set(BEHIND_INPUT) == {"capture", "communication", "generation", "input"}


class Outcomes(pl.Callback):
    """Losses, and the size of all gradients, of each step."""

    def __init__(self):
        self.values = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [p.grad.float() for p in module.parameters() if p.grad is not None]
        self.values.append(float(torch.stack([g.norm() for g in gradients]).norm()))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


class Operators(TorchDispatchMode):
    """Every operator with the sizes and strides that it gets, and what is set for the process meanwhile."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [(a.dtype, tuple(a.shape), a.stride()) for a in args if isinstance(a, torch.Tensor)]
        self.seen[(str(function), torch.get_float32_matmul_precision(), *tensors)] += 1
        return function(*args, **(kwargs or {}))


class Compiling(Scale):
    """Tiny sizes, and how many functions were compiled."""

    compiled = 0

    def compile(self, function, **options):
        type(self).compiled += 1
        return super().compile(function, **options)


def _train(case: Case, fixed: bool):
    """Losses and gradients of two steps, and all in which loops of different speed may differ."""
    if fixed and case.interpreter and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("the bundled kernels need TRITON_INTERPRET=1 here")
    Compiling.compiled = 0
    loop, outcomes, operators = measure.build(case, fixed, Compiling(tiny=True)), Outcomes(), Operators()
    with operators:
        measure.train(loop, 2, outcomes)
    settings = (
        loop.precision,
        [type(callback) for callback in loop.trainer.get("callbacks", [])],
        type(loop.module),
        # Where a tensor is made is all the same on a CPU.
        [getattr(part.attend, "__name__", "") for part in loop.module.modules() if hasattr(part, "attend")],
        getattr(loop.batches, "num_workers", None),
        getattr(loop.batches, "pin_memory", None),
        Compiling.compiled,
    )
    return outcomes.values, (settings, operators.seen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the sizes for a CPU")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", PAIRS.values(), ids=PAIRS)
def test_both_loops_of_a_pair_compute_the_same_in_different_ways(case):
    # GIVEN a loop with its fault and without, WHEN both train for two steps
    before, way_before = _train(case, fixed=False)
    after, way_after = _train(case, fixed=True)

    # THEN losses and gradients are the same, up to rounding where it may differ, and the ways are not
    assert len(before) == 4
    assert after == pytest.approx(before, rel=case.tolerance, abs=1e-6)
    assert way_before != way_after


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(CASES) - set(PAIRS)))
def test_a_well_tuned_loop_trains(name):
    outcomes = Outcomes()
    measure.train(measure.build(CASES[name], False, Scale(tiny=True)), 2, outcomes)
    assert len(outcomes.values) == 4


@pytest.mark.filterwarnings("ignore")
def test_a_case_is_timed_both_ways_and_its_trace_is_kept(tmp_path, monkeypatch):
    # GIVEN a process that has recorded nothing yet
    monkeypatch.setattr(session, "_spent_pid", None)
    trace = tmp_path / "host_sync.json.gz"

    # WHEN a small case is measured in two rounds
    plan = measure.Plan(rounds=2, blocks=2, block_steps=2, tiny=True)
    found = measure.measure(CASES["host_sync"], plan, trace)

    # THEN each loop has a time from each round, and the faulty one's trace names its fault and its context
    assert [len(found["rounds_ms"][name]) for name in ("before", "after")] == [2, 2]
    assert min(found["rounds_ms"]["before"]) <= found["before_ms"] <= max(found["rounds_ms"]["before"])
    assert found["after_ms"] > 0
    text = gzip.decompress(trace.read_bytes()).decode()
    assert "aten::item" in text
    assert '"training_advisor"' in text
    assert found["rule"] == "host.sync"


def test_a_block_of_steps_counts_from_the_end_of_warmup(monkeypatch):
    # GIVEN a clock that goes on by a second at each look
    clock = iter(range(100))
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    times = measure.BlockTimes(warmup=3, block_steps=4)

    # WHEN twelve batches end
    for i in range(12):
        times.on_train_batch_end(None, None, None, None, i)

    # THEN the clock was read after 3, 7 and 11 of them
    assert times.step_ms() == [250.0, 250.0]


def _case(**changes):
    case = {"rule": "a.fault", "before_ms": 20.0, "after_ms": 15.0, "gains": True}
    return {**case, "nothing_from": (), "range_only": "", **changes}


def _finding(rule="a.fault", likely=5.0, low=4.0, high=6.0, step=20.0):
    saving = {"low": low, "likely": likely, "high": high}
    return {"rule": rule, "saving_ms": saving, "saving_fraction": likely / step}


def _verdict(case, *findings):
    return judge.verdict(case, {"findings": list(findings)})


def test_a_verdict_compares_in_points_of_the_step():
    found = _verdict(_case(), _finding(likely=6.0, low=4.0, high=7.0), _finding("another.rule", likely=19.0))

    assert (found["realised"], found["predicted"], found["error"]) == (25.0, 30.0, 5.0)
    assert (found["low"], found["high"]) == (20.0, 35.0)
    assert found["inside"]
    assert "promised" not in found


def test_of_several_findings_of_the_rule_the_largest_counts():
    found = _verdict(_case(), _finding(likely=1.0), _finding(likely=5.0), _finding(likely=2.0))
    assert found["predicted"] == 25.0


def test_what_came_beyond_the_range_is_outside():
    assert not _verdict(_case(), _finding(low=5.5, likely=6.0, high=7.0))["inside"]
    assert not _verdict(_case(), _finding(low=1.0, likely=2.0, high=3.0))["inside"]


@pytest.mark.parametrize(
    ("gains", "after_ms", "inside"), [(True, 19.9, False), (False, 19.9, True), (False, 18.0, False)]
)
def test_silence_is_right_only_where_nothing_was_to_gain_and_nothing_came(gains, after_ms, inside):
    found = _verdict(_case(gains=gains, after_ms=after_ms), _finding("another.rule"))
    assert found["silent"]
    assert found["predicted"] == 0.0
    assert found["inside"] is inside


def test_a_finding_without_a_saving_predicts_nothing():
    finding = {"rule": "a.fault", "saving_ms": None, "saving_fraction": None}
    assert _verdict(_case(), finding)["silent"]


def test_promises_for_nothing_are_the_largest_of_the_rules_that_should_make_none():
    case = _case(gains=False, nothing_from=("a", "kernel.slow"), after_ms=20.0)

    found = _verdict(
        case,
        _finding("a.fault", likely=0.2),
        _finding("a.sibling", likely=0.6),
        _finding("kernel.slow", likely=0.4),
        _finding("kernel.other", likely=9.0),
        _finding("input.slow", likely=18.0),
    )

    assert (found["promised"], found["promised_by"]) == (3.0, "a.sibling")


def test_alarms_of_a_well_tuned_loop_are_its_findings_above_the_limit():
    found = _verdict(_case(rule=""), _finding("x.y", likely=0.5), _finding("x.z", likely=0.7))
    assert found == {"alarms": [{"rule": "x.z", "points": 3.5}]}


def _judged(error=1.0, inside=True, promised=None, **changes):
    found = {"error": error, "inside": inside, **({} if promised is None else {"promised": promised})}
    return {**_case(**changes), "verdict": found}


def _figures(*cases):
    return {figure.name: figure for figure in judge.figures(dict(enumerate(cases)))}


def test_figures_are_medians_and_worst_over_all_pairs():
    tuned = {**_case(rule=""), "verdict": {"alarms": [1, 2]}}
    found = _figures(
        _judged(error=-3.0),
        _judged(error=1.0),
        _judged(error=-21.0, inside=False, rule="b.fault"),
        _judged(error=2.0, promised=5.5, gains=False),
        _judged(error=80.0, range_only="another fix"),
        tuned,
    )

    assert (found["pairs"].value, found["rules"].value, found["pairs without gain"].value) == (5, 2, 1)
    assert (found["median error, points"].value, found["median error, points"].reached) == (2.5, True)
    assert (found["worst error, points"].value, found["worst error, points"].reached) == (21.0, False)
    assert (found["inside the range"].value, found["inside the range"].reached) == (0.8, True)
    assert not found["most promised for nothing, points"].reached
    assert not found["most findings above 3 % in a well-tuned loop"].reached


def test_figures_without_any_case_are_counts_alone():
    assert [figure.value for figure in judge.figures({})] == [0, 0, 0]


def test_the_verdict_holds_on_measured_pairs(shared):
    # GIVEN a pair that was measured elsewhere
    folder = shared / "truth" / "payoff"
    measured = json.loads((folder / "payoff.json").read_text())["cases"]["pad_vocab"]

    # WHEN its trace is analysed and judged
    report = judge.analyze(folder / "pad_vocab.json.gz", measured["before_ms"])
    found = judge.verdict(_case(**{**measured, "rule": "shape.alignment"}), report)

    # THEN what came is near what was predicted
    assert found["realised"] == pytest.approx(measured["saving_pct"], abs=0.1)
    assert abs(found["error"]) <= judge.WORST_POINTS


OUTCOME = {"before_ms": 10.0, "after_ms": 8.0, "plan": {"rounds": 3}, "fix": "f", "precision": "32-true"}


def test_a_store_goes_on_where_it_stopped(tmp_path):
    # GIVEN a folder to which one case was added
    store = Store(tmp_path)
    store.add("a", MACHINE, OUTCOME)
    store.trace("a").touch()

    # WHEN it is opened again
    again = Store(tmp_path)

    # THEN that case is there, unless it is to be measured otherwise or its trace is gone
    assert again.cases["a"]["saving_pct"] == 20.0
    assert again.has("a", {"rounds": 3})
    assert not again.has("a", {"rounds": 2})
    assert not again.has("b", {"rounds": 3})
    store.trace("a").unlink()
    assert not again.has("a", {"rounds": 3})


def test_a_store_holds_what_one_machine_gave(tmp_path):
    Store(tmp_path).add("a", MACHINE, OUTCOME)
    with pytest.raises(SystemExit, match="--traces"):
        Store(tmp_path).add("b", {**MACHINE, "device": "Other"}, OUTCOME)


def test_results_say_where_they_come_from_and_hold_judged_cases(tmp_path):
    store = Store(tmp_path)
    for name in ("a", "b"):
        store.add(name, MACHINE, OUTCOME)
    store.cases["a"]["verdict"] = {"error": 1.0}

    write_results(tmp_path / "results.json", store, "python -m benchmarks.payoff", [{"name": "pairs"}])

    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["device"], found["versions"]) == ("Toy", {"torch": "2.0"})
    assert list(found["cases"]) == ["a"]
    assert found["date"]
    assert found["command"] == "python -m benchmarks.payoff"


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Judges a folder of two cases, `a` and `b`, whose reports say what they should; gives the outcome."""
    monkeypatch.setattr(judge, "analyze", lambda trace, baseline_ms: {"findings": [_finding(likely=5.0)]})
    monkeypatch.setattr(driver, "RESULTS", tmp_path / "committed.json")

    def run(tiny=False, **options):
        store = Store(tmp_path / "traces")
        for name in ("a", "b"):
            store.add(name, MACHINE, {**_case(), "plan": {"tiny": tiny}})
            store.trace(name).touch()
        given = {"only": [], "judge_only": True, "jobs": 2, "output": None, "merge": False, **options}
        return driver.judge_all(SimpleNamespace(**given), store, "command")

    return run


def test_all_cases_are_judged_and_figures_that_are_not_reached_tell(judged, tmp_path, capsys):
    assert judged() is False
    found = json.loads((tmp_path / "committed.json").read_text())
    assert [case["verdict"]["error"] for case in found["cases"].values()] == [0.0, 0.0]
    assert {"name": "pairs", "value": 2, "goal": "≥ 16", "reached": False} in found["figures"]
    assert "pairs: 2 (≥ 16)  NOT REACHED" in capsys.readouterr().out


def test_verdicts_on_cases_that_the_folder_lacks_are_kept_with_their_day_when_asked(judged, tmp_path):
    committed = tmp_path / "committed.json"
    old = {**_case(), "plan": {"tiny": False}, "verdict": {"error": 7.0}}
    judged()
    before = json.loads(committed.read_text())
    verdict = before["cases"]["a"]["verdict"]
    before.update(date="2020-01-01", cases={"a": old, "c": {**old, "verdict": verdict}})
    committed.write_text(json.dumps(before))
    # WHEN a and b are judged again
    judged(merge=True)
    found = json.loads(committed.read_text())
    assert set(found["cases"]) == {"a", "b", "c"}
    assert found["cases"]["c"]["judged_on"] == "2020-01-01"
    assert "judged_on" not in found["cases"]["a"]
    assert found["cases"]["a"]["verdict"] == verdict
    assert {"name": "pairs", "value": 3, "goal": "≥ 16", "reached": False} in found["figures"]
    # AND without being asked, the file is of the folder alone
    judged()
    assert set(json.loads(committed.read_text())["cases"]) == {"a", "b"}


def test_a_few_cases_are_judged_without_being_the_result(judged, tmp_path, capsys):
    assert judged(only=["b"]) is True
    assert not (tmp_path / "committed.json").exists()
    assert capsys.readouterr().out.startswith("b ")


def test_small_sizes_are_no_result_of_the_benchmark(judged, tmp_path):
    judged(tiny=True)
    assert not (tmp_path / "committed.json").exists()
    assert (tmp_path / "traces" / "results.json").exists()


def test_an_unknown_case_is_named_with_those_that_there_are(judged):
    with pytest.raises(SystemExit, match="no case c: there are a, b"):
        judged(only=["c"])


def test_each_target_runs_in_a_process_of_its_own():
    processes = Processes([])
    first, second = (processes.run(payoff_targets.process_id, timeout_s=60) for _ in range(2))
    assert processes.run(payoff_targets.doubled, 7, timeout_s=60) == [7, 7]
    assert len({*first, *second, os.getpid()}) == 3
    assert processes.method == "forkserver"


def test_a_process_that_dies_is_an_error_in_words():
    answer = Processes([], "spawn").run(payoff_targets.dies, timeout_s=60)
    assert "ended with 3" in answer


def test_where_the_first_fork_fails_processes_are_spawned(monkeypatch):
    # GIVEN processes of which none has worked yet
    processes, methods = Processes([]), []
    monkeypatch.setattr(
        processes, "_run", lambda *_: methods.append(processes.method) or ("bad" if len(methods) < 2 else [1])
    )

    # WHEN the first one fails, and a later one too
    assert processes.run(payoff_targets.complains, timeout_s=60) == [1]
    methods.clear()
    assert processes.run(payoff_targets.complains, timeout_s=60) == "bad"

    # THEN only the first was tried again
    assert methods == ["spawn"]


def test_two_cases_of_one_name_are_an_error():
    def tf32(fixed: bool, n: Scale) -> Loop:
        raise AssertionError("not built")

    with pytest.raises(ValueError, match="tf32"):
        pair("precision.tf32", title="", fix="")(tf32)
