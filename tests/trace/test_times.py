"""Times are kept to the ns, however far from zero the trace's clock is."""

import json

from advisor.trace.read import decode_trace


def _ops(*times_us: float):
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": t, "dur": 1}
        for t in times_us
    ]
    return decode_trace(json.dumps({"traceEvents": events}).encode(), "t.json", None).ops


def test_whole_microseconds_since_1970_stay_exact():
    # GIVEN starts whose ns need more than the 53 bits of a float
    ops = _ops(1669783687384669, 1669783687384670)

    # THEN they are what the file says, and 1 us apart
    assert ops.ts_ns.tolist() == [1669783687384669000, 1669783687384670000]


def test_nanoseconds_after_the_decimal_point_stay_exact():
    # GIVEN a clock that started at boot, in us with three decimals
    ops = _ops(5207343899893.865)

    # THEN the ns are there
    assert ops.ts_ns.tolist() == [5207343899893865]
