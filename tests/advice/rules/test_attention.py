"""Explicit attention and slow backends: loops that have them, and the nearest that have not."""

import pytest

from advisor.advice.rates import attention_ns
from advisor.roofline.devices import Device, find_device
from tests.advice.rules.models import BF16, BOOL, FP16, FP32, Op, ask, likely_ms, loop, op

SCORES, HEADS, KEYS = [8, 12, 1024, 1024], [96, 1024, 64], [96, 64, 1024]
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>"


def product(a, b, us, gradient=()):
    kernel = [("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", us)]
    inner = op("aten::bmm", (a, b), kernels=kernel)
    return op("aten::matmul", (a, b), inside=[inner], gradient=gradient)


def bmm(a, b, us):
    return op("aten::bmm", (a, b), kernels=[("nvjet_sm90_tst_64x256_64x5_1x2_h_bz_NTN", us)])


def softmax(shape, *, us=200.0):
    inner = op("aten::_softmax", (shape, [], []), dtype=FP32, kernels=[(SOFTMAX, us)])
    back = op(
        "aten::_softmax_backward_data", (shape, shape, []), dtype=FP32, kernels=[("softmax_backward", us)]
    )
    return op("aten::softmax", (shape, [], []), dtype=FP32, inside=[inner], gradient=[back])


def masked(shape=SCORES):
    arguments = (shape, [1024, 1024], [])
    dtypes = [BF16, BOOL, "Scalar"]
    kernels = [("masked_fill_kernel", 270)]
    back = op("aten::masked_fill", arguments, dtypes=dtypes, kernels=kernels)
    return op("aten::masked_fill", arguments, dtypes=dtypes, kernels=kernels, gradient=[back])


def explicit(between=None) -> list[Op]:
    return [
        product(HEADS, KEYS, 62, gradient=[bmm(HEADS, KEYS, 60), bmm(KEYS, HEADS, 60)]),
        *(between if between is not None else [masked(), softmax(SCORES)]),
        product([96, 1024, 1024], HEADS, 61, gradient=[bmm([96, 1024, 1024], HEADS, 59)]),
    ]


def mlp() -> Op:
    a, b = [8192, 768], [768, 3072]
    return op("aten::mm", (a, b), kernels=[("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 56)])


def test_softmax_between_two_products_is_found_with_mask_and_gradients():
    # GIVEN attention by hand of 1.2 ms (623 µs forward, 649 µs backward)
    said = ask("attention.explicit", *explicit(), mlp())

    # WHEN THEN all of it goes but what fused attention takes, 47 µs and 146 µs on this device
    (advice,) = said.advice
    assert 0.85 < likely_ms(said) < 1.15
    assert "1 place" in advice.finding.title
    assert "is_causal=True" in advice.finding.fix
    assert "where keys and values have much in common" in advice.finding.risk
    assert advice.finding.swap == "attention"


def test_rows_of_the_gradients_belong_to_the_attention():
    (group,) = loop(*explicit(), mlp(), steps=2).patterns.of("attention")
    assert (len(group.forward), len(group.backward)) == (4, 5)


def test_joining_gradients_of_a_split_projection_gets_cheaper():
    # GIVEN a projection split into queries, keys and values, whose gradients are joined in 68 µs
    heads, strides = [8, 1024, 768], [786432, 768, 1]
    join = op(
        "aten::cat",
        ([heads] * 3, []),
        dtypes=["TensorList", "Scalar"],
        strides=[[strides] * 3, []],
        kernels=[("void at::native::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 3>", 68)],
    )
    split = op("aten::split", ([8, 1024, 2304], [], []), gradient=[join])

    # WHEN asked with and without it, in loops that are equal but for that
    with_split = likely_ms(ask("attention.explicit", split, *explicit(), mlp()))
    without = likely_ms(ask("attention.explicit", *explicit(), mlp()))

    # THEN a plain copy of 75 MB, 28 µs, is what remains of it
    assert 0.03 < with_split - without < 0.05


def test_softmax_over_classes_is_no_attention():
    # GIVEN the same products, but the softmax works on another size
    said = ask("attention.explicit", *explicit([masked(), softmax([8, 12, 1024, 1000])]), mlp())
    assert said.not_applicable == ["attention.explicit"]


def test_mask_of_each_sequence_is_kept_and_not_called_causal():
    mask = op("aten::add", (SCORES, [8, 1, 1024, 1024], []), kernels=[("elementwise_kernel", 186)])
    (advice,) = ask("attention.explicit", *explicit([mask, softmax(SCORES)]), mlp()).advice
    assert "attn_mask=mask" in advice.finding.fix


def sdpa(inner: list[Op], *, mask=None, mask_strides=None, dtype=BF16, gradient=()) -> Op:
    heads, plain = [8, 12, 1024, 64], [786432, 65536, 64, 1]
    dims = (heads, heads, heads, mask or [], [], [])
    types = [dtype] * 3 + [BOOL if mask else "Scalar", "Scalar", "Scalar"]
    strides = [plain, plain, plain, mask_strides, [], []] if mask_strides else None
    return op(
        "aten::scaled_dot_product_attention", dims, dtypes=types, strides=strides, inside=inner,
        gradient=gradient,
    )  # fmt: skip


def efficient(us: float) -> list[Op]:
    heads = [8, 12, 1024, 64]
    kernels = [("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", us)]
    return [op("aten::_scaled_dot_product_efficient_attention", (heads, heads, heads), kernels=kernels)]


def test_triangular_mask_that_keeps_flash_away_is_named():
    said = ask("attention.backend", sdpa(efficient(400), mask=[1024, 1024]), mlp())
    (advice,) = said.advice
    assert "memory-efficient" in advice.finding.title
    assert "is_causal=True" in advice.finding.fix
    assert 0.25 < likely_ms(said) < 0.4


def cudnn(us: float, backward: float) -> tuple[list[Op], list[Op]]:
    heads = [8, 12, 1024, 64]
    kernel = "cudnn_generated_fort_native_sdpa_sm90_flash_{}prop_wgmma_f16"
    forward = op("aten::_cudnn_attention_forward", (heads,) * 3, kernels=[(kernel.format("f"), us)])
    gradient = op("aten::_cudnn_attention_backward", (heads,) * 3, kernels=[(kernel.format("b"), backward)])
    return [op("aten::_scaled_dot_product_cudnn_attention", (heads,) * 3, inside=[forward])], [gradient]


def test_a_triangular_mask_that_cudnn_reads_is_named_though_its_backend_is_fast():
    # GIVEN 150 µs and 400 µs of cuDNN with a mask; is_causal takes 46 µs and 147 µs there
    inner, gradient = cudnn(150, 400)
    said = ask("attention.backend", sdpa(inner, mask=[1024, 1024], gradient=gradient), mlp())
    (advice,) = said.advice
    assert "cuDNN with a mask" in advice.finding.title
    assert "is_causal=True" in advice.finding.fix
    assert 0.32 < likely_ms(said) < 0.39


def test_a_plane_that_is_expanded_over_the_batch_is_one_mask():
    def said(strides: list[int]):
        inner, gradient = cudnn(150, 400)
        call = sdpa(inner, mask=[8, 1, 1024, 1024], mask_strides=strides, gradient=gradient)
        return ask("attention.backend", call, mlp())

    assert len(said([0, 0, 1024, 1]).advice) == 1
    # AND a mask of each sequence, padding say, is needed as it is
    assert said([1024 * 1024, 1024 * 1024, 1024, 1]).passed == ["attention.backend"]


def test_a_mask_over_other_keys_than_queries_is_no_triangle():
    inner, gradient = cudnn(150, 400)
    said = ask("attention.backend", sdpa(inner, mask=[1024, 77], gradient=gradient), mlp())
    assert said.passed == ["attention.backend"]


def flash(us: float) -> list[Op]:
    heads = [8, 12, 1024, 64]
    kernel = [("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", us)]
    return [op("aten::_scaled_dot_product_flash_attention", (heads,) * 3, kernels=kernel)]


def test_flash_attention_2_on_hopper_is_told_of_cudnn():
    # GIVEN the 147 µs that 25.8 GFLOP take at FlashAttention-2's 175 TFLOP/s
    said = ask("attention.backend", sdpa(flash(147)), mlp())
    (advice,) = said.advice
    assert "CUDNN_ATTENTION" in advice.finding.fix
    assert 0.04 < likely_ms(said) < 0.08
    assert advice.saving.low_ns < 0.01e6


A100 = {"id": 0, "name": "NVIDIA A100-SXM4-40GB", "totalGlobalMem": 42_000_000_000, "numSms": 108}


def test_flash_attention_2_on_ampere_is_the_fastest():
    said = ask("attention.backend", sdpa(flash(147)), mlp(), device=A100)
    assert said.passed == ["attention.backend"]


def test_mathematical_backend_for_fp32_is_named():
    inside = [bmm(HEADS, KEYS, 200), softmax(SCORES), bmm([96, 1024, 1024], HEADS, 200)]
    (advice,) = ask("attention.backend", sdpa(inside, dtype=FP32), mlp()).advice
    assert "mathematical" in advice.finding.title
    assert "fp32" in advice.finding.evidence[0]


def test_fast_backend_is_passed():
    heads = [8, 12, 1024, 64]
    kernel = [("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 47)]
    inside = [op("aten::_scaled_dot_product_cudnn_attention", (heads, heads, heads), kernels=kernel)]
    assert ask("attention.backend", sdpa(inside), mlp()).passed == ["attention.backend"]


T4 = {"id": 0, "name": "Tesla T4", "totalGlobalMem": 15_800_000_000, "numSms": 40}


def test_a_device_without_a_fast_backend_is_not_told_to_use_one():
    said = ask("attention.backend", sdpa(efficient(4_000), dtype=FP16), mlp(), device=T4)
    assert said.not_applicable == ["attention.backend"]


#: (batch, heads, tokens, head dimension, causal, masked), then µs forward and backward of cuDNN on an H200.
MEASURED = [
    (4, 8, 512, 64, True, False, 9.3, 27.1),
    (8, 12, 512, 64, True, False, 19.5, 59.5),
    (8, 12, 1024, 64, True, False, 47.3, 147),
    (8, 16, 1024, 64, True, False, 59.2, 190),
    (16, 16, 1024, 128, True, False, 169, 591),
    (4, 16, 4096, 128, True, False, 487, 1426),
    (2, 16, 8192, 128, False, False, 1823, 5251),
    (2, 12, 4096, 64, False, True, 426, 1003),
    (4, 16, 4096, 128, False, True, 1643, 4526),
]


@pytest.mark.parametrize(("batch", "heads", "tokens", "dim", "causal", "masked", *"fb"), MEASURED)
def test_fused_attention_is_promised_within_an_eighth_of_what_was_measured(
    batch, heads, tokens, dim, causal, masked, f, b
):
    entries = batch * heads * tokens**2 * (0.5 if causal else 1)

    found = attention_ns(
        find_device(override="H200"), entries=entries, queries=tokens, dim=dim, dim_v=dim,
        batch_heads=batch * heads, causal=causal, dtype="bf16", masked=masked,
    )  # fmt: skip

    assert found is not None
    assert [float(time.likely) / 1e3 for time in found] == pytest.approx([f, b], rel=0.125)


@pytest.mark.parametrize("backward", [0, 1])
def test_fused_attention_is_promised_at_the_rate_of_the_kernel_that_the_device_has(backward):
    def likely_ns(arch: str) -> float:
        device = Device("a device", peaks={"tensor_fp16": 1e14}, bandwidth_bytes_per_s=1e12, arch=arch)
        sizes = {"entries": 96 * 1024**2, "queries": 1024, "dim": 64, "dim_v": 64, "batch_heads": 96}
        return float(attention_ns(device, causal=False, dtype="fp16", **sizes)[backward].likely)

    # GIVEN devices of one speed THEN the one before FlashAttention takes about twice as long
    assert 1.5 < likely_ns("sm_75") / likely_ns("sm_80") < 3


def test_attention_of_no_tokens_is_not_timed():
    sizes = {"dim": 64, "dim_v": 64, "batch_heads": 96, "causal": True, "dtype": "bf16"}
    device = find_device(None, override="h100-sxm-80gb")
    assert attention_ns(device, entries=0, queries=0, **sizes) is None
    assert attention_ns(device, entries=96 * 64**2, queries=64, **sizes) is not None
