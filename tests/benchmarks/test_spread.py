"""Work spread over processes: a lost, hung or failing one costs its item alone."""

import multiprocessing
import os
import time

import pytest

from benchmarks.kernels.spread import spread


def work(item):
    """Does what the item says, in a process of its own."""
    if item == "raise":
        raise ValueError("no such size")
    if item == "end":
        os._exit(7)
    if item == "hang":
        time.sleep(600)


def outcomes(items, *, processes=2, budget_s=120.0, limit_s=60.0):
    return list(spread(work, items, processes=processes, budget_s=budget_s, limit_s=limit_s))


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) == before


def test_every_item_is_done_once_by_fewer_processes():
    items = [f"item {i}" for i in range(7)]
    ended = outcomes(items)
    assert sorted(outcome.item for outcome in ended) == items
    assert all(outcome.failure is None for outcome in ended)


def test_what_raises_and_what_ends_its_process_says_so_and_the_rest_is_done():
    items = ["raise", "end", "end", "fine", "raise", "end", "end", "fine too"]
    ended = {(o.item, o.failure) for o in outcomes(items)}
    assert ended == {
        ("raise", "ValueError: no such size"), ("end", "its process ended (7)"),
        ("fine", None), ("fine too", None),
    }  # fmt: skip


def test_what_takes_too_long_is_ended_and_its_place_taken():
    ended = {o.item: o.failure for o in outcomes(["hang", "one", "two"], processes=1, limit_s=6.0)}
    assert ended == {"hang": "took more than 6 s", "one": None, "two": None}


def test_after_the_budget_nothing_is_waited_for():
    start = time.monotonic()
    assert all(o.item == "fine" for o in outcomes(["hang", "hang", "fine"], budget_s=2.0))
    assert time.monotonic() - start < 30


def test_when_all_processes_end_the_rest_is_given_up():
    # GIVEN more ends than there are places to take
    ended = outcomes(["end"] * 9, processes=1)
    assert len(ended) == 3
    assert outcomes([]) == []


def test_whoever_stops_listening_leaves_nothing_running():
    listening = spread(work, ["fine", "hang"], processes=2, budget_s=60.0, limit_s=60.0)
    assert next(listening).item == "fine"
    listening.close()
