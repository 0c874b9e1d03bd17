"""`advisor demo`: train small models here and report on them."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--model",
    type=click.Choice(["gpt", "convnet", "both"]),
    default="both",
    show_default=True,
    help="What to train.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=10),
    help="Training steps of each model; by default enough for step times to settle.",
)
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("advisor_logs/demo"),
    show_default=True,
    help="Folder for traces and reports.",
)
@click.option(
    "--open/--no-open",
    "wants_browser",
    default=None,
    help="Show the reports in a browser; by default where there is a display.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of text.")
def command(model: str, steps: int | None, folder: Path, wants_browser: bool | None, as_json: bool) -> None:
    """Train a small GPT and a small ConvNet on made-up data and report on each.

    Takes under a minute on two CPU cores; uses the GPU if there is one.
    """
    import json
    import time

    from advisor.cli import _browser

    _require_extra()
    start = time.perf_counter()
    rows = []
    for name in ["gpt", "convnet"] if model == "both" else [model]:
        click.echo(f"Training the {name} loop ...", err=True)
        rows.append(_train(name, folder / name, steps))
        if not as_json:
            click.echo(_describe(rows[-1]))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(f"\nDone in {time.perf_counter() - start:.0f} s.")
    if _browser.has_display() if wants_browser is None else wants_browser:
        for row in rows:
            _browser.show(Path(row["report"]))


def _require_extra() -> None:
    from importlib.util import find_spec

    from advisor.errors import MissingExtraError

    missing = [] if find_spec("torch") else ["torch"]
    if not (find_spec("pytorch_lightning") or find_spec("lightning")):
        missing.append("pytorch-lightning")
    if missing:
        raise MissingExtraError("advisor demo", *missing)


def _train(name: str, folder: Path, steps: int | None) -> dict:
    """Train in a process of its own: a process has one exact profiler window."""
    import os
    import subprocess
    import sys

    import msgspec

    from advisor.errors import AdvisorError

    command = [sys.executable, "-m", "advisor.demo", name, str(folder), *([str(steps)] if steps else [])]
    # The profiler's own chatter lies below this level.
    env = {"KINETO_LOG_LEVEL": "6", **os.environ}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
    if done.returncode:
        raise AdvisorError(f"no report came of the {name} loop in {folder}: the lines above say why")
    page = Path(done.stdout.splitlines()[-1])
    data = page.with_suffix(".json")
    report = msgspec.json.decode(data.read_bytes())
    return {
        "model": name,
        "device": report["device"]["name"],
        "trace": report["trace"]["path"],
        "report": str(page),
        "report_json": str(data),
        "summary": report["summary"],
        "kernels": report["kernels"][:3],
        "findings": report["findings"][:3],
    }


def _describe(row: dict) -> str:
    """A few lines on one loop: verdict, step time, largest kernels, first advice, where the report is."""
    import msgspec

    from advisor.report.findings_view import gain
    from advisor.report.format import duration, percent
    from advisor.report.model import Finding

    summary = row["summary"]
    step_ms = summary["baseline_step_ms"] or summary["step_time_ms"]["p50"]
    lines = [f"\n{row['model']} on {row['device']}", f"  {summary['verdict']}"]
    lines.append(f"  a step takes {duration(step_ms)}; the largest shares of the work:")
    for kernel in row["kernels"]:
        place = " ".join(filter(None, [kernel["module"], kernel["phase"]]))
        share = percent(kernel["time_fraction"])
        lines.append(f"  {share:>6}  {kernel['bound']:<13}  {kernel['op'] or kernel['name']} ({place})")
    if row["findings"]:
        lines.append("  what to change first:")
        lines += [f"  {one.title}: {gain(one)}" for one in msgspec.convert(row["findings"], list[Finding])]
    return "\n".join([*lines, f"  report: {_from_here(Path(row['report']))}"])


def _from_here(path: Path) -> Path:
    """The path from the current directory, where it lies in that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
