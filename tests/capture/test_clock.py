from __future__ import annotations

from advisor.capture import clock
from advisor.capture.clock import StepClock


class FakeEvent:
    """A device event whose time and completion the test sets."""

    now_ms = 0.0
    reached_ms = 0.0

    def record(self):
        self.at_ms = FakeEvent.now_ms

    def query(self):
        return self.at_ms <= FakeEvent.reached_ms

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


def device_clock(monkeypatch):
    monkeypatch.setattr(clock, "_event_maker", lambda device_type: FakeEvent)
    return StepClock("cuda")


def marks(step_clock, *times_ms):
    for time_ms in times_ms:
        FakeEvent.now_ms = time_ms
        step_clock.mark()


def test_distances_are_read_only_once_the_device_has_passed_them(monkeypatch):
    # GIVEN a host that has run ahead of its device by two steps
    step_clock = device_clock(monkeypatch)
    marks(step_clock, 0, 10, 25, 45)
    FakeEvent.reached_ms = 12

    # THEN only the finished distance is there, and the others follow later
    assert step_clock.distances_ms() == [10]
    FakeEvent.reached_ms = 100
    assert step_clock.distances_ms() == [10, 15, 20]


def test_a_cut_leaves_out_the_time_up_to_the_next_mark(monkeypatch):
    step_clock = device_clock(monkeypatch)
    FakeEvent.reached_ms = 1e9
    marks(step_clock, 0, 10)
    step_clock.cut()
    marks(step_clock, 500, 511)

    assert step_clock.distances_ms() == [10, 11]


def test_clearing_forgets_everything(monkeypatch):
    step_clock = device_clock(monkeypatch)
    FakeEvent.reached_ms = 1e9
    marks(step_clock, 0, 10)
    step_clock.clear()
    marks(step_clock, 20)

    assert step_clock.distances_ms() == []


def test_the_host_clock_serves_where_there_is_no_device(monkeypatch):
    ticks = iter([0, 2_000_000, 5_000_000])
    monkeypatch.setattr(clock.time, "perf_counter_ns", lambda: next(ticks))
    step_clock = StepClock("cpu")
    for _ in range(3):
        step_clock.mark()

    assert step_clock.distances_ms() == [2.0, 3.0]
