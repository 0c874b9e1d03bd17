"""Tiles in kernels' names, and the FLOPs that whole tiles execute, as an H200 counted them."""

import pytest

from advisor.roofline.costs.tiles import Tile, convolution_flops, product_padding, tile, whole


@pytest.mark.parametrize(
    ("kernel", "sides"),
    [
        ("nvjet_sm90_tst_192x160_64x4_2x1", (192, 160, 64)),
        ("sm80_xmma_gemm_f32f32_tilesize128x64x8_stage3", (128, 64, 8)),
        ("Cijk_Alik_Bljk_BBS_MT256x32x64_MI16", (256, 32, 64)),
        ("cutlass_80_tensorop_s16816gemm_bf16_128x128_64x5_nt_align8", (128, 128, 64)),
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1", (256, 128, 32)),
        ("cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_128x256x64_2x1x1_0_ntn", (128, 256, 64)),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", (128, 64, 64)),
        ("ampere_sgemm_128x32_nn", (128, 32, 8)),
        ("cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8", (256, 64, 32)),
    ],
)
def test_a_matrix_kernels_name_tells_its_tile(kernel, sides):
    assert tile(kernel) == Tile(*sides)


@pytest.mark.parametrize("kernel", ["mystery", "gemv2T_kernel_val<int, 128, 16>", "nvjet_tst_0x64_64x4"])
def test_a_name_without_a_tile_adds_nothing(kernel):
    assert tile(kernel) is None
    assert product_padding(kernel, 100, 100, 100) == 0


def test_the_least_multiple_that_holds_a_size():
    assert [whole(size, 64) for size in (1, 63, 64, 65)] == [64, 64, 64, 128]


@pytest.mark.parametrize(
    ("kernel", "m", "k", "n", "counted"),
    [
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1", 6001, 1023, 4099, 5.204292403e10),
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x256_nt_align1", 1023, 6001, 4099, 5.204292403e10),
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align1", 6001, 4099, 1023, 5.086e10),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", 8192, 4096, 11008, 7.532e11),
        ("nvjet_sm90_tst_96x384_64x3_1x2_h_bz_coopA_TNN", 393216, 384, 96, 2.899e10),
    ],
)
def test_products_execute_whole_tiles(kernel, m, k, n, counted):
    assert 2 * m * n * k + product_padding(kernel, m, n, k) == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize(
    ("kernel", "positions", "out", "into", "taps", "counted"),
    [
        ("sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize256x64x32", 48 * 64 * 64, 160,
         96, 9, 6.523e10),
        ("sm90_xmma_dgrad_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32", 48 * 64 * 64,
         160, 96, 9, 7.248e10),
        ("sm90_xmma_wgrad_indexed_implicit_gemm_f16f16_f16f32_f32_tilesize256x128x64", 48 * 64 * 64, 160, 96,
         9, 1.16e11),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_tilesize128x128x64", 24 * 1500, 512, 512, 3,
         5.677e10),
        ("sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16_bf16f32_f32_tilesize128x64x64", 24 * 1500, 512, 512,
         3, 5.667e10),
    ],
)  # fmt: skip
def test_convolutions_execute_whole_tiles(kernel, positions, out, into, taps, counted):
    assert convolution_flops(kernel, positions, out, into, taps) == pytest.approx(counted, rel=1e-3)


def test_few_channels_are_packed_across_taps():
    name = "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_tilesize128x64x64"
    assert convolution_flops(name, 1280, 64, 3, 49) == 2 * 1280 * 64 * 3 * 49
