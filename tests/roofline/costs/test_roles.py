"""Kernel names of NVIDIA's, AMD's and PyTorch's libraries."""

import pytest

from advisor.roofline.costs import roles

TF32, NO_TF32 = {"allow_tf32_matmul": True}, {"allow_tf32_matmul": False}


@pytest.mark.parametrize(
    ("kernel", "role"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(...)", "gemm"),
        ("ampere_sgemm_128x64_nn", "gemm"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x32x64_MI16x16x1_SN_", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)", "sum_partials"),
        ("sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolution"),
        ("sm90_xmma_dgrad_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x32", "dgrad"),
        (
            "sm90_xmma_wgrad_indexed_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_execute_segment_k_on",
            "wgrad",
        ),
        ("sm90_xmma_wgrad_indexed_implicit_gemm_f16f16_f16f32_f32_execute_split_k_kernel", "sum_partials"),
        (
            "void cask_plugin__5x_cudnn::xmma__5x_cudnn::init_device_workspace_kernel<...wgrad_indexed>",
            "workspace",
        ),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float>", "layout"),
        ("batched_transpose_16x64_pack_1x4_ediv_1x2_half", "layout"),
        ("igemm_wrw_gtcx2_nhwc_bf16_bx0_ex1_bt256x128x16", "wgrad"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64", "attention"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64",
            "attention_backward",
        ),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(...)", "attention_delta"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(...)", "attention_convert"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention_backward"),
        ("bwd_kernel_dk_dv.kd", "attention_dkdv"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<...>", "sort"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<float>>", "elementwise"),
        ("who_knows", "other"),
    ],
)
def test_a_kernels_role_is_in_its_name(kernel, role):
    assert roles.role(kernel) == role


@pytest.mark.parametrize(
    ("kernel", "dtype", "settings", "pipe"),
    [
        ("nvjet_sm90_tst_256x128_64x4", "bf16", {}, "tensor_bf16"),
        ("nvjet_sm90_hsh_416x64_64x2", "fp16", {}, "tensor_fp16"),
        ("nvjet_sm90_sss_128x128", "fp32", {}, "tensor_tf32"),
        ("nvjet_sm100_qqtst_128x128", "fp8", {}, "tensor_fp8"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x64x8_stage3_ffma", "fp32", TF32, "vector_fp32"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x64x8", "fp32", {}, "tensor_tf32"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>", "fp32", TF32, "vector_fp32"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn>", "fp32", {}, "tensor_tf32"),
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn", "bf16", {}, "tensor_bf16"),
        ("volta_sgemm_64x64_nt", "fp32", {}, "vector_fp32"),
        ("some_new_gemm", "fp32", TF32, "tensor_tf32"),
        ("some_new_gemm", "fp32", NO_TF32, "vector_fp32"),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16", "fp32", TF32, "vector_fp32"),
        ("gemv2T_kernel_val<int, c10::BFloat16>", "bf16", {}, "vector_fp32"),
        ("", "fp64", {}, "vector_fp64"),
    ],
)  # fmt: skip
def test_the_pipe_is_the_one_that_the_kernel_used(kernel, dtype, settings, pipe):
    assert roles.matrix_pipe(kernel, dtype, settings) == pipe


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("CatArrayBatchedCopy_vectorized<at::native::OpaqueType<2u>, unsigned int>", "fp16"),
        (
            "multi_tensor_apply_kernel<ScalarListMetadata<float, 1>, BinaryOpFunctor<c10::BFloat16, 1>",
            "bf16",
        ),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", "bf16"),
        ("nothing_here", "unknown"),
    ],
)
def test_a_kernels_template_arguments_tell_the_element_type(kernel, dtype):
    assert roles.element_dtype(kernel) == dtype
