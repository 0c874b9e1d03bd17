"""Tables of kernels over grids of sizes, of results that are made up."""

from __future__ import annotations

import json

import pytest

FAMILY = "norm"


@pytest.fixture(scope="module")
def generator(load_generator):
    return load_generator("generate_kernels")


def row(shape, megabytes, direction="forward", kernel="layer_norm", **ms):
    """A row of results whose floor is 1 ms."""
    ms = ms or {"ours": 1.25, "eager": 2.5, "liger": 1.5}
    return {
        "kernel": kernel, "shape": shape, "direction": direction, "bytes": megabytes * 1e6, "floor_ms": 1.0,
        "ms": ms, "share_of_roof": {name: 1.0 / time for name, time in ms.items()}, "failures": {},
        "interval": dict.fromkeys(ms, 0.01), "repeats": 20,
    }  # fmt: skip


@pytest.fixture
def render(generator, tmp_path):
    """Writes the rows as a family's grid and gives the page's tables, line by line."""

    def render(*rows, sources=None, **more):
        result = {
            "device": "a GPU", "date": "2026-01-02T03:04:05+00:00", "torch": "2.11", "triton": "3.6",
            "copy_bytes_per_s": 4e12, "matmul_flops_per_s": 8e14, "rows": list(rows), "quick": False,
            "sources": sources or generator.fingerprint(FAMILY),
        } | more  # fmt: skip
        (tmp_path / f"kernels_{FAMILY}_grid.json").write_text(json.dumps(result))
        lines = generator.render(tmp_path).splitlines()
        return lines[lines.index(f"#### {FAMILY}") :]

    return render


def test_a_size_is_a_line_with_shares_and_the_best_of_the_others_each_way(render):
    lines = render(
        row("4x8", 67.1, ours=1.25, eager=2.5, liger=1.5),
        row("4x8", 167.8, "forward+backward", ours=1.0, eager=1.75, compile=1.5, ours_late=0.5),
    )
    assert "stored in `benchmarks/results/kernels_norm_grid.json`." in lines[2]
    assert lines[4] == "| kernel | size | MB | forward | best other | with backward | best other |"
    assert lines[6] == "| layer_norm | 4x8 | 67 | 80 % | 1.20× liger | 100 % | 1.50× compile |"


def test_sizes_stand_from_the_smallest_to_the_largest_a_kernel_at_a_time(render):
    lines = render(
        row("8x8", 30), row("2x2", 4, kernel="rms_norm"), row("1x8", 4.25), row("9x9", 31, kernel="rms_norm")
    )
    assert [line.split(" | ")[:3] for line in lines[6:10]] == [
        ["| layer_norm", "1x8", "4.2"], ["| layer_norm", "8x8", "30"],
        ["| rms_norm", "2x2", "4.0"], ["| rms_norm", "9x9", "31"],
    ]  # fmt: skip


def verdict(lines, kernel="layer_norm"):
    (said,) = [line for line in lines if line.startswith(f"- **{kernel}**: ")]
    return said


def test_where_ours_is_never_slower_the_page_says_at_all_sizes(render):
    # GIVEN ratios of 1.2 and of 0.996, which the table shows as 1.00
    lines = render(row("1x8", 4, ours=1.0, eager=1.2), row("8x8", 30, ours=1.0, eager=0.996))
    assert "| 1.00× eager |" in lines[7]
    assert verdict(lines) == (
        "- **layer_norm**: forward no slower than the best other at all 2 sizes; "
        "with backward not timed beside others."
    )


def test_the_size_from_which_on_ours_is_no_slower_is_the_one_after_the_last_that_is(render):
    # GIVEN a loss at the second of four sizes, given in another order
    lines = render(
        row("4x4", 268, ours=1.0, eager=1.5), row("1x1", 4, ours=1.0, eager=1.1),
        row("3x3", 67, ours=1.0, eager=1.0), row("2x2", 16, ours=1.0, eager=1.2, liger=0.9),
    )  # fmt: skip
    assert "forward no slower from 67 MB on; slower at 2x2 (0.90× liger);" in verdict(lines)
    assert "| layer_norm | 2x2 | 16 | 100 % | **0.90×** liger | – | – |" in lines


def test_a_loss_at_the_largest_size_is_told_as_such(render):
    lines = render(row("1x1", 4, ours=1.0, eager=1.1), row("2x2", 16, ours=1.0, eager=0.5))
    assert "forward slower at 1 of 2 sizes, the largest among them: 2x2 (0.50× eager);" in verdict(lines)


def test_of_two_sizes_that_move_as_much_a_loss_at_one_is_not_made_good_by_the_other(render):
    lines = render(
        row("2x8", 16, ours=1.0, eager=0.9), row("8x2", 16, ours=1.0, eager=1.5),
        row("8x8", 64, ours=1.0, eager=1.5),
    )  # fmt: skip
    assert "forward no slower from 64 MB on; slower at 2x8 (0.90× eager);" in verdict(lines)


def test_a_way_is_judged_by_its_own_times(render):
    lines = render(
        row("1x1", 4, ours=1.0, eager=1.1),
        row("1x1", 10, "forward+backward", ours=1.0, eager=0.5),
    )
    assert (
        "forward no slower than the best other at all 1 sizes; with backward slower at all 1 sizes"
        in verdict(lines)
    )


def test_what_was_not_timed_and_what_failed_are_named(render):
    failed = row("2x2", 16, eager=1.0) | {"failures": {"ours": "RuntimeError: no"}}
    lines = render(row("1x1", 4), failed, left_out=["layer_norm 3x3 forward"])
    assert "- Not timed, for lack of time: layer_norm 3x3 forward." in lines
    assert "| layer_norm | 2x2 | 16 | failed: RuntimeError: no | – | – | – |" in lines


def test_how_well_the_medians_are_known_is_told(render):
    one, two = row("1x1", 4, ours=1.0, eager=1.0), row("2x2", 16, ours=1.0, eager=1.0)
    two |= {"interval": {"ours": 0.034, "eager": 0.01}, "repeats": 40}
    assert any(
        "Medians of at most 40 calls; half the 95 % interval is within 1 % for 75% of them, 3.4% at worst."
        in line
        for line in render(one, two)
    )


@pytest.mark.parametrize(("sources", "marked"), [("changed since", True), (None, False)])
def test_a_grid_of_kernels_that_changed_since_is_marked(render, sources, marked):
    assert ("Of an earlier version" in "\n".join(render(row("1x1", 4), sources=sources))) == marked


def test_a_family_with_a_grid_alone_counts_as_timed_and_one_without_has_no_section(
    generator, render, tmp_path
):
    lines = render(row("1x1", 4))
    assert lines[-1].startswith("Not timed yet: activations, add_norm, ")
    assert " norm," not in lines[-1]
    assert generator.render(tmp_path).count("\n####") == 1
    (tmp_path / f"kernels_{FAMILY}_grid.json").unlink()
    assert "###" not in generator.render(tmp_path)
