"""What stands in for attention is laid out as the product that was written out."""

import torch
from torch import nn

from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.verify import verify


class Attends(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.transpose(-2, -1) * 0.25).softmax(-1) @ v


def test_heads_taken_from_one_projection_leave_the_result_as_it_was_laid_out():
    # GIVEN the commonest layout: heads as a view of (batch, tokens, heads, dim), which fused kernels keep
    model = Attends()
    inputs = [torch.randn(2, 8, 2, 16, requires_grad=True).transpose(1, 2) for _ in range(3)]
    assert model(*inputs).is_contiguous()
    step = StepRewrite(model, "forward")
    step.install()
    with step.collecting():
        model(*inputs)

    # WHEN PyTorch's attention stands in
    (site,) = step.sites()
    (theirs,) = [c for c in site.candidates if c.name == "torch SDPA"]

    # THEN its result is one that later views of the loop take, and it is not refused
    assert theirs.call(*site.examples[0].args).is_contiguous()
    assert verify(site, theirs).refused == ""
