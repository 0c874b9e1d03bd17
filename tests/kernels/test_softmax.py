"""Softmax: as accurate as eager PyTorch with any mask, causality, length and layout."""

import pytest
import torch
from advisor.kernels import softmax as sm
from advisor.kernels._device import UnsupportedError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.checks import assert_as_accurate, cases, check, skip_unless_runnable

DTYPES = cases([torch.float32, torch.bfloat16], [torch.float16])
LOGS = cases([False, True])


def _x(device, dtype, *shape):
    return torch.randn(*shape, device=device).mul(3).to(dtype)


def _judge(x, *, gradients=True, **options):
    """Eager computes scale, mask and softmax in fp32, as autocast and Hugging Face's attention do."""

    def eager(x):
        y = sm.softmax_reference(x.to(torch.promote_types(x.dtype, torch.float32)), **options)
        return y.to(x.dtype)

    check(lambda x: sm.softmax(x, **options), eager, {"x": x}, gradients=gradients)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("columns", cases([5, 1000], [1, 8, 64, 129, 2048]))
def test_rows_that_fit_match_eager(device, dtype, log, columns, poisoned):
    skip_unless_runnable(device, dtype)
    _judge(_x(device, dtype, 5, columns), scale=0.3, log=log)


@pytest.mark.parametrize("dtype", cases([torch.bfloat16], [torch.float16]))
@pytest.mark.parametrize("warps", [2, 4])
def test_warps_that_wait_for_each_other_once_match_eager(device, dtype, warps, monkeypatch, poisoned):
    # GIVEN peaks that differ from warp to warp, and columns of -inf as wide as a warp's or a row
    skip_unless_runnable(device, dtype)
    row = {"TILE": 1, "num_warps": warps, "JOIN": 1}
    monkeypatch.setattr(sm.FORWARD, "rows", {"default": ((None, row),)})
    x = _x(device, dtype, 6, 2048)
    x[1] += torch.linspace(0, 200, 2048, device=device).to(dtype)
    x[2, 256:512] = x[2, 1280:1536] = -torch.inf
    x[3, :1900] = -torch.inf
    x[4] = -3e4
    _judge(x, scale=0.3, gradients=False)
    x[5] = -torch.inf
    assert sm.softmax(x)[5].isnan().all()
    _judge(x[:5, :1000].contiguous())


@pytest.mark.parametrize("columns", cases([16385], [20000, 65536]))
@pytest.mark.parametrize("log", LOGS)
def test_rows_too_long_for_registers_match_eager(device, columns, log, poisoned):
    if device.type == "cpu" and columns > 20000:
        pytest.skip("long rows run on the GPU")
    x = _x(device, torch.float32, 3, columns)
    _judge(x, log=log, scale=2.0)
    _judge(x, log=log, causal=True, diagonal=columns - 100)


@pytest.mark.quick
def test_terms_too_small_to_change_the_largest_one_by_one_count_together(device):
    # GIVEN a score of 0 and, a block of columns apart each, eight whose exponential is 2^-25
    x = torch.full((1, 16400), -torch.inf, device=device)
    x[0, 0] = 0.0
    x[0, 2048 : 8 * 2048 + 1 : 2048] = -25 * torch.tensor(2.0).log()
    # THEN the sum is 1 + 2^-22 and not 1
    y = sm.softmax(x)
    assert abs(float(y[0, 0].double()) - (1 - 2**-22)) <= 2**-24


@pytest.mark.quick
def test_leading_excluded_scores_do_not_poison_a_long_row(device):
    # GIVEN a row whose first blocks are all excluded
    mask = torch.arange(16400, device=device) >= 16390
    _judge(_x(device, torch.float32, 2, 16400), mask=mask)


@pytest.mark.gpu
@pytest.mark.quick
def test_a_row_of_256_thousand_columns_matches_eager(device):
    if device.type == "cpu":
        pytest.skip("long rows run on the GPU")
    _judge(_x(device, torch.bfloat16, 8, 262144))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("sizes", cases([(7, 7), (5, 12), (12, 5)]))
def test_causal_rows_match_eager(device, dtype, log, sizes, poisoned):
    skip_unless_runnable(device, dtype)
    queries, keys = sizes
    # The diagonal is chosen so that no row is empty, which gives NaN.
    _judge(_x(device, dtype, 2, 3, queries, keys), causal=True, diagonal=max(keys - queries, 0), log=log)


@pytest.mark.quick
@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 9), (1, 1, 4, 9), (2, 1, 1, 9), (1, 3, 4, 1), (4, 9), (9,), (1,)]
)
def test_masks_broadcast_by_their_strides(device, shape, poisoned):
    x = _x(device, torch.float32, 2, 3, 4, 9)
    keep = torch.rand(shape, device=device) > 0.3
    keep[..., 0] = True
    for log in (False, True):
        _judge(x, mask=keep, scale=0.5, log=log)
        _judge(x, mask=torch.randn(shape, device=device), scale=0.5, log=log)


@pytest.mark.quick
def test_a_mask_that_no_three_strides_describe_is_copied(device):
    x = _x(device, torch.float32, 2, 2, 2, 2, 2, 5)
    mask = torch.randn(2, 1, 2, 1, 2, 5, device=device)
    _judge(x, mask=mask)
    _judge(x, mask=mask.transpose(0, 2))


@pytest.mark.quick
def test_an_expanded_and_a_transposed_mask_match_eager(device):
    x = _x(device, torch.float32, 2, 3, 6, 6)
    _judge(x, mask=torch.randn(6, 6, device=device).t().expand(2, 3, 6, 6), causal=True)


@pytest.mark.quick
def test_an_additive_mask_gets_its_gradient(device):
    x, mask = _x(device, torch.float32, 2, 3, 4, 9), torch.randn(1, 3, 1, 9, device=device)
    for log in (False, True):
        check(
            lambda x, mask, log=log: sm.softmax(x, mask=mask, scale=0.7, log=log),
            lambda x, mask, log=log: sm.softmax_reference(x, mask=mask, scale=0.7, log=log),
            {"x": x, "mask": mask},
            gradient_ulps=8,
        )


@pytest.mark.quick
def test_finfo_min_masks_exclude_as_minus_infinity_does(device):
    x = _x(device, torch.float16, 3, 20)
    mask = torch.zeros(3, 20, device=device, dtype=torch.float16)
    mask[:, 5:] = torch.finfo(torch.float16).min
    y = sm.softmax(x, mask=mask)
    assert y[:, 5:].equal(torch.zeros_like(y[:, 5:]))
    _judge(x, mask=mask.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_rows_match_eager(device, dtype):
    skip_unless_runnable(device, dtype)
    x = _x(device, dtype, 5, 300)
    x[0] = 1e4
    x[1] = -1e4
    x[2, 17] = 6e4
    x[3] = torch.where(torch.arange(300, device=device) % 2 == 0, 1e4, -1e4).to(dtype)
    for log in (False, True):
        _judge(x, log=log)


@pytest.mark.quick
def test_an_entirely_masked_row_is_nan_as_torchs_softmax_is(device):
    x = _x(device, torch.float32, 2, 4)
    mask = torch.tensor([[True] * 4, [False] * 4], device=device)
    y = sm.softmax(x, mask=mask)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()


@pytest.mark.quick
def test_strided_rows_and_columns_match_eager(device):
    _judge(_x(device, torch.float32, 6, 40)[:, 3:20])
    _judge(_x(device, torch.float32, 9, 6).t())
    _judge(_x(device, torch.float32, 2, 5, 3, 8).transpose(1, 2), causal=True, diagonal=3)


@pytest.mark.quick
def test_empty_inputs_give_empty_results(device):
    for shape in ((0, 4), (3, 0)):
        x = torch.empty(shape, device=device, requires_grad=True)
        sm.softmax(x).sum().backward()
        assert x.grad.shape == shape


@pytest.mark.quick
def test_the_result_may_have_another_dtype_and_autocast_gives_fp32(device):
    x = _x(device, torch.float16, 2, 8).requires_grad_()
    y = sm.softmax(x, dtype=torch.float32)
    y.square().sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.float32, torch.float16)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert sm.softmax(x).dtype == torch.float32
        assert sm.softmax(x, dtype=torch.float16).dtype == torch.float16


def test_first_derivatives_match_finite_differences(device):
    # Kernels compute in fp32: coarse steps and tolerances.
    x = torch.randn(3, 3, device=device).requires_grad_()
    for log in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, log=log: sm.softmax(x, scale=1.5, causal=True, log=log).nan_to_num(neginf=0.0),
            x, eps=1e-2, atol=2e-2, rtol=2e-2,
        )  # fmt: skip


def test_a_second_derivative_is_refused(device):
    x = torch.randn(2, 4, device=device, requires_grad=True)
    (g,) = torch.autograd.grad(sm.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        g.sum().backward()


def test_the_operator_passes_torchs_own_checks(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    torch.library.opcheck(sm.softmax_op, (x, None, 0.5, True, 1, False, torch.float32))
    torch.library.opcheck(sm.softmax_op, (x, torch.ones(4, device=device) > 0, 0.5, False, 0, True, x.dtype))


@pytest.mark.quick
def test_it_compiles_without_graph_breaks(device):
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    x, mask = torch.randn(3, 8, device=device, requires_grad=True), torch.randn(8, device=device)

    def step(x):
        return sm.softmax(x * 2, mask=mask, scale=0.3).square().sum()

    torch.compile(step, fullgraph=True, backend=backend)(x).backward()
    compiled, x.grad = x.grad, None
    step(x).backward()
    assert torch.allclose(compiled, x.grad, atol=1e-6)


def test_what_cannot_be_taken_is_said(device):
    x = torch.randn(2, 4, device=device)
    for args, options, says in [
        ((x.double(),), {}, "float64"),
        ((x,), {"mask": x[:, :3]}, "broadcast"),
        ((x,), {"mask": x.double()}, "mask of dtype float64"),
        ((x[0],), {"causal": True}, "two dimensions"),
        ((x,), {"dtype": torch.float64}, "result of"),
    ]:
        with pytest.raises(UnsupportedError, match=says):
            sm.softmax(*args, **options)
    assert sm.unsupported_reasons(x, dim=0) == ["dimension 0 of 2: the kernel works along the last"]
    assert sm.unsupported_reasons(x, dim=1) == []


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 80), skip=st.integers(0, 7), log=st.booleans(),
    causal=st.booleans(),
)  # fmt: skip
def test_any_shape_and_stride_matches_float64(rows, columns, skip, log, causal):
    if torch.cuda.is_available():
        pytest.skip("the interpreter's own search; the GPU runs the grid")
    x = torch.randn(rows, columns + skip)[:, skip:]
    options = {"log": log, "causal": causal, "scale": 1.7}
    assert_as_accurate(
        sm.softmax(x, **options),
        sm.softmax_reference(x, **options),
        sm.softmax_reference(x.double(), **options),
    )


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(device):
    if device.type != "cuda" or torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    x = torch.zeros(2**17 + 8, 2**14, device=device, dtype=torch.bfloat16)
    x[-1, 5] = 20.0
    y = sm.softmax(x)
    assert y[-1, 5] > 0.99
    assert y[0, 0] == 2.0**-14
