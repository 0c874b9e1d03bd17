"""`advisor devices`: the devices whose roofs are known, and where the figures come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from advisor.roofline.device_table import Row
    from advisor.roofline.devices import Device
    from advisor.roofline.measured import Measured


@click.command()
@click.argument("name", required=False)
@click.option(
    "--table",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML with rows of yours, added to the shipped ones.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(name: str | None, table: Path | None, as_json: bool) -> None:
    """List the devices that are known; with NAME, all figures of one with their sources and ridge points.

    NAME is a row of the list, a driver's name or a marketing name. Peaks are dense FLOP/s.

    \b
    advisor devices
    advisor devices "NVIDIA A100-SXM4-80GB"
    advisor devices h100 --json
    """
    import json

    from advisor.roofline.devices import device_of_row, device_rows, find_device

    measured = _measured_by_row(table)
    if name is not None:
        device = find_device(None, override=name, user_toml=table)
        here = measured.get(device.matched or "")
        click.echo(json.dumps(_as_dict(device, here), indent=2) if as_json else _sheet(device, here))
        return
    rows = device_rows(table)
    if as_json:
        found = [_as_dict(device_of_row(row), measured.get(row.key)) for row in rows.values()]
        click.echo(json.dumps(found, indent=2))
    else:
        _print_table(rows, measured)


def _measured_by_row(table: Path | None) -> dict[str, Measured]:
    """What `advisor calibrate` measured on this machine, by row of the list."""
    from advisor.roofline.devices import find_device
    from advisor.roofline.measured import all_measured

    found = {}
    for one in all_measured():
        properties = {"name": one.name, "totalGlobalMem": one.total_memory_bytes, "numSms": one.sms}
        row = find_device(properties, user_toml=table).matched
        if row:
            found[row] = one
    return found


def _as_dict(device: Device, measured: Measured | None) -> dict[str, Any]:
    import msgspec

    return {
        "key": device.matched,
        "name": device.name,
        "roofs": device.roofs,
        "arch": device.arch or None,
        "peaks": [
            {
                "pipe": pipe,
                "flops_per_s": peak,
                "ridge_flops_per_byte": device.ridge(pipe),
                "source": device.peak_sources[pipe],
            }
            for pipe, peak in device.peaks.items()
        ],
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        "bandwidth_source": device.bandwidth_source,
        "memory_bytes": device.memory_bytes,
        "l2_bytes": device.l2_bytes,
        "llc_bytes": device.llc_bytes,
        "sms": device.sms,
        "link_bytes_per_s": device.link_bytes_per_s,
        "link_source": device.link_source,
        "peer_bytes_per_s": device.peer_bytes_per_s,
        "peer_source": device.peer_source,
        "note": device.note or None,
        "measured": msgspec.to_builtins(measured),
    }


def _scaled(value: float | None, scale: float, unit: str = "", digits: int = 4) -> str:
    return "–" if value is None else f"{value / scale:,.{digits}g}{unit}"


def _brief(peak: float | None) -> str:
    """TFLOP/s in at most five characters, so that the list fits 80 columns."""
    return "–" if peak is None else f"{peak / 1e12:,.0f}" if peak >= 1e14 else _scaled(peak, 1e12, digits=3)


def _sheet(device: Device, measured: Measured | None) -> str:
    lines = [f"{device.name} ({device.matched}; figures: {device.roofs})"]
    if device.note:
        lines.append(f"  {device.note}")
    lines.append("")
    lines.append(f"  {'pipe':<13}{'dense TFLOP/s':>14}{'ridge, FLOP/byte':>18}   source")
    for pipe, peak in device.peaks.items():
        ridge = device.ridge(pipe)
        lines.append(
            f"  {pipe:<13}{_scaled(peak, 1e12, digits=5):>14}{'–' if ridge is None else f'{ridge:.1f}':>18}"
            f"   {device.peak_sources[pipe]}"
        )
    rows = [
        ("memory", _scaled(device.memory_bytes, 2**30, " GiB"), ""),
        ("bandwidth", _scaled(device.bandwidth_bytes_per_s, 1e12, " TB/s"), device.bandwidth_source),
        ("L2", _scaled(device.l2_bytes, 2**20, " MiB"), ""),
        ("host link", _scaled(device.link_bytes_per_s, 1e9, " GB/s each way"), device.link_source),
        ("peer link", _scaled(device.peer_bytes_per_s, 1e9, " GB/s each way"), device.peer_source),
        ("SMs or CUs", "–" if device.sms is None else str(device.sms), ""),
        ("architecture", device.arch or "–", ""),
    ]
    lines.append("")
    lines += [f"  {label:<13}{value:<22}{source}".rstrip() for label, value, source in rows]
    if measured:
        lines += ["", f"  measured here on {measured.measured_on} (advisor calibrate); analyses prefer these"]
        lines.append(f"  {'bandwidth':<13}{_scaled(measured.bandwidth_bytes_per_s, 1e12, ' TB/s')}")
        lines += [f"  {pipe:<13}{_scaled(rate, 1e12, ' TFLOP/s')}" for pipe, rate in measured.peaks.items()]
    return "\n".join(lines)


def _print_table(rows: dict[str, Row] | Any, measured: dict[str, Measured]) -> None:
    from rich.console import Console
    from rich.table import Table

    from advisor.roofline.devices import device_of_row

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("device", no_wrap=True)
    for title in ("GiB", "TB/s", "bf16", "fp16", "tf32", "fp8", "fp32", "fp64", "ridge", "link"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows.values():
        device = device_of_row(row)
        half = "tensor_bf16" if device.peak("tensor_bf16") else "tensor_fp16"
        ridge = device.ridge(half)
        table.add_row(
            f"{row.key}*" if row.user else row.key,
            _scaled(device.memory_bytes, 2**30, digits=3),
            _scaled(device.bandwidth_bytes_per_s, 1e12, digits=3),
            *(_brief(device.peak(f"tensor_{kind}")) for kind in ("bf16", "fp16", "tf32", "fp8")),
            *(_scaled(device.peak(f"vector_{kind}"), 1e12, digits=3) for kind in ("fp32", "fp64")),
            "–" if ridge is None else f"{ridge:.0f}",
            _scaled(device.link_bytes_per_s, 1e9, digits=3),
        )
    console = Console()
    console.print(table)
    console.print(
        "Dense TFLOP/s (fp32, fp64: outside the matrix units); ridge in FLOP/byte for\n"
        "bf16, else fp16; link to the host in GB/s each way. `advisor devices NAME` shows\n"
        "all figures and their sources.",
        highlight=False,
    )
    if any(row.user for row in rows.values()):
        console.print("* from your own table", highlight=False)
    for key, one in measured.items():
        console.print(
            f"{key} was measured here on {one.measured_on} (advisor calibrate): "
            f"{_scaled(one.bandwidth_bytes_per_s, 1e12)} TB/s",
            highlight=False,
        )
