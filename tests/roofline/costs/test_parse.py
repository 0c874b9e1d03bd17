"""Recorded arguments to tensors."""

import pytest

from advisor.roofline.costs import Tensor, parse_dtype, parse_inputs


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("float", "fp32"), ("double", "fp64"), ("c10::Half", "fp16"), ("c10::BFloat16", "bf16"),
        ("long int", "int64"),
        ("int", "int32"), ("bool", "bool"), ("unsigned char", "uint8"), ("signed char", "int8"),
        ("c10::Float8_e4m3fn", "fp8"), ("c10::complex<float>", "complex64"), ("torch.bfloat16", "bf16"),
        ("my::Type", "unknown"), ("", "unknown"), (None, "unknown"),
    ],
)  # fmt: skip
def test_dtypes_are_known_by_all_their_spellings(spelling, dtype):
    assert parse_dtype(spelling) == dtype


def test_tensors_scalars_and_lists_are_told_apart():
    inputs, concrete = parse_inputs(
        [[2, 3], [], [[4], [5, 6]], []],
        ["float", "Scalar", "TensorList", ""],
        [[3, 1], [], [[1], [6, 1]], []],
        ["", "0.5", "", ""],
    )
    assert inputs[0] == Tensor((2, 3), "fp32", (3, 1))
    assert inputs[1] is None
    assert inputs[2] == (Tensor((4,), "unknown", (1,)), Tensor((5, 6), "unknown", (6, 1)))
    assert inputs[3] is None
    assert concrete[1] == "0.5"


def test_an_empty_list_of_tensors_is_empty_and_a_zero_dimensional_tensor_is_a_tensor():
    inputs, _ = parse_inputs([[], []], ["TensorList", "double"])
    assert inputs == ((), Tensor((), "fp64", None))


@pytest.mark.parametrize("dims", [None, "garbage", 3])
def test_absent_or_broken_dims_give_no_arguments(dims):
    assert parse_inputs(dims) == ((), ())


@pytest.mark.parametrize("shape", ["2x3", [2, "3"], [2.5], None, [True], [4, -1], [2**31] * 3])
def test_a_malformed_shape_is_no_tensor(shape):
    assert parse_inputs([shape], ["float"])[0] == (None,)


def test_a_list_with_a_malformed_member_is_unknown_as_a_whole():
    assert parse_inputs([[[2], ["x"]]], ["TensorList"])[0] == (None,)


@pytest.mark.parametrize("tag", ["Int", "Double", "Bool", "GenericList", "Scalar"])
def test_the_tags_that_old_traces_give_to_scalars_are_no_tensors(tag):
    assert parse_inputs([[]], [tag])[0] == (None,)


def test_strides_past_64_bits_are_not_known():
    assert parse_inputs([[2, 3]], ["float"], [[10**400, 1]])[0] == (Tensor((2, 3), "fp32"),)


def test_strides_that_do_not_fit_the_sizes_are_not_known():
    (fits, short, long), _ = parse_inputs([[2, 3], [2, 3], [2]], ["float"] * 3, [[3, 1], [1], [3, 1]])

    assert fits.strides == (3, 1)
    assert short.strides is None
    assert long.strides is None


@pytest.mark.parametrize("kind", [["float"], {"of": "float"}, 3])
def test_a_type_that_is_no_text_is_an_unknown_one(kind):
    assert parse_inputs([[2, 3], []], [kind, kind])[0] == (Tensor((2, 3), "unknown"), None)
