"""pyproject.toml lists every package and every data file, and the versions agree."""

import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import advisor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
#: Folders at the top that are installed under another name.
HOMES = {"advisor": "advisor", "kernels": "advisor.kernels", "report_templates": "advisor.report_templates"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> dict[str, Path]:
    found = {}
    for top, home in HOMES.items():
        for init in (ROOT / top).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / top).parts
            found[".".join((home, *inner))] = init.parent
    return found


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(packages_on_disk())


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {module.parent for top in HOMES for module in (ROOT / top).rglob("*.py")}
    assert folders - set(packages_on_disk().values()) == set()


def test_every_data_file_is_packaged(project: dict[str, Any]) -> None:
    globs = project["tool"]["setuptools"]["package-data"]
    missed = [
        str(file.relative_to(ROOT))
        for name, folder in packages_on_disk().items()
        for file in folder.iterdir()
        if file.is_file()
        and file.suffix not in {".py", ".pyc"}
        and not any(fnmatch(file.name, pattern) for pattern in globs.get(name, []))
    ]
    assert missed == []


def test_no_data_lies_in_a_folder_that_is_no_package() -> None:
    packages = set(packages_on_disk().values())
    stray = [
        str(file.relative_to(ROOT))
        for top in HOMES
        for file in (ROOT / top).rglob("*")
        if file.is_file() and file.parent not in packages and file.parent.name != "__pycache__"
    ]
    assert stray == []


def test_the_version_is_stated_once(project: dict[str, Any]) -> None:
    assert project["project"]["version"] == advisor.__version__


def test_base_dependencies_cannot_change_torch(project: dict[str, Any]) -> None:
    base = {requirement.split(">")[0].strip() for requirement in project["project"]["dependencies"]}
    assert base.isdisjoint({"torch", "triton", "lightning", "pytorch-lightning", "torchmetrics"})
