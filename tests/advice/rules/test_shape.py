"""Sizes: unaligned rows, half-empty waves, small batches; and sizes that are fine."""

from tests.advice.rules.models import FP32, ask, likely_ms, op

CRAWLING = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>"
GOOD = "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN"


def head(vocabulary: int, us: float, kernel: str = CRAWLING, **options):
    return op(
        "aten::linear",
        ([8192, 768], [vocabulary, 768]),
        inside=[op("aten::mm", ([8192, 768], [768, vocabulary]), kernels=[(kernel, us)], **options)],
        gradient=[op("aten::mm", ([8192, vocabulary], [vocabulary, 768]), kernels=[(kernel, us)], **options)],
        **options,
    )


def embedding(vocabulary: int):
    return op("aten::embedding", ([vocabulary, 768], [8, 1024]), kernels=[("vectorized_gather_kernel", 15)])


def test_odd_vocabulary_is_named_with_its_padded_size():
    # GIVEN two products of 4.5 ms; an aligned one takes about 0.82 ms
    said = ask("shape.alignment", embedding(50257), head(50257, 4500))

    (advice,) = said.advice
    assert "50257 (vocabulary)" in advice.finding.title
    assert "pad to 50304" in advice.finding.title
    assert 7.0 < likely_ms(said) < 7.6


def test_padded_vocabulary_is_passed():
    assert ask("shape.alignment", embedding(50304), head(50304, 870, GOOD)).passed == ["shape.alignment"]


def test_odd_size_that_the_library_copes_with_is_passed():
    assert ask("shape.alignment", head(50257, 900, GOOD)).passed == ["shape.alignment"]


def test_fp32_product_on_plain_units_is_left_to_the_precision_rules():
    kernel = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3"
    assert ask("shape.alignment", head(50257, 12000, kernel, dtype=FP32)).passed == ["shape.alignment"]


def test_odd_sequence_is_told_from_a_layer():
    scores = op("aten::bmm", ([64, 1025, 64], [64, 64, 1025]), kernels=[(CRAWLING, 256)])
    (advice,) = ask("shape.alignment", scores).advice
    assert "1025 (the sequence or batch)" in advice.finding.title
    assert "1032" in advice.finding.title


def test_sizes_that_take_little_each_are_told_in_one_finding():
    # GIVEN three steady steps of a product of 10 ms and two odd lengths with a hundredth and two of the step
    main = op("aten::mm", ([8192, 4096], [4096, 4096]), kernels=[(GOOD, 10_000)])
    small = [
        op("aten::bmm", ([64, n, 64], [64, 64, n]), kernels=[(CRAWLING, us)])
        for n, us in ((1025, 200), (513, 100))
    ]

    (advice,) = ask("shape.alignment", main, *small).advice

    assert advice.finding.title.startswith("rows of 1025 and 513 elements begin unaligned: 2 matrix products")
    assert advice.finding.fix.splitlines() == [
        "# 1025 -> 1032 (the sequence or batch)",
        "# 513 -> 520 (the sequence or batch)",
    ]
    assert [len(edit.rows) for edit in advice.finding.edits] == [3, 3]


def test_a_size_that_takes_much_is_told_by_itself_beside_those_that_take_little():
    main = op("aten::mm", ([8192, 4096], [4096, 4096]), kernels=[(GOOD, 10_000)])
    odd = [
        op("aten::bmm", ([64, n, 64], [64, 64, n]), kernels=[(CRAWLING, us)])
        for n, us in ((1025, 200), (513, 100), (1537, 2_000))
    ]

    titles = [advice.finding.title for advice in ask("shape.alignment", main, *odd).advice]

    assert [title.split()[0] for title in titles] == ["1537", "rows"]


def tiled(m: int, us: float = 400):
    kernel = "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
    return op("aten::mm", ([m, 4096], [4096, 4096]), kernels=[(kernel, us)])


def test_nearly_empty_last_wave_is_told_without_a_saving():
    # GIVEN 32 x 17 tiles on 132 multiprocessors: 4.12 waves, so the fifth holds 16 tiles
    (advice,) = ask("shape.wave_quantization", tiled(17 * 256)).advice
    assert advice.saving is None
    assert "idle" in advice.finding.title


def test_nearly_full_waves_are_passed():
    # GIVEN 32 x 16 tiles: 3.88 waves
    assert ask("shape.wave_quantization", tiled(16 * 256)).passed == ["shape.wave_quantization"]


def layer(rows: int, us: float):
    a, b = [rows, 4096], [4096, 4096]
    return op("aten::mm", (a, b), kernels=[("nvjet_sm90_tst_64x8_64x16_1x4_h_bz_TNT", us)])


PARAMETERS = [{"shape": [4096, 4096], "dtype": "bf16", "count": 1}]


def test_few_rows_wait_for_weights_and_the_factor_is_told():
    # GIVEN 16 rows where the ridge, 206 FLOP/byte, needs about 230
    (advice,) = ask("shape.batch", layer(16, 12), parameters=PARAMETERS).advice
    assert "16 times as large" in advice.finding.title
    assert advice.saving is None


def test_many_rows_are_passed():
    assert ask("shape.batch", layer(4096, 220), parameters=PARAMETERS).passed == ["shape.batch"]


def test_batch_that_would_not_fit_is_not_proposed():
    peak = {"peak_memory_bytes": {"before": 100e9, "in_window": 100e9}}
    assert ask("shape.batch", layer(16, 12), parameters=PARAMETERS, **peak).passed == ["shape.batch"]


def test_rows_of_fp32_are_aligned_at_multiples_of_four():
    kernel = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_s1688_align1"
    (advice,) = ask("shape.alignment", head(50257, 20_000, kernel, dtype=FP32)).advice

    assert "no multiple of 4" in advice.finding.title
    # AND a size of four's multiples is none to pad, whatever eight says
    assert ask("shape.alignment", head(50260, 20_000, kernel, dtype=FP32)).passed == ["shape.alignment"]
