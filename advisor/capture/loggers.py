"""Handing the finished report to whichever loggers the run has, by what they can do rather than by class."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from advisor.capture import notify

TAG = "training_advisor"


def hand_over(loggers: Iterable[Any], report: Path, step: int) -> None:
    """Give each logger the report in the form it takes; a logger that fails costs one line.

    TensorBoard gets the Markdown as text, Weights & Biases the page and an artifact, MLflow the files.
    A logger that only writes to its folder, such as the CSV logger, has the report there already.
    """
    for logger in loggers:
        try:
            _hand_to(logger, report, step)
        except Exception as error:  # noqa: BLE001  a logger's fault must not end the run
            notify.info(f"{type(logger).__name__} did not take the report: {type(error).__name__}: {error}")


def _hand_to(logger: Any, report: Path, step: int) -> None:
    experiment = getattr(logger, "experiment", None)
    if experiment is None:
        return
    if hasattr(experiment, "add_text"):
        experiment.add_text(TAG, _text(report), step)
    elif hasattr(experiment, "log_artifact") and hasattr(logger, "run_id"):
        for path in _siblings(report):
            experiment.log_artifact(logger.run_id, str(path), TAG)
    elif hasattr(experiment, "log_artifact"):
        wandb = sys.modules.get("wandb")
        if wandb is not None and hasattr(wandb, "Html"):
            experiment.log({f"{TAG}/report": wandb.Html(report.read_text(), inject=False)})
        experiment.log_artifact(str(report), name=f"{TAG}-report", type="report")


def _siblings(report: Path) -> list[Path]:
    return [
        path for path in (report, report.with_suffix(".json"), report.with_suffix(".md")) if path.exists()
    ]


def _text(report: Path) -> str:
    markdown = report.with_suffix(".md")
    return markdown.read_text() if markdown.exists() else f"Report: `{report}`"
