"""The page on the JSON report says what the model says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from advisor.report import model

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_json", DOCS / "generate_json.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_the_one_that_the_model_gives(generator: ModuleType) -> None:
    stored = (DOCS / "json.md").read_text(encoding="utf-8")
    assert stored == generator.render(), "run: python docs/generate_json.py"


def test_every_field_of_every_struct_is_explained(generator: ModuleType) -> None:
    structs = {struct for _, struct in generator._structs(model.Report)}
    named = {
        kind for kind in vars(model).values() if isinstance(kind, type) and issubclass(kind, model.Struct)
    }
    assert structs == named - {model.Struct}
    for struct in structs:
        assert {field.name for field in msgspec.structs.fields(struct)} <= set(generator.comments(struct))
