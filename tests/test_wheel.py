"""The wheel, installed alone in a fresh environment, has all it needs and no torch."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.tiny_trace import write_tiny_trace

ROOT = Path(__file__).parents[1]
OFFLINE = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "Network is unreachable")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True)


def pip(python: str | Path, *args: str | Path, cwd: Path) -> None:
    done = run(python, "-m", "pip", "--disable-pip-version-check", *args, cwd=cwd)
    if done.returncode and any(sign in done.stdout + done.stderr for sign in OFFLINE):
        pytest.skip("the package index cannot be reached, so no fresh environment can be made")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from a copy of the tree, so that no leftover of an earlier build gets in."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("advisor", "kernels", "report_templates"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", source / "dist", ".", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that holds the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip(python, "install", wheel, cwd=folder)
    return python


def evaluate(python: Path, code: str, cwd: Path) -> str:
    done = run(python, "-c", code, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_requirements_are_met(python: Path, tmp_path: Path) -> None:
    pip(python, "check", cwd=tmp_path)


@pytest.mark.parametrize("name", ["kernels", "report_templates", "tests"])
def test_no_stray_module_at_the_top(python: Path, tmp_path: Path, name: str) -> None:
    code = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
    assert evaluate(python, code, tmp_path) == "None"


@pytest.mark.parametrize("name", ["torch", "triton", "lightning", "pytorch_lightning", "pandas"])
def test_base_install_brings_nothing_of_the_extras(python: Path, tmp_path: Path, name: str) -> None:
    code = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
    assert evaluate(python, code, tmp_path) == "None"


def test_kernels_are_inside_the_package(python: Path, tmp_path: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('advisor.kernels').origin)"
    assert evaluate(python, code, tmp_path).endswith("advisor/kernels/__init__.py")


def test_templates_are_found(python: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.resources import files\n"
        "print(*sorted(f.name for f in files('advisor.report_templates').iterdir()))"
    )
    there = set(evaluate(python, code, tmp_path).split())
    here = {f.name for f in (ROOT / "report_templates").iterdir() if f.is_file()}
    assert "report.html.j2" in there
    assert here <= there


def test_analyze_works_there(python: Path, tmp_path: Path) -> None:
    write_tiny_trace(tmp_path / "trace.json")
    advisor = python.with_name("advisor")
    done = run(advisor, "analyze", "trace.json", "-o", "report.html", "--json", "report.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "aten::mm" in (tmp_path / "report.html").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert "H100" in report["device"]["name"]
    # Each step has one 250 us and one 40 us kernel.
    assert report["summary"]["kernel_time_ms_per_step"] == pytest.approx(0.290)


def test_a_verb_that_trains_names_what_is_to_be_installed(python: Path, tmp_path: Path) -> None:
    done = run(python.with_name("advisor"), "demo", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "pip install torch pytorch-lightning" in line
