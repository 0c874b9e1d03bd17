"""Norms written out, sums and biases before norms, and formulas that are not those."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swap.rewrite.support import found_in, misses, names, one, rand, replacement_equals_original

N, C = 6, 32
EPS = 1e-5


def xw(dtype=torch.float32):
    return rand(2, N, C, dtype=dtype), rand(C)


RMS = {
    "rsqrt": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w,
    "weight first": lambda x, w: w * (x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + EPS)),
    "one over sqrt": lambda x, w: x * (1 / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + EPS)) * w,
    "divided": lambda x, w: x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w,
    "a power": lambda x, w: w * x * (x.square().mean((-1,), keepdim=True) + EPS) ** -0.5,
    "a sum": lambda x, w: x * (x.pow(2).sum(-1, keepdim=True) / C + EPS).rsqrt() * w,
    "reciprocal": lambda x, w: x * torch.reciprocal(torch.sqrt(x.pow(2).mean(-1, True) + EPS)) * w,
    "offset": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + w),
}


@pytest.mark.parametrize("fn", RMS.values(), ids=RMS.keys())
def test_each_spelling_of_rmsnorm_is_found_and_replaced_by_the_same(fn):
    # The weight's place in `w * x * r` makes it part of no norm: then the row without it is one.
    found = replacement_equals_original("norm", fn, *xw())

    assert found.match.attributes["rms"]
    assert found.match.attributes["eps"] == EPS


def test_an_offset_of_the_weight_is_carried():
    assert one("norm", RMS["offset"], *xw()).match.attributes["offset"] == 1.0


def llama(x, w):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return w * wide.to(x.dtype)


def gemma(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + w.float())).type_as(x)


def t5(x, w):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return w * x.to(w.dtype)


@pytest.mark.parametrize(("fn", "casting"), [(llama, "llama"), (gemma, "fp32"), (t5, "fp32")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_orders_of_casts_of_known_families(fn, casting, dtype):
    found = replacement_equals_original("norm", fn, *xw(dtype))

    if dtype == torch.float16:
        assert found.match.attributes["casting"] == casting


def test_bf16_rows_by_torchs_own():
    replacement_equals_original("norm", llama, *xw(torch.bfloat16), only="torch")


def test_a_norm_without_eps_has_eps_0():
    found = replacement_equals_original("norm", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True)), xw()[0])

    assert found.match.attributes["eps"] == 0.0


LAYER = {
    "var": lambda x, w, b: (
        (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + EPS) * w + b
    ),
    "correction": lambda x, w, b: (
        w * ((x - x.mean(-1, True)) * torch.rsqrt(torch.var(x, -1, correction=0, keepdim=True) + EPS)) + b
    ),
    "by hand": lambda x, w, b: _by_hand(x) * w + b,
    "without bias": lambda x, w, b: _by_hand(x) * w,
}


def _by_hand(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("fn", LAYER.values(), ids=LAYER.keys())
def test_each_spelling_of_layernorm_is_found_and_replaced_by_the_same(fn):
    x, w = xw()
    found = replacement_equals_original("norm", fn, x, w, rand(C))

    assert not found.match.attributes["rms"]


NO_NORM = {
    "eps beside the root": lambda x, w: x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + EPS) * w,
    "a mean over tokens": lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS) * w,
    "a mean over all": lambda x, w: x * torch.rsqrt(x.pow(2).mean() + EPS) * w,
    "a sum": lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS) * w,
    "cubes": lambda x, w: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + EPS) * w,
    "a root of its own": lambda x, w: x * (x.pow(2).mean(-1, keepdim=True) + EPS) ** -0.25 * w,
    "another row": lambda x, w: (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w,
    "multiplied by the root": lambda x, w: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w,
    "Bessel's correction": lambda x, w: (
        (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, keepdim=True) + EPS) * w
    ),
    "std with eps": lambda x, w: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + EPS) * w,
    "another mean": lambda x, w: (
        (x - x.mean(1, True)) / (x.var(-1, keepdim=True, correction=0) + EPS).sqrt() * w
    ),
    "scaled by constants": lambda x, w: F.normalize(x, dim=-1) * C**0.5 * w,
    "the mean square returned": lambda x, w: (lambda m: (x * torch.rsqrt(m + EPS) * w, m))(
        x.pow(2).mean(-1, keepdim=True)
    ),
    "through integers": lambda x, w: x * torch.rsqrt(x.int().float().pow(2).mean(-1, keepdim=True) + EPS) * w,
}


@pytest.mark.parametrize("fn", NO_NORM.values(), ids=NO_NORM.keys())
def test_what_is_no_norm_is_left_alone(fn):
    misses("norm", fn, *xw())


def test_near_misses_are_explained():
    assert "rather than under it" in misses("norm", NO_NORM["eps beside the root"], *xw())
    assert "Bessel" in misses("norm", NO_NORM["Bessel's correction"], *xw())


def test_complex_and_double_rows_get_no_bundled_kernel():
    found = one("norm", RMS["rsqrt"], rand(2, C, dtype=torch.float64), rand(C, dtype=torch.float64))
    values = (torch.randn(2, C, dtype=torch.float64), torch.randn(C, dtype=torch.float64))

    from advisor.swap.site import Example

    reasons = {c.name: list(c.unsupported(Example(values))) for c in found.match.candidates}
    assert reasons["advisor.kernels.rms_norm"]
    assert not reasons["torch F.rms_norm"]


def residual_layer_norm(x, r, w, b):
    s = x + r
    return s, F.layer_norm(s, (C,), w, b)


def residual_rms_written(x, r, w, b):
    s = r + x
    return s * 2, RMS["rsqrt"](s, w)


def residual_in_place(x, r, w, b):
    s = x * 1.5
    s += r
    return F.layer_norm(s, (C,), w, b), s


def residual_used_no_more(x, r, w, b):
    return F.layer_norm(x + r, (C,), w, b)


@pytest.mark.parametrize(
    "fn", [residual_layer_norm, residual_rms_written, residual_in_place, residual_used_no_more]
)
def test_a_sum_and_its_norm_are_one_and_both_come_back(fn):
    found = replacement_equals_original("add_norm", fn, rand(2, N, C), rand(2, N, C), rand(C), rand(C))

    assert len(found.match.outputs) == 2


def test_dropout_before_the_sum_belongs_to_it():
    def fn(x, r, w, b):
        s = F.dropout(x, 0.25, True) + r
        return s, F.layer_norm(s, (C,), w, b)

    found = one("add_norm", fn, rand(2, N, C), rand(2, N, C), rand(C), rand(C))

    assert found.match.attributes["p"] == 0.25
    assert found.match.random
    assert [n.name for n in found.match.inputs][:2] == ["l_x_", "l_r_"]


def test_dropout_after_the_sum_does_not():
    def fn(x, r, w, b):
        return F.layer_norm(F.dropout(x + r, 0.25, True), (C,), w, b)

    misses("add_norm", fn, rand(2, N, C), rand(2, N, C), rand(C), rand(C))


def test_a_dropped_tensor_that_is_used_elsewhere_is_taken_as_it_is():
    def fn(x, r, w, b):
        d = F.dropout(x, 0.25, True)
        return F.layer_norm(d + r, (C,), w, b), d

    found = one("add_norm", fn, rand(2, N, C), rand(2, N, C), rand(C), rand(C))

    assert found.match.attributes["p"] == 0.0
    assert not found.match.random


def test_a_sum_that_broadcasts_is_left_alone():
    misses("add_norm", residual_layer_norm, rand(2, N, C), rand(N, C), rand(C), rand(C))


def test_a_sum_that_is_written_to_later_is_left_alone():
    def fn(x, r, w, b):
        s = x + r
        y = F.layer_norm(s.detach(), (C,), w, b)
        s += 1.0
        return s, y

    found, _ = found_in(fn, rand(2, N, C), rand(2, N, C), rand(C), rand(C))
    assert "add_norm" not in names(found)


def test_a_norm_whose_weight_comes_later_than_the_sum_is_left_alone():
    def fn(x, r, w, b):
        s = x + r
        return F.layer_norm(s, (C,), w.exp(), b), s

    assert "only after" in misses("add_norm", fn, rand(2, N, C), rand(2, N, C), rand(C), rand(C))


def test_dropout_and_sum_alone():
    found = one("dropout_add", lambda x, r: r + F.dropout(x, 0.5, True), rand(2, C), rand(2, C))

    assert [n.name for n in found.match.inputs] == ["l_x_", "l_r_"]


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_that_drops_nothing_is_none(p):
    misses("dropout_add", lambda x, r: r + F.dropout(x, p, p == 0.0), rand(2, C), rand(2, C))


ACTIVATED = {
    "gelu": lambda x, b, w, c: F.layer_norm(F.gelu(x + b), (C,), w, c),
    "tanh": lambda x, b, w, c: F.layer_norm(F.gelu(b + x, approximate="tanh"), (C,), w, c),
    "silu": lambda x, b, w, c: F.layer_norm(F.silu(x + b), (C,), w, c),
    "relu": lambda x, b, w, c: F.layer_norm(torch.relu(x + b), (C,), w, c),
    "no activation": lambda x, b, w, c: F.layer_norm(x + b, (C,), w, c),
    "no bias": lambda x, b, w, c: F.layer_norm(F.gelu(x), (C,), w, c) + b,
    "no weight": lambda x, b, w, c: F.layer_norm(F.gelu(x + b), (C,)) * w,
    "after a product": lambda x, b, w, c: F.layer_norm(F.gelu(F.linear(x, torch.eye(C)) + b), (C,), w, c),
    "norm by hand": lambda x, b, w, c: _by_hand(F.gelu(x + b)) * w + c,
}


@pytest.mark.parametrize("fn", ACTIVATED.values(), ids=ACTIVATED.keys())
def test_bias_activation_and_norm_are_one(fn):
    if fn is ACTIVATED["after a product"]:
        args = (rand(N, C), rand(C), rand(C), rand(C))
        assert one("bias_act_norm", fn, *args).match.attributes["has_bias"]
        return
    replacement_equals_original("bias_act_norm", fn, rand(N, C), rand(C), rand(C), rand(C))


BEHIND = {
    "gelu": lambda x, w, b, n, c: F.layer_norm(F.gelu(F.linear(x, w, b)), (7,), n, c),
    "tanh": lambda x, w, b, n, c: F.layer_norm(F.gelu(F.linear(x, w, b), approximate="tanh"), (7,), n, c),
    "relu": lambda x, w, b, n, c: F.layer_norm(F.linear(x, w, b).relu(), (7,), n, c),
    "no weight": lambda x, w, b, n, c: F.layer_norm(F.silu(F.linear(x, w, b)), (7,)) * n + c,
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("fn", BEHIND.values(), ids=BEHIND.keys())
def test_a_linear_layers_bias_its_activation_and_the_norm_are_one(fn, autocast):
    args = (rand(2, N, C), rand(7, C), rand(7), rand(7), rand(7))
    replacement_equals_original("linear_act_norm", fn, *args, autocast=autocast)


NOT_BEHIND = {
    "no bias": lambda x, w, b: F.layer_norm(F.gelu(F.linear(x, w)), (7,)) + b,
    "no activation": lambda x, w, b: F.layer_norm(F.linear(x, w, b), (7,)),
    "a value used elsewhere": lambda x, w, b: (lambda z: F.layer_norm(F.gelu(z), (7,)) + z)(
        F.linear(x, w, b)
    ),
    "a change in between": lambda x, w, b: F.layer_norm(F.gelu(F.linear(x, w, b) * 2), (7,)),
}


@pytest.mark.parametrize("fn", NOT_BEHIND.values(), ids=NOT_BEHIND.keys())
def test_what_is_no_chain_from_a_product_to_a_norm_is_left_alone(fn):
    misses("linear_act_norm", fn, rand(N, C), rand(7, C), rand(7))


NOT_ACTIVATED = {
    "dropout between": lambda x, b, w, c: F.layer_norm(F.dropout(F.gelu(x + b), 0.1), (C,), w, c),
    "the activation returned": lambda x, b, w, c: (lambda z: (F.layer_norm(z, (C,), w, c), z))(F.gelu(x + b)),
    "a scaled activation": lambda x, b, w, c: F.layer_norm(F.gelu(x + b) * 2, (C,), w, c),
    "an rms norm": lambda x, b, w, c: F.rms_norm(F.gelu(x + b), (C,), w) + c,
    "two dimensions": lambda x, b, w, c: F.layer_norm(F.gelu(x + b), (N, C)) * w + c,
    "the bias in the product": lambda x, b, w, c: F.layer_norm(F.linear(x, torch.eye(C), b), (C,), w, c),
}


@pytest.mark.parametrize("fn", NOT_ACTIVATED.values(), ids=NOT_ACTIVATED.keys())
def test_what_stands_between_keeps_them_apart(fn):
    misses("bias_act_norm", fn, rand(N, C), rand(C), rand(C), rand(C))


SQUARES = (lambda x: x * x, lambda x: x.pow(2), lambda x: x**2, torch.square)
MEANS = (
    lambda s: s.mean(-1, keepdim=True),
    lambda s: torch.mean(s, dim=2, keepdim=True),
    lambda s: s.sum(-1, keepdim=True) / C,
    lambda s: s.sum(dim=[-1], keepdim=True) * (1 / C),
)
ROOTS = (
    lambda x, m: x * torch.rsqrt(m),
    lambda x, m: x / m.sqrt(),
    lambda x, m: m**-0.5 * x,
    lambda x, m: x * (1.0 / torch.sqrt(m)),
    lambda x, m: x / torch.pow(m, 0.5),
)
WEIGHTS = (lambda y, w: y * w, lambda y, w: w * y, lambda y, w: y, lambda y, w: y * (w + 1))
CENTRES = (lambda x: x, lambda x: x - x.mean(-1, keepdim=True), lambda x: x - x.sum(-1, True) / C)


@settings(max_examples=12)
@given(*(st.integers(0, n - 1) for n in (4, 4, 5, 4, 3)), st.booleans())
def test_any_combination_of_spellings_is_found(square, mean, root, weight, centre, eps_first):
    def fn(x, w):
        x = CENTRES[centre](x)
        moment = MEANS[mean](SQUARES[square](x))
        return WEIGHTS[weight](ROOTS[root](x, EPS + moment if eps_first else moment + EPS), w)

    found = replacement_equals_original("norm", fn, *xw(), only="torch")

    assert found.match.attributes["rms"] is (centre == 0)
    assert found.match.attributes["offset"] == (1.0 if weight == 3 else 0.0)
