"""Kernels that run inside autograd functions: sizes from the function's tensors and its partner's."""

from dataclasses import replace

import pytest

from advisor.roofline.costs import Launch, launch_costs, op_cost, partner_of
from tests.roofline.costs.calls import BF16, FP16, FP32, INT64, call

FP8_GEMM = "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize1x1x1_cublas"
X, W = ((4, 32, 64), BF16), ((96, 64), BF16)
ROWS = 4 * 32


def _backward(name, forward, *gradients, kernels=()):
    assert partner_of(name) == forward.name
    return replace(call(name, *gradients, kernels=kernels), partner=forward.inputs)


def test_a_linear_is_a_product_whatever_is_recorded_between_its_tensors():
    plain = op_cost(call("_Linear", W, X, None, "True"))
    cached = op_cost(call("_Linear", W, W, None, X))
    assert plain.flops == cached.flops == 2 * ROWS * 64 * 96
    assert plain.bytes_read == 2 * (ROWS * 64 + 96 * 64)


def test_an_fp8_kernel_reads_a_byte_an_element_on_its_own_pipe():
    (found,) = launch_costs(call("_Linear", W, X, kernels=[Launch(FP8_GEMM, 100)]))
    assert (found.pipe, found.bytes_read, found.bytes_written) == (
        "tensor_fp8", ROWS * 64 + 96 * 64, 2 * ROWS * 96,
    )  # fmt: skip


def test_a_linears_gradients_are_the_inputs_and_then_the_weights():
    kernels = ["transformer_engine::cast_transpose_fused_kernel", "nvjet_tst_64x8_a", "nvjet_tst_64x8_b"]
    cast, data, weight = launch_costs(
        _backward("_LinearBackward", call("_Linear", W, X), ((4, 32, 96), BF16), kernels=kernels)
    )
    assert (cast.bytes_read, cast.bytes_written) == (2 * ROWS * 96, 2 * ROWS * 96)
    assert data.flops - data.flops_padding == weight.flops - weight.flops_padding == 2 * ROWS * 64 * 96
    assert data.bytes_written == 2 * ROWS * 64
    assert weight.bytes_written == 2 * 96 * 64


def test_a_kernel_too_few_leaves_it_open_which_gradient_it_is():
    backward = _backward(
        "_LinearBackward", call("_Linear", W, X), ((4, 32, 96), BF16), kernels=["nvjet_tst_a"]
    )
    assert launch_costs(backward) == (None,)


def test_an_mlp_behind_a_norm_is_two_products_forward_and_four_backward():
    gated, down = ((192, 64), BF16), ((64, 96), BF16)
    forward = call("_LayerNormMLP", X, ((64,), BF16), ((64,), BF16), gated, None, down, None)
    flops = 2 * ROWS * 64 * (192 + 96)
    assert op_cost(forward).flops == flops
    assert op_cost(_backward("_LayerNormMLPBackward", forward, X)).flops == 2 * flops
    kernels = ["rmsnorm_fwd_tuned_kernel", "nvjet_tst_a", "gated_act_kernel", "nvjet_tst_b", "unheard_of"]
    norm, _, activation, _, other = launch_costs(replace(forward, launches=tuple(map(Launch, kernels))))
    assert norm.bytes_read == 2 * ROWS * 64
    assert (activation.bytes_read, activation.bytes_written) == (2 * ROWS * 192, 2 * ROWS * 96)
    assert other is None


@pytest.mark.parametrize("name", ["FusedLayerNormAffineFunction", "LigerLayerNormFunction", "LayerNormFn"])
def test_a_norms_gradient_reads_the_input_of_its_forward_call(name):
    x, weight = ((128, 64), FP16), ((64,), FP32)
    found = op_cost(_backward(f"{name}Backward", call(name, x, weight, weight), x))
    assert (found.bytes_read, found.bytes_written) == (2 * 2 * 128 * 64 + 4 * 64, 2 * 128 * 64 + 2 * 4 * 64)
    assert op_cost(call(f"{name}Backward", x)) is None


def test_apexs_kernel_for_the_weight_reads_both_again():
    x, weight = ((128, 64), FP16), ((64,), FP32)
    forward = call("FusedLayerNormAffineFunction", x, weight, weight)
    kernels = ["void cuComputePartGradGammaBeta<Half>", "void cuComputeGradInput<Half>"]
    part, data = launch_costs(_backward("FusedLayerNormAffineFunctionBackward", forward, x, kernels=kernels))
    assert part.bytes_read == 2 * 2 * 128 * 64
    assert data.bytes_written == 2 * 128 * 64


def test_a_softmax_under_a_triangle_reads_half():
    full = op_cost(call("ScaledSoftmax", ((8, 64, 64), FP16)))
    half = op_cost(call("ScaledUpperTriangMaskedSoftmax", ((8, 64, 64), FP16)))
    assert half.bytes_read / full.bytes_read == 65 / 128
    assert half.bytes_written == full.bytes_written


def test_ligers_chunks_share_the_logits():
    kernels = ["liger_cross_entropy_kernel"] * 4
    found = launch_costs(
        call("LigerFusedLinearCrossEntropyFunction", ((256, 64), BF16), ((1000, 64), BF16), kernels=kernels)
    )
    assert sum(one.bytes_read for one in found) == 2 * 256 * 1000


def test_flash_attns_loss_knows_the_logits_again_in_its_backward():
    forward = call("CrossEntropyLoss", ((16, 100), BF16), ((16,), INT64))
    found = op_cost(_backward("CrossEntropyLossBackward", forward, ((16,), FP32)))
    assert found.bytes_written == 2 * 16 * 100


def test_a_packed_qkv_turns_two_of_three():
    tables = ((32, 8), BF16)
    found = op_cost(call("ApplyRotaryEmbQKV_", ((2, 32, 3, 4, 16), BF16), tables, tables))
    assert found.bytes_written == pytest.approx(2 * 2 * 32 * 2 * 4 * 16)
