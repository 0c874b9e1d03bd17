"""`advisor kernels`: the bundled kernels: what there is, whether it is right here, and how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table


@click.group()
def command() -> None:
    """List, check and time the bundled GPU kernels.

    \b
    advisor kernels list              what there is, and what it stands in for
    advisor kernels check             is each right on this GPU? exit code 1 if not
    advisor kernels bench norm        times beside eager PyTorch and torch.compile
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """What is bundled, what it replaces, and on what it runs. Needs neither PyTorch nor a GPU.

    \b
    advisor kernels list
    advisor kernels list --json
    """
    from advisor.kernels import _here
    from advisor.kernels._family import families

    found, lacking = families(), _here.lacking()
    if as_json:
        import dataclasses
        import json

        entries = [{"name": name, **dataclasses.asdict(family)} for name, family in found.items()]
        here = {"runs_here": lacking is None, "reason": lacking}
        click.echo(json.dumps({"families": entries, **here}, indent=2))
        return
    for name, family in found.items():
        public = [f"{name}.{one}" if one == name else one for one in family.public]
        click.secho(name, bold=True)
        _paragraph(f"{family.what} ({', '.join(family.dtypes)}; {family.hardware})")
        if public:
            _paragraph(f"names: {', '.join(public)}")
        if family.replaces:
            _paragraph(f"in place of: {'; '.join(family.replaces)}")
        if family.differs:
            _paragraph(f"but: {family.differs}")
        click.echo()
    click.echo(f"They cannot run here: {lacking}." if lacking else f"They run here on {_here.name()}.")


@command.command()
@click.argument("names", nargs=-1, metavar="[FAMILY]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Only what fails, and the exit code.")
def check(names: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Check every kernel on this GPU, or those of each FAMILY, forward and backward.

    A result may be twice as far from float64 as eager PyTorch's in the same dtype, a gradient three times;
    a second run must be bit-equal, and no input be written to. Most of the time goes to
    compiling, once. The exit code is 1 if any kernel fails.

    \b
    advisor kernels check
    advisor kernels check norm attention --json
    """
    import dataclasses

    _refuse_where_lacking("check")
    from advisor.kernels import _here
    from advisor.kernels._family import families
    from advisor.kernels.verify.run import checked_families, default_device, verify

    chosen = _chosen(names, checked_families())
    unchecked = [] if names else sorted(set(families()) - set(chosen))
    outcomes = []
    with _status(quiet or as_json) as status:
        for family in chosen:
            for outcome in verify(family, default_device()):
                outcomes.append(outcome)
                status.update(f"checked {outcome.kernel} in {outcome.dtype} ({outcome.seconds:.1f} s)")
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if as_json:
        import json

        result: dict[str, Any] = {"device": _here.name(), "passed": not failed, "unchecked": unchecked}
        click.echo(json.dumps({**result, "checks": [dataclasses.asdict(o) for o in outcomes]}, indent=2))
    else:
        _show_checks(failed if quiet else outcomes, quiet)
        if not quiet:
            click.echo(f"{len(outcomes) - len(failed)} of {len(outcomes)} right on {_here.name()}")
        if unchecked and not quiet:
            click.echo(f"without a check: {', '.join(unchecked)}")
    if failed:
        raise SystemExit(1)


@command.command()
@click.argument("names", nargs=-1, metavar="[FAMILY]...")
@click.option("--quick", is_flag=True, help="One or two sizes a kernel.")
@click.option(
    "--only", default="", metavar="TEXT", help="Only kernels, shapes or directions with TEXT in them."
)
@click.option("--repeats", default=40, show_default=True, help="Timed calls of each variant.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def bench(names: tuple[str, ...], quick: bool, only: str, repeats: int, as_json: bool, quiet: bool) -> None:
    """Time the kernels, or those of each FAMILY, on this GPU beside eager PyTorch and torch.compile.

    Medians in ms, inputs out of cache. The floor is what the bytes that must move take at this GPU's copy
    rate, or the FLOPs at its bf16 matrix rate; a share is the floor over the time. Liger's kernels run too
    where they are installed.

    \b
    advisor kernels bench --quick
    advisor kernels bench norm softmax
    advisor kernels bench attention --only backward --json
    """
    import sys

    _refuse_where_lacking("bench", interpreted=False)
    from advisor.kernels.bench.run import document, measured_roofs, rows, timed_families

    chosen = _chosen(names, timed_families())
    roofs, results = measured_roofs(), []
    for family in chosen:
        result = document(family, quick, roofs, " ".join(["advisor", *sys.argv[1:]]))
        results.append(result)
        with _status(quiet or as_json) as status:
            for row in rows(family, quick, roofs, only=only, repeats=repeats):
                result["rows"].append(row)
                status.update(f"timed {row['kernel']} {row['shape']} {row['direction']}")
        if not as_json:
            _print(bench_table(result))
    if as_json:
        import json

        click.echo(json.dumps(results, indent=2))
    else:
        rate = f"{roofs.bytes_per_s / 1e12:.2f} TB/s copied, {roofs.flops_per_s / 1e12:.0f} TFLOP/s in bf16"
        click.echo(f"{results[0]['device']}: {rate}. ms, and the share of that roof")
    failed = [row for result in results for row in result["rows"] if "ours" in row["failures"]]
    if failed:
        click.echo(f"{len(failed)} could not be timed, such as: {failed[0]['failures']['ours']}", err=True)
        raise SystemExit(1)


def bench_table(result: dict[str, Any]) -> Table:
    """A family's results for a terminal: a row a case and clock, a column a variant, the fastest in bold."""
    from advisor.kernels.bench.run import clocks

    rows = result["rows"]
    variants = list(dict.fromkeys(name for row in rows for name in (*row["ms"], *row["failures"])))
    table = _table("kernel", "shape", "direction", "floor", *variants, title=result["family"], numbers=3)
    for row in (clock for each in rows for clock in clocks(each)):
        best = min(row["ms"].values(), default=0.0)
        cells = []
        for name in variants:
            ms = row["ms"].get(name)
            if ms is None:
                cells.append("failed" if name in row["failures"] else "–")
                continue
            text = f"{ms:.4f} {row['share_of_roof'][name]:4.0%}"
            cells.append(f"[bold]{text}[/bold]" if ms == best else text)
        table.add_row(row["kernel"], row["shape"], row["direction"], f"{row['floor_ms']:.4f}", *cells)
    return table


def _chosen(names: tuple[str, ...], there: list[str]) -> list[str]:
    unknown = [name for name in names if name not in there]
    if unknown:
        raise click.UsageError(f"no family {', '.join(unknown)}: there are {', '.join(there)}")
    return list(names) or there


def _refuse_where_lacking(verb: str, interpreted: bool = True) -> None:
    from advisor.errors import UsageError
    from advisor.kernels import _here

    lacking = _here.lacking()
    if lacking is None and not interpreted:
        from advisor.kernels._triton import INTERPRETED

        lacking = "Triton's interpreter has no speed: unset TRITON_INTERPRET" if INTERPRETED else None
    if lacking:
        raise UsageError(f"advisor kernels {verb} needs a GPU: {lacking}")


def _show_checks(outcomes: list[Any], quiet: bool) -> None:
    table = _table("kernel", "shape", "dtype", "", "of allowed error", "in")
    for one in outcomes:
        share = "–" if one.share is None else f"{one.share:.0%}"
        verdict = "[green]right[/green]" if one.ok else "[red]WRONG[/red]"
        table.add_row(one.kernel, one.shape, one.dtype, verdict, share, one.worst or "")
    if outcomes or not quiet:
        _print(table)
    for one in outcomes:
        if not one.ok:
            click.echo(f"{one.kernel} {one.shape} {one.dtype}: {one.failure}")


def _table(*titles: str, title: str | None = None, numbers: int | None = None) -> Table:
    """A plain table; columns from the `numbers`-th on are aligned to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for i, name in enumerate(titles):
        right = numbers is not None and i >= numbers
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console().print(table)


def _paragraph(text: str) -> None:
    """Indented, within the terminal's width."""
    import shutil
    import textwrap

    width = min(shutil.get_terminal_size().columns, 110)
    click.echo(textwrap.fill(text, width, initial_indent="  ", subsequent_indent="    "))


def _status(quiet: bool) -> Any:
    """Progress on stderr while the work goes on."""
    from rich.console import Console

    return Console(stderr=True, quiet=quiet).status("starting")
