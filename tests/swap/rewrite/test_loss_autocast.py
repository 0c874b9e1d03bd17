"""A head and its loss under autocast: a norm rounded to 16 bits before it, a weight that stays in 32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.swap.adversaries import narrowed
from advisor.swap.decide import decide
from advisor.swap.play import play, reasons
from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.site import Outcome, Site
from advisor.swap.verify import verify
from tests.swap.planted import terms
from tests.swap.rewrite.recorder import OnCpu

CLASSES, WIDTH = 13, 16
BUNDLED = "advisor.kernels.linear_cross_entropy"


class Model(nn.Module):
    """A norm, a head with an odd number of classes, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).transpose(1, 2), target)


@pytest.fixture
def recorder() -> OnCpu:
    return OnCpu()


@pytest.fixture
def step(recorder):
    torch.manual_seed(0)
    made = StepRewrite(Model(), "forward", recorder=lambda: recorder)
    assert made.install() == ""
    with made.collecting():
        loss_of(made)
    yield made
    made.close()


def loss_of(step: StepRewrite, batch: int = 2) -> Tensor:
    torch.manual_seed(batch)
    x, target = torch.randn(batch, 8, WIDTH, requires_grad=True), torch.randint(0, CLASSES, (batch, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return step.module(x, target)


def losses(step: StepRewrite) -> list[Site]:
    return [site for site in step.sites() if site.kind == "loss"]


def test_the_kernel_for_both_takes_them_where_autocast_makes_their_dtypes_one(step) -> None:
    (site,) = losses(step)
    (example,) = site.examples
    (candidate,) = site.candidates
    assert {example.args[0].dtype, example.args[1].dtype} == {torch.bfloat16, torch.float32}
    assert example.autocast is torch.bfloat16
    assert reasons(candidate, example) == []
    # It ran forward and backward, and was held against float64.
    trial = verify(site, candidate, adversarial=False)
    assert trial.error is not None
    assert "dtype" not in trial.refused


@pytest.mark.parametrize("flat", ["flatten", "view"])
def test_fewer_rows_of_flattened_logits_and_targets_are_taken_as_the_original_takes_them(flat) -> None:
    class Flat(Model):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            logits = self.head(self.norm(x))
            rows = logits.flatten(0, 1) if flat == "flatten" else logits.view(-1, CLASSES)
            return F.cross_entropy(rows, target.flatten())

    made = StepRewrite(Flat(), "forward")
    assert made.install() == ""
    with made.collecting():
        loss_of(made, batch=4)
    (site,) = losses(made)
    (candidate,) = site.candidates
    few = narrowed(site.examples[0], 2 * 8 * WIDTH)
    assert few.args[0].shape == (2, 8, WIDTH)
    assert reasons(candidate, few) == []
    theirs, ours = play(site.original, few), play(candidate.call, few)
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-2, atol=1e-3)
    made.close()


def test_head_and_loss_are_tried_as_one_first_and_taken_where_that_is_faster(step) -> None:
    (site,) = losses(step)
    assert site.what == "cross_entropy(head(x), target)"
    (candidate,) = site.candidates
    step.decide([Outcome(site, candidate, "3 times as fast")])
    # THEN the loss within is no site, and what runs is the one kernel
    assert losses(step) == []
    (graph,) = step.rewriter.graphs
    assert [(found.match.what, c.name) for _, found, c in graph.chosen()] == [(site.what, BUNDLED)]


def test_where_both_as_one_are_no_gain_the_loss_alone_is_tried(step) -> None:
    (site,) = losses(step)
    outcomes = decide([site], terms({"original": 50e3, BUNDLED: 60e3}))
    assert outcomes[0].chosen is None
    step.decide(outcomes)
    assert [inner.what for inner in losses(step)] == ["cross_entropy(logits, target)"]


def test_a_batch_of_another_size_has_the_kernel_too(step) -> None:
    (site,) = losses(step)
    step.decide([Outcome(site, site.candidates[0], "3 times as fast")])
    loss_of(step, batch=3).backward()
    # Asked outside the step, where no autocast is in force, as within it.
    assert all(graph.chosen() for graph in step.rewriter.graphs)
    assert step.rewriter.active() == len(step.rewriter.graphs) == 2


def test_it_is_recorded_and_replayed_under_the_steps_autocast(step, recorder) -> None:
    (site,) = losses(step)
    plain = loss_of(step).item()
    step.decide([Outcome(site, site.candidates[0], "3 times as fast")])
    found = []
    for _ in range(6):
        step.module.zero_grad()
        loss = loss_of(step)
        loss.backward()
        found.append((loss.item(), step.module.head.weight.grad.clone()))
        del loss  # else what is left of its graph keeps the gradient of x, which is a leaf here
    # The first is the original's, the second is recorded, the third proven; the kernel refused none of them.
    (replayer,) = step.rewriter.replayers()
    assert (replayer.refused, replayer.proven, recorder.recordings) == ("", True, 1)
    assert recorder.replays == 6  # two checks among them
    assert step.failure == ""
    assert all(value == pytest.approx(plain, rel=1e-2) for value, _ in found)
    for _, gradient in found[2:]:
        torch.testing.assert_close(gradient, found[1][1], rtol=1e-2, atol=1e-4)
