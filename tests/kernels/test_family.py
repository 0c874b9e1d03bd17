"""What a family says of itself, and the hash of its sources."""

import importlib
import importlib.util
import inspect

import pytest
from advisor.kernels._family import Family, families, fingerprint, sources

FAMILIES = families()


@pytest.fixture
def folder(tmp_path):
    """A family that imports a module, which imports another; a stranger beside them."""
    (tmp_path / "norm.py").write_text('"""Norms.\n\nMore."""\nfrom ._rows import sums\n\nFACTOR = 2\n')
    (tmp_path / "_rows.py").write_text("from . import _math\n")
    (tmp_path / "_math.py").write_text("PI = 3\n")
    (tmp_path / "rope.py").write_text('FAMILY = Family(what="turns", public=("rope",), dtypes=("fp32",))\n')
    return tmp_path


def test_a_description_is_read_without_importing_the_module(folder):
    found = families(folder)
    assert list(found) == ["norm", "rope"]
    assert found["rope"] == Family(what="turns", public=("rope",), dtypes=("fp32",))
    assert found["norm"] == Family(what="Norms.")


def test_the_sources_are_what_a_family_imports_directly_or_not(folder):
    assert [path.stem for path in sources("norm", folder)] == ["_math", "_rows", "norm"]


@pytest.mark.parametrize(
    ("file", "text", "same"),
    [
        ("norm.py", "# a comment\n", True),
        ("norm.py", "\n\n", True),
        ("norm.py", 'FAMILY = Family(\n    what="norms",\n    differs="in the last dimension",\n)\n', True),
        ("norm.py", "FACTOR = 3\n", False),
        ("_math.py", "E = 2\n", False),
        ("rope.py", "E = 2\n", True),
    ],
)
def test_the_fingerprint_changes_with_the_kernels_alone(folder, file, text, same):
    before = fingerprint("norm", folder)
    with (folder / file).open("a") as out:
        out.write(text)
    assert (fingerprint("norm", folder) == before) == same


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_described_as_its_module_says_and_has_the_names_it_gives(name):
    module = importlib.import_module(f"advisor.kernels.{name}")
    assert FAMILIES[name] == module.FAMILY
    assert FAMILIES[name].public
    assert all(callable(getattr(module, public)) for public in FAMILIES[name].public)


@pytest.mark.parametrize(
    ("name", "lacking", "said"),
    [
        ("cross_entropy", "weight", "no class weights"),
        ("softmax", "dim", "without dim"),
        ("attention", "is_causal", "causal in place of is_causal"),
        ("rope", "unsqueeze_dim", "layout in place of unsqueeze_dim"),
    ],
)
def test_an_argument_that_is_lacking_is_said_beside_what_the_family_replaces(name, lacking, said):
    module = importlib.import_module(f"advisor.kernels.{name}")
    assert lacking not in inspect.signature(getattr(module, name)).parameters
    assert said in FAMILIES[name].differs


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_can_be_checked_and_timed(name):
    for room in ("bench", "verify"):
        assert importlib.util.find_spec(f"advisor.kernels.{room}.{name}"), f"no kernels/{room}/{name}.py"


def test_no_two_families_give_the_same_name():
    given = [name for family in FAMILIES.values() for name in family.public]
    assert len(given) == len(set(given))
