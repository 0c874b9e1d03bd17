"""Fused attention of every backend."""

import pytest

from advisor.roofline.costs import launch_costs, op_cost
from advisor.roofline.costs.attention import block_pairs, causal_pairs
from tests.roofline.costs.calls import BF16, FP32, INT64, call

B, H, S, D = 4, 16, 2048, 64
Q = ((B, H, S, D), BF16)


def _forward(causal, q=Q, kv=Q, kernels=()):
    return call(
        "aten::_scaled_dot_product_flash_attention", q, kv, kv, "0.", causal, "False", None, kernels=kernels
    )


def test_full_attention_agrees_with_pytorchs_counter():
    counter = pytest.importorskip("torch.utils.flop_counter")
    expected = counter.sdpa_flop_count((B, H, S, D), (B, H, S, D), (B, H, S, D))
    found = op_cost(_forward("False"))
    assert found.flops == expected
    assert found.bytes_read == 3 * 2 * B * H * S * D
    assert found.bytes_written == 2 * B * H * S * D + 4 * B * H * S


def test_backward_multiplies_two_and_a_half_times_as_much():
    lse = ((B, H, S), FP32)
    back = call(
        "aten::_scaled_dot_product_flash_attention_backward",
        Q,
        Q,
        Q,
        Q,
        Q,
        lse,
        None,
        None,
        "2048",
        "2048",
        "0.",
        "False",
    )
    assert op_cost(back).flops == 2.5 * op_cost(_forward("False")).flops


def test_causal_attention_counts_half_and_whole_tiles_on_the_diagonal():
    # An H200 executed 36,507,222,016 tensor-core FLOPs for this call with cuDNN.
    assert op_cost(_forward("True")).flops == pytest.approx(36_507_222_016, rel=1e-6)


def test_causal_pairs_by_hand():
    assert causal_pairs(4, 4, tile=1) == 1 + 2 + 3 + 4
    assert causal_pairs(1, 100, tile=1) == 100
    assert causal_pairs(6, 4, tile=1) == 1 + 2 + 3 + 4 + 4 + 4
    assert causal_pairs(4, 4, tile=64) == 16


def test_grouped_queries_read_fewer_keys_but_multiply_for_every_query_head():
    few = op_cost(_forward("False", kv=((B, 4, S, D), BF16)))
    assert few.flops == op_cost(_forward("False")).flops
    assert few.bytes_read == 2 * B * S * D * (H + 4 + 4)


def test_the_three_kernels_of_backward_have_their_own_work():
    lse = ((B, H, S, 1), FP32)
    back = call(
        "aten::_cudnn_attention_backward",
        Q,
        Q,
        Q,
        Q,
        Q,
        lse,
        ((), INT64),
        ((), INT64),
        None,
        None,
        None,
        "2048",
        "2048",
        "0.",
        "True",
        None,
        kernels=[
            "cudnn::fusion::compute_dot_do_o_specialized<true, 64>",
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop",
            "cudnn::fusion::convert_dq_to_16bits<true>",
        ],
    )
    delta, main, convert = launch_costs(back)
    size = B * H * S * D
    assert delta.bytes_read == 2 * 2 * size
    assert main.flops == pytest.approx(91_268_055_040, rel=1e-6)  # as counted on an H200
    assert (convert.bytes_read, convert.bytes_written, convert.flops) == (4 * size, 2 * size, 0)


def test_packed_sequences_have_no_cost_because_their_lengths_are_not_recorded():
    packed = call(
        "aten::_flash_attention_forward",
        ((8192, 16, 64), BF16),
        ((8192, 16, 64), BF16),
        ((8192, 16, 64), BF16),
        ((9,), "int"),
        ((9,), "int"),
        "2048",
        "2048",
        "0.",
        "True",
        "False",
    )
    assert op_cost(packed) is None


@pytest.mark.parametrize("kv", [((B, 5, S, D), BF16), ((B + 1, H, S, D), BF16), ((B, H, S), BF16)])
def test_contradicting_sizes_have_no_cost(kv):
    assert op_cost(_forward("False", kv=kv)) is None


def test_blocks_are_visited_whole_up_to_the_diagonal():
    assert block_pairs(4, 4, (2, 1), -1, -1) == 16
    # Two rows of blocks: the first sees 2 columns, the second 4.
    assert block_pairs(4, 4, (2, 1), -1, 0) == 2 * 2 + 2 * 4
    # The diagonal ends in the last column: the rows see 5 and 6 of 6 keys, in blocks of 4.
    assert block_pairs(2, 6, (1, 4), -1, 0) == 8 + 8
    assert block_pairs(3, 5, (2, 4), -1, -1) == 4 * 8
    # A window of one key to the left: a row of blocks sees 2 and 3 columns.
    assert block_pairs(4, 4, (2, 1), 1, 0) == 2 * 2 + 2 * 3


def test_flash_attentions_name_tells_its_blocks():
    # GIVEN 1501 tokens in blocks of 128 x 64: an H200 executed 5.436e10 FLOPs
    q = ((5, 1501, 12, 96), BF16)
    kernel = (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<96, 128, 64, 4, false, false, "
        "cutlass::bfloat16_t, Flash_kernel_traits<96, 128, 64, 4, cutlass::bfloat16_t> >, true>"
    )
    forward = call(
        "aten::_flash_attention_forward", q, q, q, None, None, "1501", "1501", "0.", "False", "False",
        kernels=[kernel],
    )  # fmt: skip
    (found,) = launch_costs(forward)
    assert found.flops == pytest.approx(5.436e10, rel=1e-3)
    assert found.flops - found.flops_padding == 4 * 5 * 12 * 1501 * 1501 * 96


def test_a_head_dimension_is_padded_to_the_one_the_kernel_was_built_for():
    q = ((1, 256, 2, 80), BF16)
    kernel = "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<96, 128, 64, 4>"
    forward = call(
        "aten::_flash_attention_forward", q, q, q, None, None, "256", "256", "0.", "False", "False",
        kernels=[kernel],
    )  # fmt: skip
    (found,) = launch_costs(forward)
    assert found.flops == 4 * 2 * 256 * 256 * 96
    assert found.flops_padding == 4 * 2 * 256 * 256 * 16
