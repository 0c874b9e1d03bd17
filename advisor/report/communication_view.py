"""Collectives in words: what every renderer says of them."""

from __future__ import annotations

from advisor.report import format as fmt
from advisor.report.model import CollectiveGroup, Report


def line(report: Report) -> str:
    """One line on the communication of a step; empty without any."""
    groups = report.communication
    if not groups:
        return ""
    time_ms = sum(group.time_ms_per_step for group in groups)
    exposed_ms = sum(group.exposed_ms_per_step for group in groups)
    calls = fmt.count(sum(group.calls_per_step for group in groups))
    first = groups[0]
    text = (
        f"Communication: {calls} collectives, {fmt.duration(time_ms)} per step, {fmt.duration(exposed_ms)} "
        f"of it exposed; longest {label(first)}"
    )
    if first.bus_bandwidth_bytes_per_s is not None:
        text += f" at {fmt.bytes_per_s(first.bus_bandwidth_bytes_per_s)} bus bandwidth"
    if first.efficiency is not None:
        text += f", {fmt.percent(first.efficiency)} of the link"
    return text if first.transfer_ms_per_step is not None else f"{text}, waiting for other ranks included"


def label(group: CollectiveGroup) -> str:
    """A group's kind, dtype and size class: ``all_reduce fp32, 16 to 256 MiB``."""
    name = f"{group.kind} {group.dtype}" if group.dtype else group.kind
    return f"{name}, {group.size_class}" if group.size_class else name


def note(report: Report) -> str:
    """What the bandwidths stand on."""
    timed = any(group.transfer_ms_per_step is not None for group in report.communication)
    waiting = (
        "Transfer is the shortest time that any of these ranks spends in the same collectives: on the last "
        "rank to come nothing is left but that. Bandwidths are over it where it is known."
        if timed
        else "Time includes waiting for the last rank to come, so bandwidths are lower bounds: traces of all "
        "ranks together tell the transfer itself."
    )
    roofed = any(group.efficiency is not None for group in report.communication)
    link = (
        "The share is of the link between devices, in one direction."
        if roofed
        else "There is no share of a link: payloads or ranks are not recorded, or the ranks are not known to "
        "share one link of known rate."
    )
    return f"Bus bandwidth is counted as nccl-tests does. {waiting} {link}"
