"""Odd values in events: each is taken for what it can be, or left out and counted."""

import json

import numpy as np
import pytest

from advisor.trace.events import KERNEL, MEMCPY, MEMSET, Trace
from advisor.trace.read import decode_trace

EPOCH_US = 1_669_783_687_464_181


def op(ts: object = 1.0, dur: object = 1.0, **more: object) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": ts, "dur": dur, **more}


def kernel(ts: float = 1.0, cat: str = "kernel", **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": "k", "pid": 0, "tid": 7, "ts": ts, "dur": 1.0, "args": args}


def read(*events: dict[str, object]) -> Trace:
    return decode_trace(json.dumps({"traceEvents": events}).encode(), "t.json", None)


def lost(trace: Trace) -> dict[str, int]:
    return {loss.kind: loss.count for loss in trace.losses}


def test_events_come_out_by_start_and_the_longer_of_two_first() -> None:
    trace = read(op(5.0, 1.0), op(1.0, 2.0), op(1.0, 9.0), op(-3.0, 1.0))
    assert trace.ops.ts_ns.tolist() == [-3000, 1000, 1000, 5000]
    assert trace.ops.dur_ns.tolist() == [1000, 9000, 2000, 1000]


def test_arguments_follow_their_event_through_the_sorting() -> None:
    trace = read(op(5.0, args={"n": 5}), op(1.0), op(3.0, args={"n": 3}))
    assert [bytes(args) for args in trace.ops.args] == [b"", b'{"n": 3}', b'{"n": 5}']
    # Also when some are taken, by position or by mask.
    assert bytes(trace.ops.take(np.array([2])).args[0]) == b'{"n": 5}'
    assert [bytes(a) for a in trace.ops.take(trace.ops.ts_ns > 2000).args] == [b'{"n": 3}', b'{"n": 5}']
    assert [bytes(a) for a in trace.ops.args[1:]] == [b'{"n": 3}', b'{"n": 5}']
    assert bytes(trace.ops.args[-1]) == b'{"n": 5}'


def test_a_negative_duration_is_an_instant() -> None:
    trace = read(op(1.0, -4.0), op(2.0, 0))
    assert trace.ops.dur_ns.tolist() == [0, 0]
    assert lost(trace) == {"negative_duration": 1}


def test_a_missing_duration_is_an_instant() -> None:
    event = op()
    del event["dur"]
    trace = read(event, op(2.0, None))
    assert trace.ops.dur_ns.tolist() == [0, 0]
    assert lost(trace) == {"no_duration": 2}


def test_times_as_text_are_read() -> None:
    trace = read(op("1.5", "2.25"), op(3, 4))
    assert trace.ops.ts_ns.tolist() == [1500, 3000]
    assert trace.ops.dur_ns.tolist() == [2250, 4000]
    assert lost(trace) == {}


@pytest.mark.parametrize("ts", [None, "soon", "nan", "inf", 1e17, -1e17])
def test_a_time_that_is_none_costs_the_event(ts: object) -> None:
    trace = read(op(1.0), op(ts))
    assert len(trace.ops) == 1
    assert lost(trace) == {"bad_time": 1}


def test_an_impossible_duration_costs_the_event() -> None:
    trace = read(op(1.0), op(2.0, 1e17))
    assert len(trace.ops) == 1
    assert lost(trace) == {"bad_time": 1}


def test_time_zero_in_a_trace_that_counts_from_an_epoch_costs_the_event() -> None:
    # GIVEN one launch at time zero, five million seconds before the others
    trace = read(op(0), op(EPOCH_US), op(EPOCH_US + 5), kernel(EPOCH_US + 9), kernel(0.0))
    # THEN it is left out and counted
    assert trace.ops.ts_ns.tolist() == [EPOCH_US * 1000, (EPOCH_US + 5) * 1000]
    assert trace.device.ts_ns.tolist() == [(EPOCH_US + 9) * 1000]
    assert lost(trace) == {"stray_time": 2}


def test_time_zero_in_a_trace_that_counts_from_zero_is_a_time() -> None:
    trace = read(op(0), op(10.0), op(20.0))
    assert trace.ops.ts_ns.tolist() == [0, 10_000, 20_000]
    assert lost(trace) == {}


def test_repeated_correlations_are_kept_as_they_are() -> None:
    # A graph's kernels share the correlation of its launch.
    trace = read(kernel(1.0, correlation=5), kernel(2.0, correlation=5))
    assert trace.device.correlation.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (7, 7),
        ("7", 7),
        (3.0, 3),
        (2**63 - 1, 2**63 - 1),
        (2**63, -1),
        (10**30, -1),
        (-3, -1),
        (None, -1),
        (True, -1),
        ("x", -1),
        ([1], -1),
    ],
)
def test_a_correlation_is_a_number_from_zero_on_or_absent(value: object, stored: int) -> None:
    call = {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": 1, "dur": 1}
    trace = read(
        kernel(1.0, correlation=value),
        kernel(2.0, correlation=9),
        call | {"args": {"correlation": value}},
        call | {"ts": 2, "args": {"correlation": 9}},
    )
    assert trace.device.correlation.tolist() == [stored, 9]
    assert trace.runtime.correlation.tolist() == [stored, 9]


@pytest.mark.parametrize(
    ("args", "column", "stored"),
    [
        ({"stream": 2**31}, "stream", -1),
        ({"stream": -5}, "stream", -1),
        ({"stream": "20"}, "stream", 20),
        ({"device": 2**40}, "device", -1),
        ({"device": 3}, "device", 3),
        ({"bytes": "4096"}, "bytes", 4096),
        ({"bytes": 12.0}, "bytes", 12),
        ({"bytes": -1}, "bytes", -1),
        ({"bytes": 2**62}, "bytes", -1),
        ({"grid": [4, 0, 1]}, "grid_blocks", 0),
        ({"grid": [4, 2, 1]}, "grid_blocks", 8),
        ({"grid": [2**40, 2**40, 1]}, "grid_blocks", -1),
        ({"grid": []}, "grid_blocks", -1),
        ({"grid": "4x2"}, "grid_blocks", -1),
        ({"grid": [1, None]}, "grid_blocks", -1),
        ({}, "grid_blocks", -1),
    ],
)
def test_odd_device_arguments(args: dict[str, object], column: str, stored: int) -> None:
    trace = read(kernel(1.0, **args), kernel(2.0, correlation=9))
    assert getattr(trace.device, column)[0] == stored
    assert trace.device.correlation.tolist() == [-1, 9]


def test_arguments_that_are_no_object_are_counted() -> None:
    trace = read({**kernel(1.0), "args": [1]}, {**kernel(2.0), "args": "x"}, kernel(3.0, correlation=9))
    assert trace.device.correlation.tolist() == [-1, -1, 9]
    assert lost(trace) == {"bad_args": 2}


def test_a_thread_is_one_whether_its_id_is_a_number_or_text() -> None:
    trace = read(op(1.0), op(2.0, tid="2"), op(3.0, pid="1"), op(4.0, tid=3), op(5.0, tid="stream 7"))
    assert trace.ops.track.tolist() == [0, 0, 0, 1, 2]
    assert trace.tracks == [("1", "2"), ("1", "3"), ("1", "stream 7")]


@pytest.mark.parametrize("name", [None, 7, True, "", 1.5])
def test_a_name_may_be_no_text(name: object) -> None:
    trace = read(op(1.0) | {"name": name, "pid": None, "tid": True})
    assert trace.names == [str(name)]
    assert trace.tracks == [("None", "True")]


def test_ranges_that_old_profilers_filed_as_operators_are_annotations() -> None:
    trace = read(
        op(1.0) | {"name": "ProfilerStep#2"}, op(2.0) | {"name": "Optimizer.step#Adam.step"}, op(3.0)
    )
    assert len(trace.annotations) == 2
    assert len(trace.ops) == 1


def test_old_and_new_spellings_of_device_work_are_told_apart_by_kind() -> None:
    cats = ["kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset"]
    trace = read(*(kernel(float(i), cat) for i, cat in enumerate(cats)))
    assert trace.device.kind.tolist() == [KERNEL, KERNEL, MEMCPY, MEMCPY, MEMSET, MEMSET]


def test_a_trace_without_device_properties_or_rank_says_so() -> None:
    trace = read(op())
    assert trace.meta == {}
    assert trace.rank is None
    assert trace.world_size is None
    assert trace.context == {}
    assert not trace.has_device_work


@pytest.mark.parametrize("info", [{"rank": "0"}, {"rank": True}, [], None, "x", {"world_size": None}])
def test_distributed_info_of_an_odd_shape_is_unknown(info: object) -> None:
    document = {"traceEvents": [op()], "distributedInfo": info}
    trace = decode_trace(json.dumps(document).encode(), "t.json", None)
    assert trace.rank is None
    assert trace.world_size is None


def test_the_rank_is_the_files_own_word_before_its_name() -> None:
    document = {"traceEvents": [op()], "distributedInfo": {"rank": 3, "world_size": 8}}
    trace = decode_trace(json.dumps(document).encode(), "runs/rank5.json", None)
    assert (trace.rank, trace.world_size) == (3, 8)
    assert decode_trace(json.dumps([op()]).encode(), "runs/rank5.json", None).rank == 5


def test_entries_without_a_phase_are_no_events() -> None:
    trace = read(op(), {"foo": 1}, {})
    assert trace.event_count == 1
    assert lost(trace) == {"not_an_event": 2}
