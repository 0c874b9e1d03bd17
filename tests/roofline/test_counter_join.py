"""Launches are joined by names in order; what could be either of two is left out."""

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from advisor.roofline.counter_join import join_launches

STEP = ["embed", *["norm", "gemm", "softmax", "gemm", "gelu", "gemm"] * 3, "loss", "adam", "clip", "fill"]


def test_equal_lists_are_joined_one_to_one():
    assert join_launches(STEP, STEP) == [(i, i) for i in range(len(STEP))]


def test_a_filter_by_kernel_name_is_seen_through():
    gemms = [i for i, name in enumerate(STEP) if name == "gemm"]

    assert join_launches(STEP, ["gemm"] * len(gemms)) == [(i, j) for j, i in enumerate(gemms)]


def test_an_uninterrupted_part_is_found_at_its_place():
    trace = ["setup", "warm", *STEP, "save"]

    assert join_launches(trace, STEP) == [(i + 2, i) for i in range(len(STEP))]


def test_one_of_several_equal_steps_may_stand_for_any_if_they_did_the_same_work():
    assert join_launches(STEP * 3, STEP, STEP * 3) == [(i, i) for i in range(len(STEP))]


def test_one_of_several_steps_whose_work_differs_is_joined_where_it_does_not():
    work = [(name, step if name == "gemm" else 0) for step in range(3) for name in STEP]

    found = join_launches(STEP * 3, STEP, work)

    assert {STEP[j] for _, j in found} == set(STEP) - {"gemm"}


def test_a_few_of_many_launches_of_one_kernel_are_not_guessed():
    assert join_launches(["gemm"] * 10, ["gemm"] * 4) == []
    assert join_launches(["gemm"] * 10, ["gemm"] * 4, ["same"] * 10) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_what_differs_between_the_runs_is_left_out_and_the_rest_joined():
    other = list(STEP)
    other[4] = "gemm_split_k"

    assert join_launches(STEP, other) == [(i, i) for i in range(len(STEP)) if i != 4]


def test_an_extra_kernel_in_one_run_shifts_what_follows():
    numbered = [f"{name}{i}" for i, name in enumerate(STEP)]
    other = [*numbered[:5], "memset_kernel", *numbered[5:]]

    found = join_launches(numbered, other)

    assert found == [(i, i + (i >= 5)) for i in range(len(numbered))]


def test_nothing_in_common_joins_nothing():
    assert join_launches(STEP, ["a", "b"]) == []
    assert join_launches([], STEP) == []
    assert join_launches(STEP, []) == []


def test_a_long_trace_is_joined_in_linear_time():
    names = [f"k{random.Random(i).randrange(40)}" for i in range(30_000)]

    assert len(join_launches(names, names[7_000:21_000])) == 14_000
    assert len(join_launches(names, [*names[:9_000], "other", *names[9_000:]])) > 29_000


@given(
    st.lists(st.sampled_from("abcd"), max_size=30),
    st.data(),
)
def test_no_pair_is_wrong_whatever_part_was_counted(trace, data):
    kept = [i for i in range(len(trace)) if data.draw(st.booleans())]
    work = [data.draw(st.sampled_from("xy")) for _ in trace]

    found = join_launches(trace, [trace[i] for i in kept], work)

    # The launch joined did the same work as the one that was counted.
    assert all(trace[i] == trace[kept[j]] and work[i] == work[kept[j]] for i, j in found)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(found))
