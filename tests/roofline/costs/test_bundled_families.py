"""The bundled activations, rotary embedding, softmax and cross-entropy: bytes by closed form."""

import pytest

from advisor.roofline.costs import Launch, launch_costs, op_cost
from advisor.roofline.costs.bundled_softmax import seen_share
from tests.roofline.costs.calls import BF16, FP32, INT64, call

BF16_TYPE, FP32_TYPE = "15", "6"


def _cost(name, *args):
    return op_cost(call(f"advisor_kernels::{name}", *args, kernels=[Launch("kernel", 1)]))


def test_a_bias_and_activation_reads_and_writes_once():
    found = _cost("bias_activation", ((8, 16), BF16), ((16,), FP32), "gelu")
    # THEN the result has the promoted dtype
    assert (found.bytes_read, found.bytes_written) == (8 * 16 * 2 + 16 * 4, 8 * 16 * 4)
    found = _cost("bias_activation_backward", ((8, 16), BF16), ((8, 16), BF16), None, "gelu")
    assert (found.bytes_read, found.bytes_written) == (2 * 8 * 16 * 2, 8 * 16 * 2)


def test_an_activation_that_was_not_recorded_has_no_cost():
    assert _cost("bias_activation", ((8, 16), BF16), None, "") is None


@pytest.mark.parametrize(
    ("name", "args", "passes"),
    [
        ("gated_activation", [((8, 16), BF16)] * 2, (2, 1)),
        ("gated_activation_backward", [((8, 16), BF16)] * 3, (3, 2)),
        ("gated_activation_packed", [((8, 32), BF16)], (2, 1)),
        ("gated_activation_packed_backward", [((8, 16), BF16), ((8, 32), BF16)], (3, 2)),
    ],
)
def test_a_gate_takes_three_passes_forward_and_five_backward(name, args, passes):
    found = _cost(name, *args, "silu")
    assert (found.bytes_read, found.bytes_written) == tuple(n * 8 * 16 * 2 for n in passes)
    assert found.flops > 0


def test_rope_counts_rotated_elements_and_tables():
    table = ((4, 8), FP32)
    found = _cost("rope", ((2, 3, 4, 16), BF16), ((2, 1, 4, 16), BF16), table, table, "8")
    elements = 2 * 4 * 4 * 16
    assert found.flops == 3 * elements / 2
    assert found.bytes_read == elements * 2 + 2 * 4 * 8 * 4
    assert found.bytes_written == elements * 2


def test_causality_leaves_the_triangle():
    assert seen_share(4, 4, 0) == 10 / 16
    assert seen_share(2, 4, 2) == 7 / 8
    assert seen_share(4, 2, 0) == 7 / 8
    assert seen_share(2, 4, -2) == 0


def test_a_causal_softmax_reads_what_it_sees_and_writes_all():
    scores = ((3, 4, 4), BF16)
    found = _cost("softmax", scores, None, "1.0", "True", "0", "False", FP32_TYPE)
    assert (found.bytes_read, found.bytes_written) == (48 * 2 * 10 / 16, 48 * 4)
    found = _cost("softmax_backward", scores, scores, "1.0", "True", "0", "False", "True", BF16_TYPE)
    assert (found.bytes_read, found.bytes_written) == (2 * 48 * 2 * 10 / 16, 48 * 2)
    # THEN the log form needs every dy
    found = _cost("softmax_backward", scores, scores, "1.0", "True", "0", "True", "True", BF16_TYPE)
    assert found.bytes_read == 2 * 48 * 2


def test_a_broadcast_mask_is_read_once():
    mask = ((4, 4), FP32)
    found = _cost("softmax", ((3, 4, 4), BF16), mask, "1.0", "False", "0", "False", BF16_TYPE)
    assert found.bytes_read == 48 * 2 + 16 * 4


def test_cross_entropy_writes_a_gradient_only_if_asked():
    logits, target = ((4, 1000), BF16), ((4,), INT64)
    settings = ("-100", "0.0", "0.0", "mean")
    without = _cost("cross_entropy", logits, target, *settings, "False")
    with_it = _cost("cross_entropy", logits, target, *settings, "True")
    assert without.bytes_read == with_it.bytes_read == 4 * 1000 * 2 + 4 * 8
    assert (without.bytes_written, with_it.bytes_written) == (4 * 12, 4 * 12 + 4 * 1000 * 2)
    late = _cost("cross_entropy_backward", ((), FP32), logits, target, ((4, 2), FP32), ((), FP32))
    assert late.bytes_written == 4 * 1000 * 2


def test_a_linear_cross_entropy_has_a_cost_for_each_chunk():
    # GIVEN 20 tokens in chunks of 8, and 100 classes padded to 128
    arguments = [((20, 16), FP32), ((100, 16), FP32), None, ((20,), INT64), BF16_TYPE]
    arguments += ["-100", "0.0", "0.0", "mean", "8", "True", "True", "False"]
    kernels = [Launch("_cross_entropy_kernel", rows) for rows in (8, 8, 4)]
    found = launch_costs(call("advisor_kernels::linear_cross_entropy", *arguments, kernels=kernels))
    # THEN each reads its 16-bit logits and writes the padded gradient over them
    assert [c.bytes_read for c in found] == [rows * (100 * 2 + 8) for rows in (8, 8, 4)]
    assert [c.bytes_written for c in found] == [rows * (12 + 128 * 2) for rows in (8, 8, 4)]
