"""From files to a report: primary trace, ranks, and JSON that others can build on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from advisor.errors import InputError, UsageError
from advisor.report.build import analyze, analyze_files, build_report
from advisor.report.files import to_json
from advisor.report.model import SCHEMA_VERSION, Report
from advisor.roofline import analysis as analysis_module
from tests.report.loops import analyse, loop
from tests.trace.builder import Builder

NAMES = {
    "": "schema_version tool_version trace device environment summary breakdown kernels findings "
    "data_quality",
    "trace": "path size_bytes events losses",
    "device": "name peaks",
    "device.peaks": "pipe flops_per_s ridge_flops_per_byte source",
    "summary": "step_time_ms baseline_step_ms steps gpu_busy_fraction kernel_time_ms_per_step "
    "bound_time_fraction coverage",
    "summary.step_time_ms": "p50 p95 all",
    "summary.bound_time_fraction": "memory compute communication copy unknown",
    "summary.coverage": "costed_time_fraction attributed_time_fraction orphan_time_fraction",
    "kernels": "name op module phase calls_per_step time_ms_per_step flops bytes_read bytes_written "
    "intensity pipe bound efficiency flags",
    "data_quality": "level code message",
}


def save(builder: Builder, path: Path, **meta: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(builder.document() | meta))
    return path


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


@pytest.mark.parametrize("place", NAMES)
def test_json_has_every_name_that_others_build_on(place: str) -> None:
    found: Any = json.loads(to_json(build_report(analyse(loop()))))
    for part in place.split(".") if place else ():
        found = found[part]
    entries = found if isinstance(found, list) else [found]
    assert entries
    for entry in entries:
        assert set(NAMES[place].split()) <= set(entry)


def test_json_is_strict_and_reads_back_as_the_same_report() -> None:
    report = build_report(analyse(loop()))
    text = to_json(report)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert msgspec.json.decode(text, type=Report) == report


def test_what_is_not_known_is_null_not_zero() -> None:
    report = json.loads(to_json(build_report(analyse(Builder(device=None).launch("k", 1, at=5, dur=5)))))
    (kernel,) = report["kernels"]
    for name in ("op", "module", "flops", "bytes_read", "bytes_written", "intensity", "pipe", "efficiency"):
        assert kernel[name] is None
    assert report["summary"]["baseline_step_ms"] is None
    assert report["summary"]["mfu"] is None
    assert report["device"]["peaks"] == []


def test_a_report_holds_plain_finite_values_only() -> None:
    for builder in (
        loop(),
        Builder().step(1, 0, 5),
        Builder().launch("k", 1, at=5, dur=0),
        loop(Builder(device=None)),
    ):
        for value in leaves(msgspec.to_builtins(build_report(analyse(builder)))):
            assert type(value) in (int, float, str, bool, type(None))
            assert not (isinstance(value, float) and not math.isfinite(value))


def test_the_environment_is_the_captures_context_block() -> None:
    report = build_report(analyse(loop().context(precision="bf16-mixed")))
    assert report.environment == {"precision": "bf16-mixed"}
    assert build_report(analyse(loop())).environment == {}


def test_one_trace_has_no_ranks(tmp_path: Path) -> None:
    report = analyze(save(loop(), tmp_path / "t.json"))
    assert report.schema_version == SCHEMA_VERSION
    assert report.ranks == []
    assert len(report.trace.files) == 1


def test_with_several_ranks_details_are_those_of_the_lowest(tmp_path: Path) -> None:
    for rank, mm_us in ((2, 200), (0, 100), (1, 300)):
        save(
            loop(mm_us=mm_us), tmp_path / f"{9 - rank}.json", distributedInfo={"rank": rank, "world_size": 3}
        )
    report = analyze(tmp_path)
    assert report.trace.rank == 0
    assert [rank.rank for rank in report.ranks] == [0, 1, 2]
    assert [file.rank for file in report.trace.files] == [0, 1, 2]
    kernel_ms = [rank.kernel_time_ms_per_step for rank in report.ranks]
    assert kernel_ms == pytest.approx([0.14, 0.34, 0.24])
    assert kernel_ms[0] == pytest.approx(report.summary.kernel_time_ms_per_step)
    assert report.ranks[0].gpu_busy_fraction == pytest.approx(report.summary.gpu_busy_fraction)
    assert not {"ranks.unclear", "ranks.missing"} & {q.code for q in report.data_quality}


def test_only_the_primary_trace_is_costed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costed = []
    original = analysis_module.attach_costs
    monkeypatch.setattr(
        analysis_module,
        "attach_costs",
        lambda timeline, device: costed.append(timeline.trace.rank) or original(timeline, device),
    )
    for rank in (3, 1, 2):
        save(loop(), tmp_path / f"{rank}.json", distributedInfo={"rank": rank})
    analyze(tmp_path)
    assert costed == [1]


def test_copies_and_collectives_of_a_rank_are_told_apart(tmp_path: Path) -> None:
    builder = loop()
    for i in range(3):
        start = 10_000 + 1000 * i
        builder.launch("ncclDevKernel_AllReduce", start + 100, at=start + 500, dur=50)
        builder.launch(
            "Memcpy HtoD (Pinned -> Device)", start + 110, at=start + 600, dur=20, cat="gpu_memcpy"
        )
    for rank in (0, 1):
        save(builder, tmp_path / f"{rank}.json", distributedInfo={"rank": rank})
    rank = analyze(tmp_path).ranks[1]
    assert rank.kernel_time_ms_per_step == pytest.approx(0.39)
    assert rank.communication_ms_per_step == pytest.approx(0.05)
    assert rank.exposed_communication_ms_per_step == pytest.approx(0.05)


def test_missing_and_doubtful_ranks_are_remarked(tmp_path: Path) -> None:
    save(loop(), tmp_path / "a/x.json", distributedInfo={"rank": 0, "world_size": 4})
    save(loop(), tmp_path / "a/y.json", distributedInfo={"rank": 3, "world_size": 4})
    missing = {q.code: q.message for q in analyze(tmp_path / "a").data_quality}
    assert missing["ranks.missing"].startswith("2 of 4")
    save(loop(), tmp_path / "b/x.json")
    save(loop(), tmp_path / "b/y.json")
    assert "ranks.unclear" in {q.code for q in analyze(tmp_path / "b").data_quality}


def test_a_file_that_cannot_be_read_costs_itself_only(tmp_path: Path) -> None:
    good = save(loop(), tmp_path / "good.json")
    bad = tmp_path / "bad.json"
    bad.write_text("nothing")
    report, _ = analyze_files([str(bad), str(good)])
    assert report.trace.path == str(good)
    assert report.data_quality[0].level == "error"
    assert "bad.json" in report.data_quality[0].message


def test_no_readable_file_at_all_is_an_error(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("nothing")
    with pytest.raises(InputError, match="none of 2 files"):
        analyze(tmp_path)
    with pytest.raises(InputError, match=r"a\.json"):
        analyze(tmp_path / "a.json")


def test_an_unknown_device_name_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="abacus"):
        analyze(save(loop(), tmp_path / "t.json"), device="abacus")


def test_progress_is_called_before_each_file(tmp_path: Path) -> None:
    files = [str(save(loop(), tmp_path / name)) for name in ("a.json", "b.json")]
    seen: list[str] = []
    analyze_files(files, progress=seen.append)
    assert seen == files


def real_traces() -> list[Path]:
    folder = Path(__file__).parents[3] / "shared"
    return sorted((folder / "traces").glob("*/*.json.gz")) + sorted((folder / "truth").glob("**/*.json.gz"))


@pytest.mark.parametrize("path", real_traces(), ids=lambda path: path.name)
def test_every_real_trace_gives_a_report_whose_shares_add_up(path: Path) -> None:
    report = analyze(path, baseline_step_ms=20.0)
    json.loads(to_json(report), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    for slices in (report.breakdown.step, report.breakdown.phase, report.breakdown.family):
        assert not slices or sum(part.fraction or 0 for part in slices) == pytest.approx(1)
    if not report.summary.cpu_only:
        assert sum(part.time_ms_per_step for part in report.breakdown.step) == pytest.approx(20.0)
    if report.kernels:
        bound = report.summary.bound_time_fraction
        assert sum(getattr(bound, name) for name in bound.__struct_fields__) == pytest.approx(1)
        assert sum(group.time_fraction for group in report.kernels) == pytest.approx(1)
    for group in report.kernels:
        assert (group.flops is None) == (group.bytes_read is None) == (group.pipe is None)
        assert group.flops is None or group.flops >= 0
