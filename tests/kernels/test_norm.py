"""LayerNorm and RMSNorm."""

import pytest
import torch
from advisor.kernels import _norm_rows, _norm_wide, _rows, norm
from advisor.kernels._device import UnsupportedError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.kernels.checks import cases, check, skip_unless_runnable

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def layer(x, w=None, b=None, eps=1e-5):
    return norm.layer_norm(x, x.shape[-1], w, b, eps)


def layer_reference(x, w=None, b=None, eps=1e-5):
    return norm.layer_norm_reference(x, x.shape[-1], w, b, eps)


def rms(x, w=None, **options):
    return norm.rms_norm(x, x.shape[-1], w, 1e-6, **options)


def rms_reference(x, w=None, **options):
    return norm.rms_norm_reference(x, x.shape[-1], w, 1e-6, **options)


def made(device, dtype, *shape, vectors=2, spread=1.0, weight_dtype=None):
    skip_unless_runnable(device, dtype)
    tensors = {"x": (torch.randn(shape, device=device) * spread).to(dtype)}
    for name in ("w", "b")[:vectors]:
        tensors[name] = torch.randn(shape[-1], device=device).to(weight_dtype or dtype)
    return tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        *cases([(5, 200), (3, 4, 33), (2, 4096)], [(1, 1), (7, 8), (3, 1000)]),
        *[pytest.param(s, marks=pytest.mark.gpu) for s in [(300, 1024), (65, 5120), (37, 8192), (1000, 256)]],
        *[pytest.param(s, marks=[pytest.mark.gpu, pytest.mark.quick]) for s in [(600, 4096), (150, 16384)]],
    ],
)
def test_layer_norm_and_its_gradients_are_as_exact_as_eager(device, dtype, shape, poisoned, request):
    big_on_cpu = device.type == "cpu" and "gpu" in [m.name for m in request.node.callspec.marks]
    if big_on_cpu:
        pytest.skip("a size for the GPU")
    check(layer, layer_reference, made(device, dtype, *shape))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"offset": 1.0}, {"casting": "llama"}], ids=["plain", "gemma", "llama"]
)
@pytest.mark.parametrize("shape", [(5, 200), (2, 3, 513)])
def test_rms_norm_and_its_gradients_are_as_exact_as_eager(device, dtype, shape, options, poisoned):
    check(
        lambda x, w: rms(x, w, **options),
        lambda x, w: rms_reference(x, w, **options),
        made(device, dtype, *shape, vectors=1),
    )


def test_llamas_casting_rounds_before_the_weight(device):
    inputs = made(device, torch.float16, 16, 256, vectors=1)
    theirs = rms_reference(**inputs, casting="llama")
    # Sums in another order may tip a rounding here and there, no more.
    assert (rms(**inputs, casting="llama") == theirs).float().mean() > 0.99
    assert (rms(**inputs) == theirs).float().mean() < 0.9


def test_rms_norm_is_torchs(device):
    x, w = made(device, torch.float32, 4, 96, vectors=1).values()
    torch.testing.assert_close(norm.rms_norm(x, 96, w), nn.functional.rms_norm(x, (96,), w))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("casting", ["fp32", "llama"])
def test_the_weight_may_differ_in_dtype(device, casting, weight_dtype):
    inputs = made(device, torch.float16, 5, 64, vectors=1, weight_dtype=weight_dtype)
    check(lambda x, w: rms(x, w, casting=casting), lambda x, w: rms_reference(x, w, casting=casting), inputs)


def test_any_part_of_the_affine_map_may_be_left_out(device):
    x, w, b = made(device, torch.float32, 5, 96).values()
    check(lambda x: layer(x), lambda x: layer_reference(x), {"x": x})
    check(lambda x, w: layer(x, w), lambda x, w: layer_reference(x, w), {"x": x, "w": w})
    check(lambda x, b: layer(x, None, b), lambda x, b: layer_reference(x, None, b), {"x": x, "b": b})
    check(lambda x: rms(x), lambda x: rms_reference(x), {"x": x})


@pytest.mark.parametrize("trained", ["x", "w", "b"])
def test_only_the_gradients_that_are_asked_for_come(device, trained):
    tensors = made(device, torch.float32, 5, 96)
    held = {name: t for name, t in tensors.items() if name != trained}
    check(
        lambda **one: layer(**one, **held),
        lambda **one: layer_reference(
            **one, **{n: t.to(next(iter(one.values())).dtype) for n, t in held.items()}
        ),
        {trained: tensors[trained]},
    )


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["large", "equal", "one huge", "shifted", "tiny"])
def test_extreme_rows_are_as_exact_as_eager(device, dtype, kind):
    tensors = made(device, dtype, 6, 256)
    x = tensors["x"]
    if kind == "large":
        x = x.sign() * 1e4
    elif kind == "equal":
        x = torch.full_like(x, 3.0)
    elif kind == "one huge":
        x = x.clone()
        x[:, 17] = 6e4
    elif kind == "shifted":
        x = x + 1000.0
    else:
        x = x * 1e-6
    tensors["x"] = x
    # The sums over rows of terms near 16 cancel: the floor is of the terms, not of the sum. Eager's own error
    # in them depends on how many threads share the rows.
    check(layer, layer_reference, tensors, gradients=kind != "equal", gradient_ulps=64)
    check(rms, rms_reference, {"x": x, "w": tensors["w"]}, gradient_ulps=32)


def test_a_mean_far_from_zero_does_not_cancel(device):
    # Rows of 4096 + noise: the mean of squares less the square of the mean would lose every digit.
    x = (4096 + torch.randn(4, 512, dtype=torch.float64) / 16).to(device=device, dtype=torch.float32)
    y = layer(x).double()
    exact = layer_reference(x.double())
    assert (y - exact).abs().max() < 2e-2
    assert ((y.square().mean(-1)) - exact.square().mean(-1)).abs().max() < 1e-3


@pytest.fixture
def narrow(monkeypatch):
    """Registers for 128 columns, so that short rows take the ways of wide ones."""
    monkeypatch.setattr(_norm_rows, "MAX_BLOCK", 128)
    monkeypatch.setattr(_norm_rows, "MAX_BACKWARD_BLOCK", 128)
    block = ((None, {"BLOCK": 128, "num_warps": 1}),)
    monkeypatch.setattr(_norm_wide.WIDE, "rows", {"default": block})
    sums = {"ROWS": 2, "BLOCK": 128, "programs_per_sm": 3, "num_warps": 1}
    monkeypatch.setattr(_norm_wide.WIDE_WEIGHT, "rows", {"default": ((None, sums),)})


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [256, 300, 129])
def test_rows_walked_in_blocks_are_as_exact_as_eager(device, dtype, cols, narrow, poisoned):
    tensors = made(device, dtype, 5, cols)
    tensors["x"] = tensors["x"] + 2
    check(layer, layer_reference, tensors)
    check(lambda x, w: rms(x, w, casting="llama"), lambda x, w: rms_reference(x, w, casting="llama"),
          {"x": tensors["x"], "w": tensors["w"]})  # fmt: skip
    check(lambda x: layer(x), lambda x: layer_reference(x), {"x": tensors["x"]})


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("warps", "rows"), [(4, 1), (2, 2)])
@pytest.mark.parametrize("cols", [2048, 1000])
def test_warps_that_wait_for_each_other_once_are_as_exact_as_eager(
    device, dtype, warps, rows, cols, monkeypatch, poisoned
):
    # GIVEN rows whose mean is not zero, one of them constant, and columns that differ from warp to warp
    row = {"ROWS": rows, "num_warps": warps, "JOIN": 1}
    monkeypatch.setattr(_norm_rows.FORWARD, "rows", {"default": ((None, row),)})
    tensors = made(device, dtype, 5, cols)
    tensors["x"] += 3
    tensors["x"][1] = 100
    tensors["x"][2, cols // 4 :] *= 3
    check(layer, layer_reference, tensors, gradients=False)


def test_sums_that_do_not_fit_into_registers_are_made_apart(device, monkeypatch, poisoned):
    row = {"ROWS": 1, "num_warps": 1, "STAGES": 1, "programs_per_sm": 1, "SUMMED": 1}
    monkeypatch.setattr(_norm_rows.BACKWARD, "rows", {"default": ((None, row),)})
    check(layer, layer_reference, made(device, torch.float32, 5, 96))


@pytest.mark.parametrize(
    ("is_rms", "summed", "early"), [(True, False, 1), (False, False, 0), (True, True, 0)]
)
def test_weights_are_loaded_with_the_row_of_an_rms_norm_of_no_sum_alone(monkeypatch, is_rms, summed, early):
    given = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *tensors, **constants: given.update(constants)

    monkeypatch.setattr(_norm_rows, "_norm_forward_kernel", Kernel())
    monkeypatch.setattr(_norm_rows.FORWARD, "pick", lambda *_: {"ROWS": 1, "num_warps": 8, "EARLY": 1})
    x = torch.empty(2, 64)
    residual = x if summed else None
    _norm_rows.launch_forward(x, residual, None, 0.0, None, None, 0.0, 0.0, is_rms, False, x.dtype)
    assert given["EARLY"] == early


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("cols", [20000, 40000])
def test_wide_rows_on_a_gpu(device, cols):
    if device.type == "cpu":
        pytest.skip("a size for the GPU")
    check(layer, layer_reference, made(device, torch.bfloat16, 64, cols))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 9), cols=st.integers(1, 70), gap=st.integers(0, 3), column_step=st.integers(1, 2))
def test_any_shape_and_any_strides(device, rows, cols, gap, column_step):
    torch.manual_seed(rows * 1000 + cols)
    storage = torch.randn(rows, (cols + gap) * column_step, device=device)
    x = storage[:, : cols * column_step : column_step]
    w, b = torch.randn(2, cols, device=device)
    # With few columns the variance may be next to nothing, and dx a difference of like terms: a large eps
    # keeps the first in bounds, and the floor is of the terms.
    check(lambda x, w, b: layer(x, w, b, 1.0), lambda x, w, b: layer_reference(x, w, b, 1.0),
          {"x": x, "w": w, "b": b}, repeat=False, gradient_ulps=32)  # fmt: skip


def test_a_transposed_input_and_an_expanded_gradient(device):
    x = torch.randn(48, 6, device=device).t().requires_grad_()
    layer(x).sum().backward()
    got, x.grad = x.grad, None
    layer_reference(x).sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_several_dimensions_may_be_normalised(device):
    x, w = torch.randn(3, 4, 6, device=device), torch.randn(4, 6, device=device)
    check(
        lambda x, w: norm.layer_norm(x, (4, 6), w),
        lambda x, w: norm.layer_norm_reference(x, (4, 6), w),
        {"x": x, "w": w},
    )


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_empty_inputs_give_empty_outputs_and_zero_gradients(device, shape):
    x = torch.randn(shape, device=device, requires_grad=True)
    w = torch.ones(8, device=device, requires_grad=True)
    y = layer(x, w)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad.shape == x.shape
    assert w.grad.tolist() == [0.0] * 8


@pytest.mark.parametrize(("function", "vectors"), [(layer, 2), (rms, 1)])
def test_torch_finds_nothing_wrong_with_the_operators(device, function, vectors):
    tensors = [t.requires_grad_() for t in made(device, torch.float32, 3, 40, vectors=vectors).values()]
    function(*tensors).sum().backward()
    flat = [*tensors, *[None] * (2 - vectors)]
    forward = torch.ops.advisor_kernels.norm.default
    torch.library.opcheck(forward, (*flat, 1e-5, 0.0, vectors == 1, False, torch.float32))


@pytest.mark.quick
def test_compiled_without_graph_breaks_it_gives_the_same(device):
    tensors = made(device, torch.float32, 4, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    check(compiled, layer_reference, tensors)


def test_a_second_derivative_is_refused(device):
    x = torch.randn(3, 16, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_autocast_gives_what_eager_gives(device):
    x = torch.randn(3, 16, device=device).to(torch.float16)
    with torch.autocast(device.type, torch.bfloat16 if device.type == "cpu" else torch.float16):
        assert layer(x).dtype == nn.functional.layer_norm(x, (16,)).dtype
        assert norm.layer_norm(x, 16, out_dtype=torch.float16).dtype == torch.float16
    assert layer(x).dtype == torch.float16


def test_the_result_may_be_asked_for_in_another_dtype(device):
    x = torch.randn(5, 64, device=device)
    check(
        lambda x: norm.layer_norm(x, 64, out_dtype=torch.float16),
        lambda x: norm.layer_norm_reference(x, 64).to(torch.float16),
        {"x": x},
    )


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    if device.type == "cpu":
        pytest.skip("a size for the GPU")
    x = torch.randn(2**19 + 3, 4096, device=device, dtype=torch.bfloat16)
    y = layer(x)
    torch.testing.assert_close(y[-3:], layer_reference(x[-3:]), atol=2e-2, rtol=2e-2)


@pytest.mark.quick
def test_the_modules_stand_in_for_torchs(device):
    x = torch.randn(4, 32, device=device)
    for theirs, ours in (
        (nn.LayerNorm(32), norm.FusedLayerNorm(32)),
        (nn.LayerNorm(32, bias=False), norm.FusedLayerNorm(32, bias=False)),
        (nn.RMSNorm(32), norm.RMSNorm(32)),
        (nn.RMSNorm(32, elementwise_affine=False), norm.RMSNorm(32, elementwise_affine=False)),
    ):
        theirs, ours = theirs.to(device), ours.to(device)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x), theirs(x))
        # And by exchange of the class.
        theirs.__class__ = type(ours)
        torch.testing.assert_close(theirs(x), ours(x), rtol=0, atol=0)


def test_a_gemma_like_module_starts_as_the_identity_on_normalised_rows(device):
    module = norm.RMSNorm(32, offset=1.0).to(device)
    assert module.weight.eq(0).all()
    x = torch.randn(4, 32, device=device)
    torch.testing.assert_close(module(x), nn.functional.rms_norm(x, (32,)))


def test_what_is_not_supported_is_said(device):
    x = torch.randn(4, 32, device=device)
    with pytest.raises(UnsupportedError, match="float64"):
        layer(x.double())
    with pytest.raises(UnsupportedError, match=r"normalized_shape \[16\]"):
        norm.layer_norm(x, 16)
    with pytest.raises(UnsupportedError, match=r"shape \[16\] for normalized_shape \[32\]"):
        layer(x, x[0, :16])
    with pytest.raises(ValueError, match="casting 'other'"):
        rms(x, casting="other")
    assert norm.unsupported_reasons(x) == []


@pytest.mark.parametrize(
    ("stages", "tile_bytes", "fits"),
    [(3, 64 << 10, 3), (3, 128 << 10, 2), (2, 128 << 10, 2), (3, 512 << 10, 1), (1, 1, 1)],
)
def test_no_more_tiles_are_under_way_than_shared_memory_holds(stages, tile_bytes, fits):
    # GIVEN 227 KiB, which the interpreter stands for, and one tile less in them than there are stages
    assert _rows.fitting_stages(stages, tile_bytes, torch.device("cpu")) == fits
