"""Broken trace files: each breakage is mended or left out, and counted."""

import json
import time

import pytest

from advisor.errors import InputError
from advisor.trace.read import decode_trace
from advisor.trace.repair import BLOCK_BYTES, Salvager


def event(name: str = "aten::mm", ts: float = 1.0, **more: object) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": 1.0, **more}


def text(*events: object, **meta: object) -> str:
    """A trace laid out as Kineto does, one event an object, some entries before and after."""
    body = ",\n  ".join(e if isinstance(e, str) else json.dumps(e) for e in events)
    more = "".join(f', "{key}": {json.dumps(value)}' for key, value in meta.items())
    return f'{{\n  "schemaVersion": 1,\n  "traceEvents": [\n  {body}\n  ]{more}\n}}'


def read(data: bytes | str):
    data = data.encode() if isinstance(data, str) else data
    return decode_trace(data, "t.json", len(data))


def names(trace) -> list[str]:
    return [trace.names[i] for i in trace.ops.name]


def lost(trace) -> dict[str, int]:
    return {loss.kind: loss.count for loss in trace.losses}


GOOD = event("first", 1.0), event("last", 9.0)


def named(name: str, more: str = "") -> str:
    """An event whose name, and what else it has, stand in the file as given."""
    return f'{{"ph":"X","cat":"cpu_op","name":"{name}","pid":1,"tid":2,"ts":5,"dur":1{more}}}'


@pytest.mark.parametrize(
    ("broken", "kind", "count", "read_as"),
    [
        (named('f("a", "b")'), "unescaped_quote", 4, 'f("a", "b")'),
        (named('d["k"]'), "unescaped_quote", 2, 'd["k"]'),
        (named(r"C:\Users\me"), "bad_escape", 2, r"C:\Users\me"),
        (named("C:\\dir\\"), "bad_escape", 2, "C:\\dir\\"),
        (named("a\x01\nb"), "control_character", 2, "a  b"),
        (named(r"a\ud800b"), "surrogate", 1, "a\ufffdb"),
        (named(r"a\udc00"), "surrogate", 1, "a\ufffd"),
        (named("m", ',"args":{"x":NaN}'), "not_a_number", 1, "m"),
        (named("m", ',"args":{"x":[-Infinity,1,Infinity]}'), "not_a_number", 2, "m"),
        (named("NaN: NaN", ',"args":{"x":-nan}'), "not_a_number", 1, "NaN: NaN"),
        (named("m", ","), "trailing_comma", 1, "m"),
    ],
)
def test_an_event_that_is_not_json_is_mended_and_counted(
    broken: str, kind: str, count: int, read_as: str
) -> None:
    # GIVEN one event broken, between two good ones
    # WHEN it is read
    trace = read(text(GOOD[0], broken, GOOD[1]))
    # THEN all three are there, and the mending is counted
    assert names(trace) == ["first", read_as, "last"]
    assert lost(trace) == {kind: count}


def test_bytes_that_are_not_utf8_become_replacement_characters() -> None:
    data = text(*GOOD).encode().replace(b"last", b"l\xffst")
    trace = read(data)
    assert names(trace) == ["first", "l\ufffdst"]
    assert lost(trace) == {"bad_utf8": 1}


def test_what_stays_undecoded_is_mended_too() -> None:
    # GIVEN half a surrogate pair in arguments, which are decoded only later
    trace = read(text(event(args={"Call stack": "X"})).replace('"X"}', r'"\ud800"}'))
    # THEN decoding them later works
    assert json.loads(bytes(trace.ops.args[0])) == {"Call stack": "\ufffd"}
    assert lost(trace) == {"surrogate": 1}


def test_a_true_surrogate_pair_and_an_escaped_backslash_are_no_trouble() -> None:
    trace = read(text(event(r"\ud800 and") | {"cat": "cpu_op"}, event("\U0001f600", 2.0)))
    assert names(trace) == [r"\ud800 and", "\U0001f600"]
    assert lost(trace) == {}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_converted(encoding: str) -> None:
    trace = read(text(*GOOD, event("naïve", 10.0)).encode(encoding))
    assert names(trace) == ["first", "last", "naïve"]
    assert lost(trace) == {"encoding": 1}


@pytest.mark.parametrize(
    "bad", [{"ts": {}}, {"name": ["a"]}, {"dur": True}, {"cat": 7}, {"ph": None}, {"ts": float("1e308")}]
)
def test_one_event_of_unexpected_types_costs_that_event_alone(bad: dict[str, object]) -> None:
    if bad.get("ts") == 1e308:
        trace = read(text(GOOD[0], json.dumps(event("bad", 5.0)).replace("5.0", "1e999"), GOOD[1]))
    else:
        trace = read(text(GOOD[0], event("bad", 5.0) | bad, GOOD[1]))
    assert names(trace) == ["first", "last"]
    assert lost(trace) == {"malformed": 1}


def test_entries_that_are_not_events_are_left_out_and_counted() -> None:
    trace = read(text("17", '"x"', GOOD[0], "null", "3", GOOD[1], "false"))
    assert names(trace) == ["first", "last"]
    assert lost(trace) == {"not_an_event": 5}


def test_an_event_nested_too_deep_costs_that_event_alone() -> None:
    deep = '{"ph":"X","cat":"cpu_op","name":"d","ts":2,"dur":1,"args":{"a":' + "[" * 9000 + "]" * 9000 + "}}"
    trace = read(text(GOOD[0], deep, GOOD[1]))
    assert names(trace) == ["first", "last"]
    assert lost(trace) == {"unreadable": 1}


def test_arguments_that_hold_what_looks_like_events_are_kept_whole() -> None:
    # GIVEN a broken event, so that events are told apart by how they begin
    nested = event("outer", 5.0, args={"shapes": [{"name": "x"}, {"id": 1}]})
    trace = read(text(GOOD[0], nested, json.dumps(GOOD[1]).replace("1.0", "NaN")))
    # THEN an object within arguments does not count as an event
    assert names(trace) == ["first", "outer", "last"]
    assert json.loads(bytes(trace.ops.args[1]))["shapes"] == [{"name": "x"}, {"id": 1}]


def test_a_trailing_comma_after_the_last_event_is_no_loss() -> None:
    trace = read(text(*GOOD).replace("\n  ]", ",\n  ]"))
    assert names(trace) == ["first", "last"]
    assert lost(trace) == {}


def test_a_file_cut_anywhere_keeps_the_events_before_the_cut() -> None:
    # GIVEN a trace of five events
    whole = text(*(event(f"op{i}", float(i)) for i in range(5)), traceName="x")
    ends = [i + 1 for i, c in enumerate(whole) if c == "}"][:5]
    # WHEN it is cut at each byte after the first event
    for cut in range(ends[0], len(whole) - 1):
        trace = read(whole[:cut])
        # THEN each event that ends before the cut is there
        assert names(trace) == [f"op{i}" for i in range(sum(end <= cut for end in ends))]
        assert trace.meta["schemaVersion"] == 1
        if cut < whole.rindex("]"):
            assert lost(trace)["truncated"] == 1


def test_entries_beside_the_events_survive() -> None:
    broken = json.dumps(event("bad", 5.0)).replace("1.0", "NaN")
    devices = [{"id": 0, "name": "G"}]
    trace = read(text(GOOD[0], broken, distributedInfo={"rank": 3}, deviceProperties=devices))
    assert trace.rank == 3
    assert trace.meta["deviceProperties"] == [{"id": 0, "name": "G"}]
    assert trace.meta["schemaVersion"] == 1
    assert len(trace.ops) == 2


def test_two_documents_one_after_the_other_are_read_as_one() -> None:
    other = text(event("other", 11.0))
    trace = read(text(*GOOD) + "\n" + other)
    assert names(trace) == ["first", "last", "other"]


def test_one_event_a_line_is_read() -> None:
    trace = read("\n".join(json.dumps(e) for e in GOOD))
    assert names(trace) == ["first", "last"]


def test_repeated_keys_take_the_last_value() -> None:
    trace = read(text('{"ph":"X","cat":"cpu_op","name":"a","name":"b","ts":1,"dur":1}'))
    assert names(trace) == ["b"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"nodes": [], "edges": []}', "without traceEvents; it holds nodes, edges (byte 0)"),
        (b'{"traceEvents": []}', "traceEvents hold no event (byte 1)"),
        (b'{"traceEvents": [{"a": 1}]}', "traceEvents hold no event (byte 1)"),
        (b"[1, 2]", "a JSON list without any event (byte 0)"),
        (b"3", "a JSON value (byte 0)"),
        (b'{"traceEvents": [nonsense', "byte 18"),
        (b'{"traceEvents": ', "byte 16"),
        (b"   \n", "only white space (4 bytes)"),
        (b"PK\x03\x04rest", "a zip archive"),
        (b"<html></html>", "an HTML or XML page"),
        (b"\x80\x04\x95abc", "byte 0"),
        (b"[" * 100_000, "not readable as JSON"),
    ],
)
def test_what_holds_no_event_is_refused_with_the_file_what_it_is_and_where(data: bytes, says: str) -> None:
    with pytest.raises(InputError) as raised:
        read(data)
    message = str(raised.value)
    assert message.startswith("t.json: not a profiler trace")
    assert says in message
    assert "\n" not in message


def test_a_loss_says_what_happened_and_where() -> None:
    data = text(GOOD[0], '{"ph": "X", "ts": {}}')
    (loss,) = read(data).losses
    at = data.index('{"ph": "X", "ts": {}')
    assert loss.detail == f"events have values of an unexpected type and were left out (first at byte {at})"


def test_a_bad_event_in_each_block_costs_no_other_event() -> None:
    # GIVEN several blocks of events, every thousandth broken
    events = [json.dumps(event(f"op{i}", float(i))) for i in range(8000)]
    for i in range(0, 8000, 1000):
        events[i] = events[i].replace("}", "")
    data = text(*events)
    assert len(data) > 2 * BLOCK_BYTES
    # THEN only those are lost
    trace = read(data)
    assert len(trace.ops) == 7992
    assert lost(trace) == {"unreadable": 8}


@pytest.mark.parametrize(
    "unit",
    [
        '{"ph":',
        '{"ph":"',
        '{"name":"a',
        '{"ph":"X",',
        '{"ph":"X","args":{"id":[',
        '{"ph":"X","name":"\\ud800',
        '{"ts":NaN,',
        "{" + " " * 50,
        '"a":"b",',
        "\\ud800",
        '\\"',
        '":"',
        '"',
        "\\",
        "[",
        "]",
        ",",
        ", ",
        "{}",
        "}{",
        "1e",
    ],
)
def test_hostile_repetition_takes_linear_time(unit: str) -> None:
    def seconds(size: int) -> float:
        data = ('{"traceEvents": [{"ph":"X","ts":1},' + unit * (size // len(unit))).encode()
        start = time.process_time()
        for _ in Salvager(data).batches():
            pass
        return time.process_time() - start

    # GIVEN the same text four times as long
    small, large = seconds(50_000), seconds(200_000)
    # THEN it takes some four times as long, not sixteen
    assert large < 8 * small + 0.3
