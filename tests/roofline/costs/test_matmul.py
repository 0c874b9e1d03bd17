"""Matrix products: FLOPs against PyTorch's own counter, bytes by hand, kernels by role."""

import pytest

from advisor.roofline.costs import Launch, launch_costs, op_cost
from tests.roofline.costs.calls import BF16, FP16, FP32, H200, call


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
    assert gemm.flops - gemm.flops_padding == 2 * 64 * 4096 * 16
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


#: Kernel, blocks, m, k, n, dtype, bytes read by an H200 (Nsight Compute).
COUNTED = [
    ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NNN", 132, 12288, 1536, 6144, BF16, 137.2e6),
    ("nvjet_sm90_hsh_192x192_64x4_2x1_v_bz_coopB_TNN", 132, 12288, 6144, 1536, FP16, 254.8e6),
    ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN", 132, 393216, 96, 384, BF16, 75.6e6),
    ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1", 132, 6144, 3072, 1024,
     FP32, 119.1e6),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_ffma", 576, 6144, 1024, 3072, FP32,
     134.0e6),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_ffma", 1920, 6144, 3072, 1024, FP32,
     699.8e6),
    ("cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>", 512, 1024, 6144, 3072, FP32, 153.2e6),
    ("sm90_xmma_gemm_f64f64_f64f64_f64_nn_n_tilesize128x64x16_stage3", 512, 2048, 4096, 2048, "double",
     336.5e6),
    ("sm80_xmma_gemm_cf32cf32_f32f32_cf32_nn_n_tilesize64x64x8_stage3", 2304, 1536, 2048, 1536,
     "c10::complex<float>", 97.4e6),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "blocks", "m", "k", "n", "dtype", "counted"), COUNTED)
def test_reads_of_every_library_are_near_those_counted(kernel, blocks, m, k, n, dtype, counted):
    (found,) = launch_costs(
        call("aten::mm", ((m, k), dtype), ((k, n), dtype), kernels=[Launch(kernel, blocks)], settings=H200)
    )
    assert found.bytes_read == pytest.approx(counted, rel=0.2)


def test_operands_that_stay_in_the_cache_are_fetched_once():
    kernel = Launch("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 132)
    (found,) = launch_costs(
        call("aten::mm", ((2048, 2048), BF16), ((2048, 2048), BF16), kernels=[kernel], settings=H200)
    )
    assert found.bytes_reread == 0


def test_the_sum_of_a_split_reads_each_partial_result():
    # GIVEN 176 blocks for 3 tiles in a strip of 4: 44 slices of k, of which an H200 read 6.5 MB
    kernels = [
        Launch("cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_128x128_64x5_nt_align8>", 176),
        Launch("cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>", 72),
    ]
    product = call("aten::mm", ((96, 393216), BF16), ((393216, 384), BF16), kernels=kernels)
    _, partial_sum = launch_costs(product)
    assert partial_sum.bytes_read == 44 * 96 * 384 * 4


def test_whole_tiles_are_executed_and_what_they_add_is_padding():
    # GIVEN 96 channels in steps of 64: an H200 executed 3.865e10 FLOPs on its tensor cores
    kernel = Launch("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN", 132)
    (found,) = launch_costs(call("aten::mm", ((393216, 96), BF16), ((96, 384), BF16), kernels=[kernel]))
    assert found.flops == 2 * 393216 * 128 * 384
    assert found.flops - found.flops_padding == 2 * 393216 * 96 * 384
