"""Layout: NCHW convolutions with transforms, copies that rearrange, and loops without them."""

from tests.advice.rules.models import BF16, FP16, ask, likely_ms, op

IMAGE, WEIGHT = [64, 64, 56, 56], [64, 64, 3, 3]
NHWC_STRIDES = [200704, 1, 3584, 64]
TRANSFORM = "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false, true, 0>"
CONV = "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"


def convolution(kernels, strides=None):
    strides = [strides or [200704, 3136, 56, 1], [576, 9, 3, 1], [], [], [], [], []]
    values = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "1"]
    inner = op(
        "aten::cudnn_convolution", (IMAGE, WEIGHT, [], [], [], [], []), dtype=FP16, strides=strides,
        concrete=values, kernels=kernels,
    )  # fmt: skip
    return op(
        "aten::conv2d", (IMAGE, WEIGHT, [], [], [], [], []), dtype=FP16, strides=strides, concrete=values,
        inside=[inner],
    )  # fmt: skip


def batch_norm(us: float, strides=None):
    dims = (IMAGE, [64], [64], [64], [64], [], [], [])
    all_strides = [strides or [200704, 3136, 56, 1], [1], [1], [1], [1], [], [], []]
    values = ["", "", "", "", "", "True", "0.1", "1e-05"]
    return op(
        "aten::cudnn_batch_norm", dims, dtype=FP16, strides=all_strides, concrete=values,
        kernels=[("void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float, int, 128, true>", us)],
    )  # fmt: skip


def test_nchw_convolutions_with_transforms_gain_from_channels_last():
    # GIVEN 40 µs of transforms and a norm of 120 µs whose roof is 11 µs
    said = ask(
        "layout.channels_last", convolution([(TRANSFORM, 20), (CONV, 36), (TRANSFORM, 20)]), batch_norm(120)
    )

    # THEN the transforms go, and the norm falls to a few times its roof
    assert 0.09 < likely_ms(said) < 0.14
    assert "memory_format=torch.channels_last" in said.advice[0].finding.fix


def test_convolutions_in_channels_last_are_passed():
    model = convolution([(CONV, 36)], NHWC_STRIDES), batch_norm(30, NHWC_STRIDES)
    assert ask("layout.channels_last", *model).passed == ["layout.channels_last"]


def test_nchw_convolutions_without_transforms_are_passed():
    plain = convolution([("void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1>", 400)])
    assert ask("layout.channels_last", plain, batch_norm(120)).passed == ["layout.channels_last"]


X = [8, 1024, 4096]


def rearranged(us: float, dtypes):
    copy = op("aten::copy_", (X, X, []), dtypes=[*dtypes, "Scalar"], kernels=[("elementwise_kernel", us)])
    return op("aten::contiguous", (X, []), dtypes=[dtypes[1], "Scalar"], inside=[copy])


PLAIN, TURNED = [4194304, 4096, 1], [32768, 4096, 1]


def copied(us: float, source: tuple, target: tuple):
    """(shape, strides) to the same elements in (shape, strides)."""
    (shape, before), (to, after) = source, target
    copy = op(
        "aten::copy_", (to, shape, []), strides=[after, before, []], kernels=[("elementwise_kernel", us)]
    )
    return op("aten::contiguous", (shape, []), strides=[before, []], inside=[copy])


def tokens_first(us: float):
    return copied(us, ([1024, 8, 4096], [4096, 4194304, 1]), ([1024, 8, 4096], TURNED))


def batch_first(us: float):
    return copied(us, ([8, 1024, 4096], [4096, 32768, 1]), ([8, 1024, 4096], PLAIN))


def product(us: float):
    return op("aten::mm", ([8192, 4096], [4096, 4096]), kernels=[("nvjet_sm90_tst_256x128_64x4", us)])


def test_copies_that_rearrange_are_told_with_a_third_of_their_time():
    said = ask("layout.copies", rearranged(60, [BF16, BF16]), product(400))
    assert 0.015 < likely_ms(said) < 0.027
    assert said.advice[0].saving.low_ns < 2_000


def test_copies_that_are_turned_back_go_altogether():
    said = ask("layout.copies", product(400), tokens_first(60), batch_first(60), product(400))
    assert 0.115 < likely_ms(said) < 0.14
    assert "turned back" in said.advice[0].finding.evidence[0]
    # AND so do four in a row, there and back twice
    four = [tokens_first(60), batch_first(60)] * 2
    assert 0.23 < likely_ms(ask("layout.copies", product(400), *four, product(400))) < 0.27


def test_copies_with_work_between_them_are_not_turned_back():
    between = op("aten::gelu", (X, []), kernels=[("vectorized_elementwise_kernel", 60)])
    said = ask("layout.copies", product(400), tokens_first(60), between, batch_first(60), product(400))
    assert 0.03 < likely_ms(said) < 0.06


def test_clones_are_not_turned_back():
    clone = copied(60, (X, PLAIN), (X, PLAIN))
    said = ask("layout.copies", product(400), clone, clone, product(400))
    assert 0.03 < likely_ms(said) < 0.06


def test_copies_of_two_tensors_in_a_row_are_not_turned_back():
    # GIVEN two halves of one projection, each made contiguous
    half = copied(60, (X, [8388608, 8192, 1]), (X, PLAIN))
    said = ask("layout.copies", product(400), half, half, product(400))
    assert 0.03 < likely_ms(said) < 0.06


def test_copies_that_fused_attention_reads_go_for_the_most_part():
    heads, split, joined = [8, 16, 1024, 128], [6291456, 128, 6144, 1], [2097152, 131072, 128, 1]
    copies = [copied(60, (heads, split), (heads, joined)) for _ in range(3)]
    attend = op(
        "aten::scaled_dot_product_attention",
        (heads,) * 3,
        strides=[joined] * 3,
        kernels=[("cudnn_sdpa", 200)],
    )
    said = ask("layout.copies", product(400), *copies, attend)
    assert 0.14 < likely_ms(said) < 0.17
    # BUT where the head dimension does not come last in memory, attention needs them
    apart = [copied(60, (heads, [6291456, 128, 1, 6144]), (heads, joined)) for _ in range(3)]
    assert likely_ms(ask("layout.copies", product(400), *apart, attend)) < 0.08


def test_casts_do_not_only_rearrange():
    assert ask("layout.copies", rearranged(60, [BF16, FP16]), product(400)).passed == ["layout.copies"]


def test_few_copies_are_passed():
    assert ask("layout.copies", rearranged(6, [BF16, BF16]), product(400)).passed == ["layout.copies"]
