"""Whatever a loop looks like, no rule breaks, and what findings promise holds together."""

from __future__ import annotations

import ast
import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor.advice.advise import advise
from advisor.advice.finding import NEGLIGIBLE, Advised
from advisor.roofline.analysis import analyse_timeline
from tests.trace.builder import BACKWARD, MAIN, Builder

OPS = [
    "aten::mm", "aten::bmm", "aten::softmax", "aten::mul", "aten::add", "aten::gelu", "aten::cat",
    "aten::item", "aten::copy_", "aten::to", "aten::conv2d", "aten::native_layer_norm",
    "aten::cross_entropy_loss",
    "aten::_foreach_add_", "aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_",
    "autograd::engine::evaluate_function: MmBackward0", "torch::autograd::AccumulateGrad",
    "Torch-Compiled Region: 0/0", "torch.distributed.ddp.reducer::copy_bucket_to_grad", "</script>\x1b[2J```",
]  # fmt: skip
KERNELS = [
    ("kernel", "gemm"), ("kernel", "ncclDevKernel_AllReduce"), ("kernel", "nchwToNhwcKernel"),
    ("kernel", "sm80_xmma_gemm_f32f32_f32f32_f32_tn"), ("kernel", "softmax_warp_forward"),
    ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"), ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)"),
    ("gpu_memset", "Memset (Device)"),
]  # fmt: skip
CALLS = [
    "cudaLaunchKernel", "cudaMemcpyAsync", "cudaGraphLaunch", "cudaStreamSynchronize",
    "cudaDeviceSynchronize", "cudaEventSynchronize",
    "cudaEventRecord", "cudaStreamWaitEvent", "cudaMalloc", "cudaFree",
]  # fmt: skip
RANGES = [
    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "Optimizer.step#AdamW.step",
    "Optimizer.zero_grad#AdamW.zero_grad", "advisor::phase::forward", "advisor::phase::logging",
]  # fmt: skip
SHAPES = [[], [0, 3], [64, 64], [8192, 768], [768, 50257], [8, 12, 128, 128], [64, 3, 224, 224]]
DTYPES = ["float", "c10::BFloat16", "c10::Half", "bool", ""]
TIMES = st.sampled_from([0, 0, 1, 5, 60, 4_000])

op = st.tuples(
    st.just("op"), st.sampled_from(OPS), TIMES, st.lists(st.sampled_from(SHAPES), max_size=3),
    st.sampled_from(DTYPES), st.sampled_from([None, 1, 2]), st.sampled_from([MAIN, BACKWARD]),
)  # fmt: skip
launch = st.tuples(
    st.just("launch"), st.sampled_from(CALLS), TIMES, st.sampled_from(KERNELS), TIMES,
    st.sampled_from([-400, 0, 3, 2_000]), st.sampled_from([7, 7, 20]),
)  # fmt: skip
span = st.tuples(st.just("range"), st.sampled_from(RANGES), TIMES)
orphan = st.tuples(st.just("orphan"), TIMES)
STEPS = st.lists(st.lists(st.one_of(op, launch, launch, span, orphan), max_size=14), max_size=4)
CONTEXTS = st.sampled_from(
    [
        {},
        {"loader": {"num_workers": 4, "batch_size": 8}, "optimizers": [{"class": "AdamW"}]},
        {"loader": {"num_workers": "4", "batch_size": "8)\nimport os"}, "strategy": "DDP\nimport os"},
        {"parameters": [{"shape": [64, 64], "dtype": "fp32", "count": 3}], "gradient_clip_val": 1.0},
        {"peak_memory_bytes": {"in_window": 10**9}, "device": {"total_memory_bytes": 10**11}},
    ]
)


def _trace(steps: list, marked: bool, device: str | None, context: dict) -> Builder:
    build, at, correlation = Builder(device=device), 1_000.0, 0
    if context:
        build.context(**context)
    for number, events in enumerate(steps):
        begin = at
        for kind, *rest in events:
            if kind == "op":
                name, dur, dims, dtype, sequence, thread = rest
                build.on(thread)
                build.op(name, at, dur, dims=dims or None, dtypes=[dtype] * len(dims), sequence=sequence)
                build.on(MAIN)
            elif kind == "launch":
                name, call, (cat, kernel), dur, after, stream = rest
                correlation += 1
                build.call(at, correlation=correlation, name=name, dur=call)
                work = {"bytes": 80_000} if cat == "gpu_memcpy" else {}
                build.work(kernel, at + after, dur, correlation=correlation, cat=cat, stream=stream, **work)
            elif kind == "range":
                build.range(rest[0], at, rest[1])
            else:
                build.work("left over", at, rest[0], correlation=None)
            at += 7
        at += 20
        if marked:
            build.step(number, begin, at - begin)
    return build


def _holds(found: Advised) -> None:
    assert found.failed == []
    savings = [advice.saving for advice in found.advice if advice.saving]
    step_ns = found.replay.baseline_ns if found.replay else 0.0
    for advice in found.advice:
        ast.parse(advice.finding.fix)
        ast.parse(advice.finding.fix_torch)
        assert "\nimport os" not in advice.finding.fix
    for saving in savings:
        assert math.isfinite(saving.low_ns)
        assert math.isfinite(saving.high_ns)
        assert saving.low_ns <= saving.likely_ns <= saving.high_ns
        assert saving.likely_ns <= step_ns * (1 + 1e-6)
    if found.together:
        largest = max(saving.likely_ns for saving in savings)
        assert found.together[0].likely_ns >= largest - 1.01 * NEGLIGIBLE * step_ns


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    STEPS,
    st.booleans(),
    st.sampled_from([None, "NVIDIA H200", "Tesla T4", "AMD Instinct MI300X", "A Thing"]),
    CONTEXTS,
    st.sampled_from([None, 1e-3, 0.1, 1e6]),
)
def test_findings_of_any_loop_hold_together(steps, marked, device, context, baseline_ms):
    build = _trace(steps, marked, device, context)
    if build.events:
        _holds(advise(analyse_timeline(build.join(), baseline_step_ms=baseline_ms)))
