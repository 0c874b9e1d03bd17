"""What a collective moves: its message as a trace records it, and the bytes that cross the link for it.

Bus bytes follow nccl-tests (NVIDIA, doc/PERFORMANCE.md): what each rank has to send, and to receive, over
its link whatever the algorithm. With a buffer of S bytes and n ranks that is S × 2(n-1)/n for an all-reduce,
S × (n-1)/n for all-gather, reduce-scatter, all-to-all, gather and scatter, S being the full buffer, and S
for broadcast, reduce and point-to-point. Over time it is the bus bandwidth, which does not depend on n and
has the link's rate in one direction as its roof. Switches that reduce on their own (NVLink SHARP) send less
and may come out above it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from advisor.roofline.costs.model import DTYPE_BYTES
from advisor.roofline.costs.parse import parse_dtype, parse_inputs
from advisor.trace.wire import UNDECODABLE

#: Kinds of collective, each by a part of its name once letters alone are left of that. The first that fits.
_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("all_reduce", "allreduce|crossdevicereduce|shotall"),
        ("reduce_scatter", "reducescatter"),
        ("all_gather", "allgather"),
        ("all_to_all", "alltoall"),
        ("broadcast", "broadcast|bcast"),
        ("send_recv", "send|recv"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("reduce", "reduce"),
    )
)
#: No device holds a petabyte, and no job has a billion ranks: a larger figure is a broken record.
_MAX_BYTES, MAX_RANKS = 1e15, 10**9


@dataclass(frozen=True, slots=True)
class Message:
    """One collective as one rank sees it. What is not known is None.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``reduce``, ``all_to_all``,
            ``send_recv``, ``gather``, ``scatter`` or ``other``.
        dtype: a key of `DTYPE_BYTES`, or ``"unknown"``.
        bytes_in, bytes_out: of this rank's input and output.
        ranks: size of the process group.
        members: global ranks of the group, in its order.
        group: name of the process group, ``""`` where not recorded.
        own_in, own_out: shares of input and output that an all-to-all leaves on this rank; None for even.
        uneven: whether an all-to-all has splits, so that `own_in` and `own_out` decide.
    """

    kind: str
    dtype: str = "unknown"
    bytes_in: float | None = None
    bytes_out: float | None = None
    ranks: int | None = None
    members: tuple[int, ...] | None = None
    group: str = ""
    own_in: float | None = None
    own_out: float | None = None
    uneven: bool = False

    @property
    def payload_bytes(self) -> float | None:
        """The full buffer, S above; None where not known."""
        small, large = self.bytes_in, self.bytes_out
        if self.kind in ("reduce_scatter", "scatter"):
            small, large = large, small
        elif self.kind not in ("all_gather", "gather"):
            return max((size for size in (small, large) if size), default=None)
        if large:
            # All-gather gives no less than it takes.
            return None if small and small > large else large
        return small * self.ranks if small and self.ranks else None

    @property
    def bus_bytes(self) -> float | None:
        """Bytes over this rank's link in one direction; None where payload or group are not known."""
        size, n = self.payload_bytes, self.ranks
        if size is None or n is None or self.kind == "other":
            return None
        if self.kind in ("broadcast", "reduce", "send_recv"):
            return size
        if self.kind == "all_reduce":
            return size * 2 * (n - 1) / n
        if not self.uneven:
            return size * (n - 1) / n
        if self.own_in is None or self.own_out is None:
            return None
        return max((self.bytes_in or 0.0) * (1 - self.own_in), (self.bytes_out or 0.0) * (1 - self.own_out))


class _Recorded(msgspec.Struct, gc=False):
    """Arguments that recent PyTorch records on ``record_param_comms`` and on the kernels inside it."""

    name: Any = msgspec.field(default=None, name="Collective name")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    split_in: Any = msgspec.field(default=None, name="In split size")
    split_out: Any = msgspec.field(default=None, name="Out split size")
    ranks: Any = msgspec.field(default=None, name="Group size")
    members: Any = msgspec.field(default=None, name="Process Group Ranks")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    dtype: Any = None


_RECORDED = msgspec.json.Decoder(_Recorded)


def read_message(raw: bytes | msgspec.Raw, rank: int | None = None) -> Message | None:
    """The message that an event's arguments describe; None where they describe none.

    Args:
        raw: undecoded arguments of a kernel or of ``record_param_comms``.
        rank: this process's, which tells what an uneven all-to-all keeps.
    """
    try:
        args = _RECORDED.decode(raw)
    except UNDECODABLE:
        return None
    if not isinstance(args.name, str) or (args.elements_in is None and args.elements_out is None):
        return None
    dtype = parse_dtype(args.dtype)
    members = whole_numbers(args.members)
    ranks = _whole(args.ranks, MAX_RANKS) or (len(members) if members else None)
    if members is not None and len(members) != ranks:
        members = None
    kind = collective_kind(args.name)
    splits = [_splits(split) for split in (args.split_in, args.split_out)]
    own = [_own_share(split, members, rank, ranks) for split in splits]
    return Message(
        kind=kind,
        dtype=dtype,
        bytes_in=_bytes(args.elements_in, dtype),
        bytes_out=_bytes(args.elements_out, dtype),
        ranks=ranks,
        members=members,
        group=args.group if isinstance(args.group, str) else "",
        own_in=own[0],
        own_out=own[1],
        uneven=kind == "all_to_all" and splits != [(), ()],
    )


def message_of_range(
    name: str, dims: Sequence[object] | None, types: Sequence[object] | None, ranks: int | None
) -> Message:
    """The message of a host range ``nccl:all_reduce``, whose shapes are those of this rank's input.

    Args:
        name: of the range.
        dims, types: its ``Input Dims`` and ``Input type``.
        ranks: size of the process group, where something else tells it.
    """
    kind = collective_kind(name)
    inputs, _ = parse_inputs(dims, types)
    tensors = [item for item in inputs if item is not None and not isinstance(item, tuple)]
    dtypes = {item.dtype for item in tensors}
    dtype = dtypes.pop() if len(dtypes) == 1 else "unknown"
    sound = len(tensors) == len(inputs) and all(size >= 0 for item in tensors for size in item.shape)
    total = sum(item.numel for item in tensors) if sound else None
    return Message(kind=kind, dtype=dtype, bytes_in=_bytes(total, dtype) or None, ranks=ranks)


def collective_kind(name: str) -> str:
    """Kind of a collective by any name of it: the kernel's, the operator's or the range's.

    Example:
        >>> collective_kind("_reduce_scatter_base"), collective_kind("ncclDevKernel_SendRecv")
        ('reduce_scatter', 'send_recv')
    """
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for kind, pattern in _KINDS if pattern.search(letters)), "other")


def whole_numbers(value: object) -> tuple[int, ...] | None:
    """A list of numbers from 0 on, also as text (``"[0, 1]"``); None for anything else, or a cut-off one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except UNDECODABLE:
            return None
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        return None
    return tuple(value)


def _splits(value: object) -> tuple[int, ...] | None:
    """Splits of an all-to-all, ``()`` for even ones; None where they are recorded but cannot be read."""
    return () if value is None else whole_numbers(value)


def _own_share(
    splits: tuple[int, ...] | None, members: tuple[int, ...] | None, rank: int | None, ranks: int | None
) -> float | None:
    """Share of the buffer that stays on this rank."""
    if splits == ():
        return 1 / ranks if ranks else None
    if splits is None or members is None or rank not in members or len(splits) != len(members):
        return None
    total = sum(splits)
    return splits[members.index(rank)] / total if total else 0.0


def _whole(value: object, most: float) -> int | None:
    return value if type(value) is int and 0 < value <= most else None


def _bytes(elements: object, dtype: str) -> float | None:
    """Size of so many elements; None for no number, a negative or an impossible one."""
    width = DTYPE_BYTES.get(dtype)
    if width is None or type(elements) is not int or not 0 <= elements <= _MAX_BYTES / width:
        return None
    return elements * width
