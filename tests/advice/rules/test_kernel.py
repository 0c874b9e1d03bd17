"""Large kernels far from their roof that no other rule explains."""

from tests.advice.rules.models import ask, likely_ms, op

X = [16384, 4096]
PRODUCT = op("aten::mm", (X, [4096, 4096]), kernels=[("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 700)])


def column_sum(us: float):
    kernel = "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16>>"
    return op("aten::sum", (X, [], [], []), concrete=["", "[0]", "True", ""], kernels=[(kernel, us)])


def test_slow_reduction_is_named_with_a_fifth_of_its_headroom():
    # GIVEN 300 µs for 134 MB, 28 µs at the roof: 260 µs of headroom
    said = ask("kernel.inefficient", PRODUCT, column_sum(300))
    (advice,) = said.advice
    assert "reduce_kernel" in advice.finding.evidence[0]
    assert 0.04 < likely_ms(said) < 0.065
    assert advice.saving.low_ns < 2_000


def test_reduction_near_its_roof_is_passed():
    assert ask("kernel.inefficient", PRODUCT, column_sum(40)).passed == ["kernel.inefficient"]


def test_headroom_that_hardly_shortens_the_step_is_passed():
    # GIVEN the same slow reduction in a step ten times as long: a fifth of its headroom is 0.7 % of that
    assert ask("kernel.inefficient", *[PRODUCT] * 10, column_sum(300)).passed == ["kernel.inefficient"]


def test_unaligned_product_is_left_to_the_rule_that_explains_it():
    crawling = op(
        "aten::mm", ([8192, 768], [768, 50257]), kernels=[("cutlass_75_tensorop_bf16_align1", 6000)]
    )
    assert ask("kernel.inefficient", PRODUCT, crawling).passed == ["kernel.inefficient"]


def test_chain_is_left_to_the_rule_that_explains_it():
    slow = [op("aten::mul", (X, []), kernels=[("elementwise_kernel", 300)]) for _ in range(2)]
    assert ask("kernel.inefficient", PRODUCT, *slow).passed == ["kernel.inefficient"]


def test_a_loop_that_is_compiled_is_not_told_to_compile():
    slow = op("aten::sum", ([8192, 3072], [], [], []), kernels=[("reduce_kernel", 400)])
    compiled = op("triton_poi_fused_gelu_0", ([8192, 3072],) * 2, kernels=[("triton_poi_fused_gelu_0", 30)])

    (eager,) = ask("kernel.inefficient", slow).advice
    (again,) = ask("kernel.inefficient", slow, compiled).advice

    assert eager.finding.fix.startswith("model.compile()")
    assert "is compiled already" in again.finding.fix
