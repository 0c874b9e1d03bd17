"""vLLM's fused mixture: what the grids of its kernels tell."""

import pytest

from advisor.roofline.costs import launch_costs, op_cost
from advisor.roofline.costs.mixture import most_tiles
from tests.roofline.costs.calls import BF16, Launch, call

FIRST = "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_rM_TN_transOut_swiGlu_dynBatch_sm100f"
SECOND = "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_rM_TN_transOut_dynBatch_sm100f"
#: 888 tokens of 3072 choose 4 of 128 experts, whose gate and linear part have 512 rows each.
TILES = 342
X, SCORES = ((888, 3072), BF16), ((888, 128), BF16)


def _costs(first=8 * TILES, second=24 * TILES, x=X, scores=SCORES, extra=()):
    kernels = [Launch(FIRST, first), Launch(SECOND, second), *extra]
    return launch_costs(call("vllm::moe_forward", x, scores, kernels=kernels))


def test_the_tiles_at_worst_are_those_that_the_library_launches():
    assert most_tiles(888, 4, 128, 16) == TILES
    assert most_tiles(3, 2, 128, 16) == 6


def test_two_products_read_every_experts_weights_in_four_bits_and_their_scales():
    first, second = _costs()
    weight = 128 * 1024 * 3072 * (0.5 + 1 / 32)
    assert first.bytes_read == pytest.approx(weight + 888 * 3072 * (1 + 1 / 32), rel=1e-6)
    assert first.bytes_written == 888 * 4 * 512 * (1 + 1 / 32)
    assert first.flops - first.flops_padding == pytest.approx(2 * 888 * 4 * 1024 * 3072)
    assert second.flops - second.flops_padding == pytest.approx(2 * 888 * 4 * 512 * 3072)
    assert second.bytes_written == 888 * 4 * 3072 * 2
    assert first.pipe == "tensor_fp8"


@pytest.mark.parametrize("change", [{"second": 24 * TILES + 1}, {"second": 24 * 340, "first": 8 * 340}])
def test_grids_that_fit_no_number_of_choices_have_no_cost(change):
    assert _costs(**change) == (None, None)


def test_a_kernel_of_another_kind_has_none_either():
    *_, routing, other = _costs(extra=(Launch("moe::dev::routing::histogram"), Launch("something_else")))
    assert routing.bytes_read == 8 * 888 * 4
    assert other is None


def test_without_kernels_nothing_tells_the_experts():
    assert op_cost(call("vllm::moe_forward", X, SCORES)) is None
