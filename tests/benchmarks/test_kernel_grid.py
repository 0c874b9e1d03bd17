"""The benchmark of grids of sizes: order, compilation ahead, budget and results; its clock is made up."""

import json
import os

import pytest
from advisor.kernels.bench import run as bench
from advisor.kernels.bench.run import Roofs, grid, gridded_families
from advisor.kernels.bench.timing import Case, Result, compiled, forward, forward_backward

from benchmarks.kernels import __main__ as command
from benchmarks.kernels import ahead

SIX = ["layer_norm", "rms_norm", "swiglu", "rope", "softmax", "cross_entropy"]
ROOFS = Roofs(4e12, 8e14)


@pytest.fixture(scope="module")
def grids():
    return grid(gridded_families())


@pytest.mark.parametrize("kernel", SIX)
def test_a_grid_has_twelve_sizes_each_forward_and_with_backward_beside_its_rivals(grids, kernel):
    of_kernel = [case for _, case in grids if case.kernel == kernel]
    shapes = {case.shape for case in of_kernel}
    assert len(shapes) == 12
    assert {(c.shape, c.direction) for c in of_kernel} == {
        (shape, way) for shape in shapes for way in ("forward", "forward+backward")
    }
    assert all({"ours", "eager", "compile"} <= case.variants.keys() for case in of_kernel)
    # THEN small sizes, which need not win, are there beside large ones
    sizes = [case.bytes for case in of_kernel if case.direction == "forward"]
    assert min(sizes) < 20e6
    assert max(sizes) > 250e6


def test_kernels_take_turns_a_size_each_so_that_a_cut_leaves_each_its_first(grids):
    kernels = list(dict.fromkeys(case.kernel for _, case in grids))
    first = grids[: 2 * len(kernels)]
    assert [case.kernel for _, case in first[::2]] == kernels
    assert [case.kernel for _, case in first[1::2]] == kernels
    assert {case.direction for _, case in first[::2]} == {"forward"}
    for kernel in kernels:
        named = [c.shape for _, c in grid(gridded_families(), f"{kernel} ") if c.kernel == kernel]
        assert [case.shape for _, case in grids if case.kernel == kernel] == named
    assert "add_norm" in {family for family, _ in grids}


def test_what_is_compiled_ahead_is_what_is_timed_in_that_order(grids):
    jobs = ahead.jobs_of(grids, "grid")
    assert [job.name.split() for job in jobs] == [
        [case.kernel, case.shape, case.dtype, case.direction] for _, case in grids
    ]
    # AND each is found by its name alone
    for job in jobs[::20]:
        (found,) = ahead.named(job)
        assert f"{found.kernel} {found.shape} {found.dtype} {found.direction}" == job.name


def test_two_cases_of_one_name_are_one_job_that_finds_both(monkeypatch):
    twice = [Case("attention", "4x8", "bf16", "forward", list, {}, bytes=n) for n in (1, 2)]
    other = Case("attention", "4x8", "bf16", "backward", list, {}, bytes=3)
    monkeypatch.setattr(bench, "cases", lambda family, quick, only: iter([*twice, other]))
    jobs = ahead.jobs_of(ahead.found(["attention"], "quick"), "quick")
    assert [[case.bytes for case in ahead.named(job)] for job in jobs] == [[1, 2], [3]]


def test_eager_variants_are_left_out_ahead_and_one_that_fails_does_not_keep_the_rest():
    called = []

    def variant(name):
        def prepare(given):
            if name == "liger":
                raise MemoryError("too large\nfor this")
            return lambda: called.append((name, *given))

        return prepare

    names = ("eager", "liger", "ours", "eager_fp32", "compile")
    case = Case("norm", "4x8", "bf16", "forward", lambda: [1], {n: variant(n) for n in names}, bytes=1)
    with pytest.raises(RuntimeError, match=r"^liger: MemoryError: too large for this$"):
        ahead.call_variants(case)
    assert called == [("ours", 1), ("compile", 1)]


def test_choices_made_beside_other_work_are_forgotten_and_earlier_ones_kept(tmp_path):
    for name, at in (("old", 1000.0), ("new", 3000.0)):
        path = tmp_path / "ab" / f"{name}.best_config"
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
        os.utime(path, (at, at))
    (tmp_path / "ab" / "kernel.py").write_text("")
    assert ahead.forget_tuning(tmp_path, since=2000.0) == 1
    assert sorted(path.name for path in (tmp_path / "ab").iterdir()) == ["kernel.py", "old.best_config"]


def test_ahead_the_first_candidate_is_chosen_without_a_clock(monkeypatch):
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    monkeypatch.setattr(CachingAutotuner, "bench", CachingAutotuner.bench)
    ahead.leave_choices_untimed()
    tuner = CachingAutotuner.__new__(CachingAutotuner)
    assert tuner.bench("first", 1, stream=0) == tuner.bench("second", 1, stream=0)


def test_caches_lie_where_whoever_set_them_said(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    ahead.settle_caches()
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere"
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "1"


def test_compiled_ahead_runs_in_other_processes_and_says_what_failed(capsys, tmp_path, monkeypatch):
    # GIVEN a family that there is not, which needs no GPU to fail
    monkeypatch.setattr(ahead, "inductor_cache", lambda: tmp_path)
    (ended,) = ahead.compile_ahead([ahead.Job("no such family", "quick", "x")], 1, 120.0)
    assert ended.failure == "ModuleNotFoundError: No module named 'advisor.kernels.bench.no such family'"
    assert "1 of them not whole" in capsys.readouterr().out


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Runs the command on cases whose clock is made up, each taking 10 s; gives what was written."""
    now = [0.0]
    made = [
        (family, Case(kernel, shape, "bf16", way, list, {"ours": None, "eager": None}, bytes=4_000_000))
        for family, kernel, shape in (
            ("norm", "layer_norm", "4x8"), ("rope", "rope", "1x2"), ("norm", "rms_norm", "4x8")
        )
        for way in ("forward", "forward+backward")
    ]  # fmt: skip

    def measured(case, repeats, *, in_a_row):
        now[0] += 10.0
        assert not in_a_row
        return Result(case, ms={"ours": 2e-3, "eager": 4e-3}, interval={"ours": 0.01}, repeats=20)

    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(command, "measured", measured)
    monkeypatch.setattr(command, "measured_roofs", lambda: ROOFS)
    monkeypatch.setattr(command, "_freeze_imports", lambda: None)
    monkeypatch.setattr(command.ahead, "found", lambda families, sizes, only: iter(made))
    monkeypatch.setattr(command.ahead, "jobs_of", lambda cases, sizes: [])
    monkeypatch.setattr(command.ahead, "compile_ahead", lambda jobs, processes, budget_s: None)
    monkeypatch.setattr(
        command, "document", lambda family, quick, *rest: {"family": family, "quick": quick, "rows": []}
    )

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            command.main([*arguments, "--output", str(tmp_path)])
        assert ended.value.code == 0
        return {path.name: json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))}

    return run


def test_a_grids_results_are_files_of_their_own_a_family_each(timed):
    found = timed("--grid")
    assert list(found) == ["kernels_norm_grid.json", "kernels_rope_grid.json"]
    rows = found["kernels_norm_grid.json"]["rows"]
    assert [(row["kernel"], row["direction"]) for row in rows] == [
        ("layer_norm", "forward"), ("layer_norm", "forward+backward"),
        ("rms_norm", "forward"), ("rms_norm", "forward+backward"),
    ]  # fmt: skip
    assert rows[0]["share_of_roof"] == {"ours": pytest.approx(0.5), "eager": pytest.approx(0.25)}
    assert (rows[0]["repeats"], rows[0]["interval"]) == (20, {"ours": 0.01})
    assert "left_out" not in found["kernels_norm_grid.json"]


def test_what_the_budget_leaves_out_is_named(timed):
    # GIVEN the time for the cases that begin before 27 s
    found = timed("--grid", "--budget-s", "30")
    norm, rope = found["kernels_norm_grid.json"], found["kernels_rope_grid.json"]
    assert (len(norm["rows"]), len(rope["rows"])) == (2, 1)
    assert norm["left_out"] == ["rms_norm 4x8 forward", "rms_norm 4x8 forward+backward"]
    assert rope["left_out"] == ["rope 1x2 forward+backward"]


def test_a_plan_counts_and_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(command, "measured_roofs", lambda: pytest.fail("ran"))
    command.main(["norm", "--grid", "--plan", "--jobs", "16"])
    counted = sum(len(case.variants) for _, case in grid(["norm"]))
    assert f"48 cases, {counted} variants, 48 of them for torch.compile" in capsys.readouterr().out


def test_more_processes_and_fewer_cases_are_expected_to_take_less(grids):
    def seconds(found, processes):
        said = command.plan(found, processes, 40).split("about ")[1]
        return [float(part.split(" s to")[0]) for part in said.split(", ")]

    assert seconds(grids, 16)[0] < seconds(grids, 4)[0] < seconds(grids, 0)[0]
    assert all(few < all_ for few, all_ in zip(seconds(grids[:40], 16), seconds(grids, 16), strict=True))


def test_the_grids_fit_into_200_seconds_as_planned(grids):
    said = command.plan(grids, 16, 40).split("about ")[1]
    assert sum(float(part.split(" s to")[0]) for part in said.split(", ")) < 200


@pytest.mark.parametrize("way", [forward, forward_backward])
def test_what_is_compiled_is_compiled_at_its_first_call_after_forgetting_what_was_before(monkeypatch, way):
    import torch

    events = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: events.append("reset"))
    monkeypatch.setattr(
        torch, "compile", lambda function, *, dynamic: events.append(f"compile {dynamic}") or function
    )
    double = compiled(lambda x: 2 * x)
    assert events == []
    x = torch.ones(3, requires_grad=True)
    call = way(double)([x])
    call()
    call()
    assert events == ["reset", "compile False"]
