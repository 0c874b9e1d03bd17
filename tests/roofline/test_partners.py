"""The two halves of an autograd node find each other."""

from __future__ import annotations

from advisor.roofline.partners import Partners
from advisor.trace.link import Timeline
from tests.trace.builder import BACKWARD, MAIN, Builder


def partner(builder: Builder, op: str, of: str) -> str | int:
    """Start of the partner of the operator of this name, or -1."""
    timeline: Timeline = builder.join()
    ops, names = timeline.trace.ops, timeline.trace.names
    position = next(i for i in range(len(ops)) if names[ops.name[i]] == op)
    at = Partners(ops, names).partner(position, of)
    return -1 if at < 0 else int(ops.ts_ns[at] - ops.ts_ns[0]) // 1000


def test_a_backward_operator_finds_the_forward_one_of_its_number():
    builder = Builder().op("Norm", 0, 9, sequence=4).op("Norm", 10, 9, sequence=5)
    builder.on(BACKWARD).op("NormBackward", 30, 9, sequence=5, forward_thread=1)
    assert partner(builder, "NormBackward", "Norm") == 10


def test_a_forward_operator_without_a_number_made_the_node_before_the_next():
    # GIVEN a look-up that carries no number, between operators that do
    builder = Builder().op("aten::zero_", 0, 1, sequence=7).op("lib::lookup", 2, 3)
    builder.op("aten::cat", 6, 1, sequence=8).op("lib::lookup", 8, 3).op("aten::cat", 12, 1, sequence=9)
    builder.on(BACKWARD).op("Node<Lookup>", 30, 9, sequence=7, forward_thread=1)
    # THEN the first look-up, not the second, is the node's
    assert partner(builder, "Node<Lookup>", "lib::lookup") == 2
    assert partner(builder, "lib::lookup", "Node<Lookup>") == 30


def test_operators_of_another_thread_do_not_number_a_node():
    builder = Builder().op("lib::lookup", 2, 3).on(BACKWARD).op("aten::cat", 6, 1, sequence=8)
    builder.op("Node<Lookup>", 30, 9, sequence=7).on(MAIN)
    assert partner(builder, "Node<Lookup>", "lib::lookup") == -1


def test_two_candidates_are_none():
    builder = Builder().op("lib::lookup", 0, 1, sequence=7).op("lib::lookup", 2, 1, sequence=7)
    builder.on(BACKWARD).op("Node<Lookup>", 30, 9, sequence=7, forward_thread=1)
    assert partner(builder, "Node<Lookup>", "lib::lookup") == -1
