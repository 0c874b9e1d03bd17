"""`advisor calibrate`: measure the roofs of the device here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from advisor.roofline.measured import Measured


@click.command()
@click.option("--index", default=0, show_default=True, help="Which GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--no-save", is_flag=True, help="Measure only; later analyses keep the datasheet's roofs.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing on the terminal but errors.")
def command(index: int, as_json: bool, no_save: bool, quiet: bool) -> None:
    """Measure this GPU's bandwidth, matrix rates, launch time and host link.

    Takes under 30 s on an idle GPU. Later analyses of traces from this device, on this machine, use the
    measured roofs in place of the datasheet's and say so.
    """
    from advisor.errors import MissingExtraError

    try:
        from advisor.roofline.calibrate import calibrate
    except ImportError as error:
        raise MissingExtraError("advisor calibrate", "torch") from error
    from rich.console import Console

    from advisor.roofline import measured

    errors = Console(stderr=True, quiet=quiet)
    with errors.status("calibrating") as status:
        found = calibrate(index, lambda figure: status.update(f"calibrating: {figure}"))
    path = None if no_save else measured.save(found)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    elif not quiet:
        _show(found)
        click.echo(f"kept in {path}" if path else "not kept (--no-save)")


def _show(found: Measured) -> None:
    from rich.console import Console
    from rich.table import Table

    from advisor.report import format as fmt

    table = Table(title=found.name, show_header=False)
    table.add_row("memory bandwidth", fmt.bytes_per_s(found.bandwidth_bytes_per_s))
    for pipe, rate in found.peaks.items():
        table.add_row(pipe, fmt.flops_per_s(rate))
    table.add_row("launch", f"{found.launch_ns / 1e3:.1f} µs")
    for link, rate in found.link_bytes_per_s.items():
        table.add_row(link.replace("_", " "), fmt.bytes_per_s(rate))
    Console().print(table)
