"""Residual addition, with dropout before it and a norm after it."""

import pytest
import torch
from advisor.kernels import add_norm as family
from advisor.kernels import norm
from advisor.kernels._device import UnsupportedError

from tests.kernels.checks import check, skip_unless_runnable

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SEED = 11


def made(device, dtype, *shape, residual=None, names="xrwb"):
    skip_unless_runnable(device, dtype)
    sizes = {"x": shape, "r": shape, "w": shape[-1:], "b": shape[-1:]}
    dtypes = dict.fromkeys("xwb", dtype) | {"r": residual or dtype}
    return {name: torch.randn(sizes[name], device=device).to(dtypes[name]) for name in names}


def add_layer(x, r, w=None, b=None, **options):
    return family.add_layer_norm(x, r, x.shape[-1], w, b, **options)


def add_layer_reference(x, r, w=None, b=None):
    w, b = (None if t is None else t.to(torch.promote_types(x.dtype, r.dtype)) for t in (w, b))
    return family.add_norm_reference(x, r, x.shape[-1], w, b)


def add_rms(x, r, w=None, **options):
    return family.add_rms_norm(x, r, x.shape[-1], w, 1e-5, **options)


def add_rms_reference(x, r, w=None, **options):
    return family.add_norm_reference(x, r, x.shape[-1], w, None, 1e-5, rms=True, **options)


def seeded(function, **options):
    def call(*args, **kwargs):
        torch.manual_seed(SEED)
        return function(*args, **kwargs, **options)

    return call


def mask_of(shape, device, p, function=family.dropout_add):
    """What dropout multiplies by with the seed."""
    ones, zeros = torch.ones(shape, device=device), torch.zeros(shape, device=device)
    return seeded(function, p=p)(ones, zeros)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 200), (2, 3, 33)])
def test_sum_and_norm_and_all_gradients_are_as_exact_as_eager(device, dtype, shape, poisoned):
    check(add_layer, add_layer_reference, made(device, dtype, *shape))
    check(add_rms, add_rms_reference, made(device, dtype, *shape, names="xrw"))
    llama = {"casting": "llama", "offset": 1.0}
    check(lambda **t: add_rms(**t, **llama), lambda **t: add_rms_reference(**t, **llama),
          made(device, dtype, *shape, names="xrw"))  # fmt: skip


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("shape", [(600, 4096), (1000, 1024), (70, 3000), (40, 16384), (20, 20000)])
def test_sizes_of_real_models_are_as_exact_as_eager(device, shape):
    if device.type == "cpu":
        pytest.skip("a size for the GPU")
    check(add_layer, add_layer_reference, made(device, torch.bfloat16, *shape))


@pytest.mark.parametrize(
    ("dtype", "residual"), [(torch.float16, torch.float32), (torch.float32, torch.float16)]
)
def test_the_residual_may_differ_in_dtype(device, dtype, residual, poisoned):
    check(add_layer, add_layer_reference, made(device, dtype, 5, 96, residual=residual))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("cols", [200, 33])
def test_with_dropout_the_gradients_go_through_the_same_mask(device, dtype, p, cols, poisoned):
    tensors = made(device, dtype, 5, cols)
    mask = mask_of((5, cols), device, p, lambda *a, p: add_layer(*a, p=p)[1])
    check(
        seeded(add_layer, p=p),
        lambda x, r, w, b: add_layer_reference(x * mask.to(x.dtype), r, w, b),
        tensors,
    )


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_and_addition_alone(device, dtype, p, poisoned):
    tensors = made(device, dtype, 3, 7, 19, names="xr")
    mask = mask_of((3, 7, 19), device, p)
    ours = seeded(family.dropout_add, p=p)
    check(lambda x, r: ours(x, r), lambda x, r: x * mask.to(x.dtype) + r, tensors)


@pytest.mark.parametrize("function", [family.dropout_add, lambda *a, p: add_layer(*a, p=p)[1]])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_its_share_and_keeps_the_mean(device, function, p):
    mask = mask_of((64, 256), device, p, function)
    values = mask.unique().tolist()
    assert values == pytest.approx([0.0, 1 / (1 - p)], rel=1e-4)
    deviation = (p / (1 - p) / mask.numel()) ** 0.5
    assert abs(mask.mean().item() - 1) < 5 * deviation
    # Neither rows nor columns share a mask.
    assert mask.unique(dim=0).shape[0] == 64
    assert mask.unique(dim=1).shape[1] == 256


def test_dropout_follows_torchs_generator(device):
    x, r = torch.ones(8, 32, device=device), torch.zeros(8, 32, device=device)
    first = seeded(family.dropout_add, p=0.5)(x, r)
    second = family.dropout_add(x, r, 0.5)
    assert not first.equal(second)
    assert seeded(family.dropout_add, p=0.5)(x, r).equal(first)


def test_activation_checkpointing_draws_the_same_mask(device):
    x = torch.randn(6, 32, device=device, requires_grad=True)
    r = torch.zeros(6, 32, device=device)

    def block(x):
        return add_layer(x, r, p=0.5)[0].square()

    torch.manual_seed(SEED)
    (plain,) = torch.autograd.grad(block(x).sum(), x)
    torch.manual_seed(SEED)
    out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    (checkpointed,) = torch.autograd.grad(out.sum(), x)
    assert checkpointed.equal(plain)


def test_without_training_or_chance_nothing_is_dropped(device):
    x, r = torch.randn(2, 4, 32, device=device)
    assert family.dropout_add(x, r, 0.5, training=False).equal(x + r)
    assert family.dropout_add(x, r, 0.0).equal(x + r)
    assert add_layer(x, r, p=0.5, training=False)[1].equal(x + r)


def test_what_is_normalised_is_the_sum_that_is_returned(device):
    y, total = add_layer(**made(device, torch.float16, 16, 256, names="xr"))
    assert y.equal(norm.layer_norm(total, 256))


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_of_the_results_may_be_used(device, used):
    tensors = made(device, torch.float32, 5, 96, names="xr")
    check(lambda x, r: add_layer(x, r)[used], lambda x, r: add_layer_reference(x, r)[used], tensors)


def test_rows_too_wide_for_one_kernel_take_two(device, monkeypatch):
    monkeypatch.setattr(family, "MAX_BACKWARD_BLOCK", 64)
    check(add_layer, add_layer_reference, made(device, torch.float32, 3, 96))
    check(add_rms, add_rms_reference, made(device, torch.float32, 3, 96, names="xrw"))


def test_rows_with_any_stride_and_empty_rows(device):
    wide = torch.randn(2, 5, 50, device=device)
    check(add_layer, add_layer_reference, {"x": wide[0, :, :40], "r": wide[1, :, 3:43]})
    x = torch.randn(0, 8, device=device, requires_grad=True)
    y, total = add_layer(x, x.detach(), p=0.5)
    (y.sum() + total.sum()).backward()
    assert y.shape == total.shape == x.grad.shape == (0, 8)


def test_torch_finds_nothing_wrong_with_the_operators(device):
    x, r, w, b = (t.requires_grad_() for t in made(device, torch.float32, 3, 40).values())
    seed = torch.tensor([5], device=device)
    ops = torch.ops.advisor_kernels
    for drawn, p in ((None, 0.0), (seed, 0.5)):
        torch.library.opcheck(
            ops.add_norm.default, (x, r, drawn, p, w, b, 1e-5, 0.0, False, False, torch.float32)
        )
    torch.library.opcheck(ops.dropout_add.default, (x, r, seed, 0.5))


@pytest.mark.quick
def test_compiled_without_graph_breaks_it_gives_the_same(device):
    compiled = torch.compile(add_layer, fullgraph=True, backend="aot_eager")
    check(compiled, add_layer_reference, made(device, torch.float32, 4, 64))
    dropping = torch.compile(lambda x, r: family.dropout_add(x, r, 0.5), fullgraph=True, backend="aot_eager")
    x, r = torch.ones(2, 4, 64, device=device)
    assert not dropping(x, r).equal(dropping(x, r))


def test_a_second_derivative_is_refused(device):
    x, r = torch.randn(2, 3, 16, device=device)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(add_layer(x, r)[0].square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_what_is_not_supported_is_said(device):
    x = torch.randn(4, 32, device=device)
    with pytest.raises(UnsupportedError, match="must be alike"):
        add_layer(x, x[0])
    with pytest.raises(ValueError, match=r"probability 1\.5"):
        family.dropout_add(x, x, 1.5)
    with pytest.raises(UnsupportedError, match="float64"):
        family.dropout_add(x.double(), x.double())
