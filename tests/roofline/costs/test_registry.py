"""The registry: names, patterns, splitting, and what it promises about bad input."""

import subprocess
import sys

import pytest

from advisor.roofline.costs import Cost, Launch, OpCall, cost, family, knows, launch_costs, op_cost
from advisor.roofline.costs.registry import assign, split
from tests.roofline.costs.calls import BF16, FP32, call


def test_registering_a_name_twice_is_an_error():
    with pytest.raises(ValueError, match="aten::mm already has a cost formula"):
        cost("aten::mm")(lambda call: None)


def test_a_pattern_registered_twice_is_an_error():
    with pytest.raises(ValueError, match="nccl"):
        cost("nccl*")(lambda call: None)


@pytest.mark.parametrize(
    "name", ["aten::mm", "triton_poi_fused_gelu_view_3", "nccl:all_reduce", "c10d::allreduce_"]
)
def test_it_knows_exact_names_and_patterns(name):
    assert knows(name)


@pytest.mark.parametrize(
    "name", ["", "aten::", "mylib::mm", "aten::mm2", "autograd::engine::evaluate_function: MmBackward0"]
)
def test_it_does_not_know_what_nobody_registered(name):
    assert not knows(name)


def test_an_unknown_operator_has_no_cost_and_raises_nothing():
    unknown = call("mylib::fancy", ((4, 4), FP32), kernels=["k1", "k2"])
    assert launch_costs(unknown) == (None, None)
    assert op_cost(unknown) is None


def test_every_launch_gets_an_entry_and_copies_are_costed_by_their_bytes():
    # GIVEN a product whose library clears a semaphore first
    product = call(
        "aten::mm",
        ((64, 32), BF16),
        ((32, 16), BF16),
        kernels=[Launch("Memset (Device)", None, 4), "nvjet_tst_1"],
    )
    # WHEN it is costed
    memset, gemm = launch_costs(product)
    # THEN the memset writes its bytes and the kernel has all the FLOPs
    assert memset == Cost(0.0, 0.0, 4.0, "none")
    assert gemm.flops == 2 * 64 * 32 * 16


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [
        ("Memcpy HtoD (Pinned -> Device)", 0, 100),
        ("Memcpy DtoH (Device -> Pageable)", 100, 0),
        ("Memcpy DtoD (Device -> Device)", 100, 100),
        ("Memset (Device)", 0, 100),
    ],
)
def test_a_transfer_counts_what_it_does_to_this_devices_memory(name, read, written):
    (found,) = launch_costs(OpCall("no op", launches=(Launch(name, None, 100),)))
    assert (found.bytes_read, found.bytes_written, found.flops) == (read, written, 0)


def test_a_copy_without_stated_bytes_takes_them_from_its_operator():
    copy = call("aten::copy_", ((5, 128), FP32), ((5, 128), FP32), kernels=["Memcpy HtoD (Host -> Device)"])
    assert launch_costs(copy)[0] == Cost(0.0, 0.0, 5 * 128 * 4.0, "none")


def test_a_memset_without_stated_bytes_is_unknown():
    assert launch_costs(call("aten::sum", ((4,), FP32), kernels=["Memset (Device)"])) == (None,)


def test_a_shared_cost_adds_up_and_follows_the_thread_blocks():
    whole = Cost(100.0, 10.0, 20.0)
    parts = split(whole, [Launch("a", 1), Launch("b", 3)])
    assert [part.flops for part in parts] == [25.0, 75.0]
    assert sum(part.bytes_read for part in parts) == 10.0
    assert sum(part.bytes_written for part in parts) == 20.0


def test_among_shared_kernels_only_matrix_kernels_get_the_flops():
    parts = split(Cost(100.0, 10.0, 10.0, "tensor_bf16"), [Launch("nvjet_tst", 1), Launch("add_bias", 1)])
    assert [(part.flops, part.pipe) for part in parts] == [(100.0, "tensor_bf16"), (0.0, "none")]


def test_a_part_is_given_to_each_kernel_that_its_pattern_finds():
    pair = OpCall("x", launches=(Launch("Radix1"), Launch("main"), Launch("radix2")))
    one_pass, main = Cost(0.0, 1.0, 1.0), Cost(5.0, 9.0, 9.0)
    assert assign(pair, main, ("radix", one_pass)) == (one_pass, main, one_pass)


@pytest.mark.parametrize(
    ("op", "kernel", "label"),
    [
        ("aten::mm", "nvjet_tst", "matmul"),
        ("aten::native_layer_norm", "vectorized_layer_norm_kernel", "norm"),
        ("aten::copy_", "Memcpy DtoD (Device -> Device)", "memory"),
        ("record_param_comms", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", "communication"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0", "compiled"),
        ("", "sm90_xmma_dgrad_implicit_gemm_f16f16", "convolution"),
        ("", "Cijk_Ailk_Bljk_SB_MT64x64x16", "matmul"),
        ("advisor_kernels::cross_entropy", "_cross_entropy_rows", "loss"),
        ("advisor_kernels::attention", "_forward", "attention"),
        ("mylib::x", "unheard_of", "other"),
    ],
)
def test_the_family_comes_from_the_operator_or_else_from_the_kernel(op, kernel, label):
    assert family(op, kernel) == label


def test_loading_the_registry_is_cheap_and_needs_neither_torch_nor_numpy():
    code = (
        "import sys, advisor.roofline.costs as costs; costs.knows('aten::mm'); "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", "False"]
