"""Of which runs the rewritten step is replayed, and where gradients are added up."""

from __future__ import annotations

from types import SimpleNamespace as Plain

import pytest
from torch import nn

from advisor.capture.swapping.limits import adds_up, why_no_replay


def trainer(strategy="SingleDeviceStrategy", ranks=1, accumulate=1, callbacks=(), base=object):
    kind = type(strategy, (base,), {})
    return Plain(
        strategy=kind(), world_size=ranks, accumulate_grad_batches=accumulate, callbacks=list(callbacks)
    )


def test_one_process_is_replayed_whatever_the_strategy_and_the_norm():
    assert why_no_replay(trainer("AnyStrategy"), nn.SyncBatchNorm(4)) == ""


@pytest.mark.parametrize("base", [object, type("DDPStrategy", (), {})])
def test_several_ranks_are_where_only_their_gradients_are_exchanged(base):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert why_no_replay(trainer("DDPStrategy", 2), model) == ""
    assert bool(why_no_replay(trainer("MyStrategy", 2, base=base), model)) is (base is object)
    model.append(nn.SyncBatchNorm(4))
    assert "SyncBatchNorm has ranks talk within the step" in why_no_replay(trainer("DDPStrategy", 2), model)


def test_gradients_are_added_up_now_or_in_an_epoch_to_come(pl):
    schedule = pl.callbacks.GradientAccumulationScheduler
    assert not adds_up(lambda: trainer(callbacks=[schedule({0: 1}), pl.Callback()]))
    assert adds_up(lambda: trainer(callbacks=[schedule({0: 1, 4: 2})]))
    assert adds_up(lambda: trainer(accumulate=2))
    assert not adds_up(lambda: None)
