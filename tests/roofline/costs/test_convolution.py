"""Convolutions: sizes and FLOPs against PyTorch, gradients and layout kernels by role."""

import dataclasses

import pytest

from advisor.roofline.costs import Launch, Tensor, launch_costs, op_cost
from tests.roofline.costs.calls import BF16, FP16, FP32, H200, call


def _forward(x, w, *, stride, padding, dilation, transposed=False, extra="[0, 0]", groups=1, **kwargs):
    return call(
        "aten::convolution",
        (x, FP32),
        (w, FP32),
        None,
        stride,
        padding,
        dilation,
        str(transposed),
        extra,
        str(groups),
        **kwargs,
    )


@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((2, 8, 17, 19), (16, 8, 3, 3), {"stride": 1, "padding": 1}),
        ((2, 8, 17, 19), (16, 8, 3, 3), {"stride": 2, "padding": 0, "dilation": 2}),
        ((2, 8, 17, 19), (16, 4, 3, 3), {"groups": 2}),
        ((2, 8, 17, 19), (8, 1, 5, 5), {"groups": 8, "padding": 2}),
        ((2, 8, 30), (16, 8, 3), {"stride": 3}),
        ((2, 4, 6, 7, 8), (5, 4, 2, 2, 2), {}),
    ],
)
def test_forward_agrees_with_pytorch(x, w, options):
    torch = pytest.importorskip("torch")
    counter = pytest.importorskip("torch.utils.flop_counter")
    rank = len(x) - 2
    functional = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[
        rank - 1
    ]
    with counter.FlopCounterMode(display=False) as counted:
        y = functional(torch.empty(x, device="meta"), torch.empty(w, device="meta"), **options)
    text = {
        key: str([options.get(key, default)] * rank)
        for key, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    found = op_cost(_forward(x, w, groups=options.get("groups", 1), **text))
    assert found.flops == counted.get_total_flops()
    assert found.bytes_written == y.numel() * 4


def test_a_transposed_convolution_agrees_with_pytorch():
    torch = pytest.importorskip("torch")
    counter = pytest.importorskip("torch.utils.flop_counter")
    with counter.FlopCounterMode(display=False) as counted:
        y = torch.nn.functional.conv_transpose2d(
            torch.empty((2, 8, 9, 9), device="meta"),
            torch.empty((8, 4, 3, 3), device="meta"),
            stride=2,
            output_padding=1,
        )
    found = op_cost(
        _forward(
            (2, 8, 9, 9),
            (8, 4, 3, 3),
            stride="[2, 2]",
            padding="[0, 0]",
            dilation="[1, 1]",
            transposed=True,
            extra="[1, 1]",
        )
    )
    assert found.flops == counted.get_total_flops()
    assert found.bytes_written == y.numel() * 4


def test_a_strided_pointwise_convolution_reads_only_what_its_window_touches():
    found = op_cost(
        _forward((1, 8, 16, 16), (4, 8, 1, 1), stride="[2, 2]", padding="[0, 0]", dilation="[1, 1]")
    )
    assert found.bytes_read == 4 * (8 * 8 * 8 + 4 * 8)


_X, _W, _DY = (32, 64, 112, 112), (128, 64, 3, 3), (32, 128, 112, 112)


def _backward(kernels, mask="[True, True, False]"):
    return call(
        "aten::convolution_backward",
        (_DY, FP16),
        (_X, FP16),
        (_W, FP16),
        "[0]",
        "[1, 1]",
        "[1, 1]",
        "[1, 1]",
        "False",
        "[0, 0]",
        "1",
        mask,
        kernels=kernels,
    )


def test_both_gradients_have_the_forwards_flops_and_their_own_bytes():
    flops = 2.0 * 32 * 128 * 112 * 112 * 64 * 9
    size_x, size_w, size_dy = (2 * n for n in (32 * 64 * 112**2, 128 * 64 * 9, 32 * 128 * 112**2))
    data, weight = launch_costs(_backward(["sm90_xmma_dgrad_implicit_gemm", "sm90_xmma_wgrad_implicit_gemm"]))
    assert (data.flops, data.bytes_read, data.bytes_written) == (flops, size_dy + size_w, size_x)
    assert (weight.flops, weight.bytes_read, weight.bytes_written) == (flops, size_dy + size_x, size_w)


def test_unnamed_gemms_are_the_data_gradient_first_and_the_weights_second():
    first, second = launch_costs(_backward(["nvjet_sm90_hsh_1", "nvjet_sm90_hss_2"]))
    assert first.bytes_written == 2 * 32 * 64 * 112**2
    assert second.bytes_written == 2 * 128 * 64 * 9


def test_an_unnamed_gemm_beside_a_named_one_is_the_other_gradient():
    first, second = launch_costs(_backward(["sm90_xmma_wgrad_implicit_gemm", "nvjet_sm90_hsh_1"]))
    assert first.bytes_written == 2 * 128 * 64 * 9
    assert second.bytes_written == 2 * 32 * 64 * 112**2


def test_without_the_input_gradient_every_gemm_is_the_weights():
    (only,) = launch_costs(_backward(["nvjet_sm90_hss_2"], mask="[False, True, False]"))
    assert only.bytes_written == 2 * 128 * 64 * 9


@pytest.mark.parametrize(
    ("blocks", "elements"), [(25088, 32 * 64 * 112**2), (256, 128 * 64 * 9), (50176, 32 * 128 * 112**2)]
)
def test_a_layout_kernel_moves_the_tensor_that_its_blocks_tell(blocks, elements):
    # Block counts as cuDNN launched them on an H200.
    kernels = [
        Launch("cudnn::engines_precompiled::nchwToNhwcKernel<__half>", blocks),
        Launch("sm90_xmma_dgrad", 105),
    ]
    transform, _ = launch_costs(_backward(kernels))
    assert (transform.bytes_read, transform.bytes_written, transform.flops) == (2 * elements, 2 * elements, 0)


def test_gradients_have_no_cost_when_sizes_contradict_each_other():
    wrong = call(
        "aten::convolution_backward",
        ((3, 7, 5, 5), FP16),
        (_X, FP16),
        (_W, FP16),
        "[0]",
        "[1, 1]",
        "[1, 1]",
        "[1, 1]",
        "False",
        "[0, 0]",
        "1",
        "[True, True, False]",
        kernels=["dgrad"],
    )
    assert launch_costs(wrong) == (None,)


def test_only_the_multiplying_kernel_of_winograd_has_the_flops():
    kernels = ["winogradForwardData4x4", "winogradForwardFilter4x4", "volta_sgemm_64x64_nt",
               "winogradForwardOutput4x4"]  # fmt: skip
    found = launch_costs(_backward(kernels, mask="[True, False, False]"))
    assert [cost.flops > 0 for cost in found] == [False, False, True, False]


def test_clearing_the_result_writes_what_the_next_kernel_computes():
    clear_x, _, clear_w, _ = launch_costs(
        _backward(
            ["scalePackedTensor_kernel", "dgrad_engine", "scalePackedTensor_kernel", "wgrad_alg0_engine"]
        )
    )
    assert (clear_x.bytes_read, clear_x.bytes_written) == (0, 2 * 32 * 64 * 112**2)
    assert (clear_w.bytes_read, clear_w.bytes_written) == (0, 2 * 128 * 64 * 9)


def test_a_kernel_of_unknown_part_beside_a_known_one_has_no_cost():
    main, stranger = launch_costs(_backward(["dgrad_engine", "who_knows"], mask="[True, False, False]"))
    assert main is not None
    assert stranger is None


X, W = (32, 64, 56, 56), (128, 64, 3, 3)


def _without_values(following, x=X, w=W):
    bare = call("aten::cudnn_convolution", (x, FP32), (w, FP32), None, None, None, None, None, None, None)
    return op_cost(dataclasses.replace(bare, concrete=(), following=following))


def test_without_values_what_follows_tells_the_result():
    found = _without_values(Tensor((32, 128, 28, 28), "fp32"))
    assert found.flops == 2 * 32 * 128 * 28 * 28 * 64 * 9
    assert found.bytes_written == 4 * 32 * 128 * 28 * 28


@pytest.mark.parametrize(
    "following",
    [None, Tensor((32, 64, 28, 28), "fp32"), Tensor((32, 128, 28), "fp32"), Tensor((32, 128, 40, 28), "fp32"),
     Tensor((32, 128, 28, 28), "fp16"), Tensor((16, 128, 28, 28), "fp32")],
)  # fmt: skip
def test_what_cannot_be_the_result_is_not_believed(following):
    assert _without_values(following) is None


def test_a_strided_data_gradient_reads_its_gradient_for_each_remainder():
    # GIVEN stride 2 under 3 taps: an H200 read 75.4 MB where the gradient has 36.9
    grad, x, w = ((24, 512, 1500), BF16), ((24, 512, 3000), BF16), ((512, 512, 3), BF16)
    name = "sm90_xmma_dgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_tilesize128x256x64_strided_execute"
    back = call(
        "aten::convolution_backward", grad, x, w, "[0]", "[2]", "[1]", "[1]", "False", "[0]", "1",
        "[True, False, False]", kernels=[name], settings=H200,
    )  # fmt: skip
    (found,) = launch_costs(back)
    assert found.bytes_read == pytest.approx(75.4e6, rel=0.01)
    assert found.flops == pytest.approx(5.677e10, rel=1e-3)
