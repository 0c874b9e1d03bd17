"""`advisor kernels list`, `check` and `bench`."""

import json
import os
import subprocess
import sys

import pytest
import torch

from advisor.cli import kernels as verb
from advisor.cli import main

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(*args):
    try:
        main(["kernels", *args])
    except SystemExit as stop:
        return stop.code
    return 0


def process(*args, before="", **environment):
    """The verb in a process of its own, after the lines `before`."""
    code = f"{before}\nimport sys\nfrom advisor.cli import main\nmain(['kernels', *sys.argv[1:]])"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def without(*packages):
    return (
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name.split('.')[0] in "
        f"{packages!r} else find(name, *rest))"
    )


def test_list_says_what_there_is_and_stays_without_torch():
    done = process("list", before=without("torch", "triton"))
    assert done.returncode == 0, done.stderr
    assert "in place of: torch.nn.LayerNorm" in done.stdout
    assert "but: over the last dimension alone, without dim" in done.stdout
    assert "FlashAttention" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("They cannot run here: PyTorch is not installed")
    assert "pip install torch" in done.stdout.splitlines()[-1]


def test_list_as_json_names_every_family_and_why_it_cannot_run():
    done = process("list", "--json", before=without("triton"))
    found = json.loads(done.stdout)
    families = {family["name"]: family for family in found["families"]}
    assert "rms_norm" in families["norm"]["public"]
    assert families["softmax"]["dtypes"] == ["fp32", "fp16", "bf16"]
    assert found["runs_here"] is False
    assert "Triton is not installed" in found["reason"]


@no_gpu
@pytest.mark.parametrize("subcommand", ["check", "bench"])
def test_without_a_gpu_one_line_says_so(subcommand, monkeypatch, capsys):
    from advisor.kernels import _triton

    monkeypatch.setattr(_triton, "INTERPRETED", False)
    assert run(subcommand) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line == f"advisor: advisor kernels {subcommand} needs a GPU: no GPU that PyTorch can use is here"


@pytest.fixture
def judged(monkeypatch):
    """Makes `check` see two outcomes, one right, one as given."""
    from advisor.kernels import _here
    from advisor.kernels.verify import run as verify
    from advisor.kernels.verify.run import Outcome

    def use(**second):
        right = Outcome("norm", "layer_norm", "2x8", "fp32", True, 0.5, "output 0", None, 1.0)
        other = Outcome(
            **{"family": "norm", "kernel": "rms_norm", "shape": "2x8", "dtype": "bf16", "ok": True,
               "share": 0.25, "worst": "output 0", "failure": None, "seconds": 1.0} | second
        )  # fmt: skip
        monkeypatch.setattr(verify, "verify", lambda family, device: [right, other])
        monkeypatch.setattr(verify, "checked_families", lambda: ["norm"])
        monkeypatch.setattr(verify, "default_device", lambda: None)
        monkeypatch.setattr(_here, "lacking", lambda: None)
        monkeypatch.setattr(_here, "name", lambda: "a GPU")

    return use


def test_an_unknown_family_is_named_with_those_there_are(judged, capsys):
    judged()
    assert run("check", "nrom") == 2
    assert "no family nrom: there are norm" in capsys.readouterr().err


def test_check_shows_each_kernels_share_of_the_allowed_error(judged, capsys):
    judged()
    assert run("check") == 0
    out = capsys.readouterr().out
    assert "layer_norm" in out
    assert "50%" in out
    assert "2 of 2 right on a GPU" in out


def test_check_says_which_families_have_no_check(judged, capsys):
    judged()
    run("check")
    assert "without a check: activations, " in capsys.readouterr().out


def test_a_wrong_kernel_fails_the_check_and_says_how(judged, capsys):
    judged(ok=False, share=3.0, failure="output 0: largest error 3e-3, allowed 1e-3")
    assert run("check", "-q") == 1
    out = capsys.readouterr().out
    assert "rms_norm 2x8 bf16: output 0: largest error 3e-3, allowed 1e-3" in out
    assert "layer_norm" not in out


def test_check_as_json_holds_the_figures(judged, capsys):
    judged(ok=False, share=None, worst=None, failure="two runs differ")
    assert run("check", "norm", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["passed"], found["unchecked"]) == ("a GPU", False, [])
    assert [check["share"] for check in found["checks"]] == [0.5, None]
    assert found["checks"][1]["failure"] == "two runs differ"


def test_check_runs_the_real_kernels_under_the_interpreter():
    done = process("check", "activations", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 right on the CPU, under Triton's interpreter" in done.stdout


@pytest.fixture
def timed(monkeypatch):
    """Makes `bench` see these rows."""
    from advisor.kernels import _here, _triton
    from advisor.kernels.bench import run as bench

    def use(*rows):
        monkeypatch.setattr(_here, "lacking", lambda: None)
        monkeypatch.setattr(_triton, "INTERPRETED", False)
        monkeypatch.setattr(bench, "measured_roofs", lambda: bench.Roofs(4e12, 8e14))
        monkeypatch.setattr(bench, "timed_families", lambda: ["norm"])
        monkeypatch.setattr(bench, "rows", lambda family, quick, roofs, **options: iter(rows))
        monkeypatch.setattr(
            bench, "document", lambda family, quick, *rest: {"family": family, "device": "a GPU", "rows": []}
        )

    return use


ROW = {
    "kernel": "layer_norm", "shape": "4x8", "direction": "forward", "floor_ms": 0.5,
    "ms": {"ours": 1.0, "eager": 2.0}, "share_of_roof": {"ours": 0.5, "eager": 0.25},
    "failures": {"liger": "ModuleNotFoundError: none"},
}  # fmt: skip


def test_bench_shows_times_and_shares_of_the_roof(timed, capsys):
    timed(ROW)
    assert run("bench", "norm", "--quick") == 0
    out = capsys.readouterr().out
    assert "1.0000  50%" in out
    assert "2.0000  25%" in out
    assert "failed" in out
    assert "a GPU: 4.00 TB/s copied, 800 TFLOP/s in bf16" in out


def test_bench_as_json_holds_the_rows(timed, capsys):
    timed(ROW)
    assert run("bench", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["rows"] == [ROW]


def test_a_kernel_that_cannot_be_timed_fails_the_bench(timed, capsys):
    timed({**ROW, "ms": {}, "share_of_roof": {}, "failures": {"ours": "RuntimeError: no"}})
    assert run("bench") == 1
    assert "1 could not be timed, such as: RuntimeError: no" in capsys.readouterr().err


def test_the_interpreter_is_not_timed(monkeypatch, capsys):
    from advisor.kernels import _here, _triton

    monkeypatch.setattr(_here, "lacking", lambda: None)
    monkeypatch.setattr(_triton, "INTERPRETED", True)
    assert run("bench") == 2
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err


def test_the_fastest_variant_stands_out():
    table = verb.bench_table({"family": "norm", "rows": [ROW]})
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["ours"] == ["[bold]1.0000  50%[/bold]"]
    assert cells["eager"] == ["2.0000  25%"]


def test_times_in_a_row_have_a_row_of_their_own():
    timed = {"in_a_row_ms": {"ours": 0.75}, "in_a_row_share_of_roof": {"ours": 0.667}}
    table = verb.bench_table({"family": "norm", "rows": [{**ROW, **timed}]})
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["direction"] == ["forward", "forward, in a row"]
    assert cells["ours"] == ["[bold]1.0000  50%[/bold]", "[bold]0.7500  67%[/bold]"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_check_and_a_quick_bench_run_on_a_gpu():
    done = process("check", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["passed"]
    done = process("bench", "rope", "--quick", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["ms"]["ours"] > 0 for row in json.loads(done.stdout)[0]["rows"])
