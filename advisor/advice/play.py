"""Play a tape: work out when everything happens, round upon round, until the rounds take the same time."""

from __future__ import annotations

from advisor.advice.graph import FETCH, LAUNCH, RECORD, SYNC_ALL, SYNC_SLOT, SYNC_STREAM, WAIT
from advisor.advice.tape import Tape

#: Rounds whose times differ by less than this share have settled.
_SETTLED = 1e-4
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
    before: tuple[float, ...] | None = None
    last = None
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
        after = (base, ready, *free)
        if before is not None:
            # A stream that nothing ran on, or a loader without workers, has no pace.
            round_ns = max(b - a for a, b in zip(before, after, strict=True))
            if last is not None and abs(round_ns - last) <= _SETTLED * round_ns:
                return round_ns
            last = round_ns
        before = after
    return last or 0.0
