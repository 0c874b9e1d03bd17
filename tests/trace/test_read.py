"""Reading whole files: layouts, columns, limits, and no surprise from damaged bytes."""

import contextlib
import gzip
import json
import random
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.errors import InputError
from advisor.trace import sources
from advisor.trace.read import decode_trace, read_trace
from advisor.trace.stream import EventStream, NotStreamable


def small_trace() -> bytes:
    """A few events of each kind, laid out as Kineto does."""
    host, gpu = {"pid": 1, "tid": 1}, {"pid": 0, "tid": 7}
    launch, copy = {"correlation": 5}, {"correlation": 6, "stream": 7, "bytes": 64}
    kernel = {"correlation": 5, "device": 0, "stream": 7, "grid": [2, 3, 1]}
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "ts": 1.0, "args": {"name": "python"}},
        span("user_annotation", "ProfilerStep#3", 1.0, 90.0, **host),
        span("cpu_op", "aten::mm", 2.5, 9.0, **host, args={"External id": 7, "Input Dims": [[2, 3], [3, 4]]}),
        span("cuda_runtime", "cudaLaunchKernel", 3.0, 1.0, **host, args=launch),
        span("kernel", "gemm", 5.0, 4.0, **gpu, args=kernel),
        span("gpu_memcpy", "Memcpy HtoD", 10.0, 2.0, **gpu, args=copy),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 1, "tid": 1, "ts": 3.0},
        span("python_function", "train.py(3): step", 0.5, 99.0, **host),
    ]
    devices = [{"id": 0, "name": "GPU"}]
    document = {"schemaVersion": 1, "deviceProperties": devices, "traceEvents": events, "traceName": "t"}
    return json.dumps(document, indent=1).encode()


def span(cat: str, name: str, ts: float, dur: float, **more: object) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, **more}


def add(**more: object) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2.0} | more


def summary(trace) -> tuple[object, ...]:
    tables = (trace.ops, trace.runtime, trace.device, trace.annotations, trace.python)
    return (
        [[trace.names[i] for i in table.name] for table in tables],
        [table.ts_ns.tolist() for table in tables],
        [[bytes(args).replace(b" ", b"").replace(b"\n", b"") for args in table.args] for table in tables],
        trace.meta,
    )


@pytest.fixture
def write(tmp_path: Path):
    def write(data: bytes, name: str = "t.json") -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


def test_each_kind_of_event_becomes_columns(write) -> None:
    trace = read_trace(write(small_trace()))
    assert [trace.names[i] for i in trace.ops.name] == ["aten::mm"]
    assert trace.ops.ts_ns.tolist() == [2500]
    assert trace.ops.dur_ns.tolist() == [9000]
    assert json.loads(bytes(trace.ops.args[0]))["Input Dims"] == [[2, 3], [3, 4]]
    assert trace.runtime.correlation.tolist() == [5]
    assert trace.device.correlation.tolist() == [5, 6]
    assert trace.device.grid_blocks.tolist() == [6, -1]
    assert trace.device.bytes.tolist() == [-1, 64]
    assert trace.device.stream.tolist() == [7, 7]
    assert [trace.names[i] for i in trace.annotations.name] == ["ProfilerStep#3"]
    assert [trace.names[i] for i in trace.python.name] == ["train.py(3): step"]
    assert trace.event_count == 8
    assert trace.losses == []


@pytest.mark.parametrize("layout", ["kineto", "one line", "compact", "events last", "events first", "list"])
def test_the_layout_of_a_file_does_not_matter(layout: str, write) -> None:
    document = json.loads(small_trace())
    events = document["traceEvents"]
    meta = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}], "traceName": "t"}
    text = {
        "kineto": json.dumps(document, indent=2),
        "one line": json.dumps(document),
        "compact": json.dumps(document, separators=(",", ":")),
        "events last": json.dumps({**meta, "traceEvents": events}),
        "events first": json.dumps({"traceEvents": events, **meta}),
        "list": "\n " + json.dumps(events, indent=1),
    }[layout]
    expected = summary(read_trace(write(small_trace(), "reference.json")))
    assert summary(read_trace(write(text.encode())))[:3] == expected[:3]


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_read_in_pieces_of_any_size_is_the_file_read_whole(size: int, indent: int | None) -> None:
    # GIVEN arguments that hold lists of objects, as an unlucky place to cut
    document = json.loads(small_trace())
    document["traceEvents"][2]["args"]["list"] = [{"a": 1}, {"b": "},\n{"}]
    data = json.dumps(document, indent=indent).encode()
    # WHEN it comes in pieces
    stream = EventStream(data[i : i + size] for i in range(0, len(data), size))
    events = [(e.name, e.ts, bytes(e.args)) for batch in stream for e in batch]
    # THEN nothing differs
    whole = decode_trace(data, "t.json", None)
    assert len(events) == whole.event_count == 8
    assert events[2][2] in {bytes(args) for args in whole.ops.args}
    assert stream.meta == whole.meta


def test_objects_in_arguments_that_look_like_events_do_not_split_the_file_wrongly(write) -> None:
    # GIVEN arguments with objects that begin like events
    document = json.loads(small_trace())
    document["traceEvents"][2]["args"]["list"] = [{"name": "x"}, {"ts": 1}] * 10
    # THEN an event is one event still, with all its arguments
    trace = read_trace(write(json.dumps(document).encode()))
    assert trace.event_count == 8
    assert len(json.loads(bytes(trace.ops.args[0]))["list"]) == 20
    assert trace.losses == []


def test_a_text_without_a_list_of_events_cannot_be_streamed() -> None:
    with pytest.raises(NotStreamable):
        list(EventStream([b'{"a": 1}']))


def test_times_since_1970_keep_their_nanoseconds(write) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1669783687464181, "dur": 45}
    trace = read_trace(write(json.dumps([event]).encode()))
    assert trace.ops.ts_ns.tolist() == [1669783687464181000]


def test_the_collector_is_left_as_it_was_even_on_failure(write) -> None:
    import gc

    for collecting in (True, False):
        (gc.enable if collecting else gc.disable)()
        try:
            with pytest.raises(InputError):
                read_trace(write(b"{}"))
            assert gc.isenabled() is collecting
        finally:
            gc.enable()


def test_a_truncated_gzip_file_keeps_the_front(write) -> None:
    # GIVEN many events, compressed, and the last third of the file missing
    events = [
        {"ph": "X", "cat": "cpu_op", "name": f"op{random.Random(i).random()}", "ts": i, "dur": 1}
        for i in range(20_000)
    ]
    stored = gzip.compress(json.dumps({"traceEvents": events}).encode())
    trace = read_trace(write(stored[: len(stored) * 2 // 3], "t.json.gz"))
    # THEN about two thirds of the events are there, in order, and both troubles are told
    assert 0.6 < len(trace.ops) / len(events) < 0.7
    assert (np.diff(trace.ops.ts_ns) == 1000).all()
    assert {loss.kind for loss in trace.losses} == {"gzip", "truncated"}


def test_a_gzip_file_with_a_wrong_checksum_keeps_its_events(write) -> None:
    stored = bytearray(gzip.compress(small_trace()))
    stored[-8] ^= 0xFF
    trace = read_trace(write(bytes(stored), "t.json.gz"))
    assert len(trace.device) == 2
    assert "gzip" in {loss.kind for loss in trace.losses}


def test_reading_takes_far_less_memory_than_decoding_the_file_whole(write) -> None:
    import tracemalloc

    def peak(read) -> int:
        tracemalloc.start()
        assert len(read().ops) == 100_000
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    # GIVEN a trace of some fifteen megabytes
    lines = ",\n".join(json.dumps(add(ts=i, args={"Input Dims": [[64, 64]]})) for i in range(100_000))
    path = write(f'{{"traceEvents": [{lines}]}}'.encode())
    # THEN reading it piece by piece takes less than half of what decoding it whole does
    whole = peak(lambda: decode_trace(path.read_bytes(), "t.json", None))
    assert peak(lambda: read_trace(path)) < whole / 2


SMALL = small_trace()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["flip", "cut", "insert", "double"]),
            st.integers(0, len(SMALL)),
            st.binary(min_size=1, max_size=6) | st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b"\\"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_damaged_bytes_raise_nothing_but_input_errors(damage: list[tuple[str, int, bytes]]) -> None:
    data = SMALL
    for how, at, some in damage:
        if how == "flip":
            data = data[:at] + some + data[at + len(some) :]
        elif how == "cut":
            data = data[:at]
        elif how == "insert":
            data = data[:at] + some + data[at:]
        else:
            data = data[:at] + data[at // 2 :]
    try:
        trace = decode_trace(data, "t.json", len(data))
    except InputError:
        return
    # What did come through is whole: times in order, arguments that decode.
    assert trace.event_count > 0
    for table in (trace.ops, trace.runtime, trace.device, trace.annotations, trace.python):
        assert (table.dur_ns >= 0).all()
        assert (np.diff(table.ts_ns) >= 0).all()
        for args in table.args:
            json.loads(bytes(args) or b"{}")


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 400), st.integers(0, 255))
def test_damaged_gzip_raises_nothing_but_input_errors(tmp_path_factory, at: int, byte: int) -> None:
    stored = bytearray(gzip.compress(SMALL))
    stored[min(at, len(stored) - 1)] = byte
    path = tmp_path_factory.mktemp("damaged") / "t.json.gz"
    path.write_bytes(bytes(stored))
    with contextlib.suppress(InputError):
        assert read_trace(path).event_count > 0


def test_a_large_broken_file_takes_time_in_step_with_its_size(write) -> None:
    # GIVEN thirty megabytes with every event broken in a way that substitution mends, the end missing
    event = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::add",
        "ts": 1.5,
        "dur": 2.0,
        "args": {"x": float("nan")},
    }
    lines = ",\n".join([json.dumps(event)] * 300_000)
    path = write(f'{{"traceEvents": [{lines}'.encode()[:-9])
    # WHEN it is read
    start = time.process_time()
    trace = read_trace(path)
    seconds = time.process_time() - start
    # THEN all but the last event come back
    assert len(trace.ops) == 299_999
    assert {loss.kind: loss.count for loss in trace.losses} == {"not_a_number": 299_999, "truncated": 1}
    assert seconds < 30


@pytest.mark.parametrize(
    "name", ["h200/gpt_naive_bf16", "public/mi300x_hipgraph_decode", "public/v100_resnet50_workers0"]
)
def test_real_traces_agree_with_a_plain_json_parse(shared: Path, name: str) -> None:
    path = shared / f"traces/{name}.json.gz"
    with gzip.open(path) as file:
        document = json.load(file, parse_float=Decimal)
    kernels = [
        e for e in document["traceEvents"] if e.get("ph") == "X" and str(e.get("cat")).lower() == "kernel"
    ]
    trace = read_trace(path)
    assert trace.event_count == len(document["traceEvents"])
    ours = trace.device.take(trace.device.kind == 0)
    assert len(ours) == len(kernels)
    total_ns = float(sum(Decimal(e["dur"]) for e in kernels) * 1000)
    assert ours.dur_ns.sum() == pytest.approx(total_ns, abs=len(kernels))
    starts = sorted(round(Decimal(e["ts"]) * 1000) for e in kernels)
    assert np.abs(ours.ts_ns - np.array(starts)).max() <= 1
    assert trace.losses == []


def test_the_limit_names_the_option_that_raises_it(write) -> None:
    with pytest.raises(InputError, match="--max-gb"):
        read_trace(write(small_trace()), limit_bytes=100)


def test_the_default_limit_is_a_share_of_memory() -> None:
    assert 0 < sources.default_limit_bytes() <= 32 << 30


@pytest.mark.parametrize("broken", [False, True])
def test_entries_beside_the_events_hold_nothing_that_no_figure_can_be(broken) -> None:
    # GIVEN a context block with numbers of four hundred digits and five hundred levels of lists
    deep = "[" * 500 + "]" * 500
    text = f'{{"training_advisor":{{"big":{10**400},"deep":{deep},"fine":[1,{{"a":true}}]}},"traceEvents":['
    text += '{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":1}' + (",NaN" if broken else "") + "]}"
    context = decode_trace(text.encode(), "t.json", None).context
    # THEN those are unknown and the rest is there
    assert context["big"] is None
    assert context["fine"] == [1, {"a": True}]
    level, at = 0, context["deep"]
    while at:
        level, at = level + 1, at[0]
    assert level < 50
