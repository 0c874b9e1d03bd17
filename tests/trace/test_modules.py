"""Which module made a launch, in forward and in backward."""

from __future__ import annotations

import time

import pytest

from tests.trace.builder import BACKWARD, MAIN, Builder

FORWARD = 1


def modules_of(builder: Builder) -> dict[str, str | None]:
    timeline = builder.join()
    names = [timeline.trace.names[i] for i in timeline.launches.name.tolist()]
    paths = [timeline.modules[i] if i >= 0 else None for i in timeline.launches.module.tolist()]
    return dict(zip(names, paths, strict=True))


def forward(builder: Builder, path: str, ts: float, *, sequence: int, kernel: str) -> Builder:
    """A module of one operator on the main thread."""
    builder.on(MAIN).range(f"advisor::module::{path}", ts, 20)
    return builder.op("aten::addmm", ts + 2, 10, sequence=sequence).launch(
        kernel, ts + 4, at=ts + 1000, dur=1
    )


def backward(builder: Builder, ts: float, *, sequence: int, kernel: str, thread: int = FORWARD) -> Builder:
    builder.on(BACKWARD)
    name = "autograd::engine::evaluate_function: AddmmBackward0"
    builder.op(name, ts, 20, sequence=sequence, forward_thread=thread)
    builder.op("AddmmBackward0", ts + 1, 18, sequence=sequence, forward_thread=thread)
    return builder.op("aten::mm", ts + 2, 10).launch(kernel, ts + 4, at=ts + 1000, dur=1)


def test_a_launch_belongs_to_the_innermost_module_around_it() -> None:
    builder = (
        Builder().range("advisor::module::blocks.0", 0, 100).range("advisor::module::blocks.0.fc", 20, 30)
    )
    builder.launch("outer", 10, at=200, dur=1).launch("inner", 25, at=210, dur=1).launch(
        "none", 150, at=220, dur=1
    )
    assert modules_of(builder) == {"outer": "blocks.0", "inner": "blocks.0.fc", "none": None}


def test_backward_belongs_to_the_module_whose_forward_has_its_sequence_number() -> None:
    builder = Builder()
    forward(builder, "a", 0, sequence=10, kernel="fa")
    forward(builder, "b", 50, sequence=11, kernel="fb")
    backward(builder, 100, sequence=11, kernel="bb")
    backward(builder, 150, sequence=10, kernel="ba")
    assert modules_of(builder) == {"fa": "a", "fb": "b", "bb": "b", "ba": "a"}


def test_of_forward_operators_that_share_a_number_the_last_made_the_node() -> None:
    # GIVEN a view at the end of a, which makes no node and carries the next node's number
    builder = Builder()
    forward(builder, "a", 0, sequence=10, kernel="fa").op("aten::detach", 15, 2, sequence=11)
    forward(builder, "b", 50, sequence=11, kernel="fb")
    backward(builder, 100, sequence=11, kernel="bb")
    assert modules_of(builder)["bb"] == "b"


def test_backward_of_a_loss_outside_all_modules_is_not_given_to_the_last_module() -> None:
    builder = Builder()
    forward(builder, "a", 0, sequence=10, kernel="fa").op("aten::detach", 15, 2, sequence=11)
    builder.op("aten::cross_entropy_loss", 40, 10, sequence=11).launch("loss", 42, at=900, dur=1)
    backward(builder, 100, sequence=11, kernel="loss back")
    assert modules_of(builder) == {"fa": "a", "loss": None, "loss back": None}


def test_a_module_that_is_called_twice_owns_both_calls() -> None:
    builder = Builder()
    forward(builder, "shared", 0, sequence=10, kernel="f1")
    forward(builder, "shared", 50, sequence=11, kernel="f2")
    backward(builder, 100, sequence=11, kernel="b2")
    backward(builder, 150, sequence=10, kernel="b1")
    assert set(modules_of(builder).values()) == {"shared"}


def test_the_next_steps_forward_with_a_number_used_again_is_not_taken() -> None:
    # GIVEN a counter that starts anew: the same number before and after the backward operator
    builder = Builder()
    forward(builder, "a", 0, sequence=10, kernel="fa")
    backward(builder, 100, sequence=10, kernel="ba")
    forward(builder, "b", 200, sequence=10, kernel="fb")
    assert modules_of(builder)["ba"] == "a"


def test_what_checkpointing_computes_again_belongs_to_its_module_and_so_does_its_backward() -> None:
    # GIVEN a's forward, run again on the backward thread, which counts for itself, from a number that
    # the main thread has given to b
    builder = Builder()
    forward(builder, "a", 0, sequence=10, kernel="fa")
    forward(builder, "b", 30, sequence=11, kernel="fb")
    forward(builder, "c", 60, sequence=12, kernel="fc")
    backward(builder, 100, sequence=12, kernel="bc")
    builder.on(BACKWARD).op("CheckpointFunctionBackward", 130, 100, sequence=10, forward_thread=FORWARD)
    builder.range("advisor::module::a", 140, 20)
    builder.op("aten::addmm", 142, 10, sequence=11).launch("again", 144, at=1300, dur=1)
    backward(builder, 180, sequence=11, kernel="ba", thread=2)
    backward(builder, 250, sequence=11, kernel="bb")
    found = modules_of(builder)
    assert found["again"] == "a"
    assert found["ba"] == "a"
    assert (found["bb"], found["bc"]) == ("b", "c")


def test_backward_without_a_sequence_number_has_no_module() -> None:
    builder = forward(Builder(), "a", 0, sequence=10, kernel="fa")
    builder.on(BACKWARD).op("torch::autograd::AccumulateGrad", 100, 20).launch("acc", 105, at=900, dur=1)
    backward(builder, 200, sequence=99, kernel="unknown")
    assert modules_of(builder) == {"fa": "a", "acc": None, "unknown": None}


@pytest.mark.parametrize("number", ["ten", 2**63, -(2**64)])
def test_arguments_of_an_unexpected_type_cost_the_module_and_nothing_else(number: object) -> None:
    builder = forward(Builder(), "a", 0, sequence=10, kernel="fa")
    builder.on(BACKWARD)
    builder.op("autograd::engine::evaluate_function: MmBackward0", 100, 20, **{"Sequence number": number})
    builder.launch("b", 105, at=900, dur=1)
    assert modules_of(builder) == {"fa": "a", "b": None}


def test_lightnings_own_profiler_names_modules_too() -> None:
    builder = Builder().range("[pl][module]torch.nn.modules.linear.Linear: net.0", 0, 50)
    assert modules_of(builder.launch("k", 10, at=100, dur=1)) == {"k": "net.0"}


def test_without_ranges_modules_come_from_python_frames_numbered_within_their_parent() -> None:
    # GIVEN a model of two blocks with two linear layers each, which the profiler numbers 0 to 3
    builder = Builder().python("nn.Module: GPT_0", 0, 1000)
    for block in range(2):
        start = 10 + 100 * block
        builder.python(f"nn.Module: Block_{block}", start, 90)
        for linear in range(2):
            at = start + 5 + 40 * linear
            builder.python(f"nn.Module: Linear_{2 * block + linear}", at, 30)
            builder.python("torch/nn/functional.py(10): linear", at + 1, 20)
            builder.launch(f"k{block}{linear}", at + 5, at=2000 + at, dur=1)
    assert modules_of(builder) == {
        "k00": "GPT.Block[0].Linear[0]",
        "k01": "GPT.Block[0].Linear[1]",
        "k10": "GPT.Block[1].Linear[0]",
        "k11": "GPT.Block[1].Linear[1]",
    }


def test_a_second_call_of_a_frame_is_the_same_module() -> None:
    builder = Builder()
    for ts in (0, 100):
        builder.python("nn.Module: Linear_7", ts, 50).launch(f"k{ts}", ts + 10, at=1000 + ts, dur=1)
    assert modules_of(builder) == {"k0": "Linear", "k100": "Linear"}


def test_frames_nested_without_end_have_paths_of_bounded_length() -> None:
    # GIVEN three thousand frames, one in the other
    builder = Builder()
    for i in range(3000):
        builder.python(f"nn.Module: Layer{i}_0", i, 9000 - 2 * i)
    builder.launch("innermost", 3500, at=20_000, dur=1)
    # THEN what lies below the last level that is told apart belongs to that level
    (path,) = modules_of(builder).values()
    assert path is not None
    assert path.split(".") == [f"Layer{i}" for i in range(64)]
    assert sum(map(len, builder.join().modules)) < 100_000


def test_thousands_of_threads_do_not_multiply_the_time_of_their_backward() -> None:
    # GIVEN as many forward threads as operators, and backward ones that claim each of them
    builder, n = Builder(), 4000
    forward(builder, "a", 0, sequence=0, kernel="fa")
    for i in range(n):
        builder.on(10 + i).op("aten::mul", 100 + i, 0.5, sequence=i)
        builder.op("MulBackward0", 90_000 + i, 0.5, sequence=i, forward_thread=1 + i)
        builder.launch("b", 90_000.2 + i, at=200_000 + i, dur=1)
    begun = time.process_time()
    builder.join()
    assert time.process_time() - begun < 5


def test_a_trace_without_modules_names_none() -> None:
    assert modules_of(Builder().op("aten::mm", 0, 10).launch("k", 5, at=20, dur=1)) == {"k": None}
