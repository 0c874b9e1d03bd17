"""Elementwise operators, copies and dropout."""

import pytest

from advisor.roofline.costs import Launch, launch_costs, op_cost
from tests.roofline.costs.calls import BF16, FP16, FP32, H200, INT64, call

BIG, ROW = (8192, 4096), (4096,)
N = 8192 * 4096


def test_a_broadcast_operand_is_read_once():
    found = op_cost(call("aten::add", (BIG, BF16), (ROW, BF16), "1"))
    assert found.bytes_read == 2 * N + 2 * 4096
    assert found.bytes_written == 2 * N
    assert found.flops == 2 * N  # a + alpha * b, which an H200 does in one FFMA


def test_an_expanded_operand_is_read_once():
    found = op_cost(call("aten::mul", (BIG, BF16), (BIG, BF16, [0, 1])))
    assert found.bytes_read == 2 * N + 2 * 4096


def test_the_result_has_the_promoted_dtype():
    assert op_cost(call("aten::add", (BIG, FP32), (BIG, BF16), "1")).bytes_written == 4 * N
    assert op_cost(call("aten::mul", (BIG, BF16), ((), "double"))).bytes_written == 2 * N


def test_a_comparison_writes_bytes_and_computes_nothing():
    found = op_cost(call("aten::gt", (BIG, BF16), "0"))
    assert (found.bytes_written, found.flops, found.pipe) == (N, 0, "none")


def test_where_reads_condition_and_both_sides():
    found = op_cost(call("aten::where", (BIG, "bool"), (BIG, BF16), (ROW, BF16)))
    assert found.bytes_read == N + 2 * N + 2 * 4096
    assert found.bytes_written == 2 * N


def test_in_place_keeps_the_first_operands_dtype():
    assert op_cost(call("aten::add_", (BIG, BF16), (BIG, FP32), "1")).bytes_written == 2 * N


def test_in_place_cannot_grow_its_target():
    assert op_cost(call("aten::add_", (ROW, BF16), (BIG, BF16), "1")) is None


def test_an_output_argument_is_not_read():
    found = op_cost(call("aten::mul", (BIG, FP32), ((), "double"), (BIG, FP32)))
    assert found.bytes_read == pytest.approx(4 * N, rel=1e-6)


def test_integer_arithmetic_is_no_floating_point_work():
    found = op_cost(call("aten::add", (ROW, INT64), (ROW, INT64), "1"))
    assert (found.flops, found.pipe, found.bytes_written) == (0, "none", 8 * 4096)


def test_the_optimizers_addcmul_reads_its_gradient_once():
    assert (
        op_cost(call("aten::addcmul_", (BIG, FP32), (BIG, FP32), (BIG, FP32), "0.1")).bytes_read == 2 * 4 * N
    )


def test_an_operand_of_unknown_dtype_leaves_the_cost_unknown():
    assert op_cost(call("aten::add", (BIG, FP32), (BIG, "my::Type"), "1")) is None


def test_shapes_that_do_not_broadcast_leave_the_cost_unknown():
    assert op_cost(call("aten::add", ((3, 4), FP32), ((5,), FP32), "1")) is None


@pytest.mark.parametrize(
    ("name", "args", "counted"),
    [
        # FFMA * 2 + FADD + FMUL for an element, as an H200 counted them.
        ("aten::gelu", [(BIG, BF16), None], 19.2),
        ("aten::silu", [(BIG, BF16)], 21.0),
        ("aten::sqrt", [(BIG, FP32)], 6.0),
        ("aten::native_dropout", [(BIG, BF16), "0.1", "True"], 4.0),
    ],
)
def test_the_convention_is_what_the_hardware_executes(name, args, counted):
    assert op_cost(call(name, *args)).flops / N == pytest.approx(counted, rel=0.05)


def test_a_cast_reads_one_dtype_and_writes_the_other():
    found = op_cost(call("aten::copy_", (BIG, FP32), (BIG, BF16), "False"))
    assert (found.bytes_read, found.bytes_written, found.flops) == (2 * N, 4 * N, 0)


def test_a_fill_reads_nothing():
    found = op_cost(call("aten::fill_", (BIG, BF16), "0"))
    assert (found.bytes_read, found.bytes_written) == (0, 2 * N)


def test_cat_takes_the_width_from_its_kernel_because_lists_have_no_dtype():
    name = "CatArrayBatchedCopy_vectorized<at::native::OpaqueType<2u>, unsigned int>"
    (found,) = launch_costs(call("aten::cat", [[8, 4], [8, 6]], "1", kernels=[name]))
    assert (found.bytes_read, found.bytes_written) == (2 * 80, 2 * 80)
    assert op_cost(call("aten::cat", [[8, 4], [8, 6]], "1")) is None


def test_padding_writes_the_larger_tensor():
    found = op_cost(call("aten::constant_pad_nd", ((2, 3), FP32), "[1, 1, 0, 2]", "0"))
    assert found.bytes_written == 4 * 4 * 5


def test_dropout_writes_a_mask_of_bytes_in_training_only():
    training = op_cost(call("aten::native_dropout", (BIG, FP16), "0.1", "True"))
    evaluation = op_cost(call("aten::native_dropout", (BIG, FP16), "0.1", "False"))
    assert training.bytes_written - evaluation.bytes_written == N


def test_several_kernels_of_a_pointwise_operator_share_its_cost():
    halves = launch_costs(
        call("aten::add", (BIG, BF16), (BIG, BF16), "1", kernels=[Launch("k", 10), Launch("k", 30)])
    )
    assert [half.bytes_read for half in halves] == [N, 3 * N]


def test_a_gradient_whose_tensors_are_not_the_first_arguments_reads_both():
    x = ((64, 64), FP32)
    found = op_cost(call("aten::elu_backward", x, "1.", "1", "1", "False", x))
    assert found.bytes_read == 2 * 4 * 64 * 64


def test_joining_pieces_shorter_than_a_sector_fetches_the_result_for_each():
    # GIVEN three columns side by side: an H200 read 569 MB where they hold 144
    kernels = ["CatArrayBatchedCopy_alignedK_contig<at::native::OpaqueType<4u>, unsigned int, 2, 128, 1, 16>"]
    columns = [[12_000_000, 1]] * 3
    (found,) = launch_costs(call("aten::cat", columns, "1", kernels=kernels, settings=H200))
    assert found.bytes_read == pytest.approx(569e6, rel=0.05)
    assert found.bytes_read - found.bytes_reread == 144e6
    # AND where the pieces are long nothing is
    (found,) = launch_costs(call("aten::cat", columns, "0", kernels=kernels, settings=H200))
    assert found.bytes_reread == 0
