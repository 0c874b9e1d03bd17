"""What is tried gets gradients laid out as the loop's: a kernel may go wrong with some layouts only."""

import pytest
import torch
from torch import Tensor, nn

from advisor.swap.examples import Watch
from advisor.swap.play import play
from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.site import Candidate, Example, Site
from advisor.swap.verify import verify
from tests.swap.rewrite.models import GPT, batch
from tests.swap.rewrite.test_models import gradients


class Misread(torch.autograd.Function):
    """Twice the input, whose backward takes any gradient for a dense one, in the order of its dimensions."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.as_strided(gradient.shape, torch.empty(gradient.shape).stride()) * 2


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def _watched(use) -> Example:
    module = Double()
    x = torch.randn(4, 6, 8, requires_grad=True)
    with Watch([module]) as watch:
        use(module(x)).backward()
    (example,) = watch.records[module].examples.values()
    return example


def _site(example: Example) -> Site:
    candidate = Candidate("misread", Misread.apply, "bundled")
    return Site("activation", ["net"], "module", "Double", lambda x: x * 2, [example], [candidate])


@pytest.mark.parametrize(
    ("use", "right"),
    [
        (lambda y: y.square().sum(), True),
        (lambda y: (y.transpose(0, 1).contiguous() ** 2).sum(), False),
    ],
)
def test_a_backward_that_misreads_the_loops_layout_is_refused(use, right) -> None:
    site = _site(_watched(use))
    assert bool(verify(site, site.candidates[0]).refused) is not right


def test_gradients_are_laid_out_as_the_loops_where_rows_are_fewer_too() -> None:
    example = _watched(lambda y: (y.transpose(0, 1).contiguous() ** 2).sum())
    assert example.gradient_strides == {0: (8, 32, 1)}
    (whole,) = play(lambda x: x * 2, example).output_gradients
    assert whole is not None
    assert whole.stride() == (8, 32, 1)
    few = Example((torch.randn(2, 6, 8, requires_grad=True),), gradient_strides={0: (8, 32, 1)})
    (fewer,) = play(lambda x: x * 2, few).output_gradients
    assert fewer is not None
    assert fewer.stride() == (8, 16, 1)


def test_an_expanded_gradient_is_expanded_again() -> None:
    example = _watched(lambda y: y.sum(1).square().sum())
    (given,) = play(lambda x: x * 2, example).output_gradients
    assert given is not None
    assert given.stride()[1] == 0
    assert given.shape == (4, 6, 8)


def test_sites_of_the_steps_graph_tell_their_layouts_too() -> None:
    model, data = GPT(), batch()
    rewrite = StepRewrite(model, "training_step")
    assert rewrite.install() == ""
    with rewrite.collecting():
        gradients(model, lambda: model.training_step(data, 0), seed=3)
    (site,) = [s for s in rewrite.rewriter.sites() if s.kind == "attention"]
    # Its result's heads are put beside one another: what comes back has tokens outside of heads.
    (strides,) = site.examples[0].gradient_strides.values()
    assert strides[2] > strides[1]
    rewrite.restore()
