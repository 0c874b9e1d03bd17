"""Tests on names look at each name once."""

from __future__ import annotations

import numpy as np

from advisor.trace.names import coded, named


def test_each_name_in_use_is_looked_at_once_and_others_never() -> None:
    seen: list[str] = []
    index = np.array([2, 0, 2, 2, 0])
    found = named(["a", "unused", "b"], index, lambda name: seen.append(name) or name == "b")
    assert found.tolist() == [True, False, True, True, False]
    assert sorted(seen) == ["a", "b"]


def test_a_value_is_given_to_each_event_by_its_name() -> None:
    assert coded(["a", "bbb"], np.array([1, 0, 1]), len, np.int8).tolist() == [3, 1, 3]


def test_no_events_have_no_values() -> None:
    assert named([], np.zeros(0, np.int32), bool).tolist() == []
