"""Reports made by hand: a rich one, one that knows nothing, and one whose every text is an attack."""

from __future__ import annotations

import copy

from advisor.report import model

BANDWIDTH = 4.8e12
PEAKS = {"tensor_bf16": 989e12, "tensor_tf32": 494e12, "vector_fp32": 67e12}
DATASHEET = "NVIDIA H200 datasheet, dense"
TOKENS, WIDTH, LAYERS, VOCABULARY = 8192, 768, 12, 50257

ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
GELU = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl("
    "at::TensorIteratorBase&, at::native::GeluType)::{lambda()#2}::operator()() const> >(int)"
)
COPY = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda()#3}::operator()() const, std::array<char*, 2ul>, 4>(int)"
)
GATHER = "void at::native::vectorized_gather_kernel<16, long>(char*)"
GAMMA_BETA = "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>(long)"
MEAN = "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::MeanOps<float>>>(int)"
NLL_LOSS = "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>(float*)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float)"
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
    "at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, "
    "at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>(float)"
)
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\"><svg onload=alert(3)> ' \\ \\\\ ` | [x](javascript:alert(4)) {{ 7*7 }} {% raw %}",
    "null \x00 bell \x07 escape \x1b[31mred\x1b]8;;http://evil.example\x07 c1 \x9b31m",
    "lone \ud800 surrogate \udfff and \u2028 \u2029 separators",
    "right-to-left \u202egnp.exe\u202c \u2066isolate\u2069 zero\u200bwidth",
    "[bold red]markup[/] [link=http://evil.example]x[/link] :smile: @everyone #1 **b** _i_ ~~s~~",
    "N" * 10_000 + "<b>",
    "http://evil.example/x.js www.evil.example <!-- --> <![CDATA[ &lt;script&gt; &amp;",
    "",
)


def kernel(
    name: str,
    op: str | None,
    module: str | None,
    phase: str,
    family: str,
    calls: float,
    time_ms: float,
    flops: float | None = None,
    read: float | None = None,
    written: float | None = None,
    pipe: str | None = None,
    flags: tuple[str, ...] = (),
    bound: str | None = None,
) -> model.KernelGroup:
    """A kernel group with its bound and efficiency worked out; its share is filled in by `finish`."""
    group = model.KernelGroup(
        name=name, op=op, module=module, phase=phase, family=family, calls_per_step=calls,
        time_ms_per_step=time_ms, time_fraction=0.0, flops=flops, bytes_read=read, bytes_written=written,
        pipe=pipe, flags=list(flags), bound=bound or "unknown",
    )  # fmt: skip
    if flops is None or read is None or written is None:
        return group
    moved = read + written
    group.intensity = flops / moved if moved else None
    peak = PEAKS.get(pipe or "")
    group.bound = bound or ("compute" if peak and flops / moved > peak / BANDWIDTH else "memory")
    floor_s = max(moved / BANDWIDTH, flops / peak if peak else 0.0)
    group.efficiency = floor_s / (time_ms / 1e3)
    return group


def finish(groups: list[model.KernelGroup]) -> list[model.KernelGroup]:
    """The groups sorted by time, each with its share of the whole."""
    total = sum(group.time_ms_per_step for group in groups)
    for group in groups:
        group.time_fraction = group.time_ms_per_step / total
    return sorted(groups, key=lambda group: -group.time_ms_per_step)


def linear(module: str, n_out: int, n_in: int, calls: int, efficiency: float) -> list[model.KernelGroup]:
    """The three matrix products of a linear layer in bf16, at a given share of their peak."""
    flops = 2.0 * TOKENS * n_out * n_in * calls
    x, w, y = (2.0 * size * calls for size in (TOKENS * n_in, n_out * n_in, TOKENS * n_out))
    tile = "nvjet_sm90_tst_192x128_64x5_2x1_v_bz_coopB"
    if n_out == VOCABULARY:
        tile = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(Params)"
    roof_ms = flops / PEAKS["tensor_bf16"] * 1e3
    return [
        kernel(f"{tile}_TNT" if "nvjet" in tile else tile, "aten::addmm", module, "forward", "matmul", calls,
               roof_ms / efficiency, flops, x + w, y, "tensor_bf16"),
        kernel(f"{tile}_NNT" if "nvjet" in tile else tile, "aten::mm", module, "backward", "matmul", calls,
               roof_ms / efficiency / 0.95, flops, y + w, x, "tensor_bf16"),
        kernel(f"{tile}_NTT" if "nvjet" in tile else tile, "aten::mm", module, "backward", "matmul", calls,
               roof_ms / efficiency / 0.9, flops, y + x, w, "tensor_bf16"),
    ]  # fmt: skip


def streaming(
    name: str, op: str, module: str, phase: str, family: str, calls: int, elements: float, flops_each: float,
    efficiency: float, width_bytes: float = 2.0,
) -> model.KernelGroup:  # fmt: skip
    """A kernel that reads and writes each element once, at a given share of the memory roof."""
    moved = elements * width_bytes * calls
    flags = ("inefficient",) if efficiency < 0.35 else ()
    return kernel(name, op, module, phase, family, calls, 2 * moved / BANDWIDTH / efficiency * 1e3,
                  flops_each * elements * calls, moved, moved, "vector_fp32", flags)  # fmt: skip


def gpt_kernels() -> list[model.KernelGroup]:
    """Some sixty kernel groups of a GPT-2-sized training step in bf16-mixed on an H200."""
    hidden, wide = TOKENS * WIDTH, TOKENS * WIDTH * 4
    groups = [
        *linear("blocks.*.attn.qkv", 3 * WIDTH, WIDTH, LAYERS, 0.62),
        *linear("blocks.*.attn.proj", WIDTH, WIDTH, LAYERS, 0.51),
        *linear("blocks.*.mlp.up", 4 * WIDTH, WIDTH, LAYERS, 0.66),
        *linear("blocks.*.mlp.down", WIDTH, 4 * WIDTH, LAYERS, 0.6),
        *linear("head", VOCABULARY, WIDTH, 1, 0.12),
    ]
    attention = 4.0 * 8 * 12 * 1024 * 1024 * 64 / 2 * LAYERS
    qkv = 2.0 * hidden * LAYERS
    sdpa = (
        "cudnn_generated_fort_native_sdpa_sm90_flash_{}_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0"
    )
    groups += [
        kernel(sdpa.format("fprop"), "aten::_scaled_dot_product_cudnn_attention", "blocks.*.attn", "forward",
               "attention", LAYERS, 0.92, attention, 3 * qkv, qkv, "tensor_bf16"),
        kernel(sdpa.format("bprop"), "aten::_scaled_dot_product_cudnn_attention_backward", "blocks.*.attn",
               "backward", "attention", LAYERS, 2.1, 2.5 * attention, 5 * qkv, 3 * qkv, "tensor_bf16"),
        streaming(GELU, "aten::gelu", "blocks.*.mlp.act", "forward", "pointwise", LAYERS, wide, 14, 0.71),
        streaming(GELU.replace("GeluCUDA", "GeluBackwardCUDA"), "aten::gelu_backward", "blocks.*.mlp.act",
                  "backward", "pointwise", LAYERS, wide, 22, 0.74),
    ]  # fmt: skip
    for module in ("blocks.*.ln_1", "blocks.*.ln_2", "ln_f"):
        calls = LAYERS if "*" in module else 1
        groups += [
            streaming(NORM, "aten::native_layer_norm", module, "forward", "norm", calls, hidden, 8, 0.53, 4),
            streaming(NORM.replace("layer_norm", "layer_norm_grad_input"), "aten::native_layer_norm_backward",
                      module, "backward", "norm", calls, hidden, 14, 0.47, 4),
            streaming(GAMMA_BETA, "aten::native_layer_norm_backward",
                      module, "backward", "norm", calls, hidden, 6, 0.21, 4),
        ]  # fmt: skip
    for place, (phase, module) in enumerate(
        (phase, module)
        for phase in ("forward", "backward")
        for module in (
            "blocks.*.attn.qkv",
            "blocks.*.attn.proj",
            "blocks.*.mlp.up",
            "blocks.*.mlp.down",
            "head",
        )
    ):
        groups.append(
            streaming(
                COPY, "aten::copy_", module, phase, "copy", LAYERS, hidden / 3, 0, 0.3 + 0.05 * place, 3
            )
        )
    for place, module in enumerate(("blocks.*", "blocks.*.attn", "blocks.*.mlp", "embed")):
        groups.append(streaming(ADD, "aten::add", module, "forward", "pointwise", LAYERS, hidden, 1, 0.6))
        groups.append(
            streaming(MEAN, "aten::sum", module, "backward", "reduction", 12, hidden / (place + 1), 1, 0.28)
        )
    softmax = (
        "void at::native::(anonymous namespace)::cunn_SoftMax{}<8, c10::BFloat16, float>(c10::BFloat16*)"
    )
    logits = float(TOKENS * VOCABULARY)
    groups += [
        streaming(softmax.format("Forward"), "aten::_log_softmax", "", "loss", "loss", 1, logits, 6, 0.46),
        streaming(softmax.format("Backward"), "aten::_log_softmax_backward_data", "", "backward", "loss", 1,
                  logits, 5, 0.5),
        streaming(ADAM, "aten::_fused_adamw_", "", "optimizer", "optimizer", 3, 124e6 / 3, 16, 0.7, 14),
        kernel(NLL_LOSS, "aten::nll_loss_forward", "", "loss", "loss", 1, 0.0061,
               16384, 65536, 8, "vector_fp32", ("latency",)),
        kernel(GATHER, "aten::embedding", "embed", "forward", "embedding", 2, 0.021, 0, 25e6, 25e6, "none"),
        kernel(ALL_REDUCE, "nccl:all_reduce", None,
               "communication", "communication", 6, 4.6, bound="communication"),
        kernel("Memcpy HtoD (Pinned -> Device)", "aten::to", None, "input", "copy", 2, 0.034,
               0, 131072, 131072, "none", bound="copy"),
        kernel("my_extension::mystery_kernel(float*)", "myext::mystery", "blocks.*.mlp",
               "forward", "other", 12, 0.31),
    ]  # fmt: skip
    # Kernels that start a stream of tiny ones: hundreds of launches and hardly any time.
    for place, op in enumerate(
        ("aten::mul", "aten::div", "aten::zeros_like", "aten::clamp", "aten::eq", "aten::where")
    ):
        name, calls = ADD.replace("CUDAFunctor_add", "MulFunctor"), 3 + place
        groups.append(
            kernel(name, op, None, "optimizer", "pointwise", calls, 0.002 * calls,
                   4096, 32768, 16384, "vector_fp32", ("latency",))
        )  # fmt: skip
    return finish(groups)


def slices(groups: list[model.KernelGroup], key: str) -> list[model.Slice]:
    """Device time of the groups by one of their fields, the largest first."""
    times: dict[str, float] = {}
    for group in groups:
        times[getattr(group, key)] = times.get(getattr(group, key), 0.0) + group.time_ms_per_step
    total = sum(times.values())
    parts = [model.Slice(name=n, time_ms_per_step=t, fraction=t / total) for n, t in times.items()]
    return sorted(parts, key=lambda part: -part.time_ms_per_step)


def findings() -> list[model.Finding]:
    return [
        model.Finding(
            rule="shapes.vocabulary",
            title="The vocabulary of 50257 leaves the head's matrix products unaligned",
            saving_ms=model.Saving(low=7.1, likely=9.4, high=10.2),
            saving_fraction=0.228,
            confidence="modelled",
            evidence=[
                "3 launches of cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1, 14.6 ms a step",
                "12% of the attainable rate; aligned products in this step reach 60%",
            ],
            fix="# 50304 = 393 × 128\nself.head = nn.Linear(768, 50304, bias=False)\n"
            "self.embed = nn.Embedding(50304, 768)",
            fix_torch="# 50304 = 393 × 128\nhead = torch.nn.Linear(768, 50304, bias=False)",
            risk="None for the loss once the 47 unused logits are masked or left to be learned away.",
        ),
        model.Finding(
            rule="fusion.chain",
            title="Bias, GELU and LayerNorm run as 36 kernels",
            saving_ms=model.Saving(low=-0.4, likely=0.0, high=0.3),
            saving_fraction=0.0,
            note="The step waits for its input, so a faster chain would not shorten it.",
            swap="norm",
        ),
        model.Finding(
            rule="norm.fuse", title="LayerNorm's weight gradient runs at a fifth of the memory roof"
        ),
    ]


def rich() -> model.Report:
    """A GPT training step on an H200, two ranks, with a baseline."""
    groups = gpt_kernels()
    kernel_ms = sum(group.time_ms_per_step for group in groups)
    by_bound = {part.name: part.fraction for part in slices(groups, "bound")}
    phases = {part.name: part for part in slices(groups, "phase")}
    order = ("input", "forward", "loss", "backward", "optimizer", "communication")
    costed = [
        group for group in groups if group.efficiency is not None and group.bound in ("memory", "compute")
    ]
    at_roof = sum((group.efficiency or 0.0) * group.time_ms_per_step for group in costed)
    baseline, profiled = kernel_ms + 3.4, (kernel_ms + 3.4) * 1.52
    peaks = [
        model.Peak(pipe=pipe, flops_per_s=rate, ridge_flops_per_byte=rate / BANDWIDTH, source=DATASHEET)
        for pipe, rate in PEAKS.items()
    ]
    return model.Report(
        tool_version="0.1.0",
        created="2026-01-15T10:30:00+00:00",
        trace=model.TraceInfo(
            path="runs/gpt/advisor/step_120/rank0.pt.trace.json.gz",
            size_bytes=4_212_330,
            events=61_204,
            rank=0,
            world_size=2,
            losses=[model.Loss(kind="lone surrogate in a name", count=3, detail="replaced")],
        ),
        device=model.DeviceInfo(
            name="NVIDIA H200",
            matched="H200 SXM",
            roofs="datasheet",
            peaks=peaks,
            bandwidth_bytes_per_s=BANDWIDTH,
            bandwidth_source="NVIDIA H200 datasheet",
            memory_bytes=141_000_000_000,
            l2_bytes=62_914_560,
            sms=132,
            link_bytes_per_s=64e9,
            link_source="PCIe 5.0 x16, one way",
            hierarchy=[
                model.MemoryLevel(
                    name="Registers", size_bytes=34_603_008, bandwidth_bytes_per_s=535.2e12,
                    source="the driver",
                ),
                model.MemoryLevel(
                    name="Shared memory and L1", size_bytes=30_818_304, bandwidth_bytes_per_s=33.45e12,
                    times_slower_than_above=16.0, compared_with="Registers", source="128 bytes per clock",
                ),
                model.MemoryLevel(name="L2 cache", size_bytes=62_914_560, source="NVIDIA H200 datasheet"),
                model.MemoryLevel(
                    name="Device memory (HBM)", size_bytes=141e9, bandwidth_bytes_per_s=BANDWIDTH,
                    times_slower_than_above=33.45e12 / BANDWIDTH, compared_with="Shared memory and L1",
                    source="NVIDIA H200 datasheet",
                ),
                model.MemoryLevel(
                    name="Host memory (link)", bandwidth_bytes_per_s=64e9,
                    times_slower_than_above=BANDWIDTH / 64e9, compared_with="Device memory (HBM)",
                    source="PCIe 5.0 x16, one way",
                ),
                model.MemoryLevel(
                    name="Disk", bandwidth_bytes_per_s=16e9, times_slower_than_above=4.0,
                    compared_with="Host memory (link)", source="rule of thumb: four lanes",
                ),
            ],
        ),
        environment={
            "torch": "2.11.0+cu130",
            "precision": "bf16-mixed",
            "strategy": "ddp",
            "optimizer": {"class": "AdamW", "fused": True, "foreach": None},
            "dataloader": {"num_workers": 4, "pin_memory": True, "batch_size": 8},
            "flags": {"allow_tf32_matmul": False, "cudnn_benchmark": True},
            "parameters": [[WIDTH, WIDTH]] * 148,
            "batch_shapes": [[8, 1024], [8, 1024]],
        },
        summary=model.Summary(
            verdict=f"The GPU is busy for {baseline - 3.4:.1f} of {baseline:.1f} ms a step, and a third of "
            "that goes to the head's unaligned matrix products.",
            steps=3,
            step_time_ms=model.StepTime(p50=profiled, p95=profiled * 1.04, all=[profiled, profiled * 1.04]),
            baseline_step_ms=baseline,
            gpu_busy_fraction=kernel_ms / baseline,
            gpu_busy_fraction_profiled=kernel_ms / profiled,
            gpu_busy_ms_per_step=kernel_ms,
            kernel_time_ms_per_step=kernel_ms,
            kernels_per_step=sum(group.calls_per_step for group in groups),
            bound_time_fraction=model.BoundTimeFraction(**by_bound),
            coverage=model.Coverage(
                costed_time_fraction=0.94, attributed_time_fraction=0.998, orphan_time_fraction=0.012
            ),
            roof_fraction=at_roof / sum(group.time_ms_per_step for group in costed),
            flops_per_step=sum(group.flops or 0.0 for group in groups),
            bytes_per_step=sum((group.bytes_read or 0.0) + (group.bytes_written or 0.0) for group in groups),
            mfu=0.287,
            peak_memory_bytes=38_200_000_000,
        ),
        breakdown=model.Breakdown(
            step=[
                model.Slice(name=name, time_ms_per_step=time_ms, fraction=time_ms / baseline)
                for name, time_ms in (
                    ("compute", kernel_ms - 3.0),
                    ("exposed communication", 2.9),
                    ("exposed copy", 0.1),
                    ("idle", 3.4),
                )
            ],
            phase=[phases[name] for name in order],
            family=slices(groups, "family"),
        ),
        kernels=groups,
        findings=findings(),
        together=model.Together(
            rules=["shapes.vocabulary", "fusion.chain"],
            saving_ms=model.Saving(low=7.0, likely=9.4, high=10.5),
            saving_fraction=0.228,
        ),
        passed=[model.Passed(rule="precision.tf32", title="fp32 matrix products run in TF32")],
        not_applicable=["communication.exposed"],
        replay=model.ReplayInfo(step_ms=42.6, observed_ms=64.7, replayed_ms=64.5, host_factor=0.52),
        data_quality=[
            model.Quality(level="info", code="steps.first", message="The first profiled step was left out."),
            model.Quality(
                level="warning",
                code="orphans",
                message="1.2% of device time was launched before the trace began and belongs to no operator.",
            ),
        ],
        ranks=[
            model.RankSummary(
                rank=rank,
                path=f"runs/gpt/advisor/step_120/rank{rank}.pt.trace.json.gz",
                device="NVIDIA H200",
                step_time_ms=profiled + rank,
                gpu_busy_fraction=0.63 - 0.01 * rank,
                kernel_time_ms_per_step=kernel_ms - rank,
                communication_ms_per_step=4.6 + rank,
                exposed_communication_ms_per_step=2.9 + rank,
                waiting_ms_per_step=1.73 * rank,
            )
            for rank in (0, 1)
        ],
        cross_checks=[
            model.CrossCheck(
                tool="Holistic Trace Analysis", figure="GPU busy", unit="ms", ours=40.1, theirs=40.2,
                difference_fraction=-0.0025,
            ),
            model.CrossCheck(
                tool="Holistic Trace Analysis", figure="communication overlap", unit="%", ours=37.0,
                theirs=35.1, difference_fraction=0.054,
            ),
            model.CrossCheck(
                tool="Holistic Trace Analysis", figure="critical path", unit="ms", ours=None, theirs=38.0,
                difference_fraction=None,
            ),
        ],
    )  # fmt: skip


def unknown() -> model.Report:
    """A report in which nothing was measured."""
    return model.Report(
        tool_version="0.1.0",
        created="2026-01-15T10:30:00+00:00",
        trace=model.TraceInfo(path="trace.json", size_bytes=None, events=0),
        device=model.DeviceInfo(name="unknown device"),
        summary=model.Summary(
            verdict="The trace has no training step in it.",
            steps=0,
            step_time_ms=model.StepTime(p50=None, p95=None),
            bound_time_fraction=model.BoundTimeFraction(),
            coverage=model.Coverage(),
        ),
        breakdown=model.Breakdown(),
        data_quality=[
            model.Quality(
                level="error",
                code="no_kernels",
                message="There is no device activity, so nothing is classified.",
            ),
            model.Quality(level="warning", code="no_baseline", message="Host-side figures are upper bounds."),
        ],
    )


def hostile() -> model.Report:
    """A report in which every text that may come from outside is an attack, each text in each place."""
    report = rich()
    texts = iter(lambda: HOSTILE[next(places) % len(HOSTILE)], None)
    places = iter(range(10**9))
    for group in report.kernels:
        group.name, group.op, group.module = next(texts), next(texts), next(texts)
        group.phase, group.family, group.bound = next(texts), next(texts), next(texts)
        group.flags, group.pipe = [next(texts)], group.pipe
    report.kernels[0].time_ms_per_step = float("nan")
    report.kernels[1].efficiency = float("inf")
    report.summary.verdict = " ".join(HOSTILE)
    report.trace.path, report.device.name, report.device.matched = next(texts), HOSTILE[0], HOSTILE[1]
    report.device.bandwidth_source, report.device.link_source = next(texts), next(texts)
    for peak in report.device.peaks:
        peak.source = next(texts)
    report.trace.losses = [model.Loss(kind=text, count=1, detail=text) for text in HOSTILE]
    report.environment = {text: [text, {text: text}] for text in HOSTILE}
    report.data_quality = [
        model.Quality(level=level, code=text, message=text)
        for text in HOSTILE
        for level in ("warning", "info", text)
    ]
    report.findings = [
        model.Finding(
            rule=text,
            title=text,
            evidence=list(HOSTILE),
            fix=f"```\n{text}\n````",
            risk=text,
            confidence=text,
            fix_torch=f"```\n{text}\n````",
            note=text,
            swap=text,
        )
        for text in HOSTILE
    ]
    report.passed = [model.Passed(rule=text, title=text) for text in HOSTILE]
    report.not_applicable = list(HOSTILE)
    for part in (*report.breakdown.step, *report.breakdown.phase, *report.breakdown.family):
        part.name = next(texts)
    for rank in report.ranks:
        rank.path, rank.device = next(texts), next(texts)
    for check in report.cross_checks:
        check.tool, check.figure, check.unit = next(texts), next(texts), next(texts)
    report.swaps = _hostile_swaps()
    return report


def _hostile_swaps() -> model.Swaps:
    bad = float("nan")
    return model.Swaps(
        asked=list(HOSTILE),
        verdict=" ".join(HOSTILE),
        remarks=list(HOSTILE),
        sites=[
            model.SwapSite(
                kind=text, what=text, where=list(HOSTILE), mechanism=text, chosen=text, reason=text,
                permanent=f"```\n{text}\n````", eager_ms_per_step=bad, step_fraction=float("inf"),
                trials=[model.SwapTrial(candidate=text, source=text, refused=text, error=bad, time_ms=bad)],
            )
            for text in HOSTILE
        ],
        steps=model.SwapSteps(eager_p50_ms=bad, saving_ms=model.Saving(low=bad, likely=bad, high=bad)),
    )  # fmt: skip


def long(count: int) -> model.Report:
    """The rich report with as many kernel groups as asked for, all of different names."""
    report = rich()
    source = report.kernels
    report.kernels = finish([copy.copy(source[place % len(source)]) for place in range(count)])
    for place, group in enumerate(report.kernels):
        group.name = f"{group.name} variant_{place}"
    return report
