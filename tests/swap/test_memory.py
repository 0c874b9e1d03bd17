"""When a peak of memory counts as grown."""

import pytest

from advisor.swap.memory import WORKSPACES_BYTES, grows

GB = 10**9


@pytest.mark.parametrize(
    ("before", "after", "allowed", "grown"),
    [
        (20 * GB, 20 * GB + 19 * GB // 100, 0.0, False),  # noise
        (20 * GB, 20 * GB + 21 * GB // 100, 0.0, True),
        (GB, GB + WORKSPACES_BYTES, 0.0, False),  # workspaces
        (GB, GB + WORKSPACES_BYTES + 1, 0.0, True),
        (20 * GB, 22 * GB, 0.1, False),
        (20 * GB, 23 * GB, 0.1, True),
        (20 * GB, 2 * GB, 0.0, False),
    ],
)
def test_a_peak_has_grown_beyond_noise_and_workspaces(
    before: int, after: int, allowed: float, grown: bool
) -> None:
    assert grows(before, after, allowed) is grown
