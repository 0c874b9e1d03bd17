"""Messages of collectives as traces record them, and bus bytes by nccl-tests' convention."""

import json

import pytest

from advisor.roofline.collectives import Message, collective_kind, message_of_range, read_message

MIB = 2**20


def recorded(name="allreduce", elements_in=MIB, elements_out=MIB, **more):
    """Arguments of a kernel as recent PyTorch writes them: 4 ranks, fp32."""
    args = {
        "Collective name": name,
        "In msg nelems": elements_in,
        "Out msg nelems": elements_out,
        "Group size": 4,
        "dtype": "Float",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1, 2, 3]",
    }
    return json.dumps({**args, **more}).encode()


@pytest.mark.parametrize(
    ("name", "elements_in", "elements_out", "payload", "bus"),
    [
        ("allreduce", MIB, MIB, 4 * MIB, 4 * MIB * 2 * 3 / 4),
        ("_allgather_base", MIB, 4 * MIB, 16 * MIB, 16 * MIB * 3 / 4),
        ("_reduce_scatter_base", 4 * MIB, MIB, 16 * MIB, 16 * MIB * 3 / 4),
        ("all_to_all", MIB, MIB, 4 * MIB, 4 * MIB * 3 / 4),
        ("broadcast", MIB, MIB, 4 * MIB, 4 * MIB),
        ("reduce", MIB, MIB, 4 * MIB, 4 * MIB),
        ("send", MIB, MIB, 4 * MIB, 4 * MIB),
        ("recv", 0, MIB, 4 * MIB, 4 * MIB),
        ("gather", MIB, 4 * MIB, 16 * MIB, 16 * MIB * 3 / 4),
        ("gather", MIB, 0, 16 * MIB, 16 * MIB * 3 / 4),
        ("scatter", 0, MIB, 16 * MIB, 16 * MIB * 3 / 4),
    ],
)
def test_bus_bytes_are_the_payload_times_the_algorithms_factor(name, elements_in, elements_out, payload, bus):
    message = read_message(recorded(name, elements_in, elements_out))

    assert message.payload_bytes == payload
    assert message.bus_bytes == bus


def test_an_uneven_all_to_all_sends_all_but_its_own_share():
    # Rank 1 keeps one row of eight and gets back eight rows, two of them its own.
    args = recorded(
        "all_to_allv", 8000, 8000, **{"In split size": "[3, 1, 2, 2]", "Out split size": "[2, 2, 2, 2]"}
    )

    assert read_message(args, rank=1).bus_bytes == 4 * 8000 * 7 / 8
    assert read_message(args, rank=None).bus_bytes is None
    assert read_message(args, rank=None).payload_bytes == 4 * 8000


@pytest.mark.parametrize("split", ["[3, 1, ...]", "[-1, 2, 3, 4]", "[1, 2]", "nonsense", 7, [1, "2"]])
def test_splits_that_cannot_be_read_leave_the_bus_bytes_open(split):
    assert read_message(recorded("all_to_allv", **{"In split size": split}), rank=1).bus_bytes is None


@pytest.mark.parametrize("elements", [-1, "1048576", 1.5, True, None, 2**60, 10**40, [1], {}])
def test_sizes_that_are_no_sizes_are_unknown(elements):
    message = read_message(recorded(elements_in=elements, elements_out=elements))

    assert message is None or (message.payload_bytes is None and message.bus_bytes is None)


@pytest.mark.parametrize("ranks", [-2, 0, "4", 10**30, None, 2.5])
def test_a_group_size_that_is_none_is_taken_from_the_members_or_unknown(ranks):
    assert read_message(recorded(**{"Group size": ranks})).ranks == 4
    nothing = read_message(recorded(**{"Group size": ranks, "Process Group Ranks": None}))
    assert nothing.ranks is None
    assert nothing.bus_bytes is None
    assert nothing.payload_bytes == 4 * MIB


@pytest.mark.parametrize("members", ["[0, 1, 2, ...]", "[0, 1]", "[-1, 0, 1, 2]", "[[[[", [0, 1], 3, {}])
def test_members_that_are_cut_off_or_contradict_the_size_are_unknown(members):
    message = read_message(recorded(**{"Process Group Ranks": members}))

    assert message.members is None
    assert message.ranks == 4


def test_an_all_gather_that_gives_less_than_it_takes_is_unknown():
    assert read_message(recorded("all_gather", 4 * MIB, MIB)).payload_bytes is None


@pytest.mark.parametrize("dtype", ["Quaternion", None, 5])
def test_an_unknown_dtype_leaves_the_size_open(dtype):
    assert read_message(recorded(dtype=dtype)).payload_bytes is None


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'{"stream": 7}', b'{"Collective name": 3, "In msg nelems": 4}', b"[" * 5000],
)
def test_arguments_without_a_collective_give_no_message(raw):
    assert read_message(raw) is None


def test_a_range_of_older_traces_tells_the_input():
    message = message_of_range("nccl:_all_gather_base", [[2, 3]], ["c10::Half"], 4)

    assert (message.kind, message.dtype, message.bytes_in) == ("all_gather", "fp16", 12)
    assert message.payload_bytes == 48
    assert message.bus_bytes == 36


@pytest.mark.parametrize(
    ("dims", "types"),
    [([[-1, 3]], ["float"]), ([[2]], ["?"]), ([[2], []], ["float", ""]), (None, None), ("x", 3), ([], [])],
)
def test_a_range_whose_shapes_are_missing_or_broken_has_no_size(dims, types):
    assert message_of_range("nccl:all_reduce", dims, types, 2).payload_bytes is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send_recv"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>", "all_reduce"),
        ("nccl:all_to_all", "all_to_all"),
        ("_broadcast_oop", "broadcast"),
        ("barrier", "other"),
        ("", "other"),
    ],
)
def test_the_kind_is_read_from_any_name_of_a_collective(name, kind):
    assert collective_kind(name) == kind


def test_a_kind_without_a_convention_has_no_bus_bytes():
    assert Message("other", "fp32", 4.0, 4.0, ranks=2).bus_bytes is None
