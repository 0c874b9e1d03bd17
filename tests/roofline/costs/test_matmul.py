"""Matrix products: FLOPs against PyTorch's own counter, bytes by hand, kernels by role."""

import pytest

from advisor.roofline.costs import Launch, launch_costs, op_cost
from tests.roofline.costs.calls import BF16, FP32, H200, call


def _torch_flops(name, *shapes):
    counter = pytest.importorskip("torch.utils.flop_counter")
    torch = pytest.importorskip("torch")
    return counter.flop_registry[getattr(torch.ops.aten, name)](
        *(torch.empty(s, device="meta") for s in shapes), out_val=None
    )


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("mm", [(64, 32), (32, 16)]),
        ("addmm", [(16,), (64, 32), (32, 16)]),
        ("bmm", [(5, 64, 32), (5, 32, 16)]),
        ("baddbmm", [(5, 64, 16), (5, 64, 32), (5, 32, 16)]),
    ],
)
def test_flops_agree_with_pytorchs_counter(name, shapes):
    found = op_cost(call(f"aten::{name}", *((shape, BF16) for shape in shapes)))
    assert found.flops == _torch_flops(name, *shapes)
    assert found.pipe == "tensor_bf16"


def test_a_product_reads_its_operands_and_bias_once_and_writes_its_result():
    found = op_cost(call("aten::addmm", ((16,), BF16), ((64, 32), BF16), ((32, 16), BF16)))
    assert found.bytes_read == 2 * (16 + 64 * 32 + 32 * 16)
    assert found.bytes_written == 2 * 64 * 16


def test_linear_and_matmul_fold_leading_dimensions():
    linear = op_cost(call("aten::linear", ((4, 8, 32), FP32), ((16, 32), FP32)))
    matmul = op_cost(call("aten::matmul", ((4, 8, 32), FP32), ((32, 16), FP32)))
    assert linear.flops == matmul.flops == 2 * 4 * 8 * 32 * 16


def test_a_bmm_with_an_expanded_batch_reads_the_shared_matrix_once():
    found = op_cost(call("aten::bmm", ((5, 64, 32), BF16), ((5, 32, 16), BF16, [0, 16, 1])))
    assert found.bytes_read == 2 * (5 * 64 * 32 + 32 * 16)


def test_grouped_mm_counts_each_row_in_one_group():
    found = op_cost(call("aten::_grouped_mm", ((100, 32), BF16), ((4, 32, 16), BF16)))
    assert found.flops == 2 * 100 * 32 * 16


def test_a_complex_product_takes_four_real_ones():
    found = op_cost(call("aten::mm", ((8, 8), "c10::complex<float>"), ((8, 8), "c10::complex<float>")))
    assert found.flops == 4 * 2 * 8**3


def test_the_split_k_sum_has_no_product_of_its_own():
    product = call(
        "aten::mm",
        ((64, 4096), BF16),
        ((4096, 16), BF16),
        kernels=["nvjet_tst_64x64", "splitKreduce_kernel<32>"],
    )
    gemm, partial_sum = launch_costs(product)
    assert gemm.flops == 2 * 64 * 4096 * 16
    assert partial_sum.flops == 64 * 16
    assert partial_sum.pipe == "vector_fp32"


@pytest.mark.parametrize(
    "shapes", [((64, 32), (31, 16)), ((64,), (64, 16)), ((64, 32), (32,)), ((0, 32), (32, 16))]
)
def test_operands_that_do_not_fit_have_no_cost(shapes):
    assert op_cost(call("aten::mm", *((shape, BF16) for shape in shapes))) is None


def test_operands_larger_than_the_cache_are_fetched_again_by_each_wave():
    # GIVEN the sizes of a product whose reads an H200 counted: 294 MB, where A and B are 101 MB
    kernel = Launch("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 132)
    shapes = ((8192, 4096), BF16), ((4096, 4096), BF16)
    # WHEN the device's sizes are known, and when they are not
    (known,) = launch_costs(call("aten::mm", *shapes, kernels=[kernel], settings=H200))
    (unknown,) = launch_costs(call("aten::mm", *shapes, kernels=[kernel]))
    # THEN the re-reads are modelled in the first case only, and told apart from compulsory bytes
    assert known.bytes_read == pytest.approx(294e6, rel=0.2)
    assert known.bytes_read - known.bytes_reread == pytest.approx(unknown.bytes_read)
    assert unknown.bytes_read == 2 * (8192 * 4096 + 4096 * 4096)


def test_an_operand_that_stays_in_the_cache_is_fetched_once():
    kernel = Launch("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 132)
    (found,) = launch_costs(
        call("aten::mm", ((50257, 8192), BF16), ((8192, 768), BF16), kernels=[kernel], settings=H200)
    )
    assert found.bytes_reread == 0
