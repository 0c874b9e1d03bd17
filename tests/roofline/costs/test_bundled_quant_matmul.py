"""The bundled weight-only products: packed bytes once, and a matrix only where one is made."""

import pytest

from advisor.roofline.costs import launch_costs, op_cost
from tests.roofline.costs.calls import BF16, FP32, call

INT32, UINT8 = "int", "unsigned char"
#: 256 x 1000 in int4, groups of 64, 1024 columns when filled up; and in int8.
WORDS4, SCALE4, ZERO4 = ((256, 128), INT32), ((256, 16), BF16), ((256, 16), UINT8)
WORDS8, SCALE8 = ((256, 256), INT32), ((256, 1), FP32)
PACKED4, PACKED8 = 256 * 512 + 256 * 16 * 2, 256 * 1024 + 256 * 4


def _forward(rows, words, scale, zero, bits, kernels=(), bias=None):
    x = ((rows, 1000), BF16)
    return call("advisor_kernels::weight_only_linear", x, words, scale, zero, bias, bits, kernels=kernels)


@pytest.mark.parametrize(
    ("args", "packed"),
    [
        ((WORDS4, SCALE4, None, "4"), PACKED4),
        ((WORDS4, SCALE4, ZERO4, "4"), PACKED4 + 256 * 16),
        ((WORDS8, SCALE8, None, "8"), PACKED8),
    ],
)
def test_words_scales_and_zero_points_are_read_once(args, packed):
    found = op_cost(_forward(2, *args, kernels=["_gemv_kernel"]))
    assert found.bytes_read == 2 * 1000 * 2 + packed
    assert found.bytes_written == 2 * 256 * 2
    assert found.flops == 2 * 2 * 256 * 1000


def test_a_bias_is_read_too():
    without, with_it = (
        op_cost(_forward(1, WORDS8, SCALE8, None, "8", bias=b)) for b in (None, ((256,), BF16))
    )
    assert with_it.bytes_read - without.bytes_read == 512


@pytest.mark.parametrize(
    ("kernel", "pipe"),
    [
        ("_gemv_kernel", "vector_fp32"),
        ("_stream_kernel", "tensor_bf16"),
        ("_split_kernel", "tensor_bf16"),
        ("_tile_kernel", "tensor_bf16"),
    ],
)
def test_each_kernel_multiplies_on_its_units(kernel, pipe):
    (found,) = launch_costs(_forward(1, WORDS4, SCALE4, None, "4", kernels=[kernel]))
    assert found.pipe == pipe
    # THEN it reads packed words, and no matrix
    assert found.bytes_read == 1000 * 2 + PACKED4


def test_many_rows_write_a_matrix_and_read_it_again_but_an_ideal_operator_does_not():
    made = _forward(4096, WORDS4, SCALE4, None, "4", kernels=["_dequantize_kernel", "sm90_xmma_gemm_bf16"])
    unpacking, product = launch_costs(made)
    assert (unpacking.bytes_read, unpacking.bytes_written) == (PACKED4, 256 * 1000 * 2)
    assert product.bytes_read == 4096 * 1000 * 2 + 256 * 1000 * 2
    assert product.flops == 2 * 4096 * 256 * 1000
    ideal = op_cost(_forward(4096, WORDS4, SCALE4, None, "4"))
    assert ideal.bytes_read == 4096 * 1000 * 2 + PACKED4


def test_the_gradient_multiplies_by_the_weight_the_other_way():
    dy = ((4096, 256), BF16)
    kernels = ["_dequantize_kernel", "sm90_xmma_gemm_bf16"]
    name = "advisor_kernels::weight_only_linear_backward"
    unpacking, product = launch_costs(call(name, dy, WORDS4, SCALE4, ZERO4, "4", "1000", kernels=kernels))
    assert unpacking.bytes_written == 256 * 1000 * 2
    assert (product.flops, product.bytes_written) == (2 * 4096 * 256 * 1000, 4096 * 1000 * 2)
    # THEN a gradient that is not the weight's has no cost
    assert op_cost(call(name, ((4096, 255), BF16), WORDS4, SCALE4, ZERO4, "4", "1000")) is None


@pytest.mark.parametrize("bits", ["8", "3", ""])
def test_bits_that_contradict_the_words_have_no_cost(bits):
    assert op_cost(_forward(1, WORDS4, SCALE4, None, bits)) is None
