"""The report as GitHub-flavoured Markdown, for pull requests and CI summaries.

Names from a trace go into code spans, prose is escaped, so that neither can add markup, break a
table, mention a person or make a link.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from advisor.report import (
    breakdown,
    communication_view,
    counter_view,
    findings_view,
    hierarchy,
    metrics,
    swaps_view,
)
from advisor.report import format as fmt
from advisor.report.model import CounterSummary, Finding, Report, Swaps
from advisor.report.names import short_name

#: Kernel groups listed; the page and the JSON have them all.
TOP_KERNELS = 15
#: Lines of evidence listed for a finding; the JSON has them all.
TOP_EVIDENCE = 5
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$])")
_PLAIN_CODE = re.compile(r"[^`|\\<&]+")
_ENTITY = re.compile(r"[^\w .:,/()=-]")


def render(report: Report) -> str:
    """The report as Markdown, the long parts folded."""
    return "\n".join(_lines(fmt.printable(report))) + "\n"


def prose(text: str, width: int = 600) -> str:
    """Text that Markdown shows as it stands, on one line."""
    line = fmt.shorten(fmt.one_line(text), width)
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # A word joiner keeps "@name" from mentioning anyone; an escaped slash keeps addresses from linking.
    line = _SPECIAL.sub(r"\\\1", line).replace("@", "@\u2060").replace("://", ":\\//")
    return re.sub(r"(?i)\bwww\.", lambda match: match.group()[:-1] + "\\.", line)


def code(text: str, width: int = 80) -> str:
    """Text as a code span that holds in a table cell too."""
    line = fmt.shorten(fmt.one_line(text), width)
    if not line:
        return fmt.MISSING
    if _PLAIN_CODE.fullmatch(line):
        return f"`{line}`"
    return f"<code>{_ENTITY.sub(lambda match: f'&#{ord(match.group())};', line).replace('_', '&#95;')}</code>"


def _lines(report: Report) -> Iterator[str]:
    yield f"### {prose(report.summary.verdict)}"
    yield ""
    yield from _doubts(report)
    yield from _table(("", "", ""), [_metric(metric) for metric in metrics.metrics(report)])
    yield from _findings(report)
    if report.swaps:
        yield from _swaps(report.swaps)
    if report.passed:
        yield from _folded(_passed(report), _checks(report))
    yield from _folded("Where the step goes", _bars(report))
    if report.kernels:
        yield from _folded(f"Top kernels of {len(report.kernels):,} groups", _kernels(report))
    if report.communication:
        yield from _folded("Communication", _communication(report))
    if len(report.ranks) > 1:
        yield from _folded(f"{len(report.ranks)} ranks", _ranks(report))
    if report.counters:
        yield from _folded("Measured against modelled", _counters(report, report.counters))
    if report.cross_checks:
        yield from _folded("Checked against other tools", _cross_checks(report))
    yield from _folded("Data quality and roofs", _quality(report))
    origin = f"{prose(report.device.name, 80)} · {code(report.trace.path)}"
    yield f"<sub>training-advisor {prose(report.tool_version)} · {origin}</sub>"


def _doubts(report: Report) -> Iterator[str]:
    doubts = [remark for remark in report.data_quality if remark.level != "info"]
    for remark in doubts:
        yield f"> **{prose(remark.level, 20)}** {prose(remark.message)}\\"
    if doubts:
        yield "> Read the figures with this in mind."
        yield ""


def _metric(metric: metrics.Metric) -> tuple[str, str, str]:
    if metric.value:
        return prose(metric.label), f"**{prose(metric.value)}**", prose(metric.note)
    return prose(metric.label), f"*{fmt.NOT_MEASURED}*", f"to get it: {prose(metric.remedy)}"


def _findings(report: Report) -> Iterator[str]:
    if caveat := findings_view.caveat(report):
        yield f"> {prose(fmt.sentence(caveat))}"
        yield ""
    for finding in findings_view.worthwhile(report.findings):
        yield from _finding(finding)
    combined = findings_view.combined(report)
    if combined and report.together:
        saving = f"**{findings_view.gain(report.together)}**, {findings_view.spread(report.together)}"
        besides = f" {prose(fmt.sentence(combined.besides))}." if combined.besides else ""
        yield f"{fmt.sentence(combined.made)}: {saving}; {combined.note}.{besides}"
        yield ""
    fruitless = findings_view.fruitless(report.findings)
    title = f"{len(fruitless)} more, likely without a saving as the loop is now"
    yield from _folded(title, itertools.chain.from_iterable(map(_finding, fruitless)))


def _finding(finding: Finding) -> Iterator[str]:
    saving = findings_view.gain(finding)
    if finding.saving_ms:
        saving += f", {findings_view.spread(finding)}"
    if known := findings_view.how_known(finding):
        saving += f", {prose(known, 40)}"
    yield f"**{prose(finding.title)}**: {saving} ({code(finding.rule)})"
    yield ""
    if finding.note:
        yield prose(finding.note)
        yield ""
    for line in finding.evidence[:TOP_EVIDENCE]:
        yield f"- {prose(line)}"
    rest = len(finding.evidence) - TOP_EVIDENCE
    if rest > 0:
        yield f"- and {rest} more in the JSON report"
    if finding.fix:
        yield ""
        yield from _fenced(finding.fix)
    if plain := findings_view.plain_fix(finding):
        yield ""
        yield "Without Lightning:"
        yield from _fenced(plain)
    if finding.risk:
        yield f"Risk: {prose(finding.risk)}"
    yield ""


def _swaps(swaps: Swaps) -> Iterator[str]:
    yield f"**Swaps**: {prose(swaps.verdict)}"
    yield ""
    if swaps.steps:
        for label, value in swaps_view.figures(swaps.steps):
            yield f"- {label}: {prose(value)}"
        yield ""
    for remark in swaps.remarks[:20]:
        yield f"- {prose(remark)}"
    yield ""
    rows = swaps_view.rows(swaps)
    if rows:
        yield from _folded(f"{len(swaps.sites):,} sites", _swap_sites(rows))


def _swap_sites(rows: Sequence[swaps_view.Row]) -> Iterator[str]:
    missing = fmt.MISSING
    yield from _table(
        ("Site", "Where", "Calls", "Outcome", "Error", "Eager's", "Before", "After", "of the step"),
        [
            (
                f"{prose(row.kind, 20)} {code(row.what)}",
                code(row.where),
                row.calls,
                f"{'**kept**' if row.kept else 'left alone'} {code(row.decision) if row.kept else ''} "
                f"{prose(row.reason, 200)}",
                row.best.error if row.best else missing,
                row.best.eager_error if row.best else missing,
                row.before,
                row.after,
                row.share,
            )
            for row in rows
        ],
        numbers=(2, 4, 5, 6, 7, 8),
    )
    for row in rows:
        for tried in row.tried:
            if tried.outcome != "kept":
                yield f"- {code(row.what)}: {code(tried.name)}: {prose(tried.outcome, 300)}"
    for row in rows:
        if row.permanent:
            yield ""
            yield from _fenced(row.permanent, "diff")


def _fenced(source: str, language: str = "python") -> Iterator[str]:
    runs = re.findall("`+", source)
    fence = "`" * max(3, 1 + max(map(len, runs), default=0))
    yield f"{fence}{language}"
    yield from fmt.shorten(source, 4000).split("\n")
    yield fence


def _passed(report: Report) -> str:
    return f"{len(report.passed)} check{'' if len(report.passed) == 1 else 's'} passed"


def _checks(report: Report) -> Iterator[str]:
    for passed in report.passed:
        yield f"- {prose(passed.title)} ({code(passed.rule)})"
    if report.not_applicable:
        yield ""
        yield f"Did not apply: {', '.join(map(code, report.not_applicable))}"


def _bars(report: Report) -> Iterator[str]:
    for bar in breakdown.bars(report):
        parts = ", ".join(f"{prose(part.name, 40)} {part.share}" for part in bar.segments)
        yield f"- **{bar.title}**, {prose(bar.whole)}: {parts}"


def _kernels(report: Report) -> Iterator[str]:
    groups = metrics.by_time(report.kernels)
    yield from _table(
        ("Kernel", "Op", "Module", "Phase", "Time, ms", "Share", "FLOP/byte", "Bound", "Efficiency"),
        [
            (
                code(short_name(group.name)),
                code(group.op or ""),
                code(group.module or ""),
                prose(group.phase, 40),
                fmt.milliseconds(group.time_ms_per_step),
                fmt.percent(group.time_fraction),
                fmt.number(group.intensity),
                prose(group.bound, 40),
                metrics.efficiency(group),
            )
            for group in groups[:TOP_KERNELS]
        ],
        numbers=(4, 5, 6, 8),
    )
    for note in metrics.above_roof_notes(groups[:TOP_KERNELS]):
        yield f"{prose(note)}\\"


def _communication(report: Report) -> Iterator[str]:
    yield from _table(
        (
            "Collective", "Ranks", "Calls", "Payload", "Time", "Transfer", "Exposed", "Hidden",
            "Bus bandwidth", "of the link",
        ),
        [
            (
                prose(communication_view.label(group), 80),
                fmt.count(group.ranks),
                fmt.count(group.calls_per_step),
                fmt.nbytes(group.payload_bytes),
                fmt.duration(group.time_ms_per_step),
                fmt.duration(group.transfer_ms_per_step),
                fmt.duration(group.exposed_ms_per_step),
                fmt.percent(group.overlap_fraction),
                fmt.bytes_per_s(group.bus_bandwidth_bytes_per_s),
                fmt.percent(group.efficiency),
            )
            for group in report.communication[:TOP_KERNELS]
        ],
        numbers=range(1, 10),
    )  # fmt: skip
    yield prose(communication_view.note(report))


def _ranks(report: Report) -> Iterator[str]:
    yield from _table(
        ("Rank", "Device", "Step", "Busy", "Kernel time", "Communication", "of it exposed", "of it waiting"),
        [
            (
                "unknown" if rank.rank is None else str(rank.rank),
                prose(rank.device, 40),
                fmt.duration(rank.step_time_ms),
                fmt.percent(rank.gpu_busy_fraction),
                fmt.duration(rank.kernel_time_ms_per_step),
                fmt.duration(rank.communication_ms_per_step),
                fmt.duration(rank.exposed_communication_ms_per_step),
                fmt.duration(rank.waiting_ms_per_step),
            )
            for rank in report.ranks
        ],
        numbers=(2, 3, 4, 5, 6, 7),
    )


def _counters(report: Report, counters: CounterSummary) -> Iterator[str]:
    for label, value in counter_view.figures(counters):
        yield f"- {prose(label)}: {prose(value)}"
    yield ""
    yield from _table(
        ("Kernel", "Op", "Launches", "Read", "Modelled", "FLOPs", "Modelled", "Bound", ""),
        [
            (
                code(row.kernel),
                code(row.op),
                row.launches,
                row.read,
                row.modelled_read,
                row.flops,
                row.modelled_flops,
                prose(row.bound, 40),
                "**differs**" if row.differs else "",
            )
            for row in counter_view.rows(report)[:TOP_KERNELS]
        ],
        numbers=(2, 3, 4, 5, 6),
    )


def _cross_checks(report: Report) -> Iterator[str]:
    yield from _table(
        ("Figure", "Tool", "Unit", "Here", "There", "Difference"),
        [
            (
                prose(check.figure, 80),
                prose(check.tool, 60),
                prose(check.unit, 20),
                fmt.number(check.ours),
                fmt.number(check.theirs),
                fmt.percent(check.difference_fraction) + (" **differs**" if metrics.differs(check) else ""),
            )
            for check in report.cross_checks
        ],
        numbers=(3, 4, 5),
    )


def _quality(report: Report) -> Iterator[str]:
    coverage = report.summary.coverage
    yield f"- Device time with a cost: {fmt.percent(coverage.costed_time_fraction)}"
    yield f"- Device time joined to its operator: {fmt.percent(coverage.attributed_time_fraction)}"
    yield f"- Device time of orphans: {fmt.percent(coverage.orphan_time_fraction)}"
    for remark in report.data_quality:
        yield f"- {prose(remark.level, 20)}: {prose(remark.message)}"
    for peak in metrics.peaks_used(report):
        yield (
            f"- {prose(fmt.pipe(peak.pipe))} {fmt.flops_per_s(peak.flops_per_s)}, "
            f"ridge {fmt.intensity(peak.ridge_flops_per_byte)} ({prose(peak.source, 200)})"
        )
    if report.device.bandwidth_bytes_per_s:
        yield (
            f"- memory {fmt.bytes_per_s(report.device.bandwidth_bytes_per_s)} "
            f"({prose(report.device.bandwidth_source, 200)})"
        )
    if report.device.hierarchy:
        levels = prose(hierarchy.line(report.device.hierarchy))
        yield f"- {levels}. {prose(hierarchy.meaning(report))}".rstrip()


def _folded(title: str, lines: Iterator[str]) -> Iterator[str]:
    content = list(lines)
    if content:
        yield f"<details><summary>{title}</summary>"
        yield ""
        yield from content
        yield ""
        yield "</details>"
        yield ""


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|" + "|".join("---:" if place in numbers else "---" for place in range(len(headings))) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
