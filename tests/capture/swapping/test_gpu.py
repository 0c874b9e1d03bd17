"""What only a GPU shows of swap: bundled kernels in a live run, its memory, its times, and the way back."""

from __future__ import annotations

import json
import os
import sys
import threading

import pytest
import torch

from advisor import TrainingAdvisor
from advisor.capture.swapping.engine import REPLAY
from advisor.capture.swapping.run import State
from advisor.swap.decide import LATE
from advisor.swap.modules import MARK
from benchmarks.end_to_end_models import (
    GPT,
    Task,
    UNet,
    _denoise,
    _images,
    _next_token,
    _text,
    lightning,
    module,
)
from benchmarks.end_to_end_run import Repeated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

STEPS = 90
#: Large enough that the device sets the pace, on a busy host too; an odd vocabulary, as GPT-2's is.
TASK = Task(
    lambda: GPT(16385, 512, 768, 6, 12), _text(16, 512, 16385), _next_token, optimizer={"foreach": False}
)
#: So small that the device waits for launches; it draws random numbers. With running statistics where asked.
SMALL = Task(lambda: UNet(32), _images(4, 32, 10), _denoise)
NORMED = Task(lambda: torch.nn.Sequential(UNet(32), torch.nn.BatchNorm2d(3)), _images(4, 32, 10), _denoise)
#: Whether nothing else shares the GPU and the host, so that what a wall clock says can be held against it.
ALONE = "PYTEST_XDIST_WORKER" not in os.environ


def fit(folder, *callbacks, steps=STEPS, task=TASK, **options):
    light = lightning()
    light.seed_everything(0, verbose=False)
    generator = torch.Generator().manual_seed(1)
    batches = [task.batch(generator) for _ in range(8)]
    losses = []

    class Keep(light.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(outputs["loss"].detach())

    loop, every = module(task), options.get("accumulate_grad_batches", 1)
    trainer = light.Trainer(
        max_steps=steps, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(folder), callbacks=[*callbacks, Keep()], **options,
    )  # fmt: skip
    trainer.fit(loop, Repeated(batches, steps * every))
    return loop, [float(loss) for loss in losses]


def advisor(**options):
    return TrainingAdvisor(**{"stages": ("validate",), "warmup_steps": 5, "swap": "auto", **options})


def result(folder):
    (path,) = folder.rglob("swaps.json")
    return json.loads(path.read_text())


@pytest.mark.quick
def test_a_naive_gpt_is_made_faster_learns_the_same_and_is_put_back(tmp_path):
    _, plain = fit(tmp_path)

    loop, losses = fit(tmp_path, advisor())

    found = result(tmp_path)
    told = {site["what"]: site["reason"] for site in found["sites"]}
    chosen = {site["what"] for site in found["sites"] if site["chosen"]}
    assert found["kept"] is True, (found["verdict"], found["remarks"], told)
    assert any("is replayed as a CUDA graph" in remark for remark in found["remarks"]), found["remarks"]
    # The head is one with its loss, whose kernel casts the weight as autocast does.
    assert chosen >= {"AdamW", "cross_entropy(head(x), target)"}, told
    assert any(site["kind"] == "attention" for site in found["sites"] if site["chosen"]), told
    # Replayed, a site is judged by the device's time alone.
    assert not [why for why in told.values() if "costs the host" in why]
    assert found["steps"]["swapped_p50_ms"] < 0.8 * found["steps"]["eager_p50_ms"]
    assert found["steps"]["swapped_peak_bytes"] <= found["steps"]["eager_peak_bytes"]
    if ALONE:
        assert found["pause_s"] < 12
        assert not [what for what, why in told.items() if why.startswith("not tried")]
    for site in found["sites"]:
        for trial in site["trials"]:
            assert trial["refused"] or trial["candidate"] != site["chosen"] or trial["time_ms"] is not None
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), rtol=0.03, atol=0.03)
    assert not any(hasattr(type(part), MARK) for part in loop.modules())
    assert "training_step" in vars(type(loop))
    assert type(loop).__name__ == "Loop"


def test_a_step_is_replayed_and_its_gradients_added_up_over_batches(tmp_path):
    _, plain = fit(tmp_path, accumulate_grad_batches=2)

    _, losses = fit(tmp_path, advisor(), accumulate_grad_batches=2)

    found = result(tmp_path)
    assert found["kept"] is True, (found["verdict"], found["remarks"])
    assert any("is replayed as a CUDA graph" in remark for remark in found["remarks"]), found["remarks"]
    assert found["steps"]["swapped_p50_ms"] < 0.8 * found["steps"]["eager_p50_ms"]
    assert found["steps"]["swapped_peak_bytes"] <= found["steps"]["eager_peak_bytes"]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("task", [SMALL, NORMED], ids=["statistics none", "statistics kept"])
def test_a_step_that_its_launches_bound_is_replayed_though_nothing_is_replaced(tmp_path, task):
    reference, plain = fit(tmp_path, task=task)

    loop, losses = fit(tmp_path, advisor(swap=["replay"]), task=task)

    found = result(tmp_path)
    assert found["kept"] is True, (found["verdict"], found["remarks"], found["sites"])
    assert [site["chosen"] for site in found["sites"]] == ["CUDA graphs"]
    assert found["steps"]["swapped_p50_ms"] < 0.9 * found["steps"]["eager_p50_ms"]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), rtol=0.05, atol=0.02)
    for name, value in loop.named_buffers():
        torch.testing.assert_close(value, dict(reference.named_buffers())[name], rtol=0.05, atol=0.05)


def test_a_step_that_the_device_bounds_is_left_as_it_is_where_nothing_is_replaced(tmp_path):
    fit(tmp_path, advisor(swap=["replay"]))
    found = result(tmp_path)
    assert found["kept"] is False
    # By its launches alone, or by whole steps, where those come near to what the device takes.
    told = ("the step is not replayed: the host launches it in", "whole steps gain nothing beyond the noise")
    assert any(why in found["verdict"] for why in told), found["verdict"]


def test_unreplayed_a_naive_gpt_is_made_faster_too(tmp_path, monkeypatch):
    monkeypatch.setenv(REPLAY, "0")

    fit(tmp_path, advisor())

    found = result(tmp_path)
    assert found["kept"] is True, found["verdict"]
    assert not any("CUDA graph" in remark for remark in found["remarks"])
    assert found["steps"]["swapped_p50_ms"] < 0.9 * found["steps"]["eager_p50_ms"]


def test_batches_until_swap_begins_are_bit_equal(tmp_path):
    options = {"deterministic": True}
    try:
        _, plain = fit(tmp_path, steps=40, **options)
        _, losses = fit(tmp_path, advisor(warmup_steps=30), steps=40, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "too few" in result(tmp_path)["verdict"]
    assert losses == plain


def test_with_a_cold_cache_the_loop_trains_on_bit_equal_while_kernels_are_compiled(tmp_path, monkeypatch):
    # GIVEN nothing of the bundled kernels compiled, in memory or on disk
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for name, part in list(sys.modules.items()):
        if name.startswith("advisor.kernels"):
            for kernel in vars(part).values():
                getattr(kernel, "device_caches", {}).clear()
    callback, states = advisor(), []

    class Stops(lightning().Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            states.append(callback._swapping.state)
            trainer.should_stop = states[-1] is State.DONE

    try:
        _, losses = fit(tmp_path / "swapped", callback, Stops(), steps=2000, deterministic=True)
        began = states.index(State.COMPARING)
        _, plain = fit(tmp_path / "plain", steps=began + 1, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)

    # THEN losses are equal to the bit until the first swapped step, and the pause is that of a warm cache
    found = result(tmp_path / "swapped")
    assert states.count(State.COMPILING) > 0
    assert losses[: began + 1] == plain
    refused = [trial["refused"] for site in found["sites"] for trial in site["trials"]]
    assert not [why for why in refused if why == LATE], refused
    assert not [site for site in found["sites"] if site["reason"].startswith("not tried")]
    if ALONE:
        assert found["pause_s"] < 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("advisor-swap")]


def test_no_copy_of_the_step_stays_on_the_device(tmp_path):
    torch.cuda.empty_cache()
    fit(tmp_path)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    fit(tmp_path, advisor())
    import gc

    gc.collect()
    assert torch.cuda.memory_allocated() - before < 64 * 2**20


def test_a_recorded_run_swaps_after_its_window_and_the_report_tells_both(tmp_path):
    callback = advisor(stages=("fit",), warmup_steps=10)
    fit(tmp_path, callback, steps=130)
    report = json.loads(callback.report_path.with_suffix(".json").read_text())
    assert report["swaps"]["steps"]["saving_ms"] is not None
    assert report["kernels"]
