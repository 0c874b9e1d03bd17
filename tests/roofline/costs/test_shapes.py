"""Operators whose output shape is computed: against PyTorch's own shapes."""

import math

import pytest

from advisor.roofline.costs import launch_costs, op_cost
from advisor.roofline.costs.model import Tensor
from advisor.roofline.costs.reduction import reduced_shape
from tests.roofline.costs.calls import BF16, FP16, FP32, INT64, call

X = (2, 3, 17, 19)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [(2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 2, 1, 1, True), (3, 1, 0, 2, False), (2, 3, 1, 1, True)],
)
def test_max_pooling_agrees_with_pytorch(kernel, stride, padding, dilation, ceil):
    torch = pytest.importorskip("torch")
    y = torch.nn.functional.max_pool2d(torch.empty(X, device="meta"), kernel, stride, padding, dilation, ceil)
    found = op_cost(
        call(
            "aten::max_pool2d_with_indices",
            (X, FP32),
            f"[{kernel}, {kernel}]",
            f"[{stride}, {stride}]",
            f"[{padding}, {padding}]",
            f"[{dilation}, {dilation}]",
            str(ceil),
        )
    )
    assert found.bytes_written == y.numel() * (4 + 8)


def test_average_pooling_agrees_with_pytorch():
    torch = pytest.importorskip("torch")
    y = torch.nn.functional.avg_pool2d(torch.empty(X, device="meta"), 3, 2, 1)
    found = op_cost(call("aten::avg_pool2d", (X, FP32), "[3, 3]", "[2, 2]", "[1, 1]", "False", "True", None))
    assert found.bytes_written == y.numel() * 4


def test_an_absent_pooling_stride_is_the_kernel():
    found = op_cost(
        call(
            "aten::max_pool2d_with_indices", ((1, 1, 8, 8), FP16), "[2, 2]", "[]", "[0, 0]", "[1, 1]", "False"
        )
    )
    assert found.bytes_written == 16 * (2 + 8)


def test_interpolation_writes_the_listed_size():
    found = op_cost(call("aten::upsample_nearest2d", (X, FP16), "[34, 38]", "2.", "2."))
    assert found.bytes_written == 2 * 2 * 3 * 34 * 38


@pytest.mark.parametrize("dims", ["[0, 1]", "-1", "[2]", "[]", ""])
@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 6, 7)])
def test_reduced_shapes_agree_with_pytorch(shape, dims):
    torch = pytest.importorskip("torch")
    listed = [int(dim) for dim in dims.strip("[]").split(",") if dim]
    y = torch.empty(shape, device="meta").sum(listed) if listed else torch.empty(shape, device="meta").sum()
    assert reduced_shape(Tensor(shape, "fp32"), dims) == tuple(y.shape)


def test_a_sum_over_a_missing_dimension_has_no_cost():
    assert op_cost(call("aten::sum", ((4, 4), FP32), "[7]", "False", None)) is None


def test_integer_sums_are_wide_and_positions_too():
    assert op_cost(call("aten::sum", ((4, 8), "int"), "[1]", "False", None)).bytes_written == 4 * 8
    assert op_cost(call("aten::argmax", ((4, 8), BF16), "1", "False")).bytes_written == 4 * 8


def test_max_over_a_dimension_writes_values_and_positions():
    assert op_cost(call("aten::max", ((4, 8), FP32), "1", "False")).bytes_written == 4 * (4 + 8)


def test_max_of_two_tensors_is_elementwise():
    assert op_cost(call("aten::max", ((4, 8), FP32), ((8,), FP32))).bytes_written == 4 * 32


def test_a_scan_writes_as_much_as_it_reads():
    found = op_cost(call("aten::cumsum", ((8192, 4096), BF16), "-1", None))
    assert found.bytes_read == found.bytes_written == 2 * 8192 * 4096


def test_a_real_transform_writes_half_a_spectrum():
    found = op_cost(call("aten::_fft_r2c", ((10, 64), FP32), "[1]", "0", "True"))
    assert found.bytes_written == 10 * 33 * 8
    assert found.flops == 2.5 * 64 * 6 * 10


def test_a_complex_transform_takes_5_n_log_n():
    found = op_cost(call("aten::_fft_c2c", ((10, 64), "c10::complex<float>"), "[1]", "0", "True"))
    assert found.flops == 5 * 64 * math.log2(64) * 10


def test_an_lstm_multiplies_all_gates_at_each_step():
    lstm = call(
        "aten::_cudnn_rnn",
        ((7, 5, 16), FP32),
        [[128, 16], [128, 32]],
        "4",
        None,
        ((1, 5, 32), FP32),
        ((1, 5, 32), FP32),
        "2",
        "32",
        "0",
        "1",
        "False",
        "0.",
        "True",
        "False",
    )
    products = 2 * 7 * 5 * 4 * 32 * (16 + 32)
    assert products < op_cost(lstm).flops < 1.2 * products


def test_random_numbers_are_written_only():
    found = op_cost(call("aten::normal_", ((100,), FP32), "0", "1"))
    assert (found.bytes_read, found.bytes_written) == (0, 400)


def test_a_collective_moves_its_payload():
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    (found,) = launch_costs(call("record_param_comms", [[1000]], None, kernels=[name]))
    assert (found.bytes_read, found.bytes_written, found.flops) == (4000, 4000, 0)


def test_a_collective_without_recorded_payload_has_no_cost():
    assert launch_costs(
        call("record_param_comms", [], None, kernels=["ncclKernel_AllReduce_RING_LL_Sum_float"])
    ) == (None,)


def test_a_fused_kernels_arguments_are_its_bytes():
    found = op_cost(
        call("triton_poi_fused_gelu_view_10", ((8192, 3072), BF16), ((8, 1024, 3072), BF16), "25165824")
    )
    size = 2 * 8192 * 3072
    assert (found.bytes_read, found.bytes_written) == (size, size)
    assert found.flops == 19 * 8192 * 3072  # gelu as its eager kernel, view none


def test_an_operator_whose_gradient_is_named_too_is_part_of_it():
    both = op_cost(call("triton_poi_fused_silu_silu_backward_0", *[((64, 64), BF16)] * 3))
    gradient = op_cost(call("triton_poi_fused_silu_backward_0", *[((64, 64), BF16)] * 3))
    assert both.flops == gradient.flops


def test_a_norms_gradient_that_ends_in_partial_sums_writes_the_one_before_too():
    x = ((1000, 3072), BF16)
    found = op_cost(
        call("triton_per_fused_native_layer_norm_backward_0", x, ((3072,), BF16), x, x, ((38400,), FP32))
    )
    assert found.bytes_read == 2 * 2 * 1000 * 3072 + 2 * 3072
    assert found.bytes_written == 2 * 1000 * 3072 + 4 * 38400


def test_a_fused_lookup_reads_the_rows_picked():
    found = op_cost(
        call(
            "triton_per_fused_embedding_native_layer_norm_1",
            ((8, 1024), INT64),
            ((50257, 768), FP32),
            ((8, 1024, 768), BF16),
            "8192",
        )
    )
    assert found.bytes_read == 8192 * 8 + 8192 * 768 * 4


def test_a_product_template_is_a_product():
    found = op_cost(call("triton_tem_fused_mm_3", ((64, 32), BF16), ((32, 16), BF16), ((64, 16), BF16)))
    assert (found.flops, found.pipe) == (2 * 64 * 32 * 16, "tensor_bf16")
    assert (
        op_cost(call("triton_tem_fused_mm_3", ((64, 32), BF16), ((31, 16), BF16), ((64, 16), BF16))) is None
    )


def test_a_sum_in_a_named_dtype_writes_that_dtype():
    assert op_cost(call("aten::sum", ((4, 8), BF16), "[1]", "False", "6")).bytes_written == 4 * 4


def test_a_named_dtype_that_is_new_to_us_leaves_the_cost_unknown():
    assert op_cost(call("aten::_to_copy", ((4, 8), BF16), "99")) is None
    assert op_cost(call("aten::_to_copy", ((4, 8), BF16), "6")).bytes_written == 4 * 32


def test_a_recurrent_layers_products_are_those_of_cudnns_order():
    # GIVEN an LSTM of 6 steps: an H200 counted 1.288e10 FLOPs for all inputs, 2.147e9 for a step's state
    x, weights, state = ((6, 256, 1024), FP16), [[4096, 1024], [4096, 1024]], ((1, 256, 1024), FP16)
    mode = ("2", "1024", "0", "1", "False", "0.", "True", "False", "[]")
    step = ["nvjet_sm90_hsh_128x64_64x8_1x2_h_bz_NNT", "elemWiseRNNcell<__half>"]
    forward = ["region_transform_ABC_val", "nvjet_sm90_hsh_128x192_64x5_2x1_v_bz_coopB_NNN", *step * 6]
    found = launch_costs(
        call("aten::_cudnn_rnn", x, weights, "4", None, state, state, *mode, None, kernels=forward)
    )
    assert [cost.flops for cost in found if cost.pipe == "tensor_fp16"] == pytest.approx(
        [1.288e10] + [2.147e9] * 6, rel=1e-3
    )
    assert found[0].bytes_read == 2 * 4096 * 1024
    # AND its backward: as many for the steps' states, the input, then weights from 1, 5 and all steps
    back = [
        *["LSTM_elementWise_bp1<__half>", "nvjet_sm90_hsh_64x64_64x13_2x1_v_bz_splitK_NNT"] * 6,
        "nvjet_sm90_hsh_128x96_64x7_1x2_h_bz_NNT",
        "GENERIC_elementWise_bp2<__half>",
        *["nvjet_sm90_hsh_256x128_64x4_1x2_h_badd_coopA_NTT"] * 3,
    ]
    arguments = (x, weights, "4", None, state, state, x, x, None, None, *mode, None)
    found = launch_costs(call("aten::_cudnn_rnn_backward", *arguments, kernels=back))
    # The input's gradient has 1024 columns in tiles of 96 or 128: 1056 along n with this kernel.
    multiplied = [cost.flops for cost in found if cost.pipe == "tensor_fp16"]
    assert multiplied[:6] == pytest.approx([2.147e9] * 6, rel=1e-3)
    assert multiplied[7:] == pytest.approx([2.147e9, 1.074e10, 1.288e10], rel=1e-3)
