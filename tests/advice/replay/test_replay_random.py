"""Steps made up at random: the replay against the simulator that wrote the trace, and what always holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor.advice.edits import Estimate, Remove, Retime
from advisor.advice.replay import Replay
from tests.advice.scripted import COMPUTE, SIDE, Script, us

exactly = Estimate.exactly

_ACTION = st.one_of(
    st.tuples(st.just("work"), st.integers(1, 400)),
    st.tuples(st.just("op"), st.integers(1, 200)),
    st.tuples(st.just("launch"), st.integers(1, 500)),
    st.tuples(st.just("launch"), st.integers(1, 500)),
    st.tuples(st.just("beside"), st.integers(1, 500)),
    st.tuples(st.just("joined"), st.integers(1, 300)),
    st.tuples(st.just("sync"), st.just(0)),
    st.tuples(st.just("backward"), st.integers(1, 300)),
    st.tuples(st.just("copy"), st.integers(1, 200)),
)


def _step(actions: list[tuple[str, int]]) -> Callable[[Script], None]:
    def one(s: Script, action: str, length: int) -> None:
        if action == "beside":
            s.launch(3)
            s.wait(SIDE, COMPUTE)
            s.launch(length, SIDE)
        elif action == "joined":
            s.launch(length, SIDE)
            s.wait(COMPUTE, SIDE)
            s.launch(3)
        elif action == "sync":
            s.sync()
        elif action == "backward":
            s.backward(lambda: (s.work(length), s.launch(length)))
        elif action == "copy":
            s.copy(length, blocking=True)
        else:
            getattr(s, action)(length)

    def step(s: Script) -> None:
        s.launch(5)
        for action, length in actions:
            one(s, action, length)
        # A side stream that nothing waits for would run away from the steps that it belongs to.
        s.wait(COMPUTE, COMPUTE)
        s.launch(1, SIDE)
        s.wait(COMPUTE, SIDE)
        s.launch(1)

    return step


_programs = st.lists(_ACTION, min_size=1, max_size=12)
_some = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def _rows(replay: Replay) -> np.ndarray:
    """Launches of the played steps, in the order of their launching."""
    graph = replay.graph
    return graph.streams.order[graph.played[graph.streams.order]]


@_some
@given(_programs)
def test_unedited_it_takes_the_time_of_the_simulated_step(actions):
    steps = Script(_step(actions))
    replay = steps.replay()

    assert us(replay.profiled_ns) == pytest.approx(steps.period_us, rel=0.01, abs=6)


@_some
@given(_programs, st.lists(st.sampled_from([0.02, 0.5, 1.0, 2.0]), min_size=40, max_size=40))
def test_with_other_durations_it_takes_the_time_of_a_step_simulated_with_them(actions, factors):
    replay = Script(_step(actions)).replay()
    rows = _rows(replay)
    number = np.arange(len(rows)) % (len(rows) // len(replay.graph.windows))
    dur = replay.graph.analysis.timeline.launches.dur_ns[rows] * np.array(factors)[number % 40]

    found = replay.step_ns([Retime(rows, exactly(dur))]) / replay.result_scale

    simulated = Script(_step(actions), dur=lambda n, length: length * factors[n % 40])
    assert us(found) == pytest.approx(simulated.period_us, rel=0.02, abs=15)


@_some
@given(_programs, st.randoms(use_true_random=False))
def test_shorter_kernels_never_make_a_longer_step_and_no_step_is_shorter_than_what_it_needs(actions, random):
    replay = Script(_step(actions)).replay()
    graph, rows = replay.graph, _rows(replay)
    dur = graph.analysis.timeline.launches.dur_ns[rows] * np.array([random.random() for _ in rows])
    unedited = replay.step_ns()

    retimed = replay.step_ns([Retime(rows, exactly(dur))])
    removed = replay.step_ns([Remove(rows)])

    assert retimed <= unedited * 1.002
    assert 0 <= removed <= retimed * 1.002
    # THEN the step holds all that each stream and the host have to do
    steps = len(graph.windows)
    for stream in np.unique(graph.streams.stream[rows]):
        busy = dur[graph.streams.stream[rows] == stream].sum() / steps
        assert retimed / replay.result_scale >= busy * 0.999
    assert retimed / replay.result_scale >= graph.work_ns.sum() / steps * 0.999


@_some
@given(_programs)
def test_an_edit_that_changes_nothing_saves_nothing(actions):
    replay = Script(_step(actions)).replay()
    rows = _rows(replay)
    same = replay.graph.analysis.timeline.launches.dur_ns[rows].astype(float)

    assert replay.step_ns([Retime(rows, exactly(same))]) == pytest.approx(replay.step_ns(), rel=1e-9)
