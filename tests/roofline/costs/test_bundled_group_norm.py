"""The bundled GroupNorm: bytes by closed form, the sums of shared groups in a kernel of their own."""

import pytest

from advisor.roofline.costs import Launch, family, launch_costs, op_cost
from tests.roofline.costs.calls import BF16, FP32, call

X, W, STATS = ((2, 8, 16), BF16), ((8,), FP32), ((3, 8), FP32)
N, BF16_TYPE, FP32_TYPE = 2 * 8 * 16, "15", "6"


def forward(dtype=BF16_TYPE, name="silu", kernels=()):
    args = (X, W, W, "4", "1e-05", name, dtype)
    return call("advisor_kernels::group_norm", *args, kernels=kernels)


def backward(summed="True", kernels=()):
    args = (X, X, W, W, STATS, "4", "silu", summed)
    return call("advisor_kernels::group_norm_backward", *args, kernels=kernels)


@pytest.mark.parametrize(("dtype", "size"), [(BF16_TYPE, 2), (FP32_TYPE, 4)])
def test_it_reads_and_writes_once_in_the_dtype_that_was_asked_for(dtype, size):
    found = op_cost(forward(dtype))
    assert (found.bytes_read, found.bytes_written) == (2 * N + 2 * 32, size * N + 12 * 2 * 4)


def test_an_activation_costs_flops_and_no_bytes():
    plain, active = op_cost(forward(name="none")), op_cost(forward())
    assert plain.flops == 7 * N < active.flops
    assert plain.bytes_read == active.bytes_read
    assert op_cost(forward(name="")) is None


def test_the_backward_reads_gradient_and_input_once():
    found = op_cost(backward())
    assert (found.bytes_read, found.bytes_written) == (2 * 2 * N + 2 * 32 + 4 * 24, 2 * N + 2 * 32)
    assert op_cost(backward("False")).bytes_written == 2 * N


def test_groups_that_programs_share_are_read_twice():
    kernels = [Launch("_group_norm_moments_kernel", 8), Launch("_group_norm_apply_kernel", 8)]
    moments, apply = launch_costs(forward(kernels=kernels))
    assert (moments.bytes_read, moments.bytes_written) == (2 * N, 0)
    assert apply.bytes_read == 2 * N + 2 * 32

    kernels = [
        Launch("_group_norm_sums_kernel", 8),
        Launch("_group_norm_gradient_kernel", 8),
        Launch("_sum_partials_kernel", 1),
    ]
    sums, main, adding = launch_costs(backward(kernels=kernels))
    assert sums.bytes_read == main.bytes_read == 2 * 2 * N + 2 * 32 + 4 * 24
    assert (adding.bytes_read, adding.bytes_written) == (4 * 2 * 2 * 8, 2 * 32)


def test_the_names_of_the_operators_are_those_that_the_kernels_register():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    import advisor.kernels.group_norm  # noqa: F401

    from advisor.roofline.costs import knows

    for name in ("group_norm", "group_norm_backward"):
        assert hasattr(torch.ops.advisor_kernels, name)
        assert knows(f"advisor_kernels::{name}")
        assert "norm" in family(f"advisor_kernels::{name}", "")
