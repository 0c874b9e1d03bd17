from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from advisor.capture.lightning_context import foreign_profiler, results_folder, trainer_context


@pytest.mark.parametrize(
    ("log_dir", "root", "dirpath", "expected"),
    [
        ("logs/v0", "root", None, "logs/v0/advisor"),
        ("logs/v0", "root", "mine", "mine"),
        (None, "root", None, "root/advisor"),
        ("s3://bucket/logs", "root", None, "root/advisor"),
        ("s3://bucket/logs", "gs://bucket", None, "advisor_logs"),
    ],
)
def test_results_go_to_local_disk(log_dir, root, dirpath, expected):
    trainer = types.SimpleNamespace(log_dir=log_dir, default_root_dir=root)

    assert results_folder(trainer, dirpath) == Path(expected)


def test_what_a_trainer_does_not_tell_is_unknown():
    class Bare:
        precision = "bf16-mixed"

    context = trainer_context(Bare(), "fit")

    assert context["precision"] == "bf16-mixed"
    assert (context["world_size"], context["loader"], context["versions"]["lightning"]) == (None, None, None)


def test_a_profiler_that_the_model_holds_is_seen():
    class Owner:
        pass

    model = Owner()
    trainer = types.SimpleNamespace(profiler=Owner(), callbacks=[Owner()], lightning_module=model)
    assert foreign_profiler(trainer) is None

    model.mine = torch.profiler.profile()

    assert "Owner holds" in (foreign_profiler(trainer) or "")
