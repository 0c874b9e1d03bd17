"""The table of what was found and what was not."""

import torch
import torch.nn.functional as F

from advisor.swap.rewrite.explain import explain
from tests.swap.rewrite.support import rand, traced


def test_finds_and_near_misses_stand_beside_their_lines():
    def fn(q, k, v, x, w):
        y = F.softmax(q @ k.mT, dim=-1) @ v
        z = F.softmax(q @ k.mT, dim=1) @ v
        return y, z, x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w

    text = explain(*traced(fn, rand(2, 2, 4, 4), rand(2, 2, 4, 4), rand(2, 2, 4, 4), rand(3, 8), rand(8)))
    lines = text.splitlines()
    start = fn.__code__.co_firstlineno

    assert len(lines) == 3
    assert lines[0].split()[:2] == ["attention", f"test_explain.py:{start + 1}"]
    assert f"test_explain.py:{start + 2}" in lines[1]
    assert "not taken: the softmax goes over dimension 1, not over the keys" in lines[1]
    assert f"test_explain.py:{start + 3}" in lines[2]
    assert "not taken: eps is added to the root rather than under it" in lines[2]


def test_a_graph_without_anything_says_so():
    assert explain(*traced(lambda x: torch.sin(x) + 1, rand(3))) == "nothing found"
