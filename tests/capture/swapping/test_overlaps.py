"""Chains of layers of which modules and patterns of the step's graph want the same: what is told serves."""

from __future__ import annotations

import json

import pytest
from torch import nn
from torch.optim import SGD

from advisor import TrainingAdvisor
from advisor.capture.swapping import steps as swapping_steps
from advisor.capture.swapping.engine import ALLOW_CPU
from advisor.swap import decide
from advisor.swap.measure import ORIGINAL, Timed
from advisor.swap.rewrite.traced import Traced
from advisor.swap.site import Trial
from tests.capture.tiny import make_trainer, rows

from .planted import be_sure

BATCHES, WIDTH = 44, 32
ALONE, LARGER, WITHIN = "GELU", "LayerNorm(gelu(linear(x)))", "LayerNorm(gelu(x))"


def chain():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def make_model(light):
    class Chains(light.LightningModule):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 2)
            self.chains = nn.ModuleList(chain() for _ in range(2))

        def training_step(self, batch, batch_idx):
            x = self.embed(batch[0])
            for chain in self.chains:
                x = x + chain(x)
            return nn.functional.cross_entropy(self.head(x), batch[1])

        def configure_optimizers(self):
            return SGD(self.parameters(), lr=0.01)

    light.seed_everything(3, verbose=False)
    return Chains()


@pytest.fixture
def saves(monkeypatch):
    """Says what each site saves, by what it is, and otherwise nothing."""
    monkeypatch.setattr(swapping_steps, "MOST", 5)
    monkeypatch.setenv(ALLOW_CPU, "1")
    be_sure(monkeypatch)
    monkeypatch.setattr(decide, "verify", lambda _, c, **__: Trial(c.name))
    monkeypatch.setattr(decide, "slower", lambda ours, _, *__: "" if ours.median_ns < 1e6 else "slower")
    told = {}

    def timed(site, candidates, **_):
        ns = 1e6 - told.get(site.what, -1.0)
        return {ORIGINAL: Timed(1e6, 1e6, 1e6), **{c.name: Timed(ns, ns, ns) for c in candidates}}

    monkeypatch.setattr(decide, "measure", timed)
    return told


@pytest.fixture
def graphs(monkeypatch):
    """Of each graph that was rewritten, where."""
    found = []
    edited = Traced._edited

    def noted(self, chosen):
        found.append(sorted({match.where for _, match, _ in chosen}))
        return edited(self, chosen)

    monkeypatch.setattr(Traced, "_edited", noted)
    return found


@pytest.mark.parametrize("rival", [LARGER, WITHIN])
@pytest.mark.parametrize("pattern_wins", [False, True])
def test_of_an_activation_and_a_pattern_that_begins_with_it_the_one_told_serves(
    pl, tmp_path, saves, graphs, rival, pattern_wins
):
    # GIVEN a pattern that is tried along with the activation, or once a larger one has been refused
    wins = rival if pattern_wins else ALONE
    saves |= {ALONE: 10e3, rival: 10e3, wins: 20e3}
    swapped = []

    class Seen(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == BATCHES - 2:
                swapped.extend(type(chain[1]) is not nn.GELU for chain in pl_module.chains)

    advisor = TrainingAdvisor(stages=("validate",), warmup_steps=3, swap=["norm", "activation"])
    make_trainer(pl, tmp_path, advisor, Seen()).fit(make_model(pl), rows(BATCHES))
    (path,) = tmp_path.rglob("swaps.json")
    found = json.loads(path.read_text())
    assert found["kept"] is True, found
    # THEN what is told as chosen is what runs, in both places
    assert {site["what"] for site in found["sites"] if site["chosen"]} == {wins}, found["sites"]
    assert [len(where) for where in graphs[-1:]] == ([2] if pattern_wins else [])
    assert swapped == [not pattern_wins] * 2
