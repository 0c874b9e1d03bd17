"""The bundled norms: bytes by closed form, sums over rows in kernels of their own."""

import pytest

from advisor.roofline.costs import Launch, family, launch_costs, op_cost
from tests.roofline.costs.calls import BF16, FP32, INT64, call

X, W = ((8, 16), BF16), ((16,), FP32)
STATS, RMS_STATS = ((2, 8), FP32), ((1, 8), FP32)
N, BF16_TYPE, FP32_TYPE = 8 * 16, "15", "6"


def bundled(name, *args, kernels=()):
    return call(f"advisor_kernels::{name}", *args, kernels=kernels)


def norm(is_rms="False", dtype=BF16_TYPE, bias=W):
    return bundled("norm", X, W, bias, "1e-05", "0.", is_rms, "False", dtype)


def norm_backward(parts="2", kernels=()):
    return bundled("norm_backward", X, X, W, W, STATS, "0.", "False", "False", parts, kernels=kernels)


def test_a_norm_reads_and_writes_once():
    found = op_cost(norm())
    assert (found.bytes_read, found.bytes_written) == (2 * N + 2 * 64, 2 * N + 8 * 8)
    assert found.flops == 7 * N


def test_an_rms_norm_stores_one_moment_a_row_and_may_write_fp32():
    found = op_cost(norm("True", FP32_TYPE, None))
    assert (found.bytes_read, found.bytes_written) == (2 * N + 64, 4 * N + 4 * 8)


def test_a_norm_whose_kind_was_not_recorded_has_no_cost():
    assert op_cost(norm(is_rms="")) is None


def test_the_backward_reads_gradient_and_input_once():
    found = op_cost(norm_backward())
    assert (found.bytes_read, found.bytes_written) == (2 * 2 * N + 64 + 64, 2 * N + 2 * 64)


def test_without_weights_to_train_no_sum_is_written():
    assert op_cost(norm_backward(parts="0")).bytes_written == 2 * N


def test_the_sum_of_partials_reads_a_row_a_program_of_the_kernel_before_it():
    kernels = [Launch("_norm_backward_kernel", 4), Launch("_sum_partials_kernel", 1)]
    main, adding = launch_costs(norm_backward(kernels=kernels))
    assert main.bytes_read == 2 * 2 * N + 64 + 64
    assert (adding.bytes_read, adding.bytes_written) == (4 * 2 * 16 * 4, 2 * 64)


def test_sums_of_wide_rows_read_both_tensors_again():
    kernels = [Launch("_norm_backward_wide_kernel", 8), Launch("_norm_weight_wide_kernel", 4)]
    main, apart = launch_costs(norm_backward(kernels=kernels))
    assert apart.bytes_read == 2 * 2 * N + 64
    assert main.bytes_read == 2 * 2 * N + 64 + 64


@pytest.mark.parametrize(("seed", "seed_bytes"), [(None, 0), (((1,), INT64), 8)])
def test_an_addition_with_norm_reads_two_and_writes_two(seed, seed_bytes):
    args = (X, X, seed, "0.", W, None, "1e-05", "0.", "True", "False", BF16_TYPE)
    found = op_cost(bundled("add_norm", *args))
    assert (found.bytes_read, found.bytes_written) == (2 * 2 * N + 64 + seed_bytes, 2 * 2 * N + 4 * 8)


@pytest.mark.parametrize(("dropped", "writes"), [("", 1), (BF16_TYPE, 2)])
def test_its_backward_writes_a_second_gradient_only_where_it_differs(dropped, writes):
    args = (X, X, X, W, None, RMS_STATS, None, "0.", "0.", "True", "False", "1", dropped)
    found = op_cost(bundled("add_norm_backward", *args))
    assert (found.bytes_read, found.bytes_written) == (3 * 2 * N + 64 + 32, writes * 2 * N + 64)


def test_dropout_with_addition_stores_no_mask():
    found = op_cost(bundled("dropout_add", X, ((8, 16), FP32), ((1,), INT64), "0.1"))
    assert (found.bytes_read, found.bytes_written) == (6 * N, 4 * N)
    found = op_cost(bundled("dropout_gradient", ((8, 16), FP32), ((1,), INT64), "0.1", BF16_TYPE))
    assert (found.bytes_read, found.bytes_written) == (4 * N, 2 * N)


def test_bias_activation_and_norm_move_no_more_than_a_norm():
    found = op_cost(bundled("bias_act_norm", X, W, W, W, "1e-05", "gelu", BF16_TYPE))
    assert (found.bytes_read, found.bytes_written) == (2 * N + 3 * 64, 2 * N + 8 * 8)
    back = bundled("bias_act_norm_backward", X, X, W, W, W, STATS, "gelu", "3")
    found = op_cost(back)
    assert (found.bytes_read, found.bytes_written) == (2 * 2 * N + 2 * 64 + 64, 2 * N + 3 * 64)


def test_an_activation_that_was_not_recorded_has_no_cost():
    assert op_cost(bundled("bias_act_norm", X, W, W, W, "1e-05", "", BF16_TYPE)) is None


def test_the_names_of_the_operators_are_those_that_the_kernels_register():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    import advisor.kernels.add_norm
    import advisor.kernels.bias_act_norm  # noqa: F401

    from advisor.roofline.costs import knows

    names = ("norm", "add_norm", "dropout_add", "dropout_gradient", "bias_act_norm")
    for name in (*names, "norm_backward", "add_norm_backward", "bias_act_norm_backward"):
        assert hasattr(torch.ops.advisor_kernels, name)
        assert knows(f"advisor_kernels::{name}")
        assert "norm" in family(f"advisor_kernels::{name}", "")
