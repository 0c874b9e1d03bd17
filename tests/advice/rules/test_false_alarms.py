"""A well-tuned loop is left in peace, and every rule of the model's side says when it is silent."""

import pytest

from advisor.advice.advise import advise
from advisor.advice.rule import all_rules
from tests.advice.rules.models import FP32, MODEL, Op, analysis, op

WGMMA = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
MINE = [one for one in all_rules() if one.family in MODEL]


def linear(m: int, n: int, k: int, us: float) -> Op:
    gradient = [
        op("aten::mm", ([m, n], [n, k]), kernels=[(WGMMA, us)]),
        op("aten::mm", ([n, m], [m, k]), strides=[[1, n], [k, 1]], kernels=[(WGMMA, us)]),
    ]
    return op(
        "aten::mm", ([m, k], [k, n]), strides=[[k, 1], [1, k]], kernels=[(WGMMA, us)], gradient=gradient
    )


def compiled(name: str, dims, us: float) -> Op:
    return op(name, dims, kernels=[(name, us)], gradient=[op(f"{name}_backward", dims, kernels=[(name, us)])])


def tuned() -> list[Op]:
    heads = [8, 12, 1024, 64]
    attention = op(
        "aten::scaled_dot_product_attention",
        (heads, heads, heads, [], [], []),
        concrete=["", "", "", "", "0.", "True"],
        inside=[
            op(
                "aten::_scaled_dot_product_cudnn_attention",
                (heads, heads, heads),
                kernels=[("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 47)],
            )
        ],
    )
    x, wide = [8192, 768], [8192, 3072]
    block = [
        compiled("triton_per_fused_add_native_layer_norm_0", (x, x, x), 20),
        linear(8192, 2304, 768, 42),
        attention,
        linear(8192, 768, 768, 17),
        compiled("triton_per_fused_add_native_layer_norm_1", (x, x, x), 20),
        linear(8192, 3072, 768, 55),
        compiled("triton_poi_fused_gelu_2", (wide, wide), 27),
        linear(8192, 768, 3072, 52),
    ]
    loss = compiled("triton_red_fused_log_softmax_nll_loss_3", ([8192, 50304],), 350)
    return [*block * 4, linear(8192, 50304, 768, 800), loss]


ADAM = [op("aten::_fused_adamw_", ([], []), dtype=FP32, kernels=[("multi_tensor_apply_kernel", 200)])]


def test_well_tuned_loop_has_at_most_one_finding_above_three_percent():
    found = advise(analysis(*tuned(), optimizer=ADAM), MINE)
    assert found.failed == []
    step_ns = sum(sum(us for _, us in one.kernels) for one in tuned()) * 1e3
    large = [one.rule for one in found.advice if one.saving and one.saving.likely_ns > 0.03 * step_ns]
    assert len(large) <= 1, large


def test_spoiling_the_same_loop_raises_an_alarm():
    # GIVEN the loop with its vocabulary off by one and an activation by hand on top
    model = [one for one in tuned() if one.dims != [[8192, 768], [768, 50304]]]
    crawling = op(
        "aten::mm", ([8192, 768], [768, 50303]), kernels=[("cutlass_75_tensorop_bf16_s1688gemm_align1", 6000)]
    )
    found = advise(analysis(*model, crawling, optimizer=ADAM), MINE)
    assert "shape.alignment" in [one.rule for one in found.advice]


@pytest.mark.parametrize("rule", MINE, ids=lambda one: one.id)
def test_rule_tells_its_source_and_when_it_is_silent(rule):
    assert "ilent" in rule.explanation
    assert rule.source
    assert rule.title != rule.failure
