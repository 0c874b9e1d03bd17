"""The bundled paged attention's work: what the lengths' sum says, and nothing without it."""

import pytest

from advisor.roofline.costs import Launch, launch_costs, op_cost
from tests.roofline.costs.calls import BF16, FP32, INT64, call

#: Three sequences, eight query heads on two key heads of dimension 16, blocks of 4 in a table of 10.
CACHE, TABLE, LENS = ((99, 4, 2, 16), BF16), ((3, 10), "int"), ((3,), "int")


def _call(*, queries=1, left="-1", longest="40", total="50", cache=CACHE, kernels=(), scales=None):
    q = ((3, queries, 8, 16), BF16)
    scalars = ("0.25", "0.0", left, longest, total)
    args = (q, cache, cache, TABLE, LENS, None, scales, scales, *scalars)
    return call("advisor_kernels::paged_attention", *args, kernels=kernels)


def test_keys_and_values_of_the_tokens_that_are_there_are_read_and_not_the_whole_cache():
    found = op_cost(_call())
    q_bytes = 3 * 8 * 16 * 2
    assert found.flops == 4 * 16 * 8 * 50
    assert found.bytes_read == 2 * 50 * 2 * 16 * 2 + q_bytes + 3 * 4 + 50 / 4 * 4
    assert found.bytes_written == q_bytes + 3 * 8 * 4
    assert found.pipe == "tensor_bf16"


@pytest.mark.parametrize("total", ["-1", "", "121"])
def test_without_lengths_or_with_impossible_ones_there_is_no_cost(total):
    # 121 tokens are more than the table's 3 x 10 blocks of 4 hold
    assert op_cost(_call(total=total)) is None


def test_several_queries_see_one_another_causally():
    # Three sequences of 20, 20 and 10 tokens: the last four see 17, 18, 19, 20 and so on.
    pairs = 2 * (17 + 18 + 19 + 20) + (7 + 8 + 9 + 10)
    assert op_cost(_call(queries=4)).flops == 4 * 16 * 8 * pairs


def test_a_window_cuts_what_is_read_only_where_the_numbers_say_by_how_much():
    whole = op_cost(_call(longest="20"))
    assert op_cost(_call(longest="20", left="19")) == whole
    assert op_cost(_call(longest="20", left="18")) is None
    args = (((1, 1, 8, 16), BF16), CACHE, CACHE, ((1, 10), "int"), ((1,), "int"), None, None, None)
    alone = call("advisor_kernels::paged_attention", *args, "0.25", "0.0", "9", "40", "35")
    assert op_cost(alone).flops == 4 * 16 * 8 * 10


def test_a_cache_of_8_bits_is_half_the_bytes_and_its_scales():
    scales = ((2,), FP32)
    found = op_cost(_call(cache=((99, 4, 2, 16), "signed char"), scales=scales))
    assert op_cost(_call()).bytes_read - found.bytes_read == 50 * 2 * 16 * 2 - 2 * 2 * 4


def test_putting_splits_together_has_no_cost_and_the_first_kernel_has_all_of_it():
    kernels = [Launch("paged_attention_kernel", 8), Launch("paged_combine_kernel", 24)]
    first, second = launch_costs(_call(kernels=kernels))
    assert first == op_cost(_call())
    assert second is None


def test_writing_reads_rows_and_writes_them_in_the_caches_dtype():
    rows = ((7, 2, 16), FP32)
    found = op_cost(call("advisor_kernels::write_to_cache", rows, rows, CACHE, CACHE, ((7,), INT64)))
    assert found.bytes_read == 2 * 7 * 32 * 4 + 7 * 8
    assert found.bytes_written == 2 * 7 * 32 * 2
    assert found.flops == 0


def test_arguments_are_where_the_operators_have_them():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from advisor.kernels import _paged_ops as ops

    names = [a.name for a in ops.paged_attention_op._schema.arguments]
    assert names[:5] == ["q", "k_cache", "v_cache", "block_table", "context_lens"]
    assert names[10:] == ["left", "max_context_len", "total_context_len"]
    names = [a.name for a in ops.write_to_cache_op._opoverload._schema.arguments]
    assert names == ["key", "value", "k_cache", "v_cache", "slots", "k_scale", "v_scale"]
