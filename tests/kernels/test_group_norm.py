"""GroupNorm and the activation behind it."""

import pytest
import torch
from advisor.kernels import _group_norm_held as held
from advisor.kernels import _group_norm_split as split
from advisor.kernels import group_norm as family
from advisor.kernels._device import UnsupportedError
from advisor.kernels._math import ACTIVATIONS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.kernels.checks import check, skip_unless_runnable

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def made(device, dtype, *shape, names="xwb", mean=0.0):
    skip_unless_runnable(device, dtype)
    x = torch.randn(shape, device=device) + mean
    sizes = {name: x if name == "x" else torch.randn(shape[1], device=device) for name in names}
    return {name: t.to(dtype) for name, t in sizes.items()}


def ours(groups, activation="silu", eps=1e-5):
    return lambda x, w=None, b=None: family.group_norm(x, groups, w, b, eps, activation)


def reference(groups, activation="silu", eps=1e-5):
    return lambda x, w=None, b=None: family.group_norm_reference(x, groups, w, b, eps, activation)


@pytest.fixture(params=["held", "split"])
def way(request, monkeypatch):
    """Whether programs hold groups, or share them."""
    if request.param == "split":
        monkeypatch.setattr(family, "NEVER_SPLIT", 0)
        monkeypatch.setattr(family, "MAX_HELD", 0)
        monkeypatch.setattr(family, "MAX_HELD_BACKWARD", 0)
    return request.param


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_as_exact_as_eager(device, dtype, activation, way, poisoned):
    check(ours(2, activation), reference(2, activation), made(device, dtype, 3, 8, 5, 6))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 6, 16, 16), 2),
        ((3, 5, 7), 5),
        ((2, 12, 3, 5, 2), 3),
        ((4, 9), 3),
        ((3, 20, 33), 1),
        ((2, 4, 1), 4),
        ((1, 4, 3000), 2),
    ],
)
def test_any_number_of_dimensions_and_odd_sizes(device, dtype, shape, groups, way, poisoned):
    check(ours(groups), reference(groups), made(device, dtype, *shape))


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [8, 32])
@pytest.mark.parametrize(
    "shape", [(16, 128, 64, 64), (16, 256, 32, 32), (16, 320, 32, 32), (2, 64, 200, 200)]
)
def test_sizes_of_real_models_are_as_exact_as_eager(device, dtype, groups, shape):
    if device.type == "cpu":
        pytest.skip("a size for the GPU")
    check(ours(groups), reference(groups), made(device, dtype, *shape))


@pytest.mark.gpu
def test_a_tensor_of_more_than_2_31_elements(device):
    if device.type == "cpu" or torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("it takes 24 GiB of a GPU")
    x = torch.randn(2**19 + 1, 8, 512, device=device, dtype=torch.bfloat16)
    y = ours(2)(x)
    torch.testing.assert_close(y[-3:], reference(2)(x[-3:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 8, 11, 13), (3, 4, 40, 50)])
def test_a_mean_of_1000_spreads_costs_no_more_than_eager(device, dtype, shape, way):
    # Of 16 bits, whose numbers lie 0.5 apart there.
    inputs = made(device, dtype, *shape, mean=1e3 if dtype == torch.float32 else 1e2)
    check(ours(2), reference(2), inputs)


def test_pieces_that_lie_far_apart_join_as_exactly_as_eager(device, way):
    inputs = made(device, torch.float32, 2, 4, 2500)
    inputs["x"][0, 1] += 1e4
    inputs["x"][1, :, 1500:] -= 3e3
    check(ours(2, "none"), reference(2, "none"), inputs)


@pytest.mark.parametrize("value", [3.0, -1e4])
def test_a_constant_group_gives_the_shift(device, value, way):
    x = torch.full((2, 4, 9), value, device=device)
    w, b = torch.randn(2, 4, device=device)
    expected = b[:, None].expand(2, 4, 9)
    assert torch.equal(ours(2, "none")(x, w, b), expected)


def test_one_element_a_group_gives_the_shift(device, way):
    x, (w, b) = torch.randn(3, 4, device=device), torch.randn(2, 4, device=device)
    assert torch.equal(ours(4, "none")(x, w, b), b.expand(3, 4))


@pytest.mark.parametrize("names", ["x", "xw", "xb"])
def test_any_vector_may_be_left_out(device, names, way, poisoned):
    def expected(x, w=None, b=None):
        # Eager PyTorch has no gradient of a shift without a weight.
        return reference(2)(x, torch.ones_like(b) if w is None and b is not None else w, b)

    check(ours(2), expected, made(device, torch.float32, 2, 6, 10, names=names))


@pytest.mark.parametrize("trained", ["x", "w", "b"])
def test_only_the_gradients_that_are_asked_for_come(device, trained, way):
    tensors = made(device, torch.float32, 2, 6, 10)
    kept = {name: t for name, t in tensors.items() if name != trained}

    def expected(**one):
        (leaf,) = one.values()
        return reference(3)(**one, **{name: t.to(leaf.dtype) for name, t in kept.items()})

    check(lambda **one: ours(3)(**one, **kept), expected, {trained: tensors[trained]})


def test_vectors_may_have_another_dtype(device):
    tensors = made(device, torch.float16, 2, 6, 10)
    tensors |= {name: tensors[name].float() for name in "wb"}

    def eager(x, w, b):
        # Eager PyTorch takes one dtype alone.
        return family.group_norm_reference(x.to(w.dtype), 2, w, b, 1e-5, "silu").to(x.dtype)

    check(ours(2), eager, tensors)


@pytest.mark.parametrize("strided", ["transposed", "every second", "expanded"])
def test_any_strides_are_taken(device, strided, way):
    x = {
        "transposed": lambda: torch.randn(3, 10, 7, 8, device=device).transpose(1, 3),
        "every second": lambda: torch.randn(3, 16, 7, 10, device=device)[:, ::2, 1:],
        "expanded": lambda: torch.randn(1, 8, 7, 10, device=device).expand(3, -1, -1, -1),
    }[strided]()
    check(ours(2), reference(2), {"x": x, **made(device, torch.float32, 3, 8, names="wb")})


def test_a_gradient_of_any_strides_is_taken(device, way):
    x = torch.randn(2, 4, 6, 6, device=device, requires_grad=True)
    (got,) = torch.autograd.grad(ours(2)(x).sum(), x)
    (dense,) = torch.autograd.grad(ours(2)(x), x, torch.ones_like(x))
    assert torch.equal(got, dense)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    samples=st.integers(1, 4), groups=st.integers(1, 5), depth=st.integers(1, 6), size=st.integers(1, 50),
    shared=st.booleans(),
)  # fmt: skip
def test_any_shape(device, samples, groups, depth, size, shared):
    if samples * depth * size == 1:
        size = 2
    torch.manual_seed(size)
    x = torch.randn(samples + 1, groups * depth, size, device=device)
    w, b = torch.randn(2, groups * depth, device=device)
    with pytest.MonkeyPatch.context() as patch:
        if shared:
            patch.setattr(family, "NEVER_SPLIT", 0)
            patch.setattr(family, "MAX_HELD", 0)
            patch.setattr(family, "MAX_HELD_BACKWARD", 0)
        inputs = {"x": x, "w": w, "b": b}
        check(ours(groups, eps=0.1), reference(groups, eps=0.1), inputs, repeat=False, gradient_ulps=32)


def test_many_pieces_are_joined_in_several_steps(device, monkeypatch, way):
    monkeypatch.setattr(split, "_PIECES", 2)
    row = {"TILE": 16, "num_warps": 1, "programs_per_sm": 64}
    for table in (split.FORWARD, split.BACKWARD):
        monkeypatch.setattr(table, "rows", {"default": ((None, row),)})
    check(ours(2), reference(2), made(device, torch.float32, 1, 6, 70))


@pytest.mark.parametrize(("most", "shared"), [(64, True), (4096, False)])
def test_large_groups_and_few_ones_are_shared(device, monkeypatch, most, shared):
    used = []

    def noting(name, real):
        def noted(*args):
            used.append(name)
            return real(*args)

        monkeypatch.setattr(family, name, noted)

    for name in ("forward_held", "forward_split", "backward_held", "backward_split"):
        noting(name, getattr(family, name))
    monkeypatch.setattr(family, "NEVER_SPLIT", most)
    monkeypatch.setattr(family, "sm_count", lambda device: 132)
    check(ours(2), reference(2), made(device, torch.float32, 2, 4, 100))
    assert set(used) == ({"forward_split", "backward_split"} if shared else {"forward_held", "backward_held"})


def test_a_cut_wastes_as_little_of_a_tile_as_can_be():
    assert split.cut(16, 4096, 8192) == (2, 4096)
    # 10 planes of a group are no multiple of 4.
    assert split.cut(10, 4096, 8192) == (2, 4096)
    assert split.cut(10, 1024, 8192) == (2, 1024)
    assert split.cut(2048, 1, 4096) == (2048, 1)
    assert split.cut(1, 2**20, 4096) == (1, 4096)
    assert split.cut(1, 1, 4096) == (1, 8)


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 4, 0), (0, 4)])
def test_empty_inputs_give_empty_outputs_and_zero_gradients(device, shape):
    x = torch.randn(shape, device=device, requires_grad=True)
    w = torch.ones(4, device=device, requires_grad=True)
    y = ours(2)(x, w)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape
    assert w.grad.tolist() == [0.0] * 4


def test_torch_finds_nothing_wrong_with_the_operator(device):
    tensors = [t.requires_grad_() for t in made(device, torch.float32, 3, 4, 10).values()]
    operator = torch.ops.advisor_kernels.group_norm.default
    torch.library.opcheck(operator, (*tensors, 2, 1e-5, "silu", torch.float32))


@pytest.mark.parametrize("activation", ["none", "silu", "gelu"])
def test_differences_are_as_the_gradient_says(device, activation, way):
    # In fp32 alone, so that steps and tolerances are coarse.
    inputs = [t.requires_grad_() for t in made(device, torch.float32, 2, 4, 5).values()]
    torch.autograd.gradcheck(
        ours(2, activation, 0.1), inputs, eps=1e-2, atol=1e-2, rtol=1e-2, fast_mode=False
    )


@pytest.mark.quick
def test_compiled_without_graph_breaks_it_gives_the_same(device):
    compiled = torch.compile(ours(2), fullgraph=True, backend="aot_eager")
    check(compiled, reference(2), made(device, torch.float32, 2, 4, 6, 6))


def test_a_second_derivative_is_refused(device):
    x = torch.randn(3, 4, 6, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(ours(2)(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_autocast_gives_the_dtype_that_eager_gives(device):
    low = torch.bfloat16 if device.type == "cpu" else torch.float16
    x = torch.randn(3, 4, 6, device=device).to(torch.float16)
    with torch.autocast(device.type, low):
        assert ours(2)(x).dtype == reference(2)(x).dtype
    assert ours(2)(x).dtype == torch.float16


def test_a_result_of_another_dtype_is_the_wide_one_rounded(device, way):
    x = torch.randn(3, 4, 60, device=device)
    wide = ours(2)(x)
    assert torch.equal(family.group_norm(x, 2, activation="silu", out_dtype=torch.float16), wide.half())


def test_the_module_is_the_chain_of_torchs(device):
    module = family.FusedGroupNorm(2, 8, activation="silu").to(device)
    nn.init.normal_(module.bias)
    x = torch.randn(5, 8, 6, device=device)
    chain = nn.functional.silu(nn.functional.group_norm(x, 2, module.weight, module.bias))
    torch.testing.assert_close(module(x), chain)
    assert set(module.state_dict()) == {"weight", "bias"}
    plain = nn.GroupNorm(2, 8).to(device)
    expected = plain(x)
    plain.__class__ = family.FusedGroupNorm
    torch.testing.assert_close(plain(x), expected)


def test_what_is_not_supported_is_said(device):
    x = torch.randn(2, 4, 3, 5, device=device)
    with pytest.raises(ValueError, match="activation 'mish'"):
        family.group_norm(x, 2, activation="mish")
    with pytest.raises(UnsupportedError, match="4 channels do not divide into 3 groups"):
        family.group_norm(x, 3)
    with pytest.raises(UnsupportedError, match=r"shape \[3\] for 4 channels"):
        family.group_norm(x, 2, x[0, :3, 0, 0])
    with pytest.raises(UnsupportedError, match="float64"):
        family.group_norm(x.double(), 2)
    with pytest.raises(UnsupportedError, match="channels_last"):
        family.group_norm(x.contiguous(memory_format=torch.channels_last), 2)
    with pytest.raises(UnsupportedError, match="a 1-d tensor has no channels"):
        family.group_norm(x.flatten(), 2)


def test_no_group_is_read_or_written_beyond_its_end(device, way):
    # A tile of 16 planes of 64 positions over groups of 5 planes of 33.
    assert held.tile_of(5, 33) == 8 * 64
    tensors = made(device, torch.float32, 3, 15, 33)
    tensors["x"][1, 5:10] = float("nan")
    y = ours(3)(**tensors)
    clean = torch.ones(3, 15, dtype=torch.bool, device=device)
    clean[1, 5:10] = False
    assert bool(y[clean].isfinite().all())
    assert bool(y[~clean].isnan().all())
