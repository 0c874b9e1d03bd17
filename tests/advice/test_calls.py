"""Calls of the model with what they launched, forward and backward."""

from tests.advice.rules.models import BF16, FP32, loop, op

X = [64, 64]


def test_gradient_belongs_to_the_call_that_made_its_node():
    # GIVEN two calls of one operator, each with a gradient
    calls = [
        op(
            "aten::mm",
            (X, X),
            kernels=[(f"gemm_{i}", 9)],
            gradient=[op("aten::mm", (X, X), kernels=[(f"dgrad_{i}", 9)])],
        )
        for i in range(2)
    ]

    one = loop(*calls, steps=2)
    units = one.calls.units
    names = one.timeline.trace.names

    # THEN each gradient is of its own call
    assert [[names[one.rows.name[row]] for row in unit.rows] for unit in units] == [
        ["gemm_0", "dgrad_0"],
        ["gemm_1", "dgrad_1"],
    ]


def test_operators_inside_another_are_one_call():
    copy = op("aten::copy_", (X, X, []), dtypes=[FP32, BF16, "Scalar"], kernels=[("copy", 2)])
    inner = op("aten::_softmax", (X, [], []), dtype=FP32, kernels=[("softmax", 3)])
    outer = op("aten::softmax", (X, [], []), inside=[op("aten::to", (X, []), inside=[copy]), inner])
    (unit,) = loop(outer, steps=2).calls.units
    assert (unit.name, len(unit.forward), len(unit.backward)) == ("softmax", 2, 0)


def test_cast_gives_the_dtype_that_it_casts_to():
    copy = op("aten::copy_", (X, X, []), dtypes=[FP32, BF16, "Scalar"], kernels=[("copy", 2)])
    (unit,) = loop(op("aten::to", (X, []), inside=[copy]), steps=2).calls.units
    assert unit.result_dtype == "fp32"


def test_optimizer_is_no_call_of_the_model():
    step = op("aten::_foreach_add_", ([], []), kernels=[("multi_tensor_apply_kernel", 5)])
    units = loop(op("aten::mm", (X, X), kernels=[("gemm", 9)]), optimizer=[step], steps=2).calls.units
    assert [unit.name for unit in units] == ["mm"]


def test_rows_of_a_transposed_operand_are_as_long_as_its_stride():
    call = op("aten::mm", ([50257, 8192], [8192, 768]), strides=[[1, 50257], [768, 1]], kernels=[("gemm", 9)])
    (matrix,) = loop(call, steps=2).calls.matrices
    assert sorted(matrix.row_lengths) == [768, 768, 50257]
