"""What stands in for attention is laid out as the product that was written out."""

import torch
from torch import nn

from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.site import Outcome
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

    # THEN it is not refused, and where the layout shows, as in what the step gives, it is that of the product
    assert verify(site, theirs).refused == ""
    step.decide([Outcome(site, theirs, "planted")])
    assert model(*inputs).is_contiguous()
    assert not theirs.call(*site.examples[0].args).is_contiguous()


class Merges(Attends):
    def forward(self, q, k, v):
        return super().forward(q, k, v).transpose(1, 2).reshape(2, 8, 32) * 2


def test_where_heads_are_merged_the_result_is_not_copied_first():
    model = Merges()
    inputs = [torch.randn(2, 8, 2, 16, requires_grad=True).transpose(1, 2) for _ in range(3)]
    expected = model(*inputs)
    step = StepRewrite(model, "forward")
    step.install()
    with step.collecting():
        model(*inputs)
    (site,) = step.sites()
    step.decide([Outcome(site, next(c for c in site.candidates if c.name == "torch SDPA"), "planted")])
    torch.testing.assert_close(model(*inputs), expected)
    assert "laid_out" not in step.rewriter.graphs[0]._rewritten._call.code
