"""What is left out where whole steps do not gain by all of it; in a Trainer too."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn

from advisor import TrainingAdvisor
from advisor.capture.swapping import run as swapping
from advisor.capture.swapping import steps as swapping_steps
from advisor.capture.swapping.engine import Engine
from advisor.capture.swapping.less import Part, less
from advisor.capture.swapping.steps import compared
from tests.capture.tiny import make_trainer, rows

from . import planted
from .planted import WIDTH, SlowScale, plant, slow_model
from .test_run import is_swapped, result, same

BATCHES = 140


def part(key, saved_ms=1.0, mechanism="module", more_bytes=0):
    return Part(key, mechanism, "Norm", (key,), saved_ms * 1e6, more_bytes)


def steps(eager_ms, swapped_ms, spread=0.1):
    ramp = [spread * i / 7 for i in range(8)]
    return compared([eager_ms + x for x in ramp], [swapped_ms + x for x in ramp])


def names(parts):
    return [one.key for one in parts]


SLOWER, FATTER = steps(10.0, 11.0), steps(10.0, 5.0)
GRAPH = [part("attention", 2.0, "pattern"), part("loss", 1.0, "pattern")]
OTHERS = [part("norm", 0.5), part("optimizer", 3.0, "optimizer")]


def test_the_rewritten_graph_goes_first_and_then_the_half_that_gains_least():
    assert names(less([*GRAPH, *OTHERS], SLOWER)) == ["attention", "loss"]
    assert names(less(OTHERS, SLOWER)) == ["norm"]
    assert names(less(GRAPH, SLOWER)) == ["loss"]
    assert names(less([part(str(i), i) for i in range(1, 6)], SLOWER)) == ["2", "1"]


def test_where_memory_grows_what_needs_more_of_it_goes_first():
    fat = part("fat", 4.0, more_bytes=2**20)
    assert names(less([*GRAPH, fat, *OTHERS], FATTER)) == ["fat"]
    assert names(less([*GRAPH, fat, *OTHERS], SLOWER)) == ["attention", "loss"]
    assert names(less([*GRAPH, *OTHERS], FATTER)) == ["attention", "loss"]


def test_nothing_is_left_out_where_nothing_would_be_left_or_could_show():
    assert less([part("alone")], SLOWER) == []
    assert names(less([*GRAPH, part("norm", 0.001)], SLOWER)) == ["norm"]
    assert less([part("a", 0.02), part("b", 0.01)], steps(10.0, 11.0, spread=3.0)) == []
    assert less(OTHERS, compared([10.0], [11.0])) == []


class Sleepy(SlowScale):
    """Takes its time, the longer the wider it is."""

    def forward(self, x):
        time.sleep(0.015 if x.shape[-1] == WIDTH else 0.008)
        return planted.scale(self, x)


def model_of_two(light):
    """Two sites: a wide one, and a narrow one which saves less by itself."""
    model = slow_model(light)
    torch.manual_seed(13)
    model.net = nn.Sequential(
        nn.Linear(8, WIDTH), Sleepy(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16), Sleepy(16), nn.Linear(16, 2)
    )
    torch.manual_seed(12)
    return model


@pytest.fixture
def moody(monkeypatch):
    """A candidate that is slow in the loop where it is narrow."""
    trying = []
    decide = Engine.decide

    def noted(self, progress):
        trying.append(True)
        try:
            return decide(self, progress)
        finally:
            trying.clear()

    monkeypatch.setattr(Engine, "decide", noted)

    def call(module, x):
        if not trying and x.shape[-1] == 16:
            time.sleep(0.04)
        return planted.scale(module, x)

    return call


def only_swap(**options):
    return TrainingAdvisor(stages=("validate",), warmup_steps=6, swap=["norm"], **options)


def test_what_spoils_the_step_is_left_out_and_the_rest_is_kept(pl, tmp_path, monkeypatch, moody, capsys):
    monkeypatch.setattr(swapping_steps, "MOST", 5)
    plain = model_of_two(pl)
    make_trainer(pl, tmp_path).fit(plain, rows(BATCHES))
    plant(monkeypatch, planted.fast("planted.moody", moody), sure=False)
    model, seen = model_of_two(pl), []

    class Seen(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(is_swapped(pl_module))

    make_trainer(pl, tmp_path, only_swap(), Seen()).fit(model, rows(BATCHES))

    # THEN both were tried, and the wide one alone is kept until the end
    assert [True, True] in seen
    assert seen[-1] == [True, False]
    assert is_swapped(model) == [False, False]
    assert model.losses == plain.losses
    assert same(model, plain)
    found = result(tmp_path)
    chosen = {site["where"][0]: site for site in found["sites"]}
    assert chosen["net.1"]["chosen"] == "planted.moody"
    assert chosen["net.4"]["chosen"] is None
    assert "by itself, not kept: with 2 sites whole steps gain nothing" in chosen["net.4"]["reason"]
    assert found["verdict"].startswith("1 of 2 sites swapped: a step takes")
    assert "(with 2 sites, whole steps gain nothing beyond the noise" in found["verdict"]
    assert any("compared anew" in remark for remark in found["remarks"])
    assert found["steps"]["saving_ms"]["low"] > 0
    assert "comparing anew without Sleepy" in capsys.readouterr().err


def test_after_two_more_comparisons_everything_is_put_back(pl, tmp_path, monkeypatch):
    monkeypatch.setattr(swapping_steps, "MOST", 4)
    plant(monkeypatch, planted.fast())
    monkeypatch.setattr(
        swapping, "objection", lambda *_: "whole steps gain nothing beyond the noise: planted"
    )
    whole = []
    parts = [part(str(i), 10.0 + i) for i in range(8)]
    monkeypatch.setattr(Engine, "parts", property(lambda self: [p for p in parts if p.key not in whole]))
    monkeypatch.setattr(Engine, "drop", lambda self, keys: whole.extend(keys))
    model = slow_model(pl)

    make_trainer(pl, tmp_path, only_swap()).fit(model, rows(200))

    assert whole == ["3", "2", "1", "0", "5", "4"]
    assert is_swapped(model) == [False, False]
    found = result(tmp_path)
    assert found["kept"] is False
    assert found["verdict"].endswith("planted (the last of 3 comparisons)")
    assert len([remark for remark in found["remarks"] if "compared anew" in remark]) == 2
    assert json.dumps(found)
