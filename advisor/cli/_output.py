"""What verbs that write files have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click


def put(target: str, text: str) -> None:
    """Write text to a file, or to stdout for ``-``."""
    if target == "-":
        click.echo(text.encode("utf-8", "replace"), nl=False)
    else:
        from advisor.report.files import write_text

        write_text(Path(target), text)


def check_outputs(targets: Sequence[Path | str | None], inputs: Sequence[str], force: bool) -> None:
    """Refuse, before any work is done, what cannot or must not be written."""
    from advisor.errors import UsageError
    from advisor.report.files import is_report

    if [str(target) for target in targets].count("-") > 1:
        raise UsageError("--json and --markdown cannot both go to stdout: give one of them a file")
    files = [Path(target) for target in targets if target is not None and str(target) != "-"]
    places = [file.resolve() for file in files]
    if len(set(places)) < len(places):
        raise UsageError("two outputs have the same name")
    for file, place in zip(files, places, strict=True):
        if not file.parent.is_dir():
            raise UsageError(f"{file}: no folder {file.parent}")
        if file.is_dir():
            raise UsageError(f"{file} is a folder: give the name of a file")
        if any("://" not in path and Path(path).resolve() == place for path in inputs):
            raise UsageError(f"{file} is a trace to read: it would be overwritten")
        if file.exists() and not force and not is_report(file):
            raise UsageError(f"{file} exists and is no report of this tool: give another name, or --force")
