"""The report on a terminal: what matters of it, on about one screen.

Everything is built as `rich.text.Text`, never as markup, so that no name in a trace can colour a
line, set a link or move the cursor.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from advisor.report import breakdown, communication_view, counter_view, findings_view, metrics, swaps_view
from advisor.report import format as fmt
from advisor.report.model import CounterSummary, Finding, KernelGroup, Report, Swaps, Together
from advisor.report.names import short_name

#: Kernel groups listed; the page has them all.
TOP_KERNELS = 15
#: Findings listed; the page has them all.
TOP_FINDINGS = 8
_PARTS = 6
#: Sites of swaps listed; the page has them all.
TOP_SITES = 8
#: A column of figures takes at most this, with its gap.
_FIGURE_WIDTH = 12
#: Ranks listed; the page has them all.
_RANKS = 16
_BAR_WIDTH = 10
_WIDE = 130
#: Columns that the figures of the kernel table take, with their gaps.
_FIGURES_WIDTH = 46
_LEVEL_STYLES = {"error": "bold red", "warning": "yellow"}
_BOUND_STYLES = {"memory": "blue", "compute": "dark_orange", "communication": "magenta", "copy": "cyan"}
_SHORT = {"communication": "comm."}
_TO_ASCII = str.maketrans({"—": "-", "…": "~", "×": "x", "µ": "u", "·": ".", "−": "-", "━": "#", "→": ">"})


def render(report: Report, console: Console) -> None:
    """Print the verdict, headline figures, findings, where the step goes, top kernels and data quality."""
    view = _View(fmt.printable(report), console)
    for block in view.blocks():
        console.print()
        console.print(block)


class _View:
    """The parts of one report, fit for one console."""

    def __init__(self, report: Report, console: Console) -> None:
        self._report = report
        self._width = console.width
        self._wide = console.width >= _WIDE
        self._ascii = console.options.ascii_only
        self._overflow: OverflowMethod = "crop" if self._ascii else "ellipsis"

    def blocks(self) -> Iterator[RenderableType]:
        yield self._text(fmt.shorten(self._report.summary.verdict, 500), "bold")
        yield self._metrics()
        if len(self._report.ranks) > 1:
            yield self._ranks()
        if self._report.findings:
            yield self._findings()
        if self._report.swaps:
            yield self._swaps(self._report.swaps)
        if bars := breakdown.bars(self._report):
            yield self._bars(bars)
        if communication := communication_view.line(self._report):
            yield self._text(communication)
        if self._report.kernels:
            yield self._kernels()
        if self._report.counters:
            yield self._counters(self._report.counters)
        if self._report.cross_checks:
            yield self._cross_checks()
        if self._report.data_quality:
            yield self._quality()

    def _text(self, value: str, style: str = "") -> Text:
        line = fmt.one_line(value)
        if self._ascii:
            line = line.translate(_TO_ASCII).encode("ascii", "replace").decode()
        return Text(line, style)

    def _metrics(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        for metric in metrics.metrics(self._report):
            label = self._text(metric.label, "dim")
            if metric.value:
                table.add_row(label, self._text(metric.value, "bold"), self._text(metric.note, "dim"))
            else:
                table.add_row(label, self._text(fmt.NOT_MEASURED, "italic"), self._text(metric.remedy, "dim"))
        return table

    def _ranks(self) -> Group:
        ranks = self._report.ranks
        table = self._figures("rank", "step", "GPU busy", "kernels", "comm.", "exposed", "waiting")
        for rank in ranks[:_RANKS]:
            table.add_row(
                self._text("unknown" if rank.rank is None else str(rank.rank)),
                self._text(fmt.duration(rank.step_time_ms)),
                self._text(fmt.percent(rank.gpu_busy_fraction)),
                self._text(fmt.duration(rank.kernel_time_ms_per_step)),
                self._text(fmt.duration(rank.communication_ms_per_step)),
                self._text(fmt.duration(rank.exposed_communication_ms_per_step)),
                self._text(fmt.duration(rank.waiting_ms_per_step)),
            )
        shown = self._report.trace.rank
        whose = "the first trace's" if shown is None else f"rank {shown}'s"
        title = self._text(f"{len(ranks)} ranks; all other figures are {whose}", "bold")
        more = [self._text(f"and {len(ranks) - _RANKS} more", "dim")] if len(ranks) > _RANKS else []
        return Group(title, table, *more)

    def _cross_checks(self) -> Group:
        table = self._figures("figure", "here", "there", "difference")
        checks = [check for check in self._report.cross_checks if fmt.known(check.ours)]
        for check in checks:
            style = "yellow" if metrics.differs(check) else ""
            table.add_row(
                self._text(fmt.shorten(f"{check.figure}, {check.unit}", 100)),
                self._text(fmt.number(check.ours)),
                self._text(fmt.number(check.theirs)),
                self._text(fmt.percent(check.difference_fraction), style),
            )
        tools = ", ".join(dict.fromkeys(fmt.shorten(check.tool, 60) for check in self._report.cross_checks))
        rest = len(self._report.cross_checks) - len(checks)
        more = [self._text(f"and {rest} of its own in the report", "dim")] if rest else []
        return Group(self._text(f"Checked against {tools}", "bold"), table, *more)

    def _figures(self, first: str, *others: str) -> Table:
        """An empty table of one column of names and others of figures."""
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        room = max(self._width - _FIGURE_WIDTH * len(others), _FIGURE_WIDTH)
        table.add_column(first, no_wrap=True, overflow=self._overflow, max_width=room)
        for heading in others:
            table.add_column(heading, justify="right", no_wrap=True, overflow=self._overflow)
        return table

    def _findings(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, justify="right")
        table.add_column(ratio=1)
        found = self._report.findings
        for finding in [*findings_view.worthwhile(found), *findings_view.fruitless(found)][:TOP_FINDINGS]:
            table.add_row(self._saving(finding), self._text(fmt.shorten(finding.title, 200)))
            saving = (findings_view.spread(finding), fmt.shorten(findings_view.how_known(finding), 20))
            parts = (", ".join(filter(None, saving)), finding.note, f"advisor explain {finding.rule}")
            table.add_row("", self._text("; ".join(fmt.shorten(part, 200) for part in parts if part), "dim"))
        rest = len(found) - TOP_FINDINGS
        if rest > 0:
            table.add_row("", self._text(f"and {rest} more in the report", "dim"))
        combined, together = findings_view.combined(self._report), self._report.together
        if combined and together:
            told = f"{combined.made}, {findings_view.spread(together)}"
            table.add_row(self._saving(together), self._text(told, "bold"))
            if combined.besides:
                table.add_row("", self._text(fmt.shorten(combined.besides, 200), "dim"))
        if caveat := findings_view.caveat(self._report):
            table.add_row("", self._text(caveat, "yellow"))
        table.add_row("", self._text("the code of each change is in the report", "dim"))
        return table

    def _swaps(self, swaps: Swaps) -> Group:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, overflow=self._overflow, max_width=max(self._width // 3, 12))
        table.add_column(ratio=1)
        sites = swaps_view.rows(swaps)
        for row in sites[:TOP_SITES]:
            times = f"{row.before} → {row.after} a step; " if row.kept else ""
            table.add_row(
                self._text(fmt.shorten(f"{row.kind}: {row.what}", 80)),
                self._text(
                    fmt.shorten(f"{times}{row.decision}: {row.reason}", 300), "green" if row.kept else "dim"
                ),
            )
        rest = len(swaps.sites) - TOP_SITES
        if rest > 0:
            table.add_row("", self._text(f"and {rest} more in the report", "dim"))
        remarks = [self._text(fmt.shorten(remark, 300), "dim") for remark in swaps.remarks[:4]]
        return Group(self._text(f"Swaps: {fmt.shorten(swaps.verdict, 300)}", "bold"), table, *remarks)

    def _saving(self, found: Finding | Together) -> Text:
        saving = found.saving_ms
        if isinstance(found, Finding) and found.wrong:
            return self._text("wrong?" if found.confidence == "heuristic" else "wrong", "bold red")
        if saving is None:
            return self._text(fmt.MISSING, "dim")
        if findings_view.is_nothing(found):
            return self._text("0", "dim")
        return self._text(f"−{fmt.duration(saving.likely)}", "bold green")

    def _bars(self, bars: list[breakdown.Bar]) -> Table:
        table = Table.grid(padding=(0, 3, 1, 0), expand=True)
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        cells = [self._bar(bar) for bar in bars]
        for left in range(0, len(cells), 2):
            table.add_row(*cells[left : left + 2])
        return table

    def _bar(self, bar: breakdown.Bar) -> Group:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True, overflow=self._overflow, ratio=1)
        table.add_column(no_wrap=True, justify="right", width=6)
        table.add_column(no_wrap=True, width=_BAR_WIDTH)
        for part in sorted(bar.segments, key=lambda part: -part.fraction)[:_PARTS]:
            length = round(min(max(part.fraction, 0.0), 1.0) * _BAR_WIDTH)
            style = _BOUND_STYLES.get(part.name, "default")
            table.add_row(self._text(part.name), self._text(part.share), self._text("━" * length, style))
        rest = len(bar.segments) - _PARTS
        more = [self._text(f"and {rest} more", "dim")] if rest > 0 else []
        return Group(self._text(bar.title, "bold"), table, *more)

    def _kernels(self) -> Group:
        groups = metrics.by_time(self._report.kernels)
        title = self._text(f"Top {min(TOP_KERNELS, len(groups))} of {len(groups):,} kernel groups", "bold")
        table = Table(
            box=None, padding=(0, 1), pad_edge=False, title=title, title_justify="left", expand=True
        )
        room = self._width - _FIGURES_WIDTH
        name_width = max(room * 3 // 7 if self._wide else room, 12)
        table.add_column("kernel", no_wrap=True, overflow=self._overflow, width=name_width)
        if self._wide:
            table.add_column("op", no_wrap=True, overflow=self._overflow, ratio=1)
            table.add_column("module", no_wrap=True, overflow=self._overflow, ratio=1)
        table.add_column("phase", no_wrap=True, overflow=self._overflow, width=9)
        for heading, width in (("ms", 8), ("share", 6)):
            table.add_column(heading, justify="right", no_wrap=True, width=width)
        table.add_column("bound", no_wrap=True, overflow=self._overflow, width=7)
        table.add_column("eff.", justify="right", no_wrap=True, width=6)
        for group in groups[:TOP_KERNELS]:
            names = [self._text(short_name(group.name, name_width))]
            if self._wide:
                around = (group.op or fmt.MISSING, group.module or fmt.MISSING)
                names += [self._text(fmt.shorten(name, 100)) for name in around]
            elif place := _place(group, name_width):
                # There is no room for columns of their own.
                names[0].append("\n").append_text(self._text(place, "dim"))
            table.add_row(
                *names,
                self._text(_SHORT.get(group.phase, group.phase), "dim"),
                self._text(fmt.milliseconds(group.time_ms_per_step), "bold"),
                self._text(fmt.percent(group.time_fraction)),
                self._text(_SHORT.get(group.bound, group.bound), _BOUND_STYLES.get(group.bound, "dim")),
                self._text(metrics.efficiency(group)),
            )
        notes = metrics.above_roof_notes(groups[:TOP_KERNELS])
        return Group(table, *(self._text(note, "dim") for note in notes))

    def _counters(self, counters: CounterSummary) -> Group:
        table = Table.grid(padding=(0, 2))
        table.add_column(ratio=1)
        table.add_column(no_wrap=True)
        for label, value in counter_view.figures(counters):
            table.add_row(self._text(label, "dim"), self._text(value))
        return Group(self._text("Hardware counters against the model", "bold"), table)

    def _quality(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, max_width=8)
        table.add_column(ratio=1)
        for remark in self._report.data_quality:
            style = _LEVEL_STYLES.get(remark.level, "dim")
            table.add_row(self._text(remark.level, style), self._text(fmt.shorten(remark.message, 500)))
        return table


def _place(group: KernelGroup, width: int) -> str:
    """Operator and module on one line; without the operator where its name is the group's own."""
    op = fmt.one_line(group.op.removeprefix("aten::") if group.op and group.op != group.name else "")
    module = fmt.one_line(group.module or "")
    if op and module:
        op = fmt.shorten(op, max(width // 2 - 2, width - 3 - len(module)))
        module = fmt.shorten(module, width - 3 - len(op))
    return fmt.shorten(" · ".join(filter(None, (op, module))), width)
