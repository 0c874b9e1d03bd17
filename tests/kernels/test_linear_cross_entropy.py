"""Linear layer with cross-entropy: as accurate as eager's two steps, in one chunk or many."""

import pytest
import torch
from advisor.kernels import linear_cross_entropy as lce
from advisor.kernels._device import UnsupportedError

from tests.kernels.checks import cases, check, skip_unless_runnable

DTYPES = cases([torch.float32, torch.bfloat16], [torch.float16])
VARIANTS = cases(["fast", "memory"])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Chunks of 8 tokens, so that tiny inputs make several, the last one short."""
    monkeypatch.setattr(lce, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(lce, "_TOKENS_MULTIPLE", 8)


def _inputs(device, dtype, tokens=21, hidden=16, classes=101, bias=False):
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weight = torch.randn(classes, hidden, device=device).mul(0.5).to(dtype)
    target = torch.randint(0, classes, (tokens,), device=device)
    target[1::4] = -100
    inputs = {"x": x, "linear_weight": weight, "target": target}
    return inputs | ({"linear_bias": torch.randn(classes, device=device).to(dtype)} if bias else {})


def _judge(inputs, variant, **options):
    check(
        lambda **kw: lce.linear_cross_entropy(**kw, variant=variant, **options),
        lambda **kw: lce.linear_cross_entropy_reference(**kw, **options),
        inputs,
        ulps=4,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradients_match_eager(device, dtype, variant, reduction, poisoned):
    skip_unless_runnable(device, dtype)
    _judge(_inputs(device, dtype), variant, reduction=reduction)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bias_smoothing_and_z_loss_match_eager(device, variant, reduction, poisoned):
    _judge(
        _inputs(device, torch.float32, bias=True),
        variant,
        reduction=reduction,
        label_smoothing=0.1,
        z_loss=1e-2,
    )


@pytest.mark.parametrize("classes", cases([1, 64, 65], [7, 128, 1000]))
def test_any_vocabulary_is_padded_right(device, classes, poisoned):
    _judge(_inputs(device, torch.float16, classes=classes, tokens=9), "memory")


@pytest.mark.quick
@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_whole_and_single_chunks(device, tokens):
    _judge(_inputs(device, torch.float32, tokens=tokens), "memory")


@pytest.mark.quick
def test_fp16_weight_gradients_do_not_overflow_in_a_sum_over_tokens(device):
    # GIVEN tokens of one class with equal large inputs x, whose sum n x (1 - p) = 384000 is beyond 65504
    tokens, x = (4096, 100.0) if device.type == "cuda" else (128, 3200.0)
    inputs = torch.full((tokens, 8), x, device=device, dtype=torch.float16)
    weight = torch.zeros(16, 8, device=device, dtype=torch.float16, requires_grad=True)
    target = torch.zeros(tokens, dtype=torch.long, device=device)
    lce.linear_cross_entropy(inputs, weight, target, variant="fast").backward()
    # THEN the mean's gradient is exact: x (p - [j = y]) with p = 1/16
    expected = torch.full((16, 8), x / 16, device=device)
    expected[0] = -x * 15 / 16
    assert torch.allclose(weight.grad.float(), expected, rtol=2e-3)


@pytest.mark.quick
@pytest.mark.parametrize("variant", ["fast", "memory"])
def test_the_losss_own_gradient_multiplies_and_a_second_backward_is_right(device, variant):
    inputs = _inputs(device, torch.float32)
    x, weight = inputs["x"].requires_grad_(), inputs["linear_weight"].requires_grad_()
    loss = lce.linear_cross_entropy(x, weight, inputs["target"], variant=variant)
    once = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    thrice = torch.autograd.grad(loss * 3, (x, weight), retain_graph=True)
    for a, b in zip(once, thrice, strict=True):
        assert torch.allclose(a * 3, b, rtol=1e-5, atol=1e-7)


@pytest.mark.quick
@pytest.mark.parametrize("frozen", ["x", "linear_weight"])
def test_only_wanted_gradients_are_computed(device, frozen):
    inputs = _inputs(device, torch.float32)
    for name in ("x", "linear_weight"):
        inputs[name].requires_grad_(name != frozen)
    lce.linear_cross_entropy(**inputs, variant="memory").backward()
    assert inputs[frozen].grad is None
    other = "x" if frozen == "linear_weight" else "linear_weight"
    exact = {
        k: v.detach().double().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()
    }
    lce.linear_cross_entropy_reference(**exact).backward()
    assert torch.allclose(inputs[other].grad.double(), exact[other].grad, atol=1e-6)


@pytest.mark.quick
def test_autocast_computes_in_its_dtype_and_keeps_fp32_gradients_of_fp32_parameters(device):
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    inputs = _inputs(device, torch.float32)
    x, weight = inputs["x"].requires_grad_(), inputs["linear_weight"].requires_grad_()
    with torch.autocast(device.type, dtype=dtype):
        loss = lce.linear_cross_entropy(x, weight, inputs["target"])
        eager = lce.linear_cross_entropy_reference(x, weight, inputs["target"])
    mine = torch.autograd.grad(loss, (x, weight))
    theirs = torch.autograd.grad(eager, (x, weight))
    assert loss.dtype == torch.float32
    assert [g.dtype for g in mine] == [torch.float32, torch.float32]
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).norm() < 4 * torch.finfo(dtype).eps * b.norm()


@pytest.mark.quick
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens_give_zero_weight_gradients(device, reduction):
    x = torch.empty(0, 4, device=device, requires_grad=True)
    weight = torch.ones(3, 4, device=device, requires_grad=True)
    target = torch.empty(0, dtype=torch.long, device=device)
    loss = lce.linear_cross_entropy(x, weight, target, reduction=reduction)
    loss.sum().backward()
    assert loss.isnan().all() if reduction == "mean" else loss.sum() == 0
    assert x.grad.shape == (0, 4)
    assert weight.grad.nan_to_num(0).equal(torch.zeros_like(weight))


@pytest.mark.quick
def test_without_grad_mode_only_the_loss_is_computed(device):
    inputs = _inputs(device, torch.float32)
    with torch.no_grad():
        loss = lce.linear_cross_entropy(**inputs, variant="memory")
    assert torch.allclose(loss, lce.linear_cross_entropy_reference(**inputs), atol=1e-5)
    x, weight, target = inputs.values()
    out = lce.linear_cross_entropy_op(
        x, weight, None, target, torch.float32, -100, 0.0, 0.0, "mean", 8, False, False, False
    )
    assert [t.numel() for t in out[3:]] == [0, 0, 0]


def test_a_second_derivative_is_refused(device):
    inputs = _inputs(device, torch.float32, tokens=5)
    x = inputs["x"].requires_grad_()
    for reduction in ("mean", "none"):
        loss = lce.linear_cross_entropy(**inputs, reduction=reduction).sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            (g.sum() + loss).backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_operator_passes_torchs_own_checks(device, reduction):
    inputs = _inputs(device, torch.float32, tokens=11, bias=True)
    early = reduction != "none"
    args = (
        inputs["x"].requires_grad_(), inputs["linear_weight"].requires_grad_(),
        inputs["linear_bias"].requires_grad_(), inputs["target"], torch.float32, -100, 0.1, 0.1, reduction, 8,
        early, early, early,
    )  # fmt: skip
    torch.library.opcheck(lce.linear_cross_entropy_op, args)


@pytest.mark.quick
def test_it_compiles_without_graph_breaks(device):
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    inputs = _inputs(device, torch.float32)
    x = inputs.pop("x").requires_grad_()

    def step(x):
        return lce.linear_cross_entropy(x * 2, **inputs, variant="memory") * 3

    torch.compile(step, fullgraph=True, backend=backend)(x).backward()
    compiled, x.grad = x.grad, None
    step(x).backward()
    assert torch.allclose(compiled, x.grad, atol=1e-6)


@pytest.mark.quick
def test_the_module_has_linears_parameters_and_tied_weights_work(device):
    module = lce.LinearCrossEntropy(16, 33, bias=True, device=device, label_smoothing=0.1)
    assert [(n, tuple(p.shape)) for n, p in module.named_parameters()] == [
        ("weight", (33, 16)),
        ("bias", (33,)),
    ]
    embedding = torch.nn.Embedding(33, 16, device=device)
    module.weight = embedding.weight
    target = torch.randint(0, 33, (2, 5), device=device)
    x = embedding(target)
    module(x, target).backward()
    mine, embedding.weight.grad = embedding.weight.grad, None
    lce.linear_cross_entropy_reference(
        embedding(target), embedding.weight, target, linear_bias=module.bias, label_smoothing=0.1
    ).backward()
    assert torch.allclose(mine, embedding.weight.grad, atol=1e-6)


def test_chunks_hold_about_fifty_mebibytes_and_auto_goes_by_size(monkeypatch):
    monkeypatch.undo()
    assert lce.chunk_tokens(8192, 50257, 2, "memory") == 512
    assert lce.chunk_tokens(8192, 50257, 2, "auto") == 8192
    assert lce.chunk_tokens(65536, 50257, 2, "auto") == 512
    assert lce.chunk_tokens(65536, 50257, 2, "fast") == 65536
    assert lce.chunk_tokens(10, 10**6, 4, "memory") == 128


def test_what_cannot_be_taken_is_said(device):
    x, weight = torch.randn(2, 4, device=device), torch.randn(3, 4, device=device)
    target = torch.zeros(2, dtype=torch.long, device=device)
    for args, options, says in [
        ((x.double(), weight.double(), target), {}, "float64"),
        ((x, weight.half(), target), {}, "differ in dtype"),
        ((x, weight[:, :3], target), {}, "weight"),
        ((x, weight, target[:1]), {}, "one target for each row"),
        ((x, weight, target.float()), {}, "class indices"),
        ((x, weight, target), {"linear_bias": x[0]}, "bias"),
        ((x, weight, target), {"variant": "slow"}, "slow"),
        ((x, weight, target), {"reduction": "max"}, "max"),
    ]:
        with pytest.raises(UnsupportedError, match=says):
            lce.linear_cross_entropy(*args, **options)


@pytest.mark.gpu
@pytest.mark.quick
def test_the_memory_variant_stays_under_its_bound(device, monkeypatch):
    if device.type != "cuda":
        pytest.skip("measures GPU memory")
    monkeypatch.undo()
    inputs = _inputs(device, torch.bfloat16, tokens=8192, hidden=768, classes=50257)
    x, weight = inputs["x"].requires_grad_(), inputs["linear_weight"].requires_grad_()
    (x[:8] @ weight.t()).sum().backward()  # the library's workspace
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lce.linear_cross_entropy(x, weight, inputs["target"], variant="memory").backward()
    gradients = sum(t.grad.numel() * t.grad.element_size() for t in (x, weight))
    assert torch.cuda.max_memory_allocated() - before - gradients < 0.3 * 2**30
