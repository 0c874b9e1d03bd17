"""What bounds a launch: memory, compute, communication or a copy, and how near its roof it comes.

The roofline model (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009): with FLOPs F, bytes B, the
peak P of the pipe in use and the memory's bandwidth W, the intensity is F / B, the ridge P / W, the
attainable rate min(P, F / B × W). Time at the roof is max(F / P, B / W); efficiency is that time over the
time taken, which is achieved over attainable, and is defined for F = 0 too.

F and B are what the device does, and decide the bound and the intensity. The roof that a launch is held
against takes the useful part alone, without padding and without what is read again: otherwise a kernel that
wastes work would look near its roof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from advisor.roofline.costs.model import Cost
from advisor.roofline.devices import Device
from advisor.roofline.launch_class import (
    COLLECTIVE,
    DEVICE_COPY,
    HOST_COPY,
    LINK_COPIES,
    MEMSET,
    PAGEABLE_COPY,
    PEER_COPY,
    device_traffic,
    launch_classes,
    measured_link,
)
from advisor.roofline.launch_class import COMPUTE as COMPUTE_CLASS
from advisor.trace.names import coded

#: Codes of `Bounds.bound`.
BOUNDS = ("unknown", "memory", "compute", "communication", "copy")
UNKNOWN, MEMORY, COMPUTE, COMMUNICATION, COPY = range(len(BOUNDS))

#: Bits of `Bounds.flags`, lowest first.
#: latency: too small to fill the device.
#: inefficient: large, and far from the roof: a better kernel exists.
#: few_blocks: far from the roof with too few thread blocks to give work to half the SMs.
#: cached: above the memory roof as far as the last-level cache explains it.
#: above_roof: above the roof beyond that: the cost or the roof is wrong for this launch.
#: no_roof: has a cost, but the device's table has no figure to set it against.
#: pageable: a copy from or to pageable host memory, staged through a buffer.
#: padded: large, and much of its arithmetic is on the padding of tiles.
FLAGS = ("latency", "inefficient", "few_blocks", "cached", "above_roof", "no_roof", "pageable", "padded")

#: Below this time at the roof a kernel is all ramp-up and drain. Measured with hardware counters over 166
#: kernels on an H200: none below 4 µs at the roof reaches a quarter of it, those of 6 to 7 µs reach half.
LATENCY_ROOF_NS = 5_000
#: A launch this long is worth a better kernel; a shorter one is not long against the launch itself.
LARGE_NS = 20_000
#: Under this efficiency a launch is called far from its roof.
FAR = 0.5
#: A large launch with more of its FLOPs on padding is flagged.
PADDED = 0.2
#: Timestamps and peaks are good to a few percent: less than this above the roof is on the roof.
_SLACK = 1.05


@dataclass(frozen=True, slots=True)
class Bound:
    """What bounds one launch.

    Attributes:
        bound: one of `BOUNDS`.
        intensity: FLOP/byte as the device does them; None without a cost.
        ridge: FLOP/byte of the pipe in use, or None.
        attainable_flops_per_s: the roof at this intensity, or None; 0 where nothing is computed.
        roof_ns: time that the useful work would take at the roof (for a copy or collective, at the link's
            rate), or None.
        efficiency: `roof_ns` over the time taken, or None. Above 1 where a cache serves the data. The time of
            a collective includes waiting for other ranks.
        flags: of `FLAGS`.
    """

    bound: str
    intensity: float | None = None
    ridge: float | None = None
    attainable_flops_per_s: float | None = None
    roof_ns: float | None = None
    efficiency: float | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """What bounds each of n launches; the columns of `Bound`, NaN for None.

    Attributes:
        bound: uint8 (n,), index into `BOUNDS`.
        intensity, ridge, attainable_flops_per_s, roof_ns, efficiency: float64 (n,).
        flags: uint8 (n,), bit i stands for ``FLAGS[i]``.
    """

    bound: np.ndarray
    intensity: np.ndarray
    ridge: np.ndarray
    attainable_flops_per_s: np.ndarray
    roof_ns: np.ndarray
    efficiency: np.ndarray
    flags: np.ndarray

    def __len__(self) -> int:
        return len(self.bound)

    def __getitem__(self, index: int) -> Bound:
        def number(column: np.ndarray) -> float | None:
            return None if np.isnan(column[index]) else float(column[index])

        return Bound(
            bound=BOUNDS[self.bound[index]],
            intensity=number(self.intensity),
            ridge=number(self.ridge),
            attainable_flops_per_s=number(self.attainable_flops_per_s),
            roof_ns=number(self.roof_ns),
            efficiency=number(self.efficiency),
            flags=flag_names(int(self.flags[index])),
        )

    def is_bound(self, bound: str) -> np.ndarray:
        """bool (n,): bound by this, one of `BOUNDS`."""
        return self.bound == BOUNDS.index(bound)

    def has_flag(self, flag: str) -> np.ndarray:
        """bool (n,): carries this flag, one of `FLAGS`."""
        return (self.flags >> FLAGS.index(flag) & 1).astype(bool)


def flag_names(bits: int) -> tuple[str, ...]:
    """Names of the flags that are set."""
    return tuple(name for i, name in enumerate(FLAGS) if bits >> i & 1)


def classify_many(
    *,
    flops: np.ndarray,
    bytes_moved: np.ndarray,
    pipe: np.ndarray,
    pipes: Sequence[str],
    dur_ns: np.ndarray,
    kind: np.ndarray,
    name: np.ndarray,
    names: Sequence[str],
    device: Device,
    copy_bytes: np.ndarray | None = None,
    grid_blocks: np.ndarray | None = None,
    flops_padding: np.ndarray | None = None,
    bytes_reread: np.ndarray | None = None,
    bus_bytes: np.ndarray | None = None,
) -> Bounds:
    """What bounds each of n launches.

    Args:
        flops: float64 (n,), NaN where there is no cost.
        bytes_moved: float64 (n,), bytes read and written, NaN where there is no cost.
        pipe: integers (n,), index into `pipes`, -1 where there is no cost.
        pipes: names of pipes, as in `Cost.pipe`.
        dur_ns: (n,), time taken; 0 gives no efficiency.
        kind: (n,), KERNEL, MEMCPY, MEMSET (see `advisor.trace.events`) or CPU_OP.
        name: (n,), index into `names`: tells collectives, and the direction of copies.
        names: the interned names.
        device: whose roofs count.
        copy_bytes: (n,), bytes that each copy or memset moves; negative or NaN where not known.
        grid_blocks: (n,), thread blocks; negative or 0 where not known.
        flops_padding: float64 (n,), the part of `flops` that no result needs; None for none.
        bytes_reread: float64 (n,), the part of `bytes_moved` that is fetched again; None for none.
        bus_bytes: float64 (n,), what a collective moves over the link between devices in one direction; NaN
            where that is not known, or not that its group has that link. None for nowhere.
    """
    n = len(dur_ns)
    classes = launch_classes(kind, name, names)
    flops, nbytes = np.asarray(flops, np.float64), np.asarray(bytes_moved, np.float64)
    taken = np.where(dur_ns > 0, dur_ns, np.nan).astype(np.float64)
    copied = np.full(n, np.nan) if copy_bytes is None else np.where(copy_bytes >= 0, copy_bytes, np.nan)
    read, written = device_traffic(classes, copied)
    plain = np.isin(classes, (MEMSET, DEVICE_COPY)) & np.isnan(nbytes)
    flops, nbytes = np.where(plain, 0.0, flops), np.where(plain, read + written, nbytes)

    bandwidth = np.nan if device.bandwidth_bytes_per_s is None else device.bandwidth_bytes_per_s
    peaks = np.array([device.peaks.get(p, np.nan) for p in pipes] + [np.nan])
    peak = peaks[np.asarray(pipe, np.int64)]
    no_flops = flops == 0
    with np.errstate(divide="ignore", invalid="ignore"):
        intensity = np.where(no_flops, 0.0, flops / nbytes)
        ridge = peak / bandwidth
        compute_ns = np.where(no_flops, 0.0, flops / peak * 1e9)
        memory_ns = nbytes / bandwidth * 1e9
        attainable = np.where(no_flops, 0.0, np.minimum(peak, intensity * bandwidth))
        useful_flops = flops - (0.0 if flops_padding is None else np.nan_to_num(flops_padding))
        useful_bytes = nbytes - (0.0 if bytes_reread is None else np.nan_to_num(bytes_reread))
        useful_compute_ns = np.where(no_flops, 0.0, useful_flops / peak * 1e9)
        roof_ns = np.maximum(useful_compute_ns, useful_bytes / bandwidth * 1e9)
    on_device = np.isin(classes, (COMPUTE_CLASS, MEMSET, DEVICE_COPY))
    costed = on_device & ~np.isnan(flops) & ~np.isnan(nbytes)
    roofed = costed & ~np.isnan(roof_ns)

    bound = np.full(n, UNKNOWN, np.uint8)
    bound[roofed] = MEMORY
    bound[roofed & (compute_ns >= memory_ns) & ~no_flops] = COMPUTE
    bound[classes == COLLECTIVE] = COMMUNICATION
    bound[np.isin(classes, LINK_COPIES)] = COPY

    link = np.full(n, np.nan)
    host_copy = np.isin(classes, (HOST_COPY, PAGEABLE_COPY))
    link[host_copy] = _host_link(device, name[host_copy], names)
    link[np.isin(classes, (PEER_COPY, COLLECTIVE))] = device.peer_bytes_per_s or np.nan
    over_bus = np.full(n, np.nan) if bus_bytes is None else bus_bytes
    crossing = np.where(classes == COLLECTIVE, over_bus, copied)
    roof_ns = np.where(roofed, roof_ns, crossing / link * 1e9)
    efficiency = roof_ns / taken

    far = efficiency < FAR
    few_blocks = np.zeros(n, bool)
    if grid_blocks is not None and device.sms:
        few_blocks = (grid_blocks > 0) & (grid_blocks < device.sms / 2)
    latency = roofed & far & (roof_ns < LATENCY_ROOF_NS) & (few_blocks | (taken < LARGE_NS))
    above = roofed & (efficiency > _SLACK)
    cache_bytes = device.llc_bytes or device.l2_bytes or 0
    # What was just written can lie in the cache, and so can what is about to be evicted: both ways.
    uncached_ns = np.maximum(useful_bytes - 2 * cache_bytes, 0) / bandwidth * 1e9
    cached = (
        above & (bound == MEMORY) & (uncached_ns <= taken * _SLACK) & (useful_compute_ns <= taken * _SLACK)
    )
    named = {
        "latency": latency,
        "inefficient": roofed & far & ~latency & (taken >= LARGE_NS),
        "few_blocks": roofed & far & few_blocks,
        "cached": cached,
        "above_roof": above & ~cached,
        "no_roof": costed & ~roofed,
        "pageable": classes == PAGEABLE_COPY,
        "padded": roofed & (useful_flops < (1 - PADDED) * flops) & (taken >= LARGE_NS),
    }
    flags = np.zeros(n, np.uint8)
    for i, flag in enumerate(FLAGS):
        flags |= named[flag].astype(np.uint8) << i
    return Bounds(
        bound=bound,
        intensity=np.where(costed, intensity, np.nan),
        ridge=np.where(costed, ridge, np.nan),
        attainable_flops_per_s=np.where(roofed, attainable, np.nan),
        roof_ns=roof_ns,
        efficiency=efficiency,
        flags=flags,
    )


def _host_link(device: Device, name: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Rate of the host link for each of these copies: measured in its way and direction where it was."""
    whole = device.link_bytes_per_s or np.nan
    return coded(names, name, lambda text: device.measured_links.get(measured_link(text), whole), np.float64)


def classify(
    cost: Cost | None,
    dur_ns: int,
    kind: int,
    device: Device,
    *,
    name: str = "",
    copy_bytes: int | None = None,
    grid_blocks: int | None = None,
) -> Bound:
    """What bounds one launch; `classify_many` for a single one.

    Args:
        cost: its work, or None.
        dur_ns: time taken; 0 gives no efficiency.
        kind: KERNEL, MEMCPY, MEMSET (see `advisor.trace.events`) or CPU_OP.
        device: whose roofs count.
        name: as in the trace: tells collectives, and the direction of copies.
        copy_bytes: bytes that a copy or memset moves.
        grid_blocks: thread blocks.

    Example:
        >>> from advisor.roofline.devices import find_device
        >>> from advisor.trace.events import KERNEL
        >>> matmul = Cost(2 * 8192**3, 2 * 8192**2 * 2, 8192**2 * 2, "tensor_bf16")
        >>> classify(matmul, 1_700_000, KERNEL, find_device(override="H100")).bound
        'compute'
    """
    return classify_many(
        flops=np.array([np.nan if cost is None else cost.flops]),
        bytes_moved=np.array([np.nan if cost is None else cost.bytes]),
        flops_padding=np.array([0.0 if cost is None else cost.flops_padding]),
        bytes_reread=np.array([0.0 if cost is None else cost.bytes_reread]),
        pipe=np.array([-1 if cost is None else 0]),
        pipes=["" if cost is None else cost.pipe],
        dur_ns=np.array([dur_ns]),
        kind=np.array([kind]),
        name=np.array([0]),
        names=[name],
        device=device,
        copy_bytes=np.array([-1 if copy_bytes is None else copy_bytes]),
        grid_blocks=np.array([-1 if grid_blocks is None else grid_blocks]),
    )[0]
