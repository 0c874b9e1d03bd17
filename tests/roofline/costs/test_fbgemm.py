"""Table-batched embeddings: what the tables' widths cannot change is exact."""

from dataclasses import replace

import pytest

from advisor.roofline.costs import launch_costs, op_cost, partner_of
from tests.roofline.costs.calls import FP32, INT64, Launch, call

#: Two tables of 4 columns, 1,000 rows in all; 8 samples; 50,000 look-ups.
LOOKUP = "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"
GRADIENT = "torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>"
ARGUMENTS = (
    ((0,), FP32), ((4000,), FP32), ((0,), FP32), ((0, 0), FP32), ((2,), "int"), ((2,), INT64), ((3,), "int"),
    None, None, ((3,), INT64), None, ((50_000,), INT64), ((17,), INT64),
)  # fmt: skip
POOLED = ((8, 8), FP32)


def _both(*names):
    forward = call(LOOKUP, *ARGUMENTS)
    backward = call(GRADIENT, POOLED, kernels=[Launch(name, 100) for name in names])
    return replace(forward, partner=backward.inputs), replace(backward, partner=forward.inputs)


def test_a_lookup_reads_its_rows_once_and_writes_what_its_gradient_is_as_large_as():
    forward, _ = _both()
    found = op_cost(forward)
    assert found.bytes_read == pytest.approx(4 * 4000 + 8 * 50_000 + 8 * 17)
    assert (found.bytes_written, found.flops) == (4 * 64, 4 * 50_000)


def test_without_the_other_half_a_lookup_and_its_gradient_have_no_cost():
    assert op_cost(call(LOOKUP, *ARGUMENTS)) is None
    assert op_cost(call(GRADIENT, POOLED)) is None


def test_tables_in_the_hosts_memory_have_no_cost():
    forward, _ = _both()
    hosted = call(LOOKUP, *ARGUMENTS[:2], ((4000,), FP32), *ARGUMENTS[3:])
    assert op_cost(replace(hosted, partner=forward.partner)) is None


def test_a_gradient_of_another_batch_is_not_this_lookups():
    forward, _ = _both()
    other = call(GRADIENT, ((9, 8), FP32))
    assert op_cost(replace(forward, partner=other.inputs)) is None


def test_a_gradient_sorts_pairs_and_leaves_the_rows_to_the_kernel_for_long_runs():
    _, backward = _both(
        "void cub::DeviceRadixSortOnesweepKernel<long, int>",
        "split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1<float>",
        "split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_warp_per_row_1<float>",
    )
    sort, long_runs, short_runs = launch_costs(backward)
    assert sort.bytes_read == sort.bytes_written == 12 * 50_000
    # Every row of the tables, the gradient, and four bytes a look-up and a row.
    assert long_runs.bytes_read == pytest.approx(4 * 4000 + 4 * 64 + 4 * 50_000 + 4 * 1000)
    assert short_runs.bytes_read < 5000


def test_the_partner_is_known_by_the_beginning_of_its_name():
    assert LOOKUP.startswith(partner_of(GRADIENT))
    assert GRADIENT.startswith(partner_of(LOOKUP))
    assert partner_of("aten::mm") == ""


@pytest.mark.parametrize(
    "name", ["fbgemm::permute_pooled_embs_auto_grad", "fbgemm::recat_embedding_grad_output_mixed_D_batch"]
)
def test_pooled_embeddings_are_moved_once(name):
    found = op_cost(call(name, ((1024, 700), FP32), ((4,), INT64)))
    assert found.bytes_read == found.bytes_written == 4 * 1024 * 700


def test_features_that_are_taken_twice_are_written_twice():
    features = call("fbgemm::permute_sparse_features", ((6,), "int"), ((3, 8), "int"), ((9000,), "int"))
    found = op_cost(features)
    assert (found.bytes_read, found.bytes_written) == (4 * 9000 + 4 * 24, 2 * (4 * 9000 + 4 * 24))
