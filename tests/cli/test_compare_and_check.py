"""`advisor compare` and `advisor check` on saved reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.cli import main
from advisor.report import model
from advisor.report.files import to_json
from tests.report import reports

Run = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> tuple[int, str, str]:
        try:
            main(list(args))
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return call


def stored(path: Path, step_ms: float, **changes: float | None) -> str:
    report = reports.rich()
    report.environment = {}
    report.summary.baseline_step_ms = None
    report.summary.step_time_ms = model.StepTime(p50=step_ms, p95=step_ms, all=[step_ms] * 5)
    for name, value in changes.items():
        setattr(report.summary, name, value)
    path.write_text(to_json(report), encoding="utf-8")
    return str(path)


@pytest.fixture
def slow(tmp_path: Path) -> str:
    return stored(tmp_path / "slow.json", 30.0, peak_memory_bytes=40_000_000_000)


@pytest.fixture
def fast(tmp_path: Path) -> str:
    return stored(tmp_path / "fast.json", 20.0, peak_memory_bytes=50_000_000_000)


def test_compare_says_which_is_faster(run: Run, slow: str, fast: str) -> None:
    code, out, err = run("compare", slow, fast)
    assert (code, err) == (0, "")
    assert "Faster: a step takes 20.0 ms, before 30.0 ms" in out
    assert "(−33.3%)" in out


def test_compare_as_json_has_the_figures(run: Run, slow: str, fast: str) -> None:
    _, out, _ = run("compare", slow, fast, "--json", "-")
    found = json.loads(out)
    assert found["outcome"] == "faster"
    assert found["step_change_fraction"] == pytest.approx(-1 / 3)
    memory = next(figure for figure in found["figures"] if figure["name"] == "peak memory")
    assert (memory["before"], memory["after"]) == (40_000_000_000, 50_000_000_000)


def test_a_comparison_replaces_an_older_one_and_nothing_else(
    run: Run, tmp_path: Path, slow: str, fast: str
) -> None:
    for option, name in (("--json", "found.json"), ("--markdown", "found.md")):
        target = tmp_path / name
        assert run("compare", slow, fast, option, str(target), "-q")[0] == 0
        first = target.read_text()
        assert run("compare", fast, slow, option, str(target), "-q")[0] == 0
        assert target.read_text() != first
        target.write_text("my notes")
        assert run("compare", slow, fast, option, str(target), "-q")[0] == 2
        assert target.read_text() == "my notes"


def test_compare_takes_a_run_folder(run: Run, tmp_path: Path, fast: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    stored(folder / "report.json", 30.0)
    code, out, _ = run("compare", str(folder), fast)
    assert code == 0
    assert "Faster" in out


def test_the_folder_of_a_run_stands_for_its_only_window(run: Run, tmp_path: Path, fast: str) -> None:
    window = tmp_path / "version_0" / "advisor" / "step_40"
    window.mkdir(parents=True)
    stored(window / "report.json", 30.0)
    for folder in (window, window.parent, window.parent.parent):
        code, out, _ = run("compare", str(folder), fast)
        assert code == 0
        assert "Faster" in out


def test_windows_of_several_steps_are_not_taken_for_ranks(run: Run, tmp_path: Path, fast: str) -> None:
    for name in ("step_9", "step_50"):
        (tmp_path / name).mkdir()
        stored(tmp_path / name / "report.json", 30.0)
        (tmp_path / name / "rank0.pt.trace.json").write_text("{}")
    for args in (["compare", str(tmp_path), fast], ["analyze", str(tmp_path)]):
        code, _, err = run(*args)
        assert code == 3
        assert "2 recorded windows" in err
        assert f"such as {tmp_path / 'step_50'}" in err


def test_a_step_time_beside_a_report_is_refused_not_ignored(run: Run, slow: str, fast: str) -> None:
    for args in (
        ["compare", slow, fast, "--before-step-ms", "9"],
        ["check", slow, "--max", "step_time=1s", "--baseline-step-ms", "9"],
    ):
        code, _, err = run(*args)
        assert code == 2
        assert "slow.json is a report" in err


def test_analyze_says_what_reads_reports(run: Run, slow: str) -> None:
    code, _, err = run("analyze", slow)
    assert code == 3
    assert "slow.json is a report, not a trace: 'advisor compare'" in err


def test_a_file_that_is_neither_is_refused_by_name(run: Run, tmp_path: Path, fast: str) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text("not json")
    code, _, err = run("compare", str(odd), fast)
    assert code == 3
    assert "odd.json" in err


def test_a_report_of_another_major_version_is_refused(run: Run, tmp_path: Path, fast: str) -> None:
    other = tmp_path / "other.json"
    text = Path(fast).read_text()
    other.write_text(text.replace(f'"schema_version": "{model.SCHEMA_VERSION}"', '"schema_version": "99.0"'))
    code, _, err = run("compare", str(other), fast)
    assert code == 3
    assert "99.0" in err


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--max", "step_time=25ms"], 0, "ok"),
        (["--max", "step_time=0.025s"], 0, "ok"),
        (["--max", "step_time=15"], 1, "step_time is 20.0 ms, as profiled, asked for at most 15.0 ms"),
        (["--max", "peak_memory=60GB"], 0, "ok"),
        (["--max", "peak_memory=45GB"], 1, "failed"),
        (["--min", "gpu_busy=1%"], 0, "ok"),
        (["--max", "step_time=25ms", "--max", "peak_memory=1GB"], 1, "failed"),
    ],
)
def test_limits_decide_the_exit_code(run: Run, fast: str, args: list[str], code: int, said: str) -> None:
    found, out, _ = run("check", fast, *args)
    assert found == code
    assert said in out


def test_a_figure_that_is_not_known_is_exit_code_3(run: Run, tmp_path: Path) -> None:
    path = stored(tmp_path / "unknown.json", 20.0, peak_memory_bytes=None)
    code, out, _ = run("check", path, "--max", "peak_memory=45GB")
    assert code == 3
    assert "not known" in out


def test_a_run_on_the_cpu_passes_no_gate_on_kernels(run: Run, shared: Path) -> None:
    trace = str(shared / "traces/public/cpu_only_tiny.json.gz")
    limits = ("--max", "kernel_time=1s", "--max", "operator_time=10s", "--max", "step_time=10s")
    code, out, _ = run("check", trace, *limits)
    assert code == 3
    assert "unknown: kernel_time is not known" in out
    # AND since all its operators run behind its only step, that one's are not known either
    assert "unknown: operator_time is not known" in out
    assert "ok: step_time" in out


def test_a_failed_gate_outweighs_an_unknown_one(run: Run, tmp_path: Path) -> None:
    path = stored(tmp_path / "unknown.json", 20.0, peak_memory_bytes=None)
    assert run("check", path, "--max", "peak_memory=45GB", "--max", "step_time=1ms")[0] == 1


def test_a_change_for_the_worse_beyond_what_is_allowed_fails(run: Run, slow: str, fast: str) -> None:
    code, out, _ = run("check", slow, "--against", fast, "--fail-on", "step_time:+5%")
    assert code == 1
    assert "(50.0% worse)" in out
    assert run("check", fast, "--against", slow, "--fail-on", "step_time:+5%")[0] == 0
    assert run("check", fast, "--against", slow, "--fail-on", "peak_memory:+5%")[0] == 1


def test_a_change_within_the_noise_fails_no_gate(run: Run, tmp_path: Path) -> None:
    before, after = stored(tmp_path / "a.json", 20.0), stored(tmp_path / "b.json", 20.1)
    code, out, _ = run("check", after, "--against", before, "--fail-on", "step_time:+0.1%")
    assert code == 0
    assert "within the noise" in out


def test_the_noise_may_be_said_by_who_knows_the_machine(run: Run, tmp_path: Path) -> None:
    before, after = stored(tmp_path / "a.json", 20.0), stored(tmp_path / "b.json", 21.0)
    gate = ("check", after, "--against", before, "--fail-on", "step_time:+1%")
    assert run(*gate, "--noise", "3%")[0] == 1
    assert run(*gate, "--noise", "0.06")[0] == 0
    assert "Slower" in run("compare", before, after, "--noise", "3%")[1]
    assert "No change beyond the noise of 6.0%" in run("compare", before, after, "--noise", "6%")[1]
    code, _, err = run(*gate, "--noise", "30")
    assert code == 2
    assert "3% or 0.03" in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "nothing to check"),
        (["--max", "speed=3"], "no metric 'speed'"),
        (["--max", "step_time"], "METRIC=VALUE"),
        (["--max", "step_time=3GB"], "30ms"),
        (["--fail-on", "step_time:+5%"], "go together"),
    ],
)
def test_what_cannot_be_carried_out_is_exit_code_2(run: Run, fast: str, args: list[str], said: str) -> None:
    code, _, err = run("check", fast, *args)
    assert code == 2
    assert said in err


def test_json_has_one_entry_a_gate(run: Run, fast: str) -> None:
    code, out, _ = run("check", fast, "--max", "step_time=25ms", "--min", "gpu_busy=1%", "--json")
    assert code == 0
    assert [(entry["gate"], entry["held"]) for entry in json.loads(out)] == [
        ("step_time=25ms", True),
        ("gpu_busy=1%", True),
    ]


def test_the_metrics_are_listed(run: Run) -> None:
    code, out, _ = run("check", "--metrics")
    assert code == 0
    assert "step_time" in out
    assert "gpu_busy" in out
