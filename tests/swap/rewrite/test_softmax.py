"""A softmax with what stands around it."""

import pytest
import torch
import torch.nn.functional as F

from tests.swap.rewrite.support import misses, rand, replacement_equals_original

N = 12
INF = float("inf")

TAKEN = {
    "scale": (lambda x: (x * 0.3).softmax(-1), {"scale": 0.3}),
    "divided": (lambda x: F.softmax(x / 4, dim=-1), {"scale": 0.25}),
    "log": (lambda x: (x * 0.3).log_softmax(-1), {"log": True}),
    "causal": (
        lambda x: (x * 2).masked_fill(torch.ones(N, N).triu(1).bool(), -INF).softmax(-1), {"causal": True},
    ),
    "added": (lambda x: (x + torch.arange(N) * 0.1).softmax(-1), {"forms": ("added",)}),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_scale_and_mask_belong_to_the_softmax(name):
    fn, expected = TAKEN[name]
    found = replacement_equals_original("softmax", fn, rand(2, N, N))

    assert {k: found.match.attributes[k] for k in expected} == expected


def test_a_mask_of_the_step_is_handed_on():
    def fn(x, mask):
        return torch.where(mask, x * 0.5, -INF).softmax(-1)

    mask = torch.ones(2, 1, N, dtype=torch.bool)
    mask[0, :, 7:] = False
    replacement_equals_original("softmax", fn, rand(2, N, N), mask)


def test_casts_belong_to_the_softmax():
    found = replacement_equals_original(
        "softmax",
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype),
        rand(3, N, dtype=torch.float16),
    )

    assert found.match.attributes["dtype"] == torch.float16


LEFT = {
    "nothing to save": lambda x: x.softmax(-1),
    "over rows": lambda x: (x * 0.3).softmax(0),
    "a negative scale": lambda x: (x * -0.3).softmax(-1),
    "a finite mask": lambda x: x.masked_fill(x > 1, -1e9).softmax(-1),
    "a scale of the result": lambda x: x.softmax(-1) * 0.3,
    "scores returned": lambda x: (lambda s: (s.softmax(-1), s))(x * 0.3),
    "integers": lambda x: (x.int() * 3).softmax(-1, dtype=torch.float32),
}


@pytest.mark.parametrize("fn", LEFT.values(), ids=LEFT.keys())
def test_what_is_no_such_softmax_is_left_alone(fn):
    misses("softmax", fn, rand(N, N))
