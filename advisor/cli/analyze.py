"""`advisor analyze`: report on saved traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from advisor.cli._output import check_outputs, put
from advisor.cli._units import POSITIVE

EXAMPLES = """
\b
Examples:
  advisor analyze trace.json.gz                        summary here, page in report.html
  advisor analyze lightning_logs/version_0/advisor     all ranks of a captured run
  advisor analyze trace.json --json - --quiet | jq .summary
  advisor analyze old.json.gz --device a100-sxm-40gb --baseline-step-ms 31.5
  advisor analyze trace.json.gz --launches launches.parquet
  advisor analyze graphed.json.gz --reference eager.json.gz
  advisor analyze trace.json.gz --counters ncu.csv     beside Nsight Compute's hardware counters
"""
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(epilog=EXAMPLES, short_help="Say what bounds a saved trace, and what to change.")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="HTML report to write. [report.html]",
)
@click.option("--json", "json_to", metavar="FILE|-", help="Write the report as JSON; - is stdout.")
@click.option(
    "--markdown", "markdown_to", metavar="FILE|-", help="Write the report as Markdown; - is stdout."
)
@click.option(
    "--launches",
    "launches_to",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a row per device launch (.csv or .parquet).",
)
@click.option(
    "--device", metavar="NAME", help="The device, where the trace does not say (see 'advisor devices')."
)
@click.option(
    "--devices-toml", type=click.Path(dir_okay=False, path_type=Path), help="Device rows of your own."
)
@click.option("--baseline-step-ms", type=POSITIVE, help="Step time without the profiler.")
@click.option("--max-gb", type=POSITIVE, help="Refuse a trace larger than this unpacked.")
@click.option("--hta", is_flag=True, help="Add Holistic Trace Analysis' figures beside ours.")
@click.option(
    "--roofs",
    type=click.Choice(["auto", "datasheet", "measured"]),
    default="auto",
    help="Roofs of the datasheet, or those of 'advisor calibrate'. [auto: measured where they are]",
)
@click.option(
    "--counters",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="NCU.CSV",
    help="Nsight Compute's CSV of the same program: measured beside modelled.",
)
@click.option(
    "--reference",
    metavar="TRACE",
    help="A trace of the same program without CUDA/HIP graphs: tells what replayed kernels do.",
)
@click.option("--force", is_flag=True, help="Overwrite files that are no reports too.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing on the terminal but errors.")
def command(
    paths: tuple[str, ...],
    output: Path | None,
    json_to: str | None,
    markdown_to: str | None,
    launches_to: Path | None,
    device: str | None,
    devices_toml: Path | None,
    baseline_step_ms: float | None,
    max_gb: float | None,
    hta: bool,
    roofs: str,
    counters: Path | None,
    reference: str | None,
    force: bool,
    quiet: bool,
) -> None:
    """Say what bounds a saved torch.profiler trace, and what to change.

    PATH is a .json or .json.gz trace, a folder or glob of several ranks' traces, a URL, or - for stdin.
    """
    to_stdout = "-" in (json_to, markdown_to)
    if output is None and not to_stdout:
        output = Path("report.html")

    from advisor.report.build import analyze_files
    from advisor.report.counters import add_counters
    from advisor.report.hta import add_hta, require_hta
    from advisor.report.launches import check_launches_path, write_launches
    from advisor.roofline.counters import read_counters
    from advisor.trace.sources import find_traces

    files = find_traces(paths)
    check_outputs(
        [output, json_to, markdown_to, launches_to], [*files, *([reference] if reference else [])], force
    )
    _refuse_reports(files)
    if launches_to:
        check_launches_path(launches_to)
    if hta:
        require_hta()
    counted = read_counters(counters) if counters else None
    with _progress(len(files), hidden=quiet or to_stdout) as advance:
        report, analysis = analyze_files(
            files,
            device=device,
            devices_toml=devices_toml,
            baseline_step_ms=baseline_step_ms,
            roofs=roofs,
            limit_bytes=_bytes(max_gb) if max_gb else None,
            progress=advance,
            reference=reference,
        )
    if hta:
        with _spinner("Holistic Trace Analysis reads the same traces", hidden=quiet or to_stdout):
            add_hta(report, analysis)
    joined = add_counters(report, analysis, counted) if counted else None
    if launches_to:
        write_launches(analysis, launches_to, joined.counted if joined else None)
    _write_report(report, output, json_to, markdown_to)
    if not quiet and not to_stdout:
        from rich.console import Console

        from advisor.report import terminal

        console = Console()
        terminal.render(report, console)
        if output:
            console.print(f"Report: {output}", markup=False, highlight=False, soft_wrap=True)


def _refuse_reports(files: list[str]) -> None:
    from advisor.errors import InputError
    from advisor.report.files import is_json_report

    for file in files:
        if "://" not in file and is_json_report(Path(file)):
            raise InputError(
                f"{file} is a report, not a trace: 'advisor compare' and 'advisor check' read reports"
            )


def _bytes(gigabytes: float) -> int:
    from advisor.errors import UsageError

    if not gigabytes < 1e9:
        raise UsageError(f"--max-gb {gigabytes:g}: no machine holds that much; give a number of gigabytes")
    return int(gigabytes * 1e9)


def _write_report(report: Any, output: Path | None, json_to: str | None, markdown_to: str | None) -> None:
    if output:
        from advisor.report import html

        html.write(report, output)
    if json_to:
        from advisor.report.files import to_json

        put(json_to, to_json(report))
    if markdown_to:
        from advisor.report import markdown

        put(markdown_to, markdown.render(report))


@contextmanager
def _progress(count: int, *, hidden: bool) -> Iterator[Callable[[str], None] | None]:
    """A bar over files, on a terminal and for several only; gives a function to call before each file."""
    if hidden or count < 2:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading traces", total=count)
        started = iter(range(count))
        yield lambda _file: bar.update(task, completed=next(started))


@contextmanager
def _spinner(message: str, *, hidden: bool) -> Iterator[None]:
    """A sign of life while something takes long, on a terminal only."""
    from rich.console import Console

    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield
        return
    with console.status(message):
        yield
