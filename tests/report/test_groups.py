"""Kernel groups: what is put together, and what their sums are."""

from __future__ import annotations

import time

import pytest

from advisor.report.groups import generic_modules, kernel_groups
from tests.report.loops import MM_BYTES, MM_FLOPS, SQUARE, analyse, loop
from tests.trace.builder import Builder


def test_figures_of_a_group_are_sums_over_one_step() -> None:
    product, addition = kernel_groups(analyse(loop()))
    assert (product.op, product.calls_per_step, product.bound) == ("aten::mm", 1, "compute")
    assert product.time_ms_per_step == pytest.approx(0.3)
    assert product.flops == MM_FLOPS
    assert product.bytes_read + product.bytes_written == MM_BYTES
    assert product.intensity == pytest.approx(MM_FLOPS / MM_BYTES)
    assert product.pipe == "tensor_bf16"
    assert 0 < product.efficiency <= 1
    assert (addition.op, addition.bound) == ("aten::add", "memory")
    assert product.time_fraction + addition.time_fraction == pytest.approx(1)


def test_only_steady_steps_count() -> None:
    # GIVEN a first step whose kernels are slow
    builder = loop(Builder(), steps=1, mm_us=900)
    slow_first = builder.events[:]
    builder = loop(steps=3)
    builder.events[: len(slow_first)] = slow_first
    assert kernel_groups(analyse(builder))[0].time_ms_per_step == pytest.approx(0.3)


def test_groups_come_longest_first_and_account_for_all_device_time() -> None:
    analysis = analyse(loop())
    groups = kernel_groups(analysis)
    times = [group.time_ms_per_step for group in groups]
    assert times == sorted(times, reverse=True)
    counted = analysis.timeline.launches.dur_ns[analysis.counted].sum() / 1e6
    assert sum(times) * analysis.step_count == pytest.approx(counted)


def test_layers_of_one_kind_are_one_group() -> None:
    builder = Builder()
    for layer in range(3):
        start = 100 * layer
        builder.range(f"advisor::module::blocks.{layer}.fc", start, 90)
        builder.op("aten::mm", start + 5, 50, dims=[SQUARE, SQUARE]).launch(
            "gemm", start + 9, at=start + 99, dur=1
        )
    (group,) = kernel_groups(analyse(builder))
    assert group.module == "blocks.*.fc"
    assert group.calls_per_step == 3


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["blocks.0", "blocks.0.qkv", "blocks.11.qkv"], ["blocks.*", "blocks.*.qkv", "blocks.*.qkv"]),
        (["net.0", "net.2"], ["net.0", "net.2"]),
        (["0.fc", "h.3.mlp.0", "h.3.mlp.2"], ["*.fc", "h.*.mlp.0", "h.*.mlp.2"]),
        (["layer4.1.conv2"], ["layer4.*.conv2"]),
        (["GPT.Block[3].Linear[1]"], ["GPT.Block[*].Linear[1]"]),
        (["encoder"], ["encoder"]),
        ([], []),
    ],
)
def test_numbers_of_layers_are_stars_and_those_of_parts_stay(paths, expected) -> None:
    assert generic_modules(paths) == expected


def test_paths_of_a_thousand_parts_take_no_time_to_speak_of() -> None:
    paths = [".".join(str(i + j) for j in range(1000)) for i in range(1000)]
    begun = time.process_time()
    stars = generic_modules(paths)
    assert time.process_time() - begun < 5
    assert stars[7] == ".".join(["*"] * 999 + ["1006"])


def test_launches_of_one_kernel_that_differ_in_bound_are_two_groups() -> None:
    # GIVEN products of one kernel: square, and of a single row
    builder = Builder()
    for i, rows in enumerate((4096, 1)):
        dims = [[rows, 4096], SQUARE]
        builder.op("aten::mm", 100 * i, 50, dims=dims, dtype="c10::BFloat16")
        builder.launch("sm90_xmma_gemm", 100 * i + 9, at=1000 * i + 200, dur=300)
    assert {group.bound for group in kernel_groups(analyse(builder))} == {"compute", "memory"}


def test_costed_and_uncosted_launches_do_not_mix_so_a_sum_has_no_hole() -> None:
    # GIVEN two products by one kernel, one without shapes
    builder = Builder().op("aten::mm", 0, 50, dims=[SQUARE, SQUARE]).launch("gemm", 9, at=100, dur=500)
    builder.op("aten::mm", 60, 50).launch("gemm", 70, at=700, dur=400)
    costed, uncosted = kernel_groups(analyse(builder))
    assert costed.flops == MM_FLOPS
    assert (uncosted.flops, uncosted.bytes_read, uncosted.intensity, uncosted.efficiency) == (None,) * 4
    assert (uncosted.bound, uncosted.pipe) == ("unknown", None)


def test_phases_keep_launches_of_one_operator_apart() -> None:
    builder = loop(steps=1).range("advisor::phase::forward", 10_000, 45)
    builder.range("advisor::phase::optimizer", 10_045, 100)
    assert [group.phase for group in kernel_groups(analyse(builder))] == ["forward", "optimizer"]


def test_a_launch_without_operator_or_module_says_so() -> None:
    (group,) = kernel_groups(analyse(Builder().launch("k", 0, at=10, dur=5)))
    assert (group.op, group.module) == (None, None)


def test_work_that_takes_no_time_divides_by_nothing() -> None:
    (group,) = kernel_groups(analyse(Builder().op("aten::mm", 0, 5).launch("k", 0, at=10, dur=0)))
    assert (group.time_fraction, group.efficiency, group.flags) == (0.0, None, [])


def test_a_trace_without_launches_has_no_groups() -> None:
    assert kernel_groups(analyse(Builder().step(1, 0, 10))) == []
