"""What a launch is, as far as its roof goes: device work, a collective, or a copy over some link."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from advisor.trace.events import MEMCPY
from advisor.trace.events import MEMSET as MEMSET_KIND
from advisor.trace.phases import is_collective

#: COMPUTE stands for kernels and host operators. The last three copies have other roofs than the memory's.
COMPUTE, COLLECTIVE, MEMSET, DEVICE_COPY, HOST_COPY, PAGEABLE_COPY, PEER_COPY, OTHER_COPY = range(8)

#: Copies that cross a link; those within the device are memory traffic like a kernel's.
LINK_COPIES = (HOST_COPY, PAGEABLE_COPY, PEER_COPY, OTHER_COPY)

_HOST = re.compile(
    r"htod|dtoh|htoa|atoh|host_?to_?device|device_?to_?host"
    r"|(host|pinned|pageable) -> (device|array)|(device|array) -> (host|pinned|pageable)"
)
_TO_HOST = re.compile(r"dtoh|atoh|device_?to_?host|(device|array) -> (host|pinned|pageable)")
_PEER = re.compile(r"ptop|peer")
_DEVICE = re.compile(r"dtod|atoa|atod|dtoa|device_?to_?device|device -> device")


def launch_class(name: str, kind: int) -> int:
    """Class of one launch.

    Args:
        name: as in the trace, e.g. ``Memcpy HtoD (Pinned -> Device)``.
        kind: KERNEL, MEMCPY, MEMSET (see `advisor.trace.events`) or CPU_OP.
    """
    if kind == MEMSET_KIND:
        return MEMSET
    if kind != MEMCPY:
        return COLLECTIVE if is_collective(name) else COMPUTE
    lowered = name.lower()
    if _HOST.search(lowered):
        return PAGEABLE_COPY if "pageable" in lowered else HOST_COPY
    if _PEER.search(lowered):
        return PEER_COPY
    return DEVICE_COPY if _DEVICE.search(lowered) else OTHER_COPY


def launch_classes(kind: np.ndarray, name: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Class of each launch, each distinct name looked at once.

    Args:
        kind: (n,), as for `launch_class`.
        name: (n,), index into `names`.
        names: the interned names.

    Returns:
        uint8 (n,).
    """
    kinds = int(kind.max()) + 1 if len(kind) else 1
    pairs, inverse = np.unique(name.astype(np.int64) * kinds + kind, return_inverse=True)
    found = [launch_class(names[pair // kinds], pair % kinds) for pair in pairs.tolist()]
    return np.array(found, np.uint8)[inverse.reshape(-1)]


def goes_to_host(name: str) -> bool:
    """Whether a copy over the host link, by its name, leaves the device.

    Example:
        >>> goes_to_host("Memcpy DtoH (Device -> Pageable)"), goes_to_host("Memcpy HtoD (Pinned -> Device)")
        (True, False)
    """
    return _TO_HOST.search(name.lower()) is not None


def measured_link(name: str) -> str:
    """Which measured figure of the host link a copy is set against, by its name: direction and host memory.

    What does not say whether its host memory is pinned counts as pinned, the faster one.

    Example:
        >>> measured_link("Memcpy DtoH (Device -> Pageable)")
        'to_host_pageable'
    """
    direction = "to_host" if goes_to_host(name) else "to_device"
    return f"{direction}_{'pageable' if 'pageable' in name.lower() else 'pinned'}"


def device_traffic(classes: np.ndarray, copy_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Device memory traffic of memsets and of copies within the device, from the size that the trace states.

    Args:
        classes: (n,), from `launch_classes`.
        copy_bytes: (n,), bytes of each copy or memset; NaN or negative where not known.

    Returns:
        Bytes read and bytes written, float64 (n,); NaN for other launches and unknown sizes.
    """
    size = np.where(copy_bytes >= 0, copy_bytes, np.nan).astype(np.float64)
    copy, fill = classes == DEVICE_COPY, classes == MEMSET
    read = np.where(copy, size, np.where(fill, size * 0, np.nan))
    return read, np.where(copy | fill, size, np.nan)
