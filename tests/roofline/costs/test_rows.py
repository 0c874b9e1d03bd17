"""Softmax and normalisation: operators that visit rows or channels, some of them twice."""

import pytest

from advisor.roofline.costs import Launch, OpCall, Tensor, launch_costs, op_cost
from tests.roofline.costs.calls import BF16, FP32, H200, call

BIG, N = (8192, 4096), 8192 * 4096
LOGITS, L = (4096, 50257), 4096 * 50257
SINGLE_BLOCK = "void at::native::cunn_SoftMaxForward<4, float, float, float, LogSoftMaxForwardEpilogue>"


def test_softmax_reads_and_writes_once():
    found = op_cost(call("aten::_softmax", (BIG, BF16), "-1", "False"))
    assert (found.bytes_read, found.bytes_written) == (2 * N, 2 * N)


def test_softmax_to_float_writes_fp32():
    assert op_cost(call("aten::_log_softmax", (BIG, BF16), "1", "True")).bytes_written == 4 * N


def test_rows_too_large_for_the_cache_are_visited_again():
    # An H200 read 2110 MB of these 823 MB.
    (found,) = launch_costs(
        call("aten::_log_softmax", (LOGITS, FP32), "1", "False", kernels=[SINGLE_BLOCK], settings=H200)
    )
    assert found.bytes_read == pytest.approx(2110e6, rel=0.1)
    assert found.bytes_read - found.bytes_reread == 4 * L


def test_rows_that_fit_are_not_visited_again():
    (found,) = launch_costs(
        call("aten::_softmax", (BIG, BF16), "-1", "False", kernels=[SINGLE_BLOCK], settings=H200)
    )
    assert found.bytes_reread == 0


def test_softmax_backward_reads_the_large_gradient_twice():
    # An H200 read 2393 MB of these 1647 MB.
    kernel = SINGLE_BLOCK.replace("Forward<", "Backward<")
    back = call(
        "aten::_log_softmax_backward_data",
        (LOGITS, FP32),
        (LOGITS, FP32),
        "1",
        "6",
        kernels=[kernel],
        settings=H200,
    )
    assert launch_costs(back)[0].bytes_read == pytest.approx(2393e6, rel=0.1)


def test_softmax_backward_writes_the_inputs_dtype():
    back = call("aten::_softmax_backward_data", (BIG, FP32), (BIG, FP32), "-1", "15")
    assert op_cost(back).bytes_written == 2 * N


def test_softmax_of_a_missing_dimension_has_no_cost():
    assert op_cost(call("aten::_softmax", (BIG, BF16), "2", "False")) is None


def test_layer_norm_writes_its_statistics():
    found = op_cost(
        call("aten::native_layer_norm", (BIG, BF16), "[4096]", ((4096,), BF16), ((4096,), BF16), "1e-5")
    )
    assert found.bytes_read == 2 * N + 2 * 2 * 4096
    assert found.bytes_written == 2 * N + 2 * 4 * 8192


def test_layer_norm_backward_reads_gradient_and_input_in_each_of_its_two_kernels():
    stat, weight = ((8192, 1), FP32), ((4096,), BF16)
    back = call(
        "aten::native_layer_norm_backward",
        (BIG, BF16),
        (BIG, BF16),
        "[4096]",
        stat,
        stat,
        weight,
        weight,
        "[True, True, True]",
        kernels=["layer_norm_grad_input_kernel_vectorized", "GammaBetaBackwardCUDAKernel"],
    )
    of_input, of_weight = launch_costs(back)
    statistics = 2 * 4 * 8192
    assert of_input.bytes_read == 2 * 2 * N + statistics + 2 * 4096
    assert of_input.bytes_written == 2 * N
    assert of_weight.bytes_read == 2 * 2 * N + statistics
    assert of_weight.bytes_written == 2 * 2 * 4096


def test_the_whole_backward_reads_its_inputs_once():
    stat, weight = ((8192, 1), FP32), ((4096,), BF16)
    back = call(
        "aten::native_layer_norm_backward",
        (BIG, BF16),
        (BIG, BF16),
        "[4096]",
        stat,
        stat,
        weight,
        weight,
        "x",
    )
    assert op_cost(back).bytes_read == pytest.approx(2 * 2 * N, rel=0.01)


def test_a_weight_that_spans_no_row_contradicts_the_shape():
    assert (
        op_cost(call("aten::native_layer_norm", (BIG, BF16), "[77]", ((77,), BF16), ((77,), BF16), "1e-5"))
        is None
    )


CHANNELS = [((64,), FP32)] * 4


def _batch_norm(kernel, training="True"):
    x = ((32, 64, 112, 112), FP32)
    rest = (training, "0.1", "1e-5")
    return launch_costs(call("aten::cudnn_batch_norm", x, *CHANNELS, *rest, kernels=[kernel], settings=H200))[
        0
    ]


def test_batch_norm_visits_large_channels_twice_unless_its_kernel_reads_once():
    # An H200 read 205.6 MB of these 102.8 MB with the first kernel.
    x = 4 * 32 * 64 * 112**2
    assert _batch_norm("cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float>").bytes_read == pytest.approx(
        2 * x, rel=0.1
    )
    assert _batch_norm("cudnn::bn_fw_tr_1C11_singleread<float>").bytes_read == pytest.approx(x, rel=0.01)


def test_native_batch_norm_splits_statistics_from_scaling():
    found = launch_costs(
        call(
            "aten::native_batch_norm",
            ((8, 16, 32, 32), FP32),
            *[((16,), FP32)] * 4,
            "True",
            "0.1",
            "1e-5",
            kernels=["batch_norm_collect_statistics_kernel", "batch_norm_transform_input_kernel"],
        )
    )
    statistics, apply = found
    assert statistics.bytes_written < 1000
    assert apply.bytes_written == 4 * 8 * 16 * 32 * 32


def test_without_recorded_values_the_kernels_name_tells_training_from_inference():
    x, channel = Tensor((8, 16, 32, 32), "fp32"), Tensor((16,), "fp32")

    def found(kernel):
        inputs = (x, channel, channel, channel, channel)
        return launch_costs(OpCall("aten::cudnn_batch_norm", inputs, launches=(Launch(kernel),)))[0]

    assert found("cudnn::bn_fw_tr_1C11_singleread").flops > found("cudnn::bn_fw_inf_1C11_kernel_NCHW").flops
    assert found("who_knows") is None


def test_long_rows_of_a_layer_norm_are_fetched_for_both_visits():
    # GIVEN rows of 20 kB, of which an H200 read 222 MB where x has 134; and of 3 kB, read once
    kernel = "at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>"

    def norm(rows, width):
        shapes = ((rows, width), FP32), None, ((width,), FP32), ((width,), FP32)
        (found,) = launch_costs(
            call("aten::native_layer_norm", *shapes, "1e-5", kernels=[kernel], settings=H200)
        )
        return found

    assert norm(6553, 5120).bytes_read == pytest.approx(222e6, rel=0.05)
    assert norm(43690, 768).bytes_reread == 0


def test_unaligned_rows_take_a_kernel_for_moments_that_computes_most():
    # GIVEN rows of 1001: an H200 counted 2.234e9 FLOPs for the moments and 1.342e8 to apply them
    kernels = ["RowwiseMomentsCUDAKernel<float, float, false>", "LayerNormForwardCUDAKernel<float, float>"]
    shapes = ((33520, 1001), FP32), None, ((1001,), FP32), ((1001,), FP32)
    moments, apply = launch_costs(call("aten::native_layer_norm", *shapes, "1e-5", kernels=kernels))
    assert moments.flops == pytest.approx(2.234e9, rel=0.02)
    assert apply.flops == pytest.approx(1.342e8, rel=0.02)
