"""Operators of xFormers and bitsandbytes, and packed or windowed attention of every library."""

import pytest

from advisor.roofline.costs import launch_costs, op_cost
from tests.roofline.costs.calls import BF16, FP16, FP32, INT64, call

#: Two sequences of 256 tokens, one after the other.
PACKED, LENGTHS = ((512, 4, 64), BF16), ((3,), "int")
FLOPS = 4 * 2 * 4 * 256 * 256 * 64


def _varlen(longest="256", causal="False", left="-1", right="-1"):
    return op_cost(
        call(
            "flash_attn::_flash_attn_varlen_forward", PACKED, PACKED, PACKED, LENGTHS, LENGTHS,
            longest, longest, "0.0", "0.125", causal, left, right,
        )
    )  # fmt: skip


def test_packed_sequences_that_must_all_be_as_long_as_the_longest_are_known():
    assert _varlen().flops == FLOPS
    assert _varlen(longest="300") is None


@pytest.mark.parametrize(("causal", "left", "pairs"), [("False", "15", 32), ("True", "15", 16)])
def test_a_sliding_window_counts_what_it_covers(causal, left, pairs):
    # Each of 256 queries sees 15 keys before it and its own, without a mask as many after it less one.
    found = _varlen(causal=causal, left=left, right="16" if causal == "False" else "-1")
    assert found.flops / FLOPS * 256 == pytest.approx(pairs, rel=0.05)


def test_xformers_flash_attention_has_its_flag_in_front_of_the_gradient():
    q = ((2, 256, 4, 64), BF16)
    none = [None] * 3
    forward = op_cost(call("xformers_flash::flash_fwd", q, q, q, *none, "256", "256", "0.", "0.1", "False",
                           "-1", "-1", "False", None, "True"))  # fmt: skip
    lse = ((2, 4, 256), FP32)
    backward = op_cost(call("xformers_flash::flash_bwd", "False", q, q, q, q, q, lse, None, None, "256",
                            "256", "0.", "0.1", "False", "-1", "-1", None, "True"))  # fmt: skip
    assert (forward.flops, backward.flops) == (FLOPS, 2.5 * FLOPS)


def test_an_older_signature_is_not_read_by_the_newer_ones_positions():
    assert op_cost(call("xformers_flash::flash_fwd", PACKED, PACKED, PACKED, LENGTHS, LENGTHS, "256", "256",
                        "0.", "0.1", "True", "False")) is None  # fmt: skip


def test_a_dual_product_writes_three_results():
    found = op_cost(call("xformers::dual_gemm_silu_identity_mul", ((128, 64), FP16), ((96, 64), FP16), None,
                         ((96, 64), FP16), None))  # fmt: skip
    assert found.flops == 4 * 128 * 64 * 96
    assert found.bytes_written == 3 * 2 * 128 * 96


def test_rows_are_added_in_place():
    found = op_cost(
        call("_ScaledIndexAdd", ((8, 10, 64), FP16), ((3,), INT64), ((3, 10, 64), FP16), ((64,), FP16))
    )
    assert (found.bytes_read, found.bytes_written) == (2 * 2 * 1920 + 24 + 128, 2 * 1920)


def test_each_pair_of_source_and_index_is_a_launch():
    first, second = launch_costs(
        call(
            "_IndexSelectCat",
            ((9, 4), FP32),
            ((9, 8), FP32),
            ((3,), INT64),
            ((2,), INT64),
            kernels=["a", "b"],
        )
    )
    assert (first.bytes_written, second.bytes_written) == (4 * 12, 4 * 16)


def test_four_bit_weights_are_half_a_byte():
    packed = ((2048, 1), "unsigned char")
    found = op_cost(
        call("bitsandbytes::dequantize_4bit", packed, ((64,), FP32), "64", "nf4", "[64, 64]", "15")
    )
    assert (found.bytes_read, found.bytes_written) == (2048 + 256, 2 * 4096)
    assert (
        op_cost(call("bitsandbytes::dequantize_4bit", packed, ((64,), FP32), "64", "nf4", "[64, 65]", "15"))
        is None
    )


def test_an_eight_bit_optimizers_states_are_a_byte():
    gradient, state = ((4096,), FP32), ((4096,), "unsigned char")
    found = op_cost(
        call("bitsandbytes::optimizer_update_8bit_blockwise", None, gradient, gradient, state, state)
    )
    assert (found.bytes_read, found.bytes_written) == (4096 * 10, 4096 * 6)
