"""Operators of libraries beside PyTorch: serving kernels, Liger, Apex, FlashAttention's own names."""

import pytest

from advisor.roofline.costs import op_cost
from tests.roofline.costs.calls import BF16, INT64, call

X, W = ((888, 2880), BF16), ((2880,), BF16)
SIZE = 2 * 888 * 2880
FP8 = "c10::Float8_e4m3fn"


def test_a_norm_into_an_output_reads_only_its_input():
    found = op_cost(call("_C::rms_norm", X, X, W, "1e-5"))
    assert (found.bytes_read, found.bytes_written) == (SIZE + 2 * 2880, SIZE)


def test_a_norm_with_a_residual_reads_and_writes_both():
    found = op_cost(call("_C::fused_add_rms_norm", X, X, W, "1e-5"))
    assert (found.bytes_read, found.bytes_written) == (2 * SIZE + 2 * 2880, 2 * SIZE)
    assert found.flops == 5 * 888 * 2880


@pytest.mark.parametrize("name", ["_C::silu_and_mul", "_C::mul_and_silu", "sgl_kernel::gelu_tanh_and_mul"])
def test_a_gated_activation_reads_both_halves(name):
    found = op_cost(call(name, ((64, 100), BF16), ((64, 200), BF16)))
    assert (found.bytes_read, found.bytes_written) == (2 * 64 * 200, 2 * 64 * 100)
    assert found.flops > 64 * 100
    assert op_cost(call(name, ((64, 100), BF16), ((64, 100), BF16))) is None


def test_a_rotation_moves_queries_and_keys_and_a_row_of_the_table_for_each_token():
    query, key = ((888, 512), BF16), ((888, 64), BF16)
    found = op_cost(
        call("_C::rotary_embedding", ((888,), INT64), query, key, "64", ((131072, 64), BF16), "True")
    )
    assert found.bytes_written == 2 * 888 * 576
    assert found.bytes_read == 2 * 888 * 576 + 2 * 888 * 64 + 8 * 888
    assert found.flops == 4 * 888 * 576


def test_keys_and_values_are_written_in_the_caches_dtype():
    key, cache = ((888, 1, 64), BF16), ((4096, 16, 1, 64), "unsigned char")
    found = op_cost(call("_C_cache_ops::reshape_and_cache_flash", key, key, cache, cache, ((888,), INT64)))
    assert (found.bytes_read, found.bytes_written) == (2 * 2 * 888 * 64 + 8 * 888, 2 * 888 * 64)


def test_quantising_writes_a_byte_an_element():
    found = op_cost(call("_C::static_scaled_fp8_quant", ((888, 512), FP8), ((888, 512), BF16)))
    assert (found.bytes_read, found.bytes_written) == (2 * 888 * 512, 888 * 512)


def test_ligers_functions_are_like_pytorchs():
    liger = op_cost(call("LigerRMSNormFunction", X, W, "1e-6"))
    aten = op_cost(call("aten::_fused_rms_norm", X, "[2880]", W, "1e-6"))
    assert liger == aten
    gated = op_cost(call("LigerSiLUMulFunction", X, X))
    assert (gated.bytes_read, gated.bytes_written) == (2 * SIZE, SIZE)


def _flash3(causal, **given):
    q = ((2, 256, 4, 64), BF16)
    arguments: list = [q, q, q] + [None] * 20 + ["0.125", causal, "-1", "-1"]
    for at, value in given.items():
        arguments[int(at[1:])] = value
    return op_cost(call("flash_attn_3::fwd", *arguments))


def test_flash_attention_3_is_attention():
    full, causal = _flash3("False"), _flash3("True")
    assert full.flops == 4 * 2 * 4 * 256 * 256 * 64
    assert causal.flops - causal.flops_padding == full.flops * 257 / 512


@pytest.mark.parametrize(
    "given",
    [{"_7": ((3,), "int")}, {"_14": ((2, 8), "int")}, {"_3": ((2, 1, 4, 64), BF16)}],
    ids=["packed", "paged", "new keys"],
)
def test_what_attention_covers_must_be_recorded(given):
    assert _flash3("True", **given) is None
