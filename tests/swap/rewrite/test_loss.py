"""Cross-entropy by name and from parts, with and without the head."""

import pytest
import torch
import torch.nn.functional as F

from tests.swap.rewrite.support import misses, one, rand, replacement_equals_original

B, T, V, C = 2, 6, 11, 16


def targets(*shape):
    return torch.randint(0, V, shape or (B * T,))


LOSSES = {
    "cross_entropy": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1)),
    "log_softmax and nll_loss": lambda x, y: F.nll_loss(F.log_softmax(x.view(-1, V), dim=-1), y.view(-1)),
    "log_softmax in dimension 1": lambda x, y: F.nll_loss(x.view(-1, V).log_softmax(1), y.view(-1)),
    "in fp32": lambda x, y: F.cross_entropy(x.float().view(-1, V), y.view(-1)),
    "a sum": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), reduction="sum"),
    "none": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), reduction="none"),
    "ignored": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), ignore_index=3),
    "smoothed": lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), label_smoothing=0.1),
    "classes turned to second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "classes permuted to second": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y, reduction="none"),
}


@pytest.mark.parametrize("fn", LOSSES.values(), ids=LOSSES.keys())
def test_each_spelling_is_found_and_replaced_by_the_same(fn):
    replacement_equals_original("cross_entropy", fn, rand(B, T, V), targets(B, T))


def test_settings_are_carried():
    fn = lambda x, y: F.cross_entropy(x, y, ignore_index=3, reduction="sum", label_smoothing=0.1)  # noqa: E731
    attributes = one("cross_entropy", fn, rand(T, V), targets(T)).match.attributes

    assert (attributes["ignore_index"], attributes["reduction"], attributes["label_smoothing"]) == (
        3,
        "sum",
        0.1,
    )


NO_LOSS = {
    "class weights": (lambda x, y: F.cross_entropy(x, y, weight=torch.ones(V)), "weights"),
    "probabilities": (lambda x, y: F.cross_entropy(x, F.one_hot(y, V).float()), "probabilities"),
    "over rows": (lambda x, y: F.nll_loss(F.log_softmax(x, dim=0), y), "does not go over the classes"),
    "a softmax": (lambda x, y: F.nll_loss(F.softmax(x, dim=1).log(), y), ""),
    "class weights of parts": (lambda x, y: F.nll_loss(x.log_softmax(1), y, torch.ones(V)), "weights"),
    "the log-softmax returned": (
        lambda x, y: (lambda p: (F.nll_loss(p, y), p))(x.log_softmax(1)), "used elsewhere",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "why"), NO_LOSS.values(), ids=NO_LOSS.keys())
def test_what_is_another_loss_is_left_alone(fn, why):
    assert why in misses("cross_entropy", fn, rand(T, V), targets(T))


def test_classes_that_lie_second_are_left_alone():
    why = misses("cross_entropy", lambda x, y: F.cross_entropy(x, y), rand(B, V, T), targets(B, T))

    assert "classes come second" in why


HEADS = {
    "linear": lambda x, w, y: F.cross_entropy(F.linear(x, w).view(-1, V), y.view(-1)),
    "a product": lambda x, w, y: F.cross_entropy((x @ w.t()).reshape(B * T, V), y.view(-1)),
    "transposed": lambda x, w, y: F.cross_entropy(
        torch.matmul(x, w.transpose(0, 1)).flatten(0, 1), y.view(-1)
    ),
    "in fp32": lambda x, w, y: F.cross_entropy(F.linear(x, w).float().view(-1, V), y.view(-1)),
    "shifted": lambda x, w, y: F.cross_entropy(
        F.linear(x, w)[..., :-1, :].contiguous().view(-1, V), y[..., 1:].contiguous().view(-1)
    ),
    "shifted, by two indices": lambda x, w, y: F.cross_entropy(
        F.linear(x, w)[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1), ignore_index=2
    ),
    "turned": lambda x, w, y: F.cross_entropy(F.linear(x, w).transpose(1, 2), y),
    "parts": lambda x, w, y: F.nll_loss(F.linear(x, w).view(-1, V).log_softmax(-1), y.view(-1)),
    "smoothed sum": lambda x, w, y: F.cross_entropy(
        F.linear(x, w).view(-1, V), y.view(-1), reduction="sum", label_smoothing=0.2
    ),
}


@pytest.mark.parametrize("fn", HEADS.values(), ids=HEADS.keys())
def test_a_head_and_its_loss_are_one(fn):
    replacement_equals_original("linear_cross_entropy", fn, rand(B, T, C), rand(V, C), targets(B, T))


def test_a_weight_kept_as_hidden_by_classes():
    def fn(x, w, y):
        return F.cross_entropy((x @ w).view(-1, V), y.view(-1))

    found = replacement_equals_original("linear_cross_entropy", fn, rand(B, T, C), rand(C, V), targets(B, T))

    assert found.match.attributes["transposed"]


def test_a_heads_bias_comes_along():
    def fn(x, w, b, y):
        return F.cross_entropy(F.linear(x, w, b).view(-1, V), y.view(-1))

    replacement_equals_original("linear_cross_entropy", fn, rand(B, T, C), rand(V, C), rand(V), targets(B, T))


NO_HEAD = {
    "logits returned": lambda x, w, y: (lambda z: (F.cross_entropy(z.view(-1, V), y.view(-1)), z))(
        F.linear(x, w)
    ),
    "capped": lambda x, w, y: F.cross_entropy(torch.tanh(F.linear(x, w)).view(-1, V), y.view(-1)),
    "scaled": lambda x, w, y: F.cross_entropy((F.linear(x, w) * 0.5).view(-1, V), y.view(-1)),
    "some classes": lambda x, w, y: F.cross_entropy(F.linear(x, w)[..., :V].view(-1, V), y.view(-1)),
    "rows joined to classes": lambda x, w, y: F.cross_entropy(
        F.linear(x, w).transpose(1, 2).reshape(-1, V + 1), y.view(-1) % V
    ),
    "rows picked by a mask": lambda x, w, y: F.cross_entropy(
        F.linear(x, w).view(-1, V + 1)[y.view(-1) * 0], y.view(-1)
    ),
}


@pytest.mark.parametrize("name", NO_HEAD)
def test_what_stands_between_keeps_head_and_loss_apart(name):
    classes = V + 1 if name in ("some classes", "rows joined to classes", "rows picked by a mask") else V

    misses("linear_cross_entropy", NO_HEAD[name], rand(B, T, C), rand(classes, C), targets(B, T))
