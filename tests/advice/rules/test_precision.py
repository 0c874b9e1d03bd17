"""Precision: what runs in more bits than it needs, and what does not."""

import pytest

from tests.advice.rules.models import BF16, FP16, FP32, ask, likely_ms, op

SIMT = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3"
TF32 = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_s1688"
WGMMA = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
#: 4096 x 4096 x 4096: 137 GFLOP, 2.7 ms on plain units, 0.45 ms in TF32, 0.18 ms in bf16.
A = [4096, 4096]
WEIGHT = [{"shape": A, "dtype": "fp32", "count": 1}]
V100 = {"id": 0, "name": "Tesla V100-SXM2-32GB", "totalGlobalMem": 34_000_000_000, "numSms": 80}


def product(kernel: str, us: float, dtype: str = FP32):
    gradient = [op("aten::mm", (A, A), dtype=dtype, kernels=[(kernel, us)]) for _ in range(2)]
    return op("aten::mm", (A, A), dtype=dtype, kernels=[(kernel, us)], gradient=gradient)


def gelu(us: float, dtype: str = FP32):
    return op("aten::gelu", (A, []), dtype=dtype, kernels=[("vectorized_elementwise_kernel", us)])


def test_fp32_products_on_plain_units_gain_from_tf32():
    said = ask("precision.tf32", product(SIMT, 2700), gelu(40))
    (advice,) = said.advice
    assert "without TF32" in advice.finding.title
    assert 3 * 2.1 < likely_ms(said) < 3 * 2.4


def test_products_that_run_in_tf32_are_passed():
    assert ask("precision.tf32", product(TF32, 450), gelu(40)).passed == ["precision.tf32"]


def test_device_without_tf32_has_nothing_to_allow():
    said = ask("precision.tf32", product(SIMT, 9000), gelu(150), device=V100)
    assert said.not_applicable == ["precision.tf32"]


def test_small_share_of_fp32_products_is_passed():
    said = ask(
        "precision.tf32", op("aten::mm", ([64, 64], [64, 64]), dtype=FP32, kernels=[(SIMT, 9)]), gelu(400)
    )
    assert said.passed == ["precision.tf32"]


@pytest.mark.parametrize(("kernel", "us", "low", "high"), [(SIMT, 2700, 7.1, 7.7), (TF32, 450, 0.5, 0.9)])
def test_mixed_precision_gains_over_fp32_and_less_over_tf32(kernel, us, low, high):
    said = ask("precision.mixed", product(kernel, us), gelu(40), parameters=WEIGHT)
    (advice,) = said.advice
    assert 'precision="bf16-mixed"' in advice.finding.fix
    assert low < likely_ms(said) < high


def test_mixed_precision_is_called_fp16_where_the_device_has_no_bf16():
    (advice,) = ask("precision.mixed", product(SIMT, 9000), gelu(150), device=V100).advice
    assert 'precision="16-mixed"' in advice.finding.fix


def test_softmax_by_hand_costs_more_under_autocast():
    # GIVEN a loop whose time is a softmax in fp32 beside a product
    softmax = op(
        "aten::softmax", ([8, 12, 1024, 1024], []), dtype=FP32, kernels=[("softmax_warp_forward", 2000)]
    )
    with_softmax = ask("precision.mixed", product(SIMT, 2700), softmax, parameters=WEIGHT)
    without = ask("precision.mixed", product(SIMT, 2700), parameters=WEIGHT)
    assert likely_ms(with_softmax) < likely_ms(without) - 2


def test_bf16_products_are_passed_by_the_mixed_rule():
    assert ask("precision.mixed", product(WGMMA, 180, BF16), gelu(20, BF16)).passed == ["precision.mixed"]


def linear_with_cast(us: float, shape):
    cast = op(
        "aten::copy_", (shape, shape, []), dtypes=[BF16, FP32, "Scalar"], kernels=[("bfloat16_copy", us)]
    )
    inner = op("aten::addmm", ([4096], [64, 4096], [4096, 4096]), kernels=[(WGMMA, 20)])
    return op("aten::linear", ([64, 4096], [4096, 4096]), dtypes=[FP32, FP32], inside=[cast, inner])


def test_casts_of_weights_are_found_by_the_parameters_shape():
    said = ask("precision.weight_casts", linear_with_cast(40, A), parameters=WEIGHT)
    assert likely_ms(said) == pytest.approx(0.04, rel=0.2)


def test_weights_in_16_bits_shorten_the_update_and_the_work_in_fp32_too():
    def said(*more, **options):
        return likely_ms(
            ask("precision.weight_casts", linear_with_cast(40, A), *more, parameters=WEIGHT, **options)
        )

    plain = said()
    (advice,) = ask(
        "precision.weight_casts", linear_with_cast(40, A), parameters=WEIGHT, optimizer=[adam(100)]
    ).advice
    assert "casts take 40.0 µs, and 100 µs of other kernels move twice the bytes" in advice.finding.title

    # GIVEN an update of 100 µs THEN it moves half the bytes, at a little less bandwidth
    assert said(optimizer=[adam(100)]) - plain == pytest.approx(0.03, abs=0.005)
    # AND so do a norm and a sum in fp32, but no sum in bf16
    shape = [8192, 4096]
    norm = op(
        "aten::native_layer_norm", (shape, [], [4096]), dtype=FP32, kernels=[("layer_norm_kernel", 100)]
    )
    total = op("aten::add", (shape, shape, []), dtype=FP32, kernels=[("elementwise_kernel", 100)])
    assert said(norm) - plain == pytest.approx(0.03, abs=0.005)
    assert said(total) - plain == pytest.approx(0.05, abs=0.005)
    short = op("aten::add", (shape, shape, []), dtype=BF16, kernels=[("elementwise_kernel", 100)])
    assert said(short) - plain == pytest.approx(0, abs=0.002)


def test_with_the_casts_of_weights_go_those_of_activations():
    both = op("aten::linear", ([64, 4096], [4096, 4096]), dtypes=[FP32, FP32], inside=[
        op("aten::copy_", (shape, shape, []), dtypes=[BF16, FP32, "Scalar"], kernels=[("bfloat16_copy", 40)])
        for shape in ([64, 4096], A)
    ])  # fmt: skip
    said = ask("precision.weight_casts", both, parameters=WEIGHT)
    assert likely_ms(said) == pytest.approx(0.08, rel=0.2)
    assert "casts take 80.0 µs" in said.advice[0].finding.title
    assert said.advice[0].finding.evidence[0].startswith("1 cast of weights")


def test_casts_of_activations_are_no_casts_of_weights():
    said = ask("precision.weight_casts", linear_with_cast(40, [64, 4096]), parameters=WEIGHT)
    assert said.not_applicable == ["precision.weight_casts"]


def unscale(us: float):
    name = "aten::_amp_foreach_non_finite_check_and_unscale_"
    return op(name, ([], [], []), dtype=FP32, kernels=[("multi_tensor_apply_kernel", us)])


def test_gradient_scaling_goes_with_bf16():
    said = ask("precision.grad_scaler", product(WGMMA, 180, FP16), optimizer=[unscale(60)])
    assert likely_ms(said) >= 0.055
    assert "bf16-mixed" in said.advice[0].finding.fix


def test_gradient_scaling_stays_on_a_device_without_bf16():
    said = ask("precision.grad_scaler", product(WGMMA, 180, FP16), optimizer=[unscale(60)], device=V100)
    assert said.not_applicable == ["precision.grad_scaler"]


def test_large_products_may_gain_from_fp8_and_may_not():
    (advice,) = ask("precision.fp8", product(WGMMA, 180, BF16)).advice
    assert advice.saving.low_ns < 2_000 < advice.saving.likely_ns
    assert advice.finding.confidence == "heuristic"


def test_small_products_are_not_for_fp8():
    small = op("aten::mm", ([8192, 768], [768, 3072]), kernels=[(WGMMA, 56)])
    assert ask("precision.fp8", small).passed == ["precision.fp8"]


def adam(us: float, name: str = "aten::_fused_adamw_"):
    return op(name, ([], [], []), dtype=FP32, kernels=[("multi_tensor_apply_kernel", us)])


def test_fused_adam_in_a_good_part_of_the_step_could_keep_8_bit_moments():
    said = ask("precision.optimizer_state", product(WGMMA, 180, BF16), optimizer=[adam(400)])
    assert 0.08 < likely_ms(said) < 0.12


def test_optimizer_that_is_not_fused_gains_more_elsewhere():
    said = ask("precision.optimizer_state", product(WGMMA, 180), optimizer=[adam(400, "aten::_foreach_add_")])
    assert said.not_applicable == ["precision.optimizer_state"]


MI300X = {"id": 0, "name": "AMD Instinct MI300X", "totalGlobalMem": 206_000_000_000, "numSms": 304}


def test_tf32_is_not_advised_where_the_setting_alone_does_nothing():
    said = ask("precision.tf32", product("Cijk_Ailk_Bljk_SB_MT128x128x16", 2700), gelu(40), device=MI300X)
    assert said.not_applicable == ["precision.tf32"]


def test_fp8_for_inference_is_another_change_than_for_training():
    inference = op("aten::mm", (A, A), kernels=[(WGMMA, 180)])
    training = ask("precision.fp8", product(WGMMA, 180, BF16)).advice[0].finding
    predicting = ask("precision.fp8", inference).advice[0].finding
    assert "convert_to_float8_training" in training.fix
    assert "convert_to_float8_training" not in predicting.fix
    assert "quantize_" in predicting.fix
