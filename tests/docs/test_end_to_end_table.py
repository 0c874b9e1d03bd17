"""The table of whole training runs says what was measured."""

from __future__ import annotations

import pytest

PAGE = "Before.\n<!-- end to end: from here -->\nold\n<!-- end to end: to here -->\nAfter.\n"


@pytest.fixture(scope="module")
def generator(load_generator):
    return load_generator("generate_end_to_end")


def _swap(**changes):
    told = {
        "verdict": "2 of 3 sites swapped",
        "sites": [
            {"chosen": "advisor.kernels.rope"},
            {"chosen": None},
            {"chosen": "torch.optim.AdamW(fused=True)"},
        ],
        "remarks": ["training_step: what is swapped is replayed as a CUDA graph (1.9 GB of device memory)"],
        "steps": {"eager_p50_ms": 60.0, "eager_peak_bytes": 8_000_000_000},
        "pause_s": 7.04,
        **changes,
    }
    return {"step_ms": 20.0, "peak_bytes": 4_000_000_000, "swaps": told}


def _results(**models):
    versions = {"torch": "2.0", "triton": "3.0", "lightning": "2.4"}
    about = {"command": "python benchmarks/end_to_end.py", "date": "2020-02-02", "device": "Toy"}
    return {**about, "versions": versions, "models": models}


def test_the_stored_page_is_in_step_with_the_results(generator):
    stored = generator.TARGET.read_text(encoding="utf-8")
    assert stored == generator.render(stored, generator.load()), "run: python docs/generate_end_to_end.py"


def test_without_results_the_page_says_that_nothing_was_measured(generator):
    page = generator.render(PAGE, None)
    assert "Not yet measured" in page
    assert "old" not in page
    assert page.startswith("Before.\n")
    assert page.endswith("\nAfter.\n")


def test_a_model_shows_its_steps_memory_and_what_was_chosen(generator):
    eager = {"step_ms": 50.0, "peak_bytes": 9_000_000_000}
    page = generator.render(
        PAGE, _results(net={"variants": {"eager": eager, "swap": _swap(), "compile": {"step_ms": 30.0}}})
    )
    assert (
        "| model | eager, ms | swap, ms |  | torch.compile, ms | peak, GB | what was done | s to try |"
        in page
    )
    assert "| net | 50.0 | 20.0 | 2.50× | 30.0 | 9.0 → 4.0 | `rope`, `torch.optim.AdamW(fused=True)`;" in page
    assert "; replayed | 7.0 |" in page
    assert "Measured on 2020-02-02 on Toy with torch 2.0" in page


def test_what_is_reserved_has_a_column_where_it_was_measured_both_ways(generator):
    eager = {"step_ms": 50.0, "peak_bytes": 9_000_000_000, "reserved_bytes": 11_000_000_000}
    swap = {**_swap(), "reserved_bytes": 6_000_000_000}
    earlier = {"eager": {"step_ms": 50.0, "peak_bytes": 9_000_000_000}, "swap": _swap()}
    page = generator.render(
        PAGE, _results(net={"variants": {"eager": eager, "swap": swap}}, old={"variants": earlier},
                       broken={"variants": {"swap": {"failed": "RuntimeError: no"}}})
    )  # fmt: skip
    assert "| peak, GB | reserved, GB | what was done |" in page
    assert "| 9.0 → 4.0 | 11.0 → 6.0 | `rope`" in page
    assert "| 9.0 → 4.0 | – | `rope`" in page
    assert "| broken | | | | | | RuntimeError: no | |" in page


def test_without_a_run_of_its_own_eager_is_that_of_the_swapped_run(generator):
    page = generator.render(PAGE, _results(net={"variants": {"swap": _swap()}}))
    assert "| net | 60.0 | 20.0 | 3.00× | 8.0 → 4.0 |" in page
    assert "torch.compile" not in page


def test_a_loop_that_was_left_alone_or_failed_says_so(generator):
    alone = _swap(sites=[{"chosen": None}], remarks=[], verdict="nothing was swapped: no gain", kept=False)
    failed = {"failed": "RuntimeError: no"}
    page = generator.render(
        PAGE, _results(calm={"variants": {"swap": alone}}, broken={"variants": {"swap": failed}})
    )
    # AND no ratio of two runs of one loop
    assert "| calm | 60.0 | 20.0 | – | 8.0 → 4.0 | nothing was swapped: no gain | 7.0 |" in page
    assert "| broken | | | | | RuntimeError: no | |" in page


def test_a_name_of_an_earlier_version_is_explained_where_a_row_has_it(generator):
    explained = "\n\n`attention (precise gradient)` is an earlier name of `attention`."
    old = _swap(sites=[{"chosen": "advisor.kernels.attention (precise gradient)"}])
    new = _swap(sites=[{"chosen": "advisor.kernels.attention"}])
    assert explained in generator.render(PAGE, _results(net={"variants": {"swap": old}}))
    assert "earlier name" not in generator.render(PAGE, _results(net={"variants": {"swap": new}}))


def test_the_loss_is_told_beside_two_seeds(generator):
    curve = {"steps": 300, "distance": 0.012, "spread": 0.034, "first_difference": 0.0021}
    page = generator.render(PAGE, _results(net={"variants": {"swap": _swap()}, "curve": curve}))
    assert "Loss of net over 300 steps, smoothed: 0.012 from the eager loop's on average" in page
    assert "0.034 apart; at most 0.0021 in any of the first 20." in page
    assert "scaled_dot_product_attention" not in page


def test_the_loss_with_torchs_own_attention_is_told_where_it_was_run(generator):
    curve = {"steps": 300, "distance": 0.012, "spread": 0.034, "first_difference": 0.0021}
    curve |= {"last_losses": [0.091, 0.092, 0.093], "sdpa": {"distance": 0.87, "last_loss": 2.456}}
    page = generator.render(PAGE, _results(net={"variants": {"swap": _swap()}, "curve": curve}))
    assert "net with `scaled_dot_product_attention` in the model, without swap: 0.87 from the eager" in page
    assert "at a loss of 2.46, where the two seeds of the eager loop are at 0.091 and 0.092" in page
    assert "the swapped run is at 0.093." in page


def test_a_page_without_its_marks_is_refused(generator):
    with pytest.raises(ValueError, match="end to end: from here"):
        generator.render("no marks", None)
