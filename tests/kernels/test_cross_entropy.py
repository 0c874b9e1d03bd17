"""Cross-entropy: loss and gradient as accurate as eager PyTorch's, on whatever rows."""

import pytest
import torch
import torch.nn.functional as F
from advisor.kernels import _cross_entropy_rows
from advisor.kernels import cross_entropy as ce
from advisor.kernels._device import UnsupportedError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.checks import assert_as_accurate, cases, check, skip_unless_runnable

DTYPES = cases([torch.float32, torch.bfloat16], [torch.float16])
REDUCTIONS = cases(["mean"], ["sum", "none"])


def _logits(device, dtype, rows, classes, row_stride=None):
    wide = torch.randn(rows, row_stride or classes, device=device).mul(4).to(dtype)
    return wide[:, :classes]


def _target(device, rows, classes, ignored=True):
    target = torch.randint(0, classes, (rows,), device=device)
    if ignored:
        target[1::3] = -100
    return target


def _judge(logits, target, **options):
    check(
        lambda logits: ce.cross_entropy(logits, target, **options),
        lambda logits: ce.cross_entropy_reference(
            logits, target, **{k: v for k, v in options.items() if k != "gradient_in_forward"}
        ),
        {"logits": logits},
        ulps=4,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", cases([{}, {"label_smoothing": 0.1, "z_loss": 1e-2}]))
def test_loss_and_gradient_match_eager(device, dtype, reduction, options, poisoned):
    skip_unless_runnable(device, dtype)
    _judge(_logits(device, dtype, 7, 777), _target(device, 7, 777), reduction=reduction, **options)


@pytest.mark.parametrize("classes", cases([1, 257], [2, 3, 7, 8, 255, 256, 1000, 4099]))
@pytest.mark.parametrize("dtype", cases([torch.float16], [torch.float32]))
def test_rows_of_any_length_and_alignment(device, dtype, classes, poisoned):
    for stride in (classes, classes + 5, classes + 8):
        _judge(_logits(device, dtype, 5, classes, stride), _target(device, 5, classes), label_smoothing=0.2)


@pytest.mark.quick
@pytest.mark.parametrize("rows", [3, 5, 7])
def test_a_single_class_has_a_gradient_of_exactly_zero_as_in_eager(device, rows):
    # GIVEN weights of rows and smoothings that are no powers of two
    for smoothing in (0.0, 0.1, 0.2, 0.3, 0.7):
        x = torch.randn(rows, 1, device=device, requires_grad=True)
        ce.cross_entropy(x, x.new_zeros(rows, dtype=torch.int64), label_smoothing=smoothing).backward()
        assert x.grad.equal(torch.zeros_like(x))


@pytest.mark.parametrize("early", cases([True, False]))
@pytest.mark.parametrize("dtype", cases([torch.float32, torch.bfloat16]))
def test_a_gradient_written_in_the_forward_equals_one_computed_later(device, dtype, early):
    skip_unless_runnable(device, dtype)
    _judge(
        _logits(device, dtype, 6, 513),
        _target(device, 6, 513),
        gradient_in_forward=early,
        label_smoothing=0.1,
    )


@pytest.mark.quick
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("classes", [1301, 1024, 7])
def test_rows_of_several_tiles_match_eager(device, monkeypatch, poisoned, early, classes):
    # GIVEN groups before and after a row's whole tiles, no such groups, and no whole tile
    row = {"BLOCK": 512, "num_warps": 1}
    for table in (_cross_entropy_rows.ROWS, _cross_entropy_rows.LOSS):
        monkeypatch.setattr(table, "rows", {"default": ((None, row),)})
    rows = 7 if device.type == "cpu" else 1001
    _judge(
        _logits(device, torch.float16, rows, classes), _target(device, rows, classes),
        label_smoothing=0.1, gradient_in_forward=early,
    )  # fmt: skip


@pytest.mark.quick
def test_a_target_that_is_a_vocabulary_of_gpt2(device):
    rows = 2 if device.type == "cpu" else 512
    _judge(_logits(device, torch.float16, rows, 50257), _target(device, rows, 50257))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_stay_finite(device, dtype):
    skip_unless_runnable(device, dtype)
    x = _logits(device, dtype, 6, 300)
    x[0] = 1e4
    x[1] = -1e4
    x[2, 17] = 6e4
    x[3] = torch.where(torch.arange(300, device=device) % 2 == 0, 1e4, -1e4).to(dtype)
    x[4, :299] = -torch.inf
    target = torch.tensor([0, 299, 17, 4, 299, 5], device=device)
    _judge(x, target)
    _judge(x[:4], torch.tensor([0, 299, 3, 4], device=device), label_smoothing=0.1, reduction="none")


@pytest.mark.quick
def test_leading_masked_logits_do_not_poison_the_row(device):
    # GIVEN a row whose first blocks are all -inf
    x = torch.full((2, 700), -torch.inf, device=device)
    x[:, 650:] = torch.randn(2, 50, device=device)
    _judge(x, torch.tensor([651, 699], device=device))


@pytest.mark.quick
def test_only_ignored_rows_give_nan_and_a_zero_gradient_as_in_eager(device):
    x = torch.randn(3, 9, device=device, requires_grad=True)
    loss = ce.cross_entropy(x, torch.full((3,), -100, device=device))
    loss.backward()
    assert loss.isnan()
    assert x.grad.equal(torch.zeros_like(x))


@pytest.mark.quick
def test_an_ignored_rows_logits_are_not_read(device):
    x = torch.randn(2, 40, device=device)
    x[1] = torch.nan
    target = torch.tensor([3, 7], device=device)
    x.requires_grad_()
    loss = ce.cross_entropy(x, target, ignore_index=7)
    loss.backward()
    assert torch.allclose(loss, F.cross_entropy(x[:1], target[:1]))
    assert x.grad[1].equal(torch.zeros_like(x.grad[1]))


@pytest.mark.quick
@pytest.mark.parametrize("wrong", [-1, 40, 10**9])
def test_a_target_outside_the_classes_gives_nan_and_reads_nothing_out_of_bounds(device, wrong):
    x = torch.randn(2, 40, device=device, requires_grad=True)
    ce.cross_entropy(x, torch.tensor([3, wrong], device=device), reduction="sum").backward()
    assert x.grad[0].isfinite().all()
    assert x.grad[1].isnan().all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_losss_own_gradient_multiplies(device, reduction):
    x = _logits(device, torch.float32, 5, 130).requires_grad_()
    target = _target(device, 5, 130)
    for factor in (1.0, 0.0, -2.5):
        (mine,) = torch.autograd.grad((ce.cross_entropy(x, target, reduction=reduction) * factor).sum(), x)
        eager = F.cross_entropy(x, target, reduction=reduction) * factor
        assert torch.allclose(mine, torch.autograd.grad(eager.sum(), x)[0], atol=1e-6)


@pytest.mark.quick
def test_a_second_backward_through_the_same_graph_is_right(device):
    x = _logits(device, torch.float32, 5, 130).requires_grad_()
    loss = ce.cross_entropy(x, _target(device, 5, 130))
    first = torch.autograd.grad(loss * 3, x, retain_graph=True)[0].clone()
    second = torch.autograd.grad(loss * 2, x, retain_graph=True)[0]
    third = torch.autograd.grad(loss, x)[0]
    assert torch.allclose(first / 3, third, atol=1e-7)
    assert torch.allclose(second / 2, third, atol=1e-7)


@pytest.mark.quick
def test_fp16_gradients_survive_where_unscaled_ones_underflow(device):
    # GIVEN a loss scaled as a gradient scaler does, and probabilities of 6e-9, which fp16 rounds to 0
    x = torch.zeros(1, 5000, device=device, dtype=torch.float16)
    x[0, 0] = 19.0
    x.requires_grad_()
    (ce.cross_entropy(x, torch.zeros(1, dtype=torch.long, device=device)) * 65536.0).backward()
    assert (x.grad[0, 1:] > 0).all()


@pytest.mark.quick
def test_no_gradient_buffer_is_made_where_no_gradient_is_needed(device):
    x = torch.randn(4, 64, device=device)
    target = _target(device, 4, 64)
    assert not ce.cross_entropy(x, target).requires_grad
    with torch.no_grad():
        assert not ce.cross_entropy(x.requires_grad_(), target).requires_grad
    _, _, _, grad = ce.cross_entropy_op(x.detach(), target, -100, 0.0, 0.0, "mean", False)
    assert grad.numel() == 0


@pytest.mark.quick
def test_shapes_beyond_two_dimensions_and_int32_targets(device):
    x = torch.randn(2, 3, 50, device=device)
    target = torch.randint(0, 50, (2, 3), device=device)
    eager = F.cross_entropy(x.view(-1, 50), target.view(-1), reduction="none").view(2, 3)
    assert torch.allclose(ce.cross_entropy(x, target.int(), reduction="none"), eager, atol=1e-6)
    assert torch.allclose(ce.CrossEntropyLoss()(x, target), eager.mean(), atol=1e-6)


@pytest.mark.quick
def test_columns_apart_and_expanded_rows_match_eager(device):
    target = _target(device, 4, 33)
    _judge(torch.randn(33, 4, device=device).t(), target)
    _judge(torch.randn(1, 33, device=device).expand(4, 33), target)


@pytest.mark.quick
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows_give_what_eager_gives(device, reduction):
    x = torch.randn(0, 5, device=device, requires_grad=True)
    target = torch.empty(0, dtype=torch.long, device=device)
    mine = ce.cross_entropy(x, target, reduction=reduction)
    mine.sum().backward()
    eager = F.cross_entropy(x, target, reduction=reduction)
    assert torch.equal(mine.nan_to_num(7), eager.nan_to_num(7))
    assert x.grad.shape == (0, 5)


@pytest.mark.quick
def test_autocast_gives_fp32_as_eager_does(device):
    x = torch.randn(2, 8, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float16)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = ce.cross_entropy(x, _target(device, 2, 8, ignored=False))
    assert loss.dtype == torch.float32


def test_first_derivatives_match_finite_differences(device):
    # Kernels compute in fp32: coarse steps and tolerances.
    target = torch.tensor([1, -100, 4], device=device)
    x = torch.randn(3, 6, device=device).requires_grad_()
    for early in (True, False):
        assert torch.autograd.gradcheck(
            lambda x, early=early: ce.cross_entropy(
                x, target, label_smoothing=0.1, z_loss=0.1, gradient_in_forward=early
            ),
            x, eps=1e-2, atol=1e-2, rtol=1e-2,
        )  # fmt: skip


def test_a_second_derivative_is_refused(device):
    x = torch.randn(2, 4, device=device, requires_grad=True)
    target = _target(device, 2, 4)
    for early in (True, False):
        loss = ce.cross_entropy(x, target, gradient_in_forward=early)
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            (g.sum() + loss).backward()


@pytest.mark.parametrize("early", [True, False])
def test_the_operator_passes_torchs_own_checks(device, early):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    # Compiled code never asks for the gradient in the forward.
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    tests += () if early else ("test_aot_dispatch_dynamic",)
    args = (x, _target(device, 3, 8), -100, 0.1, 0.1, "mean", early)
    torch.library.opcheck(ce.cross_entropy_op, args, test_utils=tests)


@pytest.mark.quick
def test_it_compiles_without_graph_breaks(device):
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    x = torch.randn(3, 8, device=device, requires_grad=True)
    target = _target(device, 3, 8)

    def step(x):
        return ce.cross_entropy(x * 2, target) * 3

    torch.compile(step, fullgraph=True, backend=backend)(x).backward()
    compiled, x.grad = x.grad, None
    step(x).backward()
    assert torch.allclose(compiled, x.grad, atol=1e-6)


@pytest.mark.quick
def test_checkpointing_gives_the_same_gradient(device):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(3, 40, device=device, requires_grad=True)
    target = _target(device, 3, 40)
    for reentrant in (True, False):
        loss = checkpoint(ce.cross_entropy, x, target, use_reentrant=reentrant)
        assert torch.allclose(
            torch.autograd.grad(loss, x)[0] if not reentrant else _grad_of(loss, x),
            torch.autograd.grad(F.cross_entropy(x, target), x)[0],
            atol=1e-6,
        )


def _grad_of(loss, x):
    x.grad = None
    loss.backward()
    return x.grad


def test_what_cannot_be_taken_is_said(device):
    x, target = torch.randn(2, 4, device=device), torch.zeros(2, dtype=torch.long, device=device)
    for args, options, says in [
        ((x.double(), target), {}, "float64"),
        ((x, target.float()), {}, "class indices"),
        ((x, target[:1]), {}, "classes come last"),
        ((x[:, :0], target), {}, "no classes"),
        ((x, target), {"reduction": "max"}, "max"),
        ((x, target), {"label_smoothing": 1.5}, "1.5"),
        ((x, target), {"reduction": "none", "gradient_in_forward": True}, "in the forward"),
    ]:
        with pytest.raises(UnsupportedError, match=says):
            ce.cross_entropy(*args, **options)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 4), classes=st.integers(1, 600), pad=st.integers(0, 9), skip=st.integers(0, 5))
def test_any_shape_stride_and_offset_matches_float64(rows, classes, pad, skip):
    if torch.cuda.is_available():
        pytest.skip("the interpreter's own search; the GPU runs the grid")
    # GIVEN rows that begin anywhere in memory
    x = torch.randn(rows, skip + classes + pad).half()[:, skip : skip + classes].requires_grad_()
    target = _target(torch.device("cpu"), rows, classes)
    losses = [f(x, target, reduction="none") for f in (ce.cross_entropy, ce.cross_entropy_reference)]
    exact = x.detach().double().requires_grad_()
    truth = ce.cross_entropy_reference(exact, target, reduction="none")
    assert_as_accurate(losses[0], losses[1], truth)
    mine, eager = (torch.autograd.grad(loss.sum(), x)[0] for loss in losses)
    assert_as_accurate(mine, eager, torch.autograd.grad(truth.sum(), exact)[0], factor=3)


@pytest.mark.gpu
def test_more_logits_than_an_int32_counts(device):
    if device.type != "cuda" or torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    rows, classes = 43000, 50257
    x = torch.zeros(rows, classes, device=device, dtype=torch.bfloat16)
    x[-1, 7] = 20.0
    x.requires_grad_()
    target = torch.full((rows,), 7, device=device)
    losses = ce.cross_entropy(x, target, reduction="none")
    assert losses[-1] < 1e-3
    assert torch.allclose(losses[0], torch.tensor(classes).float().log().to(device))
    ce.cross_entropy(x, target, reduction="sum").backward()
    assert x.grad[0, 7] == -1
    assert x.grad[-1, 7].abs() < 1e-2
