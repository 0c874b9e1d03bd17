"""Runs whose processes Lightning starts itself."""

from __future__ import annotations

import importlib

import pytest
import torch

from advisor import TrainingAdvisor

from .tiny import make_trainer, names, read_trace, rows

pl = importlib.import_module("pytorch_lightning")


class Spawned(pl.LightningModule):
    """At the top of a module, since a spawned process unpickles it."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_a_spawned_ddp_run_gives_a_trace_per_recording_rank(tmp_path):
    # GIVEN two spawned processes, each with an unpickled copy of the callback
    callback = TrainingAdvisor(warmup_steps=4, report=False, ranks="all")
    trainer = make_trainer(pl, tmp_path, callback, devices=2, strategy="ddp_spawn")

    # WHEN they train
    trainer.fit(Spawned(), rows(60))

    # THEN each recording rank has its trace of the same steps, with paths that carry no wrapper's name
    found = sorted(path.name for path in (tmp_path / "advisor" / "step_4").glob("*.gz"))
    assert found == [f"rank{rank}.pt.trace.json.gz" for rank in (0, 1)]
    for rank in (0, 1):
        trace = read_trace(tmp_path / "advisor" / "step_4" / f"rank{rank}.pt.trace.json.gz")
        context = trace["training_advisor"]
        assert (context["rank"], context["world_size"], context["strategy"]) == (rank, 2, "DDPStrategy")
        assert set(names(trace, "advisor::module::")) == {f"advisor::module::net.{n}" for n in range(3)}
        assert trace["distributedInfo"]["rank"] == rank
