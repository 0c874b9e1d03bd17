"""Where a trace tells what its collectives move, and when their link is known."""

import numpy as np
import pytest

from advisor.roofline.analysis import analyse_timeline
from advisor.roofline.collectives import Message
from advisor.roofline.devices import find_device
from advisor.roofline.messages import find_messages, link_bytes_per_s
from advisor.trace.link import load
from tests.trace.builder import Builder

KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
H100 = find_device(override="h100-sxm")
RECORDED = {
    "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2,
    "dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]",
}  # fmt: skip


def messages(builder):
    timeline = builder.join()
    names = [timeline.trace.names[i] for i in timeline.launches.name]
    return find_messages(timeline, np.flatnonzero([name == KERNEL for name in names]))


def job(builder=None, *, world=2, visible=2, **context):
    """A job whose process sees so many devices."""
    builder = builder or Builder()
    builder.meta["distributedInfo"] = {"rank": 0, "world_size": world}
    builder.meta["deviceProperties"] *= visible
    builder.work("gemm", 0, 5, correlation=None)
    return builder.context(**context) if context else builder


def test_a_kernel_launched_outside_the_trace_has_the_message_of_its_own_arguments():
    builder = Builder().work(KERNEL, 100, 50, correlation=None, **RECORDED)

    (message,) = messages(builder)

    assert (message.bytes_in, message.ranks, message.members) == (4000, 2, (0, 1))


def test_an_orphan_without_arguments_is_known_by_kind_alone():
    (message,) = messages(Builder().work(KERNEL, 100, 50, correlation=None))

    assert message == Message("all_reduce")


def test_without_arguments_on_the_kernel_those_of_the_operator_count():
    builder = (
        Builder().event("cpu_op", "record_param_comms", 10, 50, **RECORDED).launch(KERNEL, 20, at=100, dur=50)
    )

    assert messages(builder)[0].payload_bytes == 4000


def test_older_traces_tell_it_by_the_range_around_the_launch():
    shapes = {"Input Dims": [[25, 40]], "Input type": ["float"]}
    builder = (
        job().op("record_param_comms", 10, 50).event("user_annotation", "nccl:all_reduce", 15, 40, **shapes)
    )

    (message,) = messages(builder.launch(KERNEL, 20, at=100, dur=50))

    assert message.payload_bytes == 4000
    assert message.bus_bytes == 4000 * 2 * 1 / 2


def test_in_a_larger_job_an_older_trace_does_not_tell_the_group():
    shapes = {"Input Dims": [[25, 40]], "Input type": ["float"]}
    builder = job(world=8).event("user_annotation", "nccl:all_reduce", 15, 40, **shapes)

    (message,) = messages(builder.launch(KERNEL, 20, at=100, dur=50))

    assert message.payload_bytes == 4000
    assert message.bus_bytes is None


@pytest.mark.parametrize(
    ("groups", "bus"),
    [
        ([{"pg_size": 4, "ranks": [0, 1, 2, 3]}], 4000 * 2 * 3 / 4),
        ([{"pg_size": 4, "ranks": "?"}], 4000 * 2 * 3 / 4),
        ([{"pg_size": 4}, {"pg_size": 2}], None),
        ([{"pg_size": 10**400}], None),
        ([{"pg_size": -4}], None),
        (["?"], None),
    ],
)
def test_the_only_group_of_a_job_is_that_of_its_collectives(groups, bus):
    shapes = {"Input Dims": [[25, 40]], "Input type": ["float"]}
    builder = job(world=8).event("user_annotation", "nccl:all_reduce", 15, 40, **shapes)
    builder.meta["distributedInfo"]["pg_config"] = groups

    (message,) = messages(builder.launch(KERNEL, 20, at=100, dur=50))

    assert message.bus_bytes == bus


def test_kernels_that_share_one_collective_have_no_size_of_their_own():
    builder = Builder().event("cpu_op", "record_param_comms", 10, 50, **RECORDED)
    builder.launch(KERNEL, 20, at=100, dur=50, **RECORDED).launch(KERNEL, 30, at=150, dur=50, **RECORDED)

    assert [message.payload_bytes for message in messages(builder)] == [None, None]


@pytest.mark.parametrize(
    ("builder", "members", "reached"),
    [
        (job(), (0, 1), True),
        (job(visible=1), (0, 1), False),
        (job(world=16, visible=8), (0, 8), False),
        (job(visible=1, num_nodes=1), (0, 1), True),
        (job(world=16, visible=8, num_nodes=2), (0, 7), True),
        (job(world=16, visible=8, num_nodes=2), (7, 8), False),
        (job(world=16, visible=8, num_nodes=2), None, False),
        (job(visible=1, num_nodes="one"), (0, 1), False),
    ],
    ids=[
        "all devices here", "one visible", "across nodes", "one node stated", "within a node",
        "across stated nodes", "members unknown", "nonsense",
    ],
)  # fmt: skip
def test_a_link_is_known_where_the_group_is_known_to_lie_on_one_node(builder, members, reached):
    message = Message("all_reduce", ranks=2, members=members)

    assert link_bytes_per_s(H100, builder.join(), message) == (450e9 if reached else None)


@pytest.mark.parametrize(
    ("device", "ranks", "rate"),
    [
        ("h100-pcie", 2, None),
        ("a100-pcie-80gb", 2, None),
        ("l4", 8, None),
        ("mi300x", 2, None),
        ("mi300x", 8, 448e9),
        ("h200", 3, 450e9),
    ],
)
def test_bridges_and_parts_of_a_mesh_are_no_known_link(device, ranks, rate):
    timeline = job(world=8, visible=8).join()

    found = link_bytes_per_s(find_device(override=device), timeline, Message("all_reduce", ranks=ranks))

    assert found == rate


def test_ddp_on_two_h200s_moves_its_buckets_once_over_the_link(shared):
    # 38597376 floats among 2 ranks: 2 (n-1)/n of the buffer is the buffer.
    timeline = load(shared / "traces/h200/ddp2_gpt_rank1.json.gz")
    analysis = analyse_timeline(timeline)

    rows = [row for row, message in analysis.messages.items() if message.bytes_in == 4 * 38597376]

    assert len(rows) == 3
    for row in rows:
        bytes_moved = 4 * 38597376
        assert analysis.messages[row].bus_bytes == bytes_moved
        expected = bytes_moved / 450e9 / (timeline.launches.dur_ns[row] / 1e9)
        assert analysis.bounds[row].efficiency == pytest.approx(expected)
        assert analysis.bounds[row].bound == "communication"
    # Those launched before the window carry no arguments.
    orphans = [m for row, m in analysis.messages.items() if timeline.launches.launch_ts_ns[row] < 0]
    assert len(orphans) == 4
    assert all(message.payload_bytes is None for message in orphans)


def test_all_to_alls_of_a_recommender_are_told_by_their_ranges(shared):
    analysis = analyse_timeline(load(shared / "traces/public/ranks_dlrm/rank0.json.gz"))

    kinds = [(message.kind, message.dtype, message.bytes_in) for message in analysis.messages.values()]

    assert ("all_to_all", "fp32", 4 * 6144) in kinds
    assert ("all_reduce", "fp32", 4 * 394241) in kinds
    assert np.isnan(analysis.bounds.efficiency[list(analysis.messages)]).all()
