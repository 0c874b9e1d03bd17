"""The communication of a step in groups: exposure, transfer across ranks, bandwidth against the link."""

import pytest

from advisor.report.build import analyze
from advisor.report.communication import collective_groups, exchanges, shortest_ns
from advisor.report.communication_view import line, note
from tests.report.loops import analyse, loop

KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ELEMENTS = 11_250_000


def ddp(durations_us, *, rank=0, elements=ELEMENTS, visible=2, group="0"):
    """Steps of two kernels and an all-reduce of 45 MB among two ranks, begun 100 µs before they end."""
    builder = loop(steps=len(durations_us), step_us=2000)
    builder.meta["distributedInfo"] = {"rank": rank, "world_size": 2}
    builder.meta["deviceProperties"] *= visible
    for i, dur in enumerate(durations_us):
        start = 10_000 + i * 2000
        builder.launch(
            KERNEL, start + 90, at=start + 300, dur=dur, stream=17,
            **{
                "Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements,
                "Group size": 2, "dtype": "Float", "Process Group Name": group,
                "Process Group Ranks": "[0, 1]",
            },
        )  # fmt: skip
    return builder


def test_a_group_tells_payload_exposure_and_the_share_of_the_link():
    # The collective runs from 300 to 800 µs; the product ends at 350, the addition runs from 360 to 400.
    (group,) = collective_groups(analyse(ddp([500, 500, 500])))

    assert (group.kind, group.dtype, group.ranks, group.size_class) == (
        "all_reduce",
        "fp32",
        2,
        "16 to 256 MiB",
    )
    assert group.calls_per_step == 1
    assert group.payload_bytes == group.bus_bytes == 45e6
    assert group.time_ms_per_step == pytest.approx(0.5)
    assert group.exposed_ms_per_step == pytest.approx(0.41)
    assert group.overlap_fraction == pytest.approx(0.18)
    assert group.bus_bandwidth_bytes_per_s == pytest.approx(90e9)
    assert group.efficiency == pytest.approx(0.2)
    assert group.transfer_ms_per_step is None


def test_without_a_known_link_the_bandwidth_is_shown_alone():
    (group,) = collective_groups(analyse(ddp([500, 500, 500], visible=1)))

    assert group.bus_bandwidth_bytes_per_s == pytest.approx(90e9)
    assert group.link_bytes_per_s is None
    assert group.efficiency is None


def test_another_rank_that_comes_last_tells_the_transfer():
    waiting, last = analyse(ddp([500, 900, 500])), analyse(ddp([100, 125, 125], rank=1))

    (group,) = collective_groups(waiting, shortest_ns([exchanges(waiting), exchanges(last)]))

    assert group.time_ms_per_step == pytest.approx(0.7)
    assert group.transfer_ms_per_step == pytest.approx(0.125)
    assert group.bus_bandwidth_bytes_per_s == pytest.approx(360e9)
    assert group.efficiency == pytest.approx(0.8)


@pytest.mark.parametrize(
    "other",
    [
        ddp([100, 100, 100], rank=1, elements=ELEMENTS + 1),
        ddp([100, 100, 100], rank=1, group="1"),
        loop(),
    ],
    ids=["another size", "another group", "no collectives"],
)
def test_what_is_not_the_same_collective_does_not_tell_its_transfer(other):
    mine = analyse(ddp([500, 500, 500]))

    (group,) = collective_groups(mine, shortest_ns([exchanges(mine), exchanges(analyse(other))]))

    assert group.transfer_ms_per_step is None


def test_a_collective_of_unknown_size_has_a_time_and_no_bandwidth():
    (group,) = collective_groups(analyse(ddp([500, 500, 500], elements=-5)))

    assert group.time_ms_per_step == pytest.approx(0.5)
    assert (group.payload_bytes, group.bus_bandwidth_bytes_per_s, group.efficiency) == (None, None, None)
    assert group.size_class is None


def test_a_loop_without_collectives_has_no_groups():
    assert collective_groups(analyse(loop())) == []


def test_the_roof_fraction_leaves_collectives_out(tmp_path):
    plain, communicating = tmp_path / "plain.json", tmp_path / "ddp.json"
    plain.write_bytes(loop(steps=3, step_us=2000).json())
    communicating.write_bytes(ddp([500, 500, 500]).json())

    assert analyze(communicating).summary.roof_fraction == analyze(plain).summary.roof_fraction


def test_reports_say_what_the_bandwidth_stands_on(tmp_path):
    paths = [tmp_path / "rank0.json", tmp_path / "rank1.json"]
    for rank, (path, dur) in enumerate(zip(paths, (500, 125), strict=True)):
        path.write_bytes(ddp([dur] * 3, rank=rank).json())

    alone, together = analyze(paths[0]), analyze(paths)

    assert "90.0 GB/s" in line(alone)
    assert "waiting" in line(alone)
    assert "lower bounds" in note(alone)
    assert "360 GB/s" in line(together)
    assert "80.0% of the link" in line(together)
    assert "lower bounds" not in note(together)


def test_a_report_without_collectives_has_no_line(tmp_path):
    path = tmp_path / "plain.json"
    path.write_bytes(loop().json())

    assert line(analyze(path)) == ""


def test_every_view_has_the_table_only_where_there_is_communication(tmp_path):
    from advisor.report import html, markdown

    plain, communicating = tmp_path / "plain.json", tmp_path / "ddp.json"
    plain.write_bytes(loop().json())
    communicating.write_bytes(ddp([500, 500, 500]).json())

    for render in (html.render, markdown.render):
        assert "90.0 GB/s" in render(analyze(communicating))
        assert "Bus bandwidth" not in render(analyze(plain))


def test_ddp_over_nvlink_waits_for_most_of_its_communication(shared):
    report = analyze([shared / f"traces/h200/ddp2_gpt_rank{rank}.json.gz" for rank in (0, 1)])

    group = report.communication[0]

    assert (group.kind, group.dtype, group.ranks, group.calls_per_step) == ("all_reduce", "fp32", 2, 8)
    assert group.transfer_ms_per_step < 0.2 * group.time_ms_per_step
    assert 0.4 < group.efficiency < 0.7
