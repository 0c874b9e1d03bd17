"""What formulas read from arguments, checked against PyTorch where it has an answer."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from advisor.roofline.costs.args import Unknown, broadcast, footprint, promote
from advisor.roofline.costs.model import Tensor


def test_an_expanded_dimension_is_read_once():
    assert footprint(Tensor((8192, 4096), "bf16", (0, 1))) == 4096 * 2


def test_a_transposed_tensor_is_read_whole_and_once():
    assert footprint(Tensor((4096, 8192), "bf16", (1, 4096))) == 4096 * 8192 * 2


def test_every_second_element_costs_the_sectors_around_it():
    # An H200 read 67 MB for these 33.5 MB: a 32-byte sector is the least that it can fetch.
    assert footprint(Tensor((8192, 2048), "bf16", (4096, 2))) == pytest.approx(8192 * 4096 * 2, rel=1e-3)


def test_far_apart_elements_cost_a_sector_each():
    assert footprint(Tensor((100,), "fp32", (1000,))) == 100 * 32


def test_overlapping_windows_cost_no_more_than_their_storage():
    assert footprint(Tensor((100, 10), "fp32", (1, 1))) == 109 * 4


def test_shapes_that_do_not_broadcast_are_unknown():
    with pytest.raises(Unknown):
        broadcast((2, 3), (4, 3))


_SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
_TORCH_NAMES = {
    "fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int64": "int64",
    "int32": "int32", "int16": "int16", "int8": "int8", "uint8": "uint8", "bool": "bool",
}  # fmt: skip


def _is_number_beside_integers(described):
    floats = [shape for shape, dtype in described if dtype.startswith(("fp", "bf"))]
    others = [shape for shape, dtype in described if not dtype.startswith(("fp", "bf"))]
    return bool(floats) and not any(floats) and any(others)


@given(st.lists(st.tuples(_SHAPES, st.sampled_from(list(_TORCH_NAMES))), min_size=1, max_size=2))
def test_promotion_agrees_with_pytorch(described):
    torch = pytest.importorskip("torch")
    # Only a trace cannot tell a Python number from a 0-d tensor; and PyTorch widens uint8 with int8 to int16.
    assume(
        not _is_number_beside_integers(described) and {"uint8", "int8"} != {dtype for _, dtype in described}
    )
    tensors = [torch.empty(shape, dtype=getattr(torch, _TORCH_NAMES[dtype])) for shape, dtype in described]
    expected = torch.result_type(*tensors) if len(tensors) == 2 else tensors[0].dtype
    found = promote(*(Tensor(shape, dtype) for shape, dtype in described))
    assert getattr(torch, _TORCH_NAMES[found]) == expected


def test_a_python_number_makes_integers_fp32():
    assert promote(Tensor((3,), "int64"), Tensor((), "fp64")) == "fp32"


@given(_SHAPES, _SHAPES)
def test_broadcasting_agrees_with_pytorch(a, b):
    torch = pytest.importorskip("torch")
    try:
        expected = tuple(torch.broadcast_shapes(a, b))
    except RuntimeError:
        with pytest.raises(Unknown):
            broadcast(a, b)
        return
    assert broadcast(a, b) == expected
