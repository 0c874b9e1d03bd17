"""What only a GPU shows: kernels in the trace, device-side step times, CUPTI detached afterwards."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from advisor import TrainingAdvisor

from .tiny import make_model, make_trainer, read_trace, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def fit(light, folder, callbacks=(), **options):
    model = make_model(light)
    make_trainer(light, folder, *callbacks, accelerator="gpu", **options).fit(model, rows(120))
    return model


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_losses_on_the_gpu_are_bit_equal_to_those_without_us(light, tmp_path, precision):
    plain = fit(light, tmp_path, precision=precision)
    callback = TrainingAdvisor(report=False)

    model = fit(light, tmp_path, [callback], precision=precision)

    assert callback.trace_path is not None
    assert model.losses == plain.losses


def test_each_recorded_step_has_the_same_kernels_and_the_context_names_the_device(pl, tmp_path):
    callback = TrainingAdvisor(report=False)
    fit(pl, tmp_path, [callback])

    trace = read_trace(callback.trace_path)
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if "LaunchKernel" in e["name"] and e.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    steps = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["name"].startswith("ProfilerStep#") and e["cat"] == "user_annotation"
    )
    kernels = Counter()
    for event in events:
        launched = launches.get(event.get("args", {}).get("correlation"))
        if event.get("cat") == "kernel" and launched is not None:
            kernels.update(i for i, (start, end) in enumerate(steps) if start <= launched < end)
    context = trace["training_advisor"]
    assert len(steps) == 4
    assert kernels[1] == kernels[2] == kernels[3] > 20
    assert context["device"]["name"] == torch.cuda.get_device_name()
    assert context["device"]["total_memory_bytes"] > 1 << 30
    assert context["peak_memory_bytes"]["in_window"] >= context["peak_memory_bytes"]["before"] > 0
    assert context["baseline"]["n"] >= 10


def test_the_speed_is_back_after_the_window(pl, tmp_path):
    callback = TrainingAdvisor(report=False, warmup_steps=60)
    fit(pl, tmp_path, [callback])

    after = read_trace(callback.trace_path)["training_advisor"]["after"]
    assert after["verified"] is not False, after
