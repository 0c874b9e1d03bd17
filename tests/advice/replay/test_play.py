"""What is worked out for many launches at once is what comes of one after the other."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from advisor.advice.replay import play
from advisor.advice.replay.graph import FETCH, LAUNCH, RECORD, SYNC_ALL, SYNC_SLOT, SYNC_STREAM, WAIT
from advisor.advice.replay.tape import Tape


def tape(seed: int, launches: int, depth: int, device_us: float, others: int, streams: int = 3) -> Tape:
    """A round of launches on some streams with other items thrown in, at random."""
    random = np.random.default_rng(seed)
    kinds = np.array([RECORD, WAIT, SYNC_ALL, SYNC_STREAM, SYNC_SLOT, FETCH])
    kind = np.concatenate([np.full(launches, LAUNCH), random.choice(kinds, others)])
    random.shuffle(kind)
    n = len(kind)
    return Tape(
        kind=kind,
        at_ns=np.cumsum(random.exponential(5_000, n)),
        stream=random.integers(0, streams, n),
        delay_ns=random.exponential(5_000, n),
        gap_ns=random.normal(1_000, 800, n),
        dur_ns=random.exponential(device_us * 1_000, n),
        slot=random.integers(0, 4, n),
        row=np.where(kind == LAUNCH, np.arange(n), -1),
        host_ns=5_000.0 * n,
        stream_count=streams,
        slot_count=4,
        depth=depth,
        loader_ns=1e6 if others else 0.0,
    )


@pytest.mark.parametrize("device_us", [2, 12, 40])
@pytest.mark.parametrize(("launches", "depth"), [(300, 1024), (900, 100), (60, 64), (500, 7)])
@pytest.mark.parametrize("others", [0, 4])
def test_launches_at_once_take_the_same_time_to_the_last_bit(monkeypatch, device_us, launches, depth, others):
    for seed in range(3):
        made = tape(seed, launches, depth, device_us, others)
        monkeypatch.setattr(play, "_MANY", 2)
        at_once = play.period_ns(made)
        monkeypatch.setattr(play, "_MANY", 10**9)

        assert play.period_ns(made) == at_once


def test_a_full_queue_holds_the_host_until_a_kernel_begins():
    # GIVEN kernels of 10 µs launched every 1 µs, with a host that then works for 5 ms
    made = dataclasses.replace(
        tape(0, 1_000, 2_000, 1, 0, streams=1),
        at_ns=np.arange(1_000) * 1_000.0,
        delay_ns=np.zeros(1_000),
        gap_ns=np.zeros(1_000),
        dur_ns=np.full(1_000, 10_000.0),
        host_ns=6_000_000.0,
    )

    # THEN with room for all of them host and device overlap, and with room for 100 they do less so
    assert play.period_ns(made) == pytest.approx(10_000_000)
    assert play.period_ns(dataclasses.replace(made, depth=100)) == pytest.approx(
        900 * 10_000 + 6_000_000 - 1_000_000 + 100 * 1_000, rel=0.01
    )
