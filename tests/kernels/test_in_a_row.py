"""The clock of calls in a row, on a GPU whose time the test makes."""

from collections.abc import Callable, Sequence

import pytest
import torch
from advisor.kernels.bench.in_a_row import LEAST_CALLS, Cuda, time_in_a_row


class Gpu:
    """Calls take the time that they add to `now_ms`; what it was asked is kept."""

    def __init__(self, start_ms: Sequence[float] = (0.0,)):
        self.now_ms, self.start_ms = 0.0, list(start_ms)
        self.called: list[str] = []
        self.captures, self.waits = 0, []

    def call(self, name: str, ms: float) -> Callable[[], object]:
        def run() -> None:
            self.called.append(name)
            self.now_ms += ms

        return run

    def captured(self, calls):
        self.captures += 1
        return lambda: [call() for call in calls]

    def elapsed_ms(self, call, host_ns):
        before = self.now_ms
        self.waits.append(host_ns)
        call()
        start = self.start_ms.pop(0) if len(self.start_ms) > 1 else self.start_ms[0]
        return self.now_ms - before + start


class NoCapture(Gpu):
    """One on which nothing can be captured."""

    def captured(self, calls):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")


def test_a_calls_time_is_a_replays_over_its_calls_which_visit_every_set_as_often():
    # GIVEN three sets whose calls take 1, 2 and 6 ms
    gpu = Gpu()
    calls = [gpu.call(name, ms) for name, ms in (("a", 1.0), ("b", 2.0), ("c", 6.0))]
    found = time_in_a_row({"ours": calls}, {"ours": 5.0}, repeats=1, device=gpu)
    assert found.ms == {"ours": pytest.approx(3.0)}
    assert found.ungraphed == {}
    # THEN neighbours are of different sets, and there are enough of them
    assert gpu.called == ["a", "b", "c"] * (len(gpu.called) // 3)
    assert len(gpu.called) >= LEAST_CALLS
    # THEN the host is not waited for, since it enqueues a graph
    assert gpu.waits == [0.0]


def test_many_sets_make_one_round():
    gpu = Gpu()
    time_in_a_row({"ours": [gpu.call("x", 1.0)] * 40}, {"ours": 5.0}, repeats=1, device=gpu)
    assert len(gpu.called) == 40


def test_one_slow_replay_does_not_move_the_median():
    gpu = Gpu(start_ms=[0.0, 1000.0, 0.0])
    found = time_in_a_row({"ours": [gpu.call("x", 2.0)]}, {"ours": 5.0}, repeats=3, device=gpu)
    assert found.ms == {"ours": pytest.approx(2.0)}


def test_variants_take_turns():
    gpu = Gpu()
    calls = {name: [gpu.call(name, 1.0)] * LEAST_CALLS for name in ("ours", "eager")}
    time_in_a_row(calls, dict.fromkeys(calls, 0.0), repeats=2, device=gpu)
    assert gpu.called[::LEAST_CALLS] == ["ours", "eager", "ours", "eager"]


def test_what_cannot_be_captured_is_enqueued_call_by_call_and_says_why():
    gpu = NoCapture()
    found = time_in_a_row({"ours": [gpu.call("x", 2.0)]}, {"ours": 5.0}, repeats=1, device=gpu)
    assert found.ms == {"ours": pytest.approx(2.0)}
    assert found.ungraphed == {"ours": "RuntimeError: operation not permitted"}
    # THEN the GPU is kept busy for as long as the host needs for all of them
    assert gpu.waits == [5.0 * LEAST_CALLS]


def test_without_capture_no_graph_is_tried():
    gpu = Gpu()
    found = time_in_a_row({"ours": [gpu.call("x", 2.0)]}, {"ours": 5.0}, capture=False, device=gpu)
    assert gpu.captures == 0
    assert found.ungraphed == {"ours": "not captured"}


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_replays_its_calls_and_takes_time():
    x = torch.zeros(2**22, device="cuda")
    add = [lambda: x.add_(1.0)] * LEAST_CALLS
    device = Cuda()
    replay = device.captured(add)
    # The capture itself runs nothing; one replay follows it.
    assert x[0] == LEAST_CALLS
    assert 0.0 < device.elapsed_ms(replay, 0.0) < 100.0
    assert x[0] == 2 * LEAST_CALLS
