"""The message of every collective of a timeline, and whether its group lies on one fast link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from advisor.roofline.collectives import (
    MAX_RANKS,
    Message,
    collective_kind,
    message_of_range,
    read_message,
    whole_numbers,
)
from advisor.roofline.devices import Device
from advisor.trace.link import Timeline
from advisor.trace.names import named
from advisor.trace.nesting import Nesting, nearest
from advisor.trace.wire import UNDECODABLE

#: Devices of a full mesh, all of whose links a group must use to reach a device's rate.
_MESH_DEVICES = 8


def find_messages(timeline: Timeline, rows: np.ndarray) -> list[Message]:
    """What each of these launches moves.

    Kernels of a recent PyTorch carry the arguments of their collective; else ``record_param_comms`` or the
    shapes of the range ``nccl:...`` around the launch tell it. Where one collective launches several kernels
    nothing tells them apart, and their sizes stay unknown.

    Args:
        timeline: joined trace.
        rows: int (k,), launches that are collectives.

    Returns:
        k messages, of which at least the kind is known.
    """
    trace, launches = timeline.trace, timeline.launches
    names = [trace.names[i] for i in launches.name[rows].tolist()]
    if timeline.cpu_only or len(trace.device) != len(launches):
        return [Message(collective_kind(name)) for name in names]
    ranks, members = _only_group(trace.meta.get("distributedInfo"))
    comms = nearest(
        launches.op[rows], timeline.op_parent, named(trace.names, trace.ops.name, _records_comms)
    ).tolist()
    spans, ranges = _innermost_ranges(timeline, rows)
    kernels_of_op, kernels_of_range = Counter(comms), Counter(ranges)
    found = []
    for row, name, op, span in zip(rows.tolist(), names, comms, ranges, strict=True):
        message = read_message(trace.device.args[row], trace.rank)
        if message is None and op >= 0:
            message = read_message(trace.ops.args[op], trace.rank)
        shared = op >= 0 and kernels_of_op[op] > 1
        if message is None and span >= 0:
            args = _shapes(spans.args[span])
            message = message_of_range(trace.names[spans.name[span]], args.dims, args.types, ranks)
            shared = kernels_of_range[span] > 1
        if message is None:
            message = Message(collective_kind(name), ranks=ranks)
        if message.kind == "other":
            message = replace(message, kind=collective_kind(name))
        if message.members is None and message.ranks == ranks and members:
            message = replace(message, members=members)
        if shared:
            message = replace(message, bytes_in=None, bytes_out=None)
        found.append(message)
    return found


def link_bytes_per_s(device: Device, timeline: Timeline, message: Message) -> float | None:
    """Rate of the link that the message's group is known to share, in one direction; else None.

    Known is a group on one node of devices behind a switch, or one that fills a mesh; cards that may or may
    not have a bridge are not known to.
    """
    reaches = device.peer_fabric == "switch" or (
        device.peer_fabric == "mesh" and (message.ranks or 0) >= _MESH_DEVICES
    )
    return device.peer_bytes_per_s if reaches and _on_one_node(timeline, message) else None


def _on_one_node(timeline: Timeline, message: Message) -> bool:
    trace = timeline.trace
    world, nodes = trace.world_size, trace.context.get("num_nodes")
    if type(nodes) is int and nodes >= 1:
        if nodes == 1:
            return True
        if message.members and world and world % nodes == 0:
            # Lightning numbers the ranks of a node one after the other.
            return len({member // (world // nodes) for member in message.members}) == 1
        return False
    properties = trace.meta.get("deviceProperties")
    visible = len(properties) if isinstance(properties, list) else 0
    return world is not None and 1 < world <= visible


def _only_group(info: object) -> tuple[int | None, tuple[int, ...] | None]:
    """Size and members of the process group, where the job can have but one size of it."""
    info = info if isinstance(info, Mapping) else {}
    groups = info.get("pg_config")
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], Mapping):
        size, members = groups[0].get("pg_size"), whole_numbers(groups[0].get("ranks"))
        if type(size) is int and 0 < size <= MAX_RANKS:
            return size, members if members and len(members) == size else None
    # Among two ranks a collective has both.
    return (2, (0, 1)) if info.get("world_size") == 2 else (None, None)


def _records_comms(name: str) -> bool:
    return name == "record_param_comms"


def _innermost_ranges(timeline: Timeline, rows: np.ndarray) -> tuple[Any, list[int]]:
    """Ranges that NCCL's wrapper opens, and for each launch the one around its host call, or -1."""
    trace, launches = timeline.trace, timeline.launches
    of_nccl = named(trace.names, trace.annotations.name, lambda name: name.startswith(("nccl:", "rccl:")))
    spans = trace.annotations.take(of_nccl)
    around = Nesting(spans.track, spans.ts_ns, spans.dur_ns).innermost(
        launches.track[rows], launches.launch_ts_ns[rows]
    )
    return spans, around.tolist()


class _Shapes(msgspec.Struct, gc=False):
    dims: Any = msgspec.field(default=None, name="Input Dims")
    types: Any = msgspec.field(default=None, name="Input type")


def _shapes(raw: msgspec.Raw) -> _Shapes:
    try:
        return msgspec.json.decode(raw, type=_Shapes)
    except UNDECODABLE:
        return _Shapes()
