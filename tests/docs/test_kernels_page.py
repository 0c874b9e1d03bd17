"""The tables of speed on the page of the kernels are those of the results."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FAMILY = "norm"


@pytest.fixture(scope="module")
def generator(load_generator) -> ModuleType:
    return load_generator("generate_kernels")


@pytest.fixture
def write(tmp_path, generator):
    """Writes a family's results, of the present kernels unless told otherwise, and returns their folder."""

    def write(quick=False, sources=None, **row):
        entry = {
            "kernel": "layer_norm", "shape": "4x8", "direction": "forward", "floor_ms": 0.5,
            "ms": {"ours": 1.0, "eager": 3.0, "liger": 2.0, "ours_memory": 0.5},
            "share_of_roof": {"ours": 0.5}, "failures": {},
        } | row  # fmt: skip
        result = {
            "device": "a GPU", "date": "2026-01-02T03:04:05+00:00", "torch": "2.11", "triton": "3.6",
            "copy_bytes_per_s": 4e12, "matmul_flops_per_s": 8e14, "rows": [entry],
            "sources": sources or generator.fingerprint(FAMILY),
        }  # fmt: skip
        name = f"kernels_{FAMILY}{'_quick' if quick else ''}.json"
        (tmp_path / name).write_text(json.dumps(result))
        return tmp_path

    return write


def test_the_page_has_the_tables_that_the_results_give(generator):
    page = (DOCS / "kernels.md").read_text(encoding="utf-8")
    assert page == generator.inserted(page, generator.render()), "run: python docs/generate_kernels.py"


def test_a_row_gives_times_share_and_the_ratio_to_the_best_of_the_others(generator, write):
    lines = generator.render(write()).splitlines()
    assert lines[4].startswith("| kernel | shape | direction | floor | ours | eager | liger | ours_memory |")
    # THEN a second variant of ours is no rival
    row = "| layer_norm | 4x8 | forward | 0.500 | **1.000** (50%) | 3.000 | 2.000 | 0.500 | 2.00× |"
    assert lines[6] == row


def test_times_in_a_row_are_a_row_of_their_own(generator, write):
    timed = {"in_a_row_ms": {"ours": 0.8, "eager": 1.2}, "in_a_row_share_of_roof": {"ours": 0.625}}
    lines = generator.render(write(**timed)).splitlines()
    assert lines[6].startswith("| layer_norm | 4x8 | forward | 0.500 | **1.000** (50%) |")
    row = "| layer_norm | 4x8 | forward, in a row | 0.500 | **0.800** (62%) | 1.200 | – | – | 1.50× |"
    assert lines[7] == row


def test_a_table_names_the_file_that_it_is_made_of(generator, write):
    assert "stored in `benchmarks/results/kernels_norm_quick.json`." in generator.render(write(quick=True))
    # THEN all sizes, once they are there, are a file of their own
    assert "stored in `benchmarks/results/kernels_norm.json`." in generator.render(write())


def test_a_kernel_that_failed_says_so(generator, write):
    text = generator.render(write(ms={"eager": 3.0}, share_of_roof={}, failures={"ours": "RuntimeError: no"}))
    assert "| failed: RuntimeError: no | 3.000 | – |" in text


@pytest.mark.parametrize(("quick", "marked"), [(True, True), (False, False)])
def test_quick_results_are_marked(generator, write, quick, marked):
    assert ("Quick: one or two sizes a kernel." in generator.render(write(quick=quick))) == marked


@pytest.mark.parametrize(("sources", "marked"), [("changed since", True), (None, False)])
def test_results_of_kernels_that_changed_since_are_marked(generator, write, sources, marked):
    assert ("Of an earlier version of these kernels" in generator.render(write(sources=sources))) == marked


def test_results_of_the_present_kernels_come_before_more_of_earlier_ones(generator, write):
    write(quick=False, sources="changed since")
    assert "Quick" in generator.render(write(quick=True))
    assert "Quick" not in generator.render(write(quick=False))


def test_a_family_that_was_not_timed_is_named(generator, tmp_path):
    assert generator.render(tmp_path).startswith("Not timed yet: activations, ")


def test_a_page_without_marks_is_refused(generator):
    with pytest.raises(ValueError, match="lacks"):
        generator.inserted("# A page", "tables")
