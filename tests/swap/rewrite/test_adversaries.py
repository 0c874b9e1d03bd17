"""Programs that look like a pattern and compute something else: whatever is matched in them must be equal.

Sizes are alike, so that no shape tells a transposed operand or a wrong axis from a right one.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from advisor.swap.play import Played, play
from advisor.swap.rewrite.edit import replaced
from advisor.swap.rewrite.facts import Facts
from advisor.swap.rewrite.match import find
from advisor.swap.site import Example
from tests.swap.rewrite.support import _inputs_of, rand, traced

N, INF = 4, float("inf")
CLASSES = torch.arange(N) % 3


def seen(diagonal: int = 0) -> Tensor:
    return torch.ones(N, N).tril(diagonal).bool()


def weights(q, k):
    return (q @ k.mT / 2).masked_fill(~seen(), -INF).softmax(-1)


def attention_over_flipped_time(q, k, v):
    return (q @ k.flip(-2).mT / 2).masked_fill(~seen(), -INF).softmax(-1) @ v.flip(-2)


def attention_in_a_window(q, k, v):
    return (q @ k.mT / 2).masked_fill(~(seen() & ~seen(-2)), -INF).softmax(-1) @ v


def attention_to_what_comes(q, k, v):
    return (q @ k.mT / 2).masked_fill(seen(-1), -INF).softmax(-1) @ v


def attention_with_a_sink(q, k, v):
    scores = (q @ k.mT / 2).masked_fill(~seen(), -INF)
    return F.pad(scores, (0, 1)).softmax(-1)[..., :-1] @ v


def attention_whose_weights_are_wanted(q, k, v):
    w = weights(q, k)
    return w @ v, w.sum(-2)


def attention_without_a_gradient_of_its_weights(q, k, v):
    return weights(q, k).detach() @ v


def attention_without_a_gradient_of_its_keys(q, k, v):
    return weights(q, k.detach()) @ v


def attention_with_weights_transposed(q, k, v):
    return weights(q, k).mT @ v


def attention_with_values_transposed(q, k, v):
    return weights(q, k) @ v.mT


def attention_with_values_written_to_in_between(q, k, v):
    v = v * 1
    w = weights(q, k)
    v[..., 0].zero_()
    return w @ v


def attention_with_scores_written_in_place(q, k, v):
    scores = q @ k.mT
    scores.mul_(0.5)
    scores.masked_fill_(~seen(), -INF)
    return scores.softmax(-1) @ v


def norm_centred_along_another_axis(x, y, z):
    c = x - x.mean(-2, keepdim=True)
    return c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5) * y


def norm_with_the_bias_before_the_weight(x, y, z):
    w, b = y[0, 0, 0], z[0, 0, 0]
    c = x - x.mean(-1, keepdim=True)
    return (c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5) + b) * w


def norm_without_a_gradient_of_its_root(x, y, z):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5).detach() * y[0, 0, 0]


def norm_of_a_sum_that_counts_one_twice(x, y, z):
    total = torch.add(x, y, alpha=2)
    return F.layer_norm(total, (N,)) + total


def gate_of_halves_that_overlap(x, y, z):
    return F.silu(x[..., :3]) * x[..., 1:]


def gate_of_every_other(x, y, z):
    return F.silu(x[..., ::2]) * x[..., 1::2]


def loss_with_a_part_on_its_logits(x, y, z):
    logits = F.linear(x[0, 0], y[0, 0])
    return F.cross_entropy(logits, CLASSES) + 0.1 * logits.logsumexp(-1).square().mean()


def loss_of_shifted_rows(x, y, z):
    return F.cross_entropy(F.linear(x[0, 0], y[0, 0])[1:], CLASSES[:-1], ignore_index=2)


def rotation_of_the_one_by_the_others_half(x, y, z):
    angle = (torch.arange(N * 2.0).view(N, 2) * 0.1).repeat(1, 2)
    return x * angle.cos() + torch.cat((-y[..., 2:], y[..., :2]), -1) * angle.sin()


def rotation_by_tables_of_unlike_halves(x, y, z):
    cos = torch.arange(N * N * 1.0).view(N, N) * 0.1
    return x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * (cos.flip(-1) + 1)


def rotation_of_two_by_unlike_angles(x, y, z):
    angle = torch.arange(N * N * 1.0).view(N, N) * 0.1

    def turned(t, by):
        return t * by.cos() + torch.cat((-t[..., 2:], t[..., :2]), -1) * by.sin()

    return turned(x, angle), turned(y, 2 * angle)


PROGRAMS = [f for name, f in sorted(globals().items()) if name.split("_")[0] in
            ("attention", "norm", "gate", "loss", "rotation")]  # fmt: skip


def results(played: Played) -> dict[str, Tensor]:
    outputs = {f"output {i}": t for i, t in enumerate(played.outputs)}
    return {**outputs, **played.gradients}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_whatever_is_matched_is_equal(program):
    torch.manual_seed(0)
    gm, inputs = traced(program, *(rand(2, 2, N, N) for _ in range(3)))
    given = tuple(i.detach().clone().requires_grad_(i.requires_grad) for i in inputs)
    example = Example(given)
    truth = play(gm, example, wide=torch.float64)
    eager = results(play(gm, example, output_gradients=truth.output_gradients))
    for match in find(Facts(gm, inputs)):
        taken = Example(_inputs_of(gm, match, example))
        for candidate in match.match.candidates:
            if candidate.unsupported(taken):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                new = replaced(gm, [(match, candidate.call)])
                ours = results(play(new, example, output_gradients=truth.output_gradients))
            assert ours.keys() == results(truth).keys()
            for name, exact in results(truth).items():
                error, own = ((t[name].double() - exact).abs().max() for t in (ours, eager))
                allowed = 3 * own + 5e-6 * (1 + exact.abs().max())
                assert error <= allowed, (match.match.pattern, candidate.name, name)
