"""The rooms import only what they may, and analysis runs without torch."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_trace import write_tiny_trace

ROOT = Path(__file__).parents[1]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command as lint; lint()"
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_every_wall_stands() -> None:
    run = lint_imports(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("advisor/trace", "import torch", "without torch"),
        ("advisor/roofline", "def f():\n    import triton", "without torch"),
        ("advisor/report", "from advisor.capture import callback", "only those below it"),
        ("advisor/trace", "import advisor.roofline", "only those below it"),
        ("advisor/capture", "from advisor.cli import main", "only those below it"),
        ("advisor/cli", "import pytorch_lightning", "command line itself loads no torch"),
        ("kernels", "from advisor import errors", "kernels know nothing of advisor"),
    ],
)
def test_a_hole_in_a_wall_is_reported(tmp_path: Path, module: str, line: str, broken: str) -> None:
    # GIVEN a copy of the tree whose walls stand
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("advisor", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    # WHEN one module imports what it must not
    (tmp_path / module / "intruder.py").write_text(line + "\n")
    # THEN the wall it breaks is named
    run = lint_imports(tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    blamed = [row for row in run.stdout.splitlines() if " BROKEN" in row]
    assert [row for row in blamed if broken in row], run.stdout


@pytest.mark.parametrize("statement", ["import advisor", "import advisor; dir(advisor)"])
def test_importing_the_package_loads_nothing_heavy(statement: str) -> None:
    heavy = {"numpy", "msgspec", "torch", "click"}
    code = f"import sys; {statement}; print(*sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_analysis_never_loads_torch(tmp_path: Path) -> None:
    trace = write_tiny_trace(tmp_path / "trace.json")
    code = (
        "import sys, advisor\n"
        "report = advisor.analyze(sys.argv[1])\n"
        "assert report.summary.kernel_time_ms_per_step\n"
        "print(*sorted({'torch', 'triton', 'lightning', 'pytorch_lightning'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(trace)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ""
