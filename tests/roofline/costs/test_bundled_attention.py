"""The bundled attention's work, against pairs counted one by one."""

import itertools

import pytest

from advisor.roofline.costs import Launch, launch_costs, op_cost
from advisor.roofline.costs.bundled_attention import seen_pairs
from tests.roofline.costs.calls import BF16, FP32, call

Q, K, ROWS = ((2, 4, 6, 8), BF16), ((2, 2, 10, 8), BF16), ((2, 4, 6), FP32)
SCALARS = ("0.35", "0.0", "0.0")
ENDS = ("6", "10")


def _counted(n, m, left, right, lower_right):
    shift = m - n if lower_right else 0
    return sum(
        (left < 0 or j - i >= shift - left) and (right < 0 or j - i <= shift + right)
        for i, j in itertools.product(range(n), range(m))
    )


@pytest.mark.parametrize(("n", "m"), [(6, 6), (3, 9), (9, 3), (1, 7)])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (2, 0), (0, 3), (50, 50)])
@pytest.mark.parametrize("lower_right", [False, True])
def test_the_scores_of_a_window_are_those_counted_one_by_one(n, m, left, right, lower_right):
    assert seen_pairs(n, m, left, right, lower_right) == _counted(n, m, left, right, lower_right)


def _forward(*window, mask=None, packed=None, precise="False"):
    args = (Q, K, K, mask, packed, packed, None, *SCALARS, *window, *ENDS, precise)
    return op_cost(call("advisor_kernels::attention", *args))


def test_the_forward_counts_two_products_of_what_is_seen():
    full = _forward("-1", "-1", "False")
    assert full.flops == 4 * 8 * (2 * 4 * 6 * 10)
    assert full.bytes_read == 2 * (2 * 4 * 6 * 8) + 2 * 2 * (2 * 2 * 10 * 8)
    assert full.bytes_written == 2 * (2 * 4 * 6 * 8) + 4 * 48
    assert full.pipe == "tensor_bf16"
    assert _forward("-1", "0", "False").flops == 4 * 8 * 2 * 4 * _counted(6, 10, -1, 0, False)


def test_an_expanded_mask_is_read_once():
    mask = ((2, 4, 6, 10), FP32, (0, 10, 0, 1))
    without = _forward("-1", "-1", "False")
    assert _forward("-1", "-1", "False", mask=mask).bytes_read - without.bytes_read == 4 * 4 * 10


def test_packed_sequences_have_no_cost_since_their_lengths_are_unknown():
    assert _forward("-1", "-1", "False", packed=((3,), "int")) is None


def test_the_backwards_kernels_compute_seven_products_and_the_operator_needs_five():
    args = (Q, Q, K, K, Q, ROWS, None, None, None, None, *SCALARS, "-1", "-1", "False", *ENDS)
    kernels = [Launch("query_gradient_kernel", 8), Launch("key_gradient_kernel", 8)]
    recorded = call("advisor_kernels::attention_backward", *args, kernels=kernels)
    product = 2 * 8 * (2 * 4 * 6 * 10)
    assert [found.flops for found in launch_costs(recorded)] == [3 * product, 4 * product]
    assert op_cost(recorded).flops == 5 * product


def test_a_precise_gradient_takes_the_outputs_residue_along():
    args = (Q, Q, K, K, Q, ROWS, None, None, None, None, *SCALARS, "-1", "-1", "False", *ENDS)
    kernels = [Launch("query_gradient_kernel", 8), Launch("key_gradient_kernel", 8)]
    plain, precise = (
        launch_costs(call("advisor_kernels::attention_backward", *args, residue, kernels=kernels))
        for residue in (((0,), BF16), Q)
    )
    assert [found.flops for found in precise] == [found.flops for found in plain]
    assert precise[0].bytes_read - plain[0].bytes_read == 2 * (2 * 4 * 6 * 8)
    assert precise[1].bytes_read == plain[1].bytes_read
    forwards = [_forward("-1", "-1", "False", precise=said) for said in ("False", "True")]
    assert forwards[1].bytes_written - forwards[0].bytes_written == 2 * (2 * 4 * 6 * 8)
