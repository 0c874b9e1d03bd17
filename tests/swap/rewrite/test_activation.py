"""Activations with bias, written out, and gated ones."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.swap.rewrite.support import misses, one, rand, replacement_equals_original

N, C = 5, 32
ROOT = math.sqrt(2 / math.pi)

WRITTEN = {
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "gelu_tanh, cubed": lambda x: x * 0.5 * (torch.tanh((x + x * x * x * 0.044715) * ROOT) + 1),
    "gelu_tanh, factored": lambda x: (
        0.5 * x * (1 + torch.tanh(x * 0.7978845608028654 * (1 + 0.044715 * x * x)))
    ),
    "gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "silu": lambda x: x * torch.sigmoid(x),
    "silu, turned": lambda x: x.sigmoid() * x,
    "relu_squared": lambda x: F.relu(x).square(),
    "relu_squared, power": lambda x: torch.pow(x.relu(), 2),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_an_activation_written_out_is_found_and_replaced_by_the_same(name):
    found = replacement_equals_original("bias_act", WRITTEN[name], rand(N, C))

    assert found.match.attributes["name"] == name.partition(",")[0]


NO_ACTIVATION = {
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "another constant": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.05 * torch.pow(x, 3.0)))),
    "another power": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 2.0)))),
    "another root": lambda x: x * 0.5 * (1.0 + torch.erf(x / 2.0)),
    "without the half": lambda x: x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "another argument": lambda x: x * torch.sigmoid(x + 1),
    "of another tensor": lambda x: x * 0.5 * (1.0 + torch.erf((x - 1) / math.sqrt(2.0))),
    "minus": lambda x: x * 0.5 * (1.0 - torch.erf(x / math.sqrt(2.0))),
    "the sigmoid returned": lambda x: (lambda s: (x * s, s))(torch.sigmoid(x)),
    "called by name": lambda x: F.gelu(x),
    "relu of a square": lambda x: F.relu(x.square()),
}


@pytest.mark.parametrize("fn", NO_ACTIVATION.values(), ids=NO_ACTIVATION.keys())
def test_what_is_another_function_is_left_alone(fn):
    misses("bias_act", fn, rand(N, C))


BIASED = {
    "gelu": lambda x, b: F.gelu(x + b),
    "gelu_tanh": lambda x, b: F.gelu(torch.add(b, x), approximate="tanh"),
    "silu": lambda x, b: F.silu(x + b),
    "relu": lambda x, b: (x + b).relu(),
    "gelu, written out": lambda x, b: (lambda z: z * 0.5 * (1.0 + torch.erf(z * 0.7071067811865476)))(x + b),
}


@pytest.mark.parametrize("fn", BIASED.values(), ids=BIASED.keys())
def test_a_bias_belongs_to_the_activation_behind_it(fn):
    found = replacement_equals_original("bias_act", fn, rand(2, N, C), rand(C))

    assert len(found.match.inputs) == 2


BEHIND = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "gelu, written out": WRITTEN["gelu"],
    "gelu_tanh, written out": WRITTEN["gelu_tanh"],
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", BEHIND)
def test_an_activation_adds_the_bias_of_the_linear_layer_before_it(name, autocast):
    found = replacement_equals_original(
        "linear_act", lambda x, w, b: BEHIND[name](F.linear(x, w, b)), rand(2, N, C), rand(7, C), rand(7),
        autocast=autocast,
    )  # fmt: skip

    assert found.match.attributes["name"] == name.partition(",")[0]


NOT_BEHIND = {
    "relu": lambda x, w, b: F.relu(F.linear(x, w, b)),
    "no bias": lambda x, w, b: F.gelu(F.linear(x, w)) + b,
    "a value used elsewhere": lambda x, w, b: (lambda z: F.gelu(z) + z)(F.linear(x, w, b)),
    "a change in between": lambda x, w, b: F.gelu(F.linear(x, w, b) * 2),
}


@pytest.mark.parametrize("fn", NOT_BEHIND.values(), ids=NOT_BEHIND.keys())
def test_what_is_no_activation_behind_a_linear_layer_is_left_alone(fn):
    misses("linear_act", fn, rand(N, C), rand(C, C), rand(C))


def test_a_bias_within_a_linear_layer_stays_there():
    misses("bias_act", lambda x, w, b: F.gelu(F.linear(x, w, b)), rand(N, C), rand(C, C), rand(C))


def test_a_bias_along_the_rows_is_none():
    misses("bias_act", lambda x, b: F.gelu(x + b[:, None]), rand(N, C), rand(N))


def test_a_biased_value_that_is_used_elsewhere_stays():
    misses("bias_act", lambda x, b: (lambda z: F.gelu(z) + z)(x + b), rand(N, C), rand(C))


GATED = {
    "silu": lambda g, u: F.silu(g) * u,
    "turned": lambda g, u: u * F.gelu(g),
    "tanh": lambda g, u: torch.mul(F.gelu(g, approximate="tanh"), u),
    "written out": lambda g, u: g * torch.sigmoid(g) * u,
    "relu": lambda g, u: F.relu(g) * u,
}


@pytest.mark.parametrize("fn", GATED.values(), ids=GATED.keys())
def test_a_gate_is_found_and_replaced_by_the_same(fn):
    replacement_equals_original("gate", fn, rand(2, N, C), rand(2, N, C))


HALVES = {
    "chunk": (lambda x: (lambda g, u: F.silu(g) * u)(*x.chunk(2, dim=-1)), True),
    "chunk, up first": (lambda x: (lambda u, g: u * F.gelu(g))(*x.chunk(2, -1)), False),
    "split": (lambda x: (lambda g, u: F.silu(g) * u)(*x.split(C // 2, dim=2)), True),
    "split, sizes": (lambda x: (lambda g, u: F.silu(g) * u)(*torch.split(x, [C // 2, C // 2], -1)), True),
    "slices": (lambda x: F.silu(x[..., : C // 2]) * x[..., C // 2 :], True),
    "slices, up first": (lambda x: F.silu(x[:, :, C // 2 :]) * x[:, :, : C // 2], False),
}


@pytest.mark.parametrize(("fn", "gate_first"), HALVES.values(), ids=HALVES.keys())
def test_the_halves_of_one_tensor_are_told_apart(fn, gate_first):
    found = replacement_equals_original("gate", fn, rand(2, N, C))

    assert found.match.attributes["gate_first"] is gate_first


def test_halves_along_another_dimension_are_two_tensors():
    def fn(x):
        g, u = x.chunk(2, dim=1)
        return F.silu(g) * u

    found = replacement_equals_original("gate", fn, rand(2, 6, C))

    assert "gate_first" not in found.match.attributes


def test_a_tensor_of_which_more_is_made_than_its_halves_is_not_packed():
    def fn(x):
        g, u = x.chunk(2, dim=-1)
        return F.silu(g) * u, x.sum()

    found = replacement_equals_original("gate", fn, rand(2, N, C))

    assert "gate_first" not in found.match.attributes


NO_GATE = {
    "the same half": lambda x: (lambda g, u: F.silu(g) * g)(*x.chunk(2, -1)),
    "the activation returned": lambda x: (lambda g, u: (F.silu(g) * u, F.silu(g).sum()))(*x.chunk(2, -1)),
    "a sum": lambda x: (lambda g, u: F.silu(g) + u)(*x.chunk(2, -1)),
    "tanh": lambda x: (lambda g, u: torch.tanh(g) * u)(*x.chunk(2, -1)),
    "glu": lambda x: (lambda g, u: torch.sigmoid(g) * u)(*x.chunk(2, -1)),
    "integers": lambda x: (lambda g, u: F.relu(g) * u)(*x.int().chunk(2, -1)),
}


@pytest.mark.parametrize("name", NO_GATE)
def test_what_is_no_gate_is_left_alone(name):
    if name == "the activation returned":
        # Two calls of silu: the product takes its own.
        one("gate", NO_GATE[name], rand(N, C))
        return
    misses("gate", NO_GATE[name], rand(N, C))


def test_a_gate_whose_activation_is_used_elsewhere_is_left_alone():
    def fn(g, u):
        a = F.silu(g)
        return a * u, a

    assert "used elsewhere" in misses("gate", fn, rand(N, C), rand(N, C))


def test_a_gate_that_broadcasts_is_left_alone():
    assert "differ in shape" in misses("gate", lambda g, u: F.silu(g) * u, rand(N, 1), rand(N, C))


@pytest.mark.parametrize("dtype", [torch.float16])
def test_sixteen_bits(dtype):
    replacement_equals_original("gate", GATED["silu"], rand(N, C, dtype=dtype), rand(N, C, dtype=dtype))
    replacement_equals_original("bias_act", WRITTEN["gelu"], rand(N, C, dtype=dtype))
