"""A comparison on a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from advisor.report import format as fmt
from advisor.report.compare import Change, Comparison, KernelChange
from advisor.report.markdown import code, prose

#: Rows of kernels shown; the JSON has them all.
TOP = 15
#: Changes of kernels, and parts of the step, below this share of the step are not shown.
_SEEN = 1e-3
#: Columns that phase, times and verdict take beside the names, with their gaps.
_FIGURES_WIDTH = 53
_STYLES = {"faster": "green", "vanished": "green", "slower": "red", "appeared": "yellow"}


def render(comparison: Comparison, console: Console) -> None:
    """Print the verdict, the figures and the kernels that changed most."""
    shown = fmt.printable(comparison)
    console.print(Text(shown.verdict, "bold"))
    for remark in shown.remarks:
        console.print(Text(f"note: {remark}", "yellow"))
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("a step")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    for change in _figures(shown):
        table.add_row(*map(Text, _figure(change)))
    console.print()
    console.print(table)
    kernels = _changed(shown)
    if not kernels:
        return
    console.print()
    table = Table(box=None, padding=(0, 1), pad_edge=False, title_justify="left")
    # Names give way on a narrow terminal, figures never.
    names = max(console.width - _FIGURES_WIDTH, 24)
    modules = max(len(kernel.module or "") for kernel in kernels)
    modules = min(max(modules, len("module")), names * 3 // 7, 28) if modules else 0
    table.add_column("operator", overflow="ellipsis", no_wrap=True, max_width=min(names - modules, 36))
    if modules:
        table.add_column("module", overflow="ellipsis", no_wrap=True, max_width=modules)
    table.add_column("phase", no_wrap=True, min_width=5)
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=8)
    table.add_column("", no_wrap=True, min_width=8)
    for kernel in kernels[:TOP]:
        op = kernel.op.removeprefix("aten::")
        module = (kernel.module or fmt.MISSING,) if modules else ()
        cells = (op, *module, kernel.phase, *_times(kernel))
        table.add_row(*(Text(cell) for cell in cells), Text(kernel.change, _STYLES.get(kernel.change, "dim")))
    console.print(table)
    if rest := _rest(kernels):
        console.print(Text(rest, "dim"))


def markdown(comparison: Comparison) -> str:
    """The comparison as GitHub-flavoured Markdown."""
    return "\n".join(_lines(fmt.printable(comparison))) + "\n"


def _lines(shown: Comparison) -> Iterator[str]:
    yield f"### {prose(shown.verdict)}"
    yield ""
    for remark in shown.remarks:
        yield f"> {prose(remark)}"
    if shown.remarks:
        yield ""
    yield "| a step | before | after | change |"
    yield "|---|---:|---:|---:|"
    for change in _figures(shown):
        yield f"| {' | '.join(map(prose, _figure(change)))} |"
    yield ""
    kernels = _changed(shown)
    if kernels:
        yield "| operator | module | phase | before | after | change | |"
        yield "|---|---|---|---:|---:|---:|---|"
        for kernel in kernels[:TOP]:
            cells = [code(kernel.op), code(kernel.module or ""), kernel.phase, *_times(kernel), kernel.change]
            yield f"| {' | '.join(cells)} |"
        yield ""
        if rest := _rest(kernels):
            yield rest
            yield ""
    yield f"<sub>training-advisor · {code(shown.before.path)} and {code(shown.after.path)}</sub>"


def _changed(shown: Comparison) -> list[KernelChange]:
    least_ms = _SEEN * (shown.before.step_ms or 0.0)
    return [k for k in shown.kernels if k.change != "same" and abs(k.after_ms - k.before_ms) > least_ms]


def _rest(kernels: list[KernelChange]) -> str:
    rest = len(kernels) - TOP
    return f"and {rest:,} smaller change{'' if rest == 1 else 's'}, in the JSON" if rest > 0 else ""


def _figures(shown: Comparison) -> list[Change]:
    """What is known of either side, without parts of the step that are nothing on both."""
    least_ms = _SEEN * (shown.before.step_ms or 0.0)
    parts = [part for part in shown.breakdown if max(part.before or 0.0, part.after or 0.0) > least_ms]
    return [one for one in [*shown.figures, *parts] if one.before is not None or one.after is not None]


def _times(kernel: KernelChange) -> tuple[str, str, str]:
    change = kernel.after_ms - kernel.before_ms
    sign = "+" if change > 0 else "−"
    return fmt.duration(kernel.before_ms), fmt.duration(kernel.after_ms), sign + fmt.duration(abs(change))


def _figure(change: Change) -> tuple[str, str, str, str]:
    show = {"ms": fmt.duration, "bytes": fmt.nbytes, "FLOP": fmt.number_with_prefix}.get(
        change.unit, fmt.count
    )
    difference = change.difference
    ratio = fmt.change(difference / change.before) if change.before and difference is not None else ""
    return change.name, show(change.before), show(change.after), ratio
