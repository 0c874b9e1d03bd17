"""Play a tape: work out when everything happens, round upon round, until the rounds take the same time."""

from __future__ import annotations

from advisor.advice.replay.graph import FETCH, LAUNCH, RECORD, SYNC_ALL, SYNC_SLOT, SYNC_STREAM, WAIT
from advisor.advice.replay.tape import Tape

#: Rounds whose times differ by less than this share have settled.
_SETTLED = 1e-6
_MOST_ROUNDS = 12


def period_ns(tape: Tape) -> float:
    """Time of a round in the steady state: that of the slowest of host, streams and loader."""
    past = -1e18
    free = [past] * tape.stream_count
    kept = [past] * tape.slot_count
    began: list[float] = []
    ready = past
    base = 0.0
    depth, loader = tape.depth, tape.loader_ns
    columns = (tape.kind, tape.at_ns, tape.stream, tape.delay_ns, tape.gap_ns, tape.dur_ns, tape.slot)
    items = list(zip(*columns, strict=True))
    ends: list[tuple[float, ...]] = []
    last = 0.0
    for _ in range(_MOST_ROUNDS):
        # Only the last `depth` beginnings are asked for.
        began = began[-depth:]
        count = len(began)
        for kind, at, stream, delay, gap, dur, slot in items:
            now = base + at
            if kind == LAUNCH:
                if count >= depth and began[count - depth] > now:
                    base += began[count - depth] - now
                    now = began[count - depth]
                start = free[stream] + gap
                if now + delay > start:
                    start = now + delay
                began.append(start)
                count += 1
                if start + dur > free[stream]:
                    free[stream] = start + dur
                continue
            if kind == RECORD:
                kept[slot] = free[stream]
                continue
            if kind == WAIT:
                if kept[slot] > free[stream]:
                    free[stream] = kept[slot]
                continue
            if kind == SYNC_STREAM:
                until = free[stream] + delay
            elif kind == SYNC_ALL:
                until = max(free) + delay
            elif kind == SYNC_SLOT:
                until = kept[slot] + delay
            elif kind == FETCH and loader:
                ready = ready + loader if ready > past else now
                until = ready
            else:
                continue
            if until > now:
                base += until - now
        base += tape.host_ns
        # A stream that nothing ran on, or a loader without workers, stays where it is.
        ends.append((base, ready, *free))
        if len(ends) > 1:
            round_ns = _slowest(ends[-2], ends[-1])
            if len(ends) > 2 and abs(round_ns - last) <= _SETTLED * round_ns:
                return round_ns
            last = round_ns
    # Rounds may alternate for ever.
    half = _MOST_ROUNDS // 2
    return _slowest(ends[-1 - half], ends[-1]) / half


def _slowest(before: tuple[float, ...], after: tuple[float, ...]) -> float:
    return max(b - a for a, b in zip(before, after, strict=True))
