"""`advisor compare`: two runs beside each other."""

from __future__ import annotations

import click

from advisor.cli._output import check_outputs, put
from advisor.cli._units import POSITIVE, Percent


@click.command(short_help="Say whether one run is faster than another, and why.")
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option(
    "--before-step-ms", type=POSITIVE, help="Step time of BEFORE without the profiler, for a trace."
)
@click.option("--after-step-ms", type=POSITIVE, help="Step time of AFTER without the profiler, for a trace.")
@click.option(
    "--noise",
    type=Percent(),
    help="What step times of two such runs differ by at least. [2%, or 10% where the host limits one]",
)
@click.option("--json", "json_to", metavar="FILE|-", help="Write the comparison as JSON; - is stdout.")
@click.option("--markdown", "markdown_to", metavar="FILE|-", help="Write it as Markdown; - is stdout.")
@click.option("--force", is_flag=True, help="Overwrite files that are no reports too.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing on the terminal but errors.")
def command(
    before: str,
    after: str,
    before_step_ms: float | None,
    after_step_ms: float | None,
    noise: float | None,
    json_to: str | None,
    markdown_to: str | None,
    force: bool,
    quiet: bool,
) -> None:
    """Say whether AFTER is faster than BEFORE, beyond the noise, and which kernels made the difference.

    Each is a trace, a JSON report, or the folder of a captured run. Kernels are matched by operator, module
    and phase. Noise is told from the spread of the steps on both sides, and is no less than --noise.

    \b
    advisor compare before.json.gz after.json.gz
    advisor compare lightning_logs/version_0/advisor lightning_logs/version_1/advisor
    advisor compare main.json branch.json --markdown - >> "$GITHUB_STEP_SUMMARY"
    """
    from advisor.report.compare import compare
    from advisor.report.compare_view import markdown, render
    from advisor.report.files import to_json
    from advisor.report.saved import open_report

    check_outputs([json_to, markdown_to], [before, after], force)
    found = compare(
        open_report(before, baseline_step_ms=before_step_ms),
        open_report(after, baseline_step_ms=after_step_ms),
        noise_floor=noise,
    )
    if json_to:
        put(json_to, to_json(found))
    if markdown_to:
        put(markdown_to, markdown(found))
    if not quiet and "-" not in (json_to, markdown_to):
        from rich.console import Console

        render(found, Console())
