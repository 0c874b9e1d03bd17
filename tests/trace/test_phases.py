"""Forward, backward, optimizer and the rest, stated or inferred."""

from __future__ import annotations

import pytest

from advisor.trace.phases import PHASES, is_backward, is_collective
from tests.trace.builder import BACKWARD, MAIN, Builder

ENGINE = "autograd::engine::evaluate_function: MmBackward0"


def phases_of(builder: Builder) -> dict[str, str]:
    """Phase of each launch by its name."""
    timeline = builder.join()
    names = [timeline.trace.names[i] for i in timeline.launches.name.tolist()]
    return dict(zip(names, [PHASES[i] for i in timeline.launches.phase.tolist()], strict=True))


def launches(builder: Builder, *named_at: tuple[str, float]) -> Builder:
    for name, ts in named_at:
        builder.launch(name, ts, at=ts + 1000, dur=1)
    return builder


def test_our_own_ranges_decide_on_every_thread() -> None:
    builder = Builder().step(1, 0, 400)
    for i, phase in enumerate(("input", "forward", "backward", "optimizer", "logging")):
        builder.range(f"advisor::phase::{phase}", 50 * i, 40)
    launches(builder, ("i", 10), ("f", 60), ("o", 160), ("l", 210), ("between", 245))
    launches(builder.on(BACKWARD), ("b", 110))
    assert phases_of(builder) == {
        "i": "input", "f": "forward", "b": "backward", "o": "optimizer", "l": "logging", "between": "forward",
    }  # fmt: skip


def test_a_range_inside_another_decides() -> None:
    builder = Builder().range("advisor::phase::forward", 0, 100).range("advisor::phase::loss", 50, 20)
    assert phases_of(launches(builder, ("f", 10), ("l", 55), ("f2", 80))) == {
        "f": "forward", "l": "loss", "f2": "forward",
    }  # fmt: skip


def test_a_range_of_another_thread_does_not_decide_over_the_threads_own() -> None:
    # GIVEN a thread that validates beside the loop's, over the end of its forward
    builder = Builder().on(MAIN).range("forward", 0, 100).on(7).range("validation", 50, 100)
    launches(builder.on(MAIN), ("f", 60))
    launches(builder.on(7), ("v", 70))
    assert phases_of(builder) == {"f": "forward", "v": "validation"}


def test_a_phase_of_a_later_version_is_other_not_a_crash() -> None:
    builder = Builder().range("advisor::phase::dreaming", 0, 100)
    assert phases_of(launches(builder, ("k", 10))) == {"k": "other"}


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("## forward ##", "forward"),
        ("## Backward ##", "backward"),
        ("optimizer_step", "optimizer"),
        ("train_loss", "loss"),
        ("[pl][profile][Strategy]DDPStrategy.training_step", "forward"),
        ("[pl][profile][Strategy]SingleDeviceStrategy.backward", "backward"),
        ("[pl][profile][Strategy]SingleDeviceStrategy.batch_to_device", "input"),
        ("[pl][profile][_TrainingEpochLoop].train_dataloader_next", "input"),
        ("[pl][profile][LightningModule]Net.configure_gradient_clipping", "optimizer"),
        ("[pl][profile][Strategy]SingleDeviceStrategy.validation_step", "validation"),
    ],
)
def test_ranges_of_users_and_of_lightnings_profiler_are_understood(name, phase) -> None:
    # GIVEN the range, and something that would otherwise be called backward inside it
    inner = Builder().step(1, 0, 100).range(name, 10, 50).op(ENGINE, 5, 90)
    assert phases_of(launches(inner, ("k", 20))) == {"k": phase}


@pytest.mark.parametrize(
    "name", ["forward_hook_of_mine", "backwards", "[pl][profile][LightningModule]Net.optimizer_step"]
)
def test_ranges_that_only_look_alike_state_nothing(name) -> None:
    builder = Builder().step(1, 0, 100).range(name, 10, 50).op(ENGINE, 5, 90)
    assert phases_of(launches(builder, ("k", 20))) == {"k": "backward"}


def test_inferred_phases_of_a_plain_loop() -> None:
    # GIVEN forward and loss, backward on a thread of its own, clipping and the optimizer
    builder = (
        Builder()
        .step(1, 0, 1000)
        .range("enumerate(DataLoader)#_Iter.__next__", 0, 20)
        .op("aten::cross_entropy_loss", 150, 30)
        .range("Optimizer.step#Adam.step", 600, 100)
        .range("Optimizer.zero_grad#Adam.zero_grad", 800, 20)
    )
    launches(
        builder, ("fetch", 5), ("forward", 100), ("loss", 160), ("clip", 550), ("adam", 650), ("zero", 805)
    )
    builder.on(BACKWARD).op(ENGINE, 200, 100).op(ENGINE, 320, 80)
    launches(builder, ("grad", 250), ("between", 310))
    assert phases_of(builder) == {
        "fetch": "input", "forward": "forward", "loss": "loss", "grad": "backward", "between": "backward",
        "clip": "other", "adam": "optimizer", "zero": "optimizer",
    }  # fmt: skip


def test_an_optimizers_range_that_holds_the_closure_is_optimizer_only_after_backward() -> None:
    # GIVEN Lightning's order: everything inside Optimizer.step
    builder = (
        Builder()
        .step(1, 0, 1000)
        .range("Optimizer.step#AdamW.step", 10, 900)
        .range("Optimizer.zero_grad#AdamW.zero_grad", 200, 20)
    )
    launches(builder, ("forward", 100), ("zero", 210), ("adam", 700))
    builder.on(BACKWARD).op(ENGINE, 300, 200)
    launches(builder, ("grad", 350))
    assert phases_of(builder) == {
        "forward": "forward", "zero": "optimizer", "grad": "backward", "adam": "optimizer",
    }  # fmt: skip


def test_two_forward_and_backward_rounds_in_one_step_are_told_apart() -> None:
    # GIVEN a GAN: generator's round and optimizer, then discriminator's
    builder = Builder().step(1, 0, 1000)
    builder.range("Optimizer.step#Adam.step", 300, 50).range("Optimizer.step#Adam.step", 800, 50)
    launches(builder, ("f1", 50), ("o1", 310), ("f2", 450), ("o2", 810))
    builder.on(BACKWARD).op(ENGINE, 100, 100).op(ENGINE, 600, 100)
    launches(builder, ("b1", 150), ("b2", 650))
    assert phases_of(builder) == {
        "f1": "forward", "b1": "backward", "o1": "optimizer",
        "f2": "forward", "b2": "backward", "o2": "optimizer",
    }  # fmt: skip


def test_backward_without_engine_ranges_is_told_by_the_nodes_names() -> None:
    # GIVEN a trace of an old profiler
    builder = Builder().op("AddmmBackward", 0, 50, cat="Operator").op("aten::mm", 10, 20, cat="Operator")
    builder.op("torch::autograd::AccumulateGrad", 60, 10, cat="Operator")
    assert phases_of(launches(builder, ("mm", 15), ("accumulate", 65))) == {
        "mm": "backward", "accumulate": "backward",
    }  # fmt: skip


def test_fused_and_foreach_operators_after_backward_are_the_optimizers_without_its_range() -> None:
    builder = Builder().step(1, 0, 1000).op("aten::_foreach_norm", 10, 10).op("aten::_fused_adamw_", 600, 50)
    launches(builder, ("forward_norm", 15), ("adam", 610))
    launches(builder.on(BACKWARD).op(ENGINE, 200, 100), ("grad", 250))
    assert phases_of(builder) == {"forward_norm": "forward", "grad": "backward", "adam": "optimizer"}


def test_a_fused_optimizer_needs_no_step_marks_to_be_told() -> None:
    # GIVEN two iterations in a trace without any marks
    builder = Builder().op("aten::_fused_adamw_", 300, 20).op("aten::_fused_adamw_", 900, 20)
    launches(builder, ("adam1", 305), ("forward2", 500), ("adam2", 905))
    launches(builder.on(BACKWARD).op(ENGINE, 100, 100).op(ENGINE, 700, 100), ("b1", 150), ("b2", 750))
    assert phases_of(builder) == {
        "b1": "backward", "adam1": "optimizer", "forward2": "forward", "b2": "backward", "adam2": "optimizer",
    }  # fmt: skip


def test_collectives_are_communication_wherever_they_are_launched() -> None:
    builder = Builder().step(1, 0, 400).range("advisor::phase::backward", 100, 100)
    builder.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 150, at=160, dur=5)
    assert set(phases_of(builder).values()) == {"communication"}


def test_copies_to_the_device_are_input_unless_a_range_says_otherwise() -> None:
    builder = Builder().step(1, 0, 400).range("advisor::phase::forward", 100, 100)
    builder.launch("Memcpy HtoD (Pageable -> Device)", 10, at=20, dur=5, cat="gpu_memcpy")
    builder.launch("Memcpy HtoD (Pinned -> Device)", 110, at=120, dur=5, cat="gpu_memcpy")
    builder.launch("Memcpy DtoH (Device -> Pinned)", 20, at=30, dur=5, cat="gpu_memcpy")
    assert phases_of(builder) == {
        "Memcpy HtoD (Pageable -> Device)": "input",
        "Memcpy HtoD (Pinned -> Device)": "forward",
        "Memcpy DtoH (Device -> Pinned)": "forward",
    }


def test_an_orphan_has_no_phase() -> None:
    builder = Builder().range("advisor::phase::forward", 0, 100).work("k", 10, 5, correlation=None)
    assert phases_of(builder) == {"k": "other"}


def test_recomputation_inside_backward_is_backward() -> None:
    builder = Builder().step(1, 0, 400).range("Optimizer.step#SGD.step", 350, 10)
    builder.on(BACKWARD).op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 100, 200)
    builder.op("aten::addmm", 150, 20)
    assert phases_of(launches(builder, ("again", 155))) == {"again": "backward"}


def test_backward_on_the_loops_own_thread_does_not_swallow_the_forward() -> None:
    # GIVEN a CPU run, where the engine works on the calling thread
    builder = Builder(device=None).on(MAIN).step(1, 0, 400)
    builder.op("aten::first", 10, 20).op(ENGINE, 100, 50).op("aten::second", 200, 20).op(ENGINE, 300, 50)
    assert phases_of(builder)["aten::second"] == "forward"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MmBackward0", True),
        ("NativeLayerNormBackward0", True),
        ("torch::autograd::AccumulateGrad", True),
        ("struct torch::autograd::AccumulateGrad", True),
        ("autograd::engine::evaluate_function: X", True),
        ("aten::mm", False),
        ("aten::_log_softmax_backward_data", False),
        ("BackwardLooking", False),
    ],
)
def test_names_of_the_autograd_engine(name, expected) -> None:
    assert is_backward(name) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", True),
        ("void ncclDevKernel_SendRecv()", True),
        ("rcclGenericKernel", True),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", True),
        ("void (anonymous namespace)::multimem_one_shot_reduce_kernel<float, 16, 8>(float*)", True),
        ("void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>()", True),
        ("void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>()", True),
        ("void vllm::cross_device_reduce_1stage<__half, 8>(vllm::RankData*, vllm::RankSignals)", True),
        ("void nvshmemi_reduce_on_stream_kernel<float>()", True),
        ("rocshmem_put_kernel", True),
        ("oneccl_allreduce_pcie", True),
        ("void deep_ep::internode_ll::combine<true>()", True),
        ("my_nccl_free_kernel", False),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>()", False),
        ("triton_poi_fused_add_all_reduce_4", False),
    ],
)
def test_names_of_collectives(name, expected) -> None:
    assert is_collective(name) is expected


def test_kernels_alone_tell_no_phase() -> None:
    assert phases_of(launches(Builder(), ("batch_norm_backward_kernel", 10))) == {
        "batch_norm_backward_kernel": "other"
    }
    # GIVEN operators, of which none is the autograd engine's
    with_operator = Builder().op("aten::mm", 0, 50)
    assert phases_of(launches(with_operator, ("gemm", 10))) == {"gemm": "forward"}
