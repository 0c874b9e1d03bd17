"""What a loop tells of itself, whatever the capture's block holds."""

from __future__ import annotations

import pytest

from tests.advice.rules.steps import loop_of, training

WEIGHT = {"shape": [64, 32], "dtype": "fp32", "count": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        3, None, [], "weight", {}, {"shape": 1}, {"shape": [4, "x"], "dtype": "fp32"},
        {"shape": [4, -1], "dtype": "fp32"}, {"shape": [4], "dtype": 7},
        {"shape": [4], "dtype": "fp32", "count": "two"}, {"shape": [4], "dtype": "fp32", "count": {}},
    ],
)  # fmt: skip
def test_entries_that_are_no_parameters_are_passed_over(wrong):
    assert loop_of(training, parameters=[wrong]).trained == []
    both = loop_of(training, parameters=[wrong, WEIGHT]).trained
    assert [tensor.shape for tensor in both] == [(64, 32), (64, 32)]


def test_an_absurd_number_of_parameters_takes_no_more_memory_than_a_large_model():
    assert len(loop_of(training, parameters=[WEIGHT | {"count": 10**15}]).trained) <= 1_000_000


@pytest.mark.parametrize("wrong", ["80 GB", [1], {"total": 1}, True, -5, 0])
def test_sizes_of_memory_that_are_no_figures_are_not_known(wrong):
    loop = loop_of(training, peak_memory_bytes={"in_window": wrong}, device={"total_memory_bytes": wrong})
    assert loop.peak_memory_bytes is None
    assert loop.memory_bytes == loop.device.memory_bytes
    # WHEN another figure is right THEN that one is taken
    loop = loop_of(training, peak_memory_bytes={"in_window": wrong, "before": 7e9})
    assert loop.peak_memory_bytes == 7e9
