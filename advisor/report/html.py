"""The report as one HTML file that needs nothing besides itself.

Everything the page loads is inside it. Its content security policy forbids requests and allows
one script, by hash. Names reach the markup through Jinja's escaping and the script through JSON.
"""

from __future__ import annotations

import base64
import hashlib
import os
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from advisor.report import (
    breakdown,
    communication_view,
    counter_view,
    findings_view,
    hierarchy,
    metrics,
    page,
    roofline_plot,
    swaps_view,
)
from advisor.report import format as fmt
from advisor.report.files import GENERATOR, write_text
from advisor.report.model import Report

_STYLES = ("advisor.css", "table.css", "plot.css")
_SCRIPTS = ("plot.js", "table.js", "advisor.js")


def render(report: Report) -> str:
    """The page of a report: valid UTF-8, no requests, under a megabyte however long the trace."""
    report = fmt.printable(report)
    report.kernels = metrics.by_time(report.kernels)
    script = _script()
    table = page.rows(report)
    plot = roofline_plot.plot(report)
    return _environment().get_template("report.html.j2").render(
        generator=Markup(GENERATOR),
        report=report,
        trace_name=PurePath(report.trace.path).name or report.trace.path,
        trace_ranks=len(report.ranks),
        summary=report.summary,
        device=report.device,
        worthwhile=findings_view.worthwhile(report.findings),
        fruitless=findings_view.fruitless(report.findings),
        combined=findings_view.combined(report),
        caveat=findings_view.caveat(report),
        metrics=metrics.metrics(report),
        bars=breakdown.bars(report),
        plot=plot,
        families_drawn={report.kernels[dot.row].family for dot in plot.dots},
        frame=roofline_plot.FRAME,
        columns=page.COLUMNS,
        flags=page.FLAGS,
        rows=table,
        static_rows=table[: page.STATIC_ROWS],
        any_module=any(group.module for group in report.kernels),
        hidden_groups=report.kernels[len(table) :],
        colours=breakdown.family_colours(report),
        quality=page.quality_by_level(report),
        losses=page.losses(report),
        facts=page.environment(report),
        peaks_used=metrics.peaks_used(report),
        levels=[
            (level, hierarchy.price(report.device.hierarchy, place))
            for place, level in enumerate(report.device.hierarchy)
            if level.size_bytes or level.bandwidth_bytes_per_s
        ],
        levels_meaning=hierarchy.meaning(report),
        counter_figures=counter_view.figures(report.counters) if report.counters else [],
        counter_rows=counter_view.rows(report),
        swap_figures=swaps_view.figures(report.swaps.steps) if report.swaps and report.swaps.steps else [],
        swap_rows=swaps_view.rows(report.swaps) if report.swaps else [],
        communication_note=communication_view.note(report),
        # The style and script are this package's own; the JSON is escaped for a script element.
        style=Markup("\n".join(_asset(name) for name in _STYLES)),
        script=Markup(script),
        script_hash=_csp_hash(script),
        payload=Markup(page.script_json(page.payload(table))),
    )  # fmt: skip


def write(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page beside its place and rename it there, so that no half of it is ever seen.

    Raises:
        OSError: the folder does not exist or cannot be written to.
    """
    write_text(Path(path), render(report))


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "bytes_per_s": fmt.bytes_per_s,
        "collective": communication_view.label,
        "count": fmt.count,
        "duration": fmt.duration,
        "flops_per_s": fmt.flops_per_s,
        "gain": findings_view.gain,
        "spread": findings_view.spread,
        "how_known": findings_view.how_known,
        "intensity": fmt.intensity,
        "nbytes": fmt.nbytes,
        "number": fmt.number,
        "percent": fmt.percent,
        "pipe": fmt.pipe,
        "plain_fix": findings_view.plain_fix,
        "sentence": fmt.sentence,
        "shorten": fmt.shorten,
    }
    environment.filters.update(filters)
    environment.tests["differing"] = metrics.differs
    return environment


def _asset(name: str) -> str:
    return resources.files("advisor.report_templates").joinpath(name).read_text(encoding="utf-8")


def _script() -> str:
    return "\n".join(["(() => {", '"use strict";', *map(_asset, _SCRIPTS), "})();"])


def _csp_hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
