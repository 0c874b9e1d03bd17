"""`advisor check`: gates for continuous integration."""

from __future__ import annotations

import click

from advisor.cli._units import POSITIVE, Percent


def _list_metrics(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        from advisor.report.gates import METRICS

        for name, metric in METRICS.items():
            click.echo(f"{name:<14} {metric.unit:<9} {metric.what}; {metric.better} is better")
        ctx.exit()


@click.command(short_help="Hold a run against limits; the exit code tells.")
@click.argument("path")
@click.option("--max", "at_most", multiple=True, metavar="METRIC=VALUE", help="Fail above this; repeatable.")
@click.option("--min", "at_least", multiple=True, metavar="METRIC=VALUE", help="Fail below this; repeatable.")
@click.option(
    "--against", metavar="PATH", help="What --fail-on compares with: a trace, JSON report or run folder."
)
@click.option(
    "--fail-on",
    "changes",
    multiple=True,
    metavar="METRIC:+PERCENT%",
    help="Fail if this much worse than --against.",
)
@click.option(
    "--baseline-step-ms", type=POSITIVE, help="Step time of PATH without the profiler, for a trace."
)
@click.option("--against-step-ms", type=POSITIVE, help="The same of --against.")
@click.option(
    "--noise",
    type=Percent(),
    help="What step times of two such runs differ by at least. [2%, or 10% where the host limits one]",
)
@click.option(
    "--metrics", is_flag=True, is_eager=True, expose_value=False, callback=_list_metrics, help="List METRICs."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but what failed.")
def command(
    path: str,
    at_most: tuple[str, ...],
    at_least: tuple[str, ...],
    against: str | None,
    changes: tuple[str, ...],
    baseline_step_ms: float | None,
    against_step_ms: float | None,
    noise: float | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Hold a run against limits. Exit code 0: all hold; 1: one fails; 3: one cannot be told.

    PATH is a trace, a JSON report, or the folder of a captured run.

    \b
    advisor check report.json --max step_time=30ms --min gpu_busy=80%
    advisor check branch.json --against main.json --fail-on step_time:+5% --fail-on peak_memory:+10%
    advisor check --metrics
    """
    from advisor.errors import UsageError
    from advisor.report.gates import check_changes, check_limits
    from advisor.report.saved import open_report

    if not (at_most or at_least or changes):
        raise UsageError("nothing to check: give --max, --min or --fail-on; --metrics lists what there is")
    if bool(changes) != bool(against):
        raise UsageError("--fail-on and --against go together: what changed, and against what")
    report = open_report(path, baseline_step_ms=baseline_step_ms)
    outcomes = check_limits(report, at_most, at_least)
    if against:
        other = open_report(against, baseline_step_ms=against_step_ms)
        outcomes += check_changes(report, other, changes, noise_floor=noise)
    failed = any(outcome.held is False for outcome in outcomes)
    unknown = any(outcome.held is None for outcome in outcomes)
    if as_json:
        import json

        click.echo(
            json.dumps([{"gate": o.gate, "held": o.held, "reason": o.reason} for o in outcomes], indent=2)
        )
    else:
        for outcome in outcomes:
            word = {True: "ok", False: "failed", None: "unknown"}[outcome.held]
            if outcome.held is not True or not quiet:
                click.echo(f"{word}: {outcome.reason}")
    raise SystemExit(1 if failed else 3 if unknown else 0)
