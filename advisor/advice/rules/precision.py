"""Precision: what runs in more bits than it needs, and what the fewer bits cost on top."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from advisor.advice.autocast import attention_in_16_bits, casts, memory_bound_in_16_bits
from advisor.advice.calls import tensors_of
from advisor.advice.edits import DropSync, Edit, Estimate, Remove, Retime
from advisor.advice.evidence import kernel_lines, module_line
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rates import aligned, at_most, convolution_ns, matmul_ns, pick
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent
from advisor.roofline.costs import Tensor, roles

#: Below this share of the step a change of precision is not worth its risk.
_WORTH = 0.05
_SHARED_SOURCE = """\
An H200 (torch 2.11), 8192³: 51 TFLOP/s in fp32, 353 in TF32, 679 to 790 in bf16
NVIDIA A100 whitepaper: TF32 keeps fp32's 8 bits of exponent and 10 bits of mantissa"""


def _work(loop: Loop, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Useful FLOPs and compulsory bytes of these launches."""
    costs = loop.analysis.costs
    flops = costs.flops[rows] - costs.flops_padding[rows]
    return flops, costs.bytes_read[rows] - costs.bytes_reread[rows] + costs.bytes_written[rows]


def _on_pipes(loop: Loop, *names: str) -> np.ndarray:
    """Rows of counted matrix kernels that compute on one of these pipes."""
    costs = loop.analysis.costs
    wanted = [i for i, pipe in enumerate(costs.pipes) if pipe in names]
    matrix = loop.by_name(roles.is_matrix, bool)
    return np.flatnonzero(np.isin(costs.pipe, wanted) & matrix & loop.counted & (costs.flops > 0))


def _fp32_products(loop: Loop, *pipes: str) -> np.ndarray:
    """Rows of matrix kernels on these pipes whose operands are fp32."""
    rows = _on_pipes(loop, *pipes)
    return rows[np.array([_is_fp32(loop, row) for row in rows.tolist()], bool)]


def _is_fp32(loop: Loop, row: int) -> bool:
    op = int(loop.rows.op[row])
    return op >= 0 and any(tensor.dtype == "fp32" for tensor in tensors_of(loop.call(op))[:2])


def _rows_aligned(loop: Loop, rows: np.ndarray, itemsize: float) -> np.ndarray:
    """bool (n,): whether all rows of operands and result would begin at multiples of 16 bytes."""
    lengths = {matrix.row: matrix.row_lengths for matrix in loop.calls.matrices}
    return np.array([all(aligned(n, itemsize) for n in lengths.get(row, ())) for row in rows.tolist()], bool)


def _in_precision(loop: Loop, rows: np.ndarray, pipe: str, itemsize: float) -> Estimate | None:
    """Time of these fp32 products and convolutions on another pipe."""
    flops, nbytes = _work(loop, rows)
    nbytes = nbytes * itemsize / 4
    products = matmul_ns(loop.device, flops, nbytes, pipe, aligned=_rows_aligned(loop, rows, itemsize))
    convolutions = convolution_ns(loop.device, flops, nbytes, pipe)
    if products is None or convolutions is None:
        return None
    return pick(loop.family[rows] == "convolution", convolutions, products)


@rule(
    "precision.tf32",
    title="fp32 matrix products run on tensor cores",
    failure="fp32 matrix products run without TF32",
    source=_SHARED_SOURCE,
)
def tf32(loop: Loop) -> Iterator[Finding]:
    """Matrix products in fp32 run on the plain units unless TF32 is allowed, at a seventh of the rate.

    TF32 rounds the operands to 10 bits of mantissa, multiplies on tensor cores and sums in fp32. PyTorch
    allows it for convolutions, not for matrix products.

    Recognised by matrix kernels with fp32 operands on the plain pipe where the device has a TF32 pipe. The
    new time: that of TF32 kernels of the same sizes, bound by memory where they are; rows that begin
    unaligned keep them slow.

    Silent where TF32 or 16 bits are in use, on devices without TF32, on AMD's, where this setting alone
    changes nothing, and below a twentieth of the step.
    """
    loop.require(loop.device.peak("tensor_tf32"), "the device has no TF32, or its roofs are not known")
    loop.require(not loop.device.arch.startswith("gfx"), "PyTorch allows no TF32 on AMD's by this setting")
    rows = _fp32_products(loop, "vector_fp32")
    # Fused attention in fp32 multiplies in three TF32 products each whatever the setting.
    rows = rows[loop.family[rows] != "attention"]
    taken = loop.per_step_ns(rows)
    if not len(rows) or loop.share(taken) < _WORTH:
        return
    time = _in_precision(loop, rows, "tensor_tf32", 4)
    if time is None:
        return
    flops = float(_work(loop, rows)[0].sum()) / loop.steps
    yield Finding(
        title=f"{count(len(rows) / loop.steps, 'matrix product', 'run', what='in fp32')} without TF32: "
        f"{duration(taken)}, {percent(loop.share(taken))} of the step",
        evidence=[
            f"{flops / 1e12:.2f} TFLOP a step at {flops / taken / 1e3:.0f} TFLOP/s on the plain units",
            *kernel_lines(loop, rows.tolist()),
            *module_line(loop, rows.tolist()),
        ],
        edits=[Retime(rows, at_most(time, loop.rows.dur_ns[rows].astype(float)))],
        fix='torch.set_float32_matmul_precision("high")  # before trainer.fit',
        risk="operands of products are rounded to 10 bits of mantissa in place of 23; sums stay in fp32",
    )


_TORCH_NAME = {"bf16": "bfloat16", "fp16": "float16"}


@rule(
    "precision.mixed",
    title="Matrix products run in 16 bits",
    failure="The model trains in 32 bits where mixed precision would do",
    source=_SHARED_SOURCE + "\nPyTorch, Automatic Mixed Precision: which operators run in which dtype",
)
def mixed(loop: Loop) -> Iterator[Finding]:
    """Mixed precision multiplies in bf16 and keeps weights, sums, norms and the loss in fp32.

    bf16 has fp32's range, so no loss scaling is needed. Products and convolutions run at the 16-bit rate,
    what follows them moves half the bytes, and attention becomes eligible for FlashAttention. On top come
    casts of weights and of what comes from fp32 norms; a softmax written by hand stays in fp32 between casts.

    Recognised by products, convolutions or attention with fp32 operands in a good part of the step. Each
    kernel's new time follows from its kind and size.

    Silent where 16 bits are in use, on devices without 16-bit matrix units, and where such work is under a
    tenth of the step.
    """
    dtype = "bf16" if loop.device.peak("tensor_bf16") else "fp16"
    pipe = f"tensor_{dtype}"
    loop.require(loop.device.peak(pipe), "the device has no 16-bit matrix units, or its roofs are not known")
    rows = _fp32_products(loop, "vector_fp32", "tensor_tf32")
    taken = loop.per_step_ns(rows)
    if not len(rows) or loop.share(taken) < 2 * _WORTH:
        return
    fused_attention = loop.family[rows] == "attention"
    products = rows[~fused_attention]
    time = _in_precision(loop, products, pipe, 2)
    if time is None:
        return
    edits: list[Edit] = [
        Retime(products, at_most(time, loop.rows.dur_ns[products].astype(float), worse=1.05))
    ]
    edits += attention_in_16_bits(loop, rows[fused_attention], dtype)
    edits += memory_bound_in_16_bits(loop, set(rows.tolist()))
    edits += casts(loop, products)
    now = "TF32" if np.isin(rows, _on_pipes(loop, "tensor_tf32")).mean() > 0.5 else "fp32"
    yield Finding(
        title=f"{count(len(rows) / loop.steps, 'product', 'take', what='in 32 bits')} {duration(taken)}, "
        f"{percent(loop.share(taken))} of the step, where {dtype} would do",
        evidence=[
            f"{now} now; {dtype} multiplies at "
            f"{(loop.device.peak(pipe) or 0) / 1e12:.0f} TFLOP/s on this device",
            *kernel_lines(loop, rows.tolist(), 5),
            *module_line(loop, rows.tolist()),
        ],
        edits=edits,
        fix=f'trainer = Trainer(precision="{"bf16" if dtype == "bf16" else "16"}-mixed")',
        fix_torch=f'with torch.autocast("cuda", dtype=torch.{_TORCH_NAME[dtype]}):\n'
        "    loss = model(batch)\nloss.backward()"
        + ("" if dtype == "bf16" else "  # scaled by torch.amp.GradScaler"),
        risk="operands of products are rounded to 8 bits of mantissa; check the loss curve, and keep "
        "sensitive parts in fp32 with torch.autocast(enabled=False)"
        if dtype == "bf16"
        else "fp16 overflows beyond 65504: needs loss scaling, which Lightning adds by itself",
    )


@rule(
    "precision.weight_casts",
    title="Weights are seldom cast",
    failure="Autocast casts the same weights in each step",
    source="PyTorch, Automatic Mixed Precision: weights are cast once within an autocast context",
)
def weight_casts(loop: Loop) -> Iterator[Finding]:
    """Under autocast, fp32 weights are cast to 16 bits in each forward, and their gradients back.

    The cost is that of the parameters, whatever the batch: it counts for small batches and large layers.
    Weights kept in 16 bits need no cast; several forwards inside one autocast context share one. With them
    gradients and optimizer state have 16 bits too, so that the update moves half the bytes, and so do norms
    and residual sums between products, whose results need no cast either. At worst, with fp32 master weights,
    the update stays as it is.

    Recognised by casts of tensors with the shape of a trained parameter inside products and convolutions,
    from a fiftieth of the step on. Silent for smaller shares: casts are the price of fp32 master weights.
    """
    shapes = {tensor.shape for tensor in loop.trained if len(tensor.shape) >= 2}
    loop.require(shapes, "the trained parameters are not known")
    rows: list[int] = []
    others: list[int] = []
    times: dict[tuple[int, ...], int] = defaultdict(int)
    for unit in loop.calls.units:
        if not ("conv" in unit.name or unit.name in ("linear", "matmul", "addmm", "mm", "bmm", "to")):
            continue
        for row in unit.rows:
            cast = _cast_of(loop, row)
            if cast is not None and cast in shapes:
                rows.append(row)
                times[cast] += row in unit.forward
            elif cast is not None and unit.name != "to":
                others.append(row)
    loop.require(rows, "no casts of weights")
    taken = loop.per_step_ns(np.array(rows))
    if loop.share(taken) < 0.02:
        return
    worst = max(times, key=lambda shape: times[shape])
    update = np.flatnonzero(loop.in_phase("optimizer") & loop.counted & (loop.rows.dur_ns > _SMALL_NS))
    halved = _fp32_work(loop, {*rows, *others})
    edits: list[Edit] = [Remove(np.array(rows + others))]
    edits += [_on_half_the_bytes(loop, at) for at in (update, halved) if len(at)]
    host_ns, gone_ns = loop.host_gain_ns(edits), loop.per_step_ns(np.array(rows + others))
    launching = f", the host {duration(host_ns)} to launch them" if host_ns > gone_ns else ""
    twice_ns = loop.per_step_ns(update) + loop.per_step_ns(halved)
    besides = f", and {duration(twice_ns)} of other kernels move twice the bytes" if twice_ns else ""
    yield Finding(
        title=f"weights kept in fp32 under autocast: casts take {duration(gone_ns)}{launching}{besides}",
        evidence=[
            f"{count(len(rows) / loop.steps, 'cast', 'take', what='of weights and their gradients')} "
            f"{duration(taken)}, {percent(loop.share(taken))} of the step",
            f"weights of {list(worst)} are cast {times[worst] / loop.steps:.0f} times a step",
            *kernel_lines(loop, rows),
            *(
                f"in 16 bits, {duration(loop.per_step_ns(at))} of {what} would move half the bytes"
                for at, what in ((update, "the update"), (halved, "norms and sums in fp32"))
                if len(at)
            ),
            *module_line(loop, rows),
        ],
        edits=edits,
        fix='trainer = Trainer(precision="bf16-true")  # weights in bf16, or with fp32 master weights:\n'
        "# FSDP MixedPrecision(param_dtype=torch.bfloat16) casts once a step",
        risk="updates smaller than a 256th of a weight are lost in bf16 weights; use an optimizer with "
        "stochastic rounding or fp32 master weights",
    )


#: Launches shorter than this hardly shrink with their bytes.
_SMALL_NS = 5_000


#: Memory-bound work in bf16 over that in fp32: fused AdamW of 89 million parameters takes 0.67 ms in place of
#: 0.92, layer_norm and its gradients 0.66 to 0.73, a residual sum 0.35. Measured on an H200 (torch 2.11).
_ON_HALF = {"norm": (1.0, 0.7, 0.5), "optimizer": (1.0, 0.7, 0.5), "": (1.0, 0.5, 0.35)}


def _on_half_the_bytes(loop: Loop, rows: np.ndarray) -> Retime:
    now = loop.rows.dur_ns[rows].astype(float)
    factor = np.array([_ON_HALF.get(family, _ON_HALF[""]) for family in loop.family[rows].tolist()])
    return Retime(rows, Estimate(*(now * each for each in factor.T)))


def _fp32_work(loop: Loop, besides: set[int]) -> np.ndarray:
    """Rows of the model's memory-bound work in fp32, matrix products and the loss left out."""
    memory = loop.analysis.bounds.is_bound("memory") & (loop.rows.dur_ns > _SMALL_NS)
    memory &= loop.in_phase("forward", "backward") & (loop.family != "loss")
    return np.array(
        [
            row for unit in loop.calls.units if any(tensor.dtype == "fp32" for tensor in unit.tensors)
            for row in unit.rows if memory[row] and row not in besides and _in_fp32(loop, row)
        ],
        np.int64,
    )  # fmt: skip


def _in_fp32(loop: Loop, row: int) -> bool:
    """Whether the largest tensor that a launch's operator is given is fp32."""
    shaped = [tensor for tensor in tensors_of(loop.call(int(loop.rows.op[row]))) if tensor.shape]
    return bool(shaped) and max(shaped, key=lambda tensor: tensor.numel).dtype == "fp32"


def _cast_of(loop: Loop, row: int) -> tuple[int, ...] | None:
    """Shape of what a launch casts between fp32 and 16 bits, or None."""
    call = loop.call(int(loop.rows.op[row]))
    if call.name != "aten::copy_" or len(call.inputs) < 2:
        return None
    target, source = call.inputs[:2]
    if not isinstance(target, Tensor) or not isinstance(source, Tensor):
        return None
    return target.shape if {target.dtype, source.dtype} in ({"fp32", "bf16"}, {"fp32", "fp16"}) else None


@rule(
    "precision.grad_scaler",
    title="No gradient scaling where bf16 would spare it",
    failure="fp16 needs a GradScaler, bf16 would not",
    source="PyTorch, Automatic Mixed Precision: gradient scaling",
)
def grad_scaler(loop: Loop) -> Iterator[Finding]:
    """fp16 gradients underflow, so the loss is scaled, and gradients are unscaled and searched for infinity.

    That is a pass over all gradients, and the search's result is fetched: the host waits for backward before
    it may launch the optimizer. bf16 has fp32's range and needs none of it, at the same speed.

    Recognised by the scaler's operators on a device with bf16. Silent on devices without.
    """
    loop.require(loop.device.peak("tensor_bf16"), "the device has no bf16 matrix units")
    scaler = loop.ops_named(r"^aten::_amp_(?:foreach_non_finite_check_and_unscale_|update_scale_)$")
    loop.require(scaler.any(), "no GradScaler")
    rows = np.flatnonzero((loop.under(scaler) >= 0) & loop.counted)
    calls = _waits_after(loop, scaler)
    taken = loop.per_step_ns(rows)
    yield Finding(
        title=f"gradient scaling for fp16: {duration(taken)} on the device and "
        f"{count(len(calls) / loop.steps, 'wait')} of the host a step, which bf16 does without",
        evidence=kernel_lines(loop, rows.tolist()),
        edits=[Remove(rows), DropSync(calls)] if len(calls) else [Remove(rows)],
        fix='trainer = Trainer(precision="bf16-mixed")  # in place of "16-mixed"\n'
        "# or keep fp16 with torch.optim.AdamW(..., fused=True): it takes the flag without a wait",
        fix_torch='torch.autocast("cuda", dtype=torch.bfloat16)  # and no torch.amp.GradScaler',
        risk="bf16 keeps 8 bits of mantissa where fp16 keeps 11, but does not overflow",
    )


def _waits_after(loop: Loop, scaler: np.ndarray) -> np.ndarray:
    """Calls that wait for the device inside the `item` right after a scaler's operator."""
    trace = loop.timeline.trace
    items = np.flatnonzero(loop.ops_named(r"^aten::item$"))
    starts = trace.ops.ts_ns[items]
    found: list[int] = []
    for op in np.flatnonzero(scaler).tolist():
        at = int(np.searchsorted(starts, trace.ops.end_ns[op]))
        if at == len(items) or starts[at] - trace.ops.end_ns[op] > 1_000_000:
            continue
        first, last = trace.ops.ts_ns[items[at]], trace.ops.end_ns[items[at]]
        inside = (trace.runtime.ts_ns >= first) & (trace.runtime.ts_ns < last)
        waits = [
            i for i in np.flatnonzero(inside).tolist() if "ynchronize" in trace.names[trace.runtime.name[i]]
        ]
        found += waits
    return np.array(sorted(set(found)), np.int64)


#: fp8 pays where operands are large in all three sizes; casts and scales eat the rest.
_MIN_FP8 = 2_048
_FP8_TRAINING = """\
from torchao.float8 import convert_to_float8_training
def configure_model(self):
    convert_to_float8_training(self.model, module_filter_fn=lambda m, name: "head" not in name)
    self.model.compile()  # fuses the casts"""
_FP8_INFERENCE = """\
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, quantize_
quantize_(model, Float8DynamicActivationFloat8WeightConfig())
model.compile()  # fuses the casts"""


@rule(
    "precision.fp8",
    title="Large products could not gain from fp8",
    failure="Large products run in 16 bits where the device has fp8",
    source="Micikevicius et al., FP8 Formats for Deep Learning (2022); torchao float8 training",
)
def fp8(loop: Loop) -> Iterator[Finding]:
    """fp8 doubles the rate of matrix products over bf16, less what scaling and casting the operands costs.

    It pays for linear layers whose sizes are all 2048 and more. Recognised by such products in bf16 on a
    device with fp8, in a fifth of the step or more. The range begins at no gain, for fp8 training needs a
    library and a check of the loss. Silent for small layers, attention's products, devices without fp8.
    """
    loop.require(loop.device.peak("tensor_fp8"), "the device has no fp8, or its roofs are not known")
    pipes, costs = loop.analysis.costs.pipes, loop.analysis.costs
    rows = [
        matrix.row
        for matrix in loop.calls.matrices
        if matrix.product.batch == 1
        and min(matrix.product.m, matrix.product.n, matrix.product.k) >= _MIN_FP8
        and costs.pipe[matrix.row] >= 0
        and pipes[costs.pipe[matrix.row]] in ("tensor_bf16", "tensor_fp16")
    ]
    at = np.array(rows, np.int64)
    taken = loop.per_step_ns(at)
    if not rows or loop.share(taken) < 0.2:
        return
    now = loop.rows.dur_ns[at].astype(float)
    yield Finding(
        title=f"{count(len(rows) / loop.steps, 'large product', 'take', what='in 16 bits')} "
        f"{duration(taken)}, {percent(loop.share(taken))} of the step, on a device with fp8",
        evidence=kernel_lines(loop, rows),
        edits=[Retime(at, Estimate(now, now * 0.8, now * 0.6))],
        fix=_FP8_TRAINING if loop.in_phase("backward").any() else _FP8_INFERENCE,
        risk="fp8 keeps 2 or 3 bits of mantissa: compare the results with a run in bf16",
        confidence="heuristic",
    )


@rule(
    "precision.optimizer_state",
    title="Optimizer state takes a small part of the step",
    failure="Reading and writing fp32 optimizer state takes a good part of the step",
    source="Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022)",
)
def optimizer_state(loop: Loop) -> Iterator[Finding]:
    """A fused Adam step moves 28 bytes a parameter, 16 of them for two moments in fp32.

    Moments in 8 bits move 4 bytes in their place. Recognised by fused Adam kernels bound by memory in a
    twelfth of the step or more. Silent where the optimizer is not fused yet, which gains more.
    """
    fused = loop.ops_named(r"_fused_adam")
    loop.require(fused.any(), "no fused Adam")
    rows = np.flatnonzero((loop.under(fused) >= 0) & loop.counted)
    taken = loop.per_step_ns(rows)
    if not len(rows) or loop.share(taken) < 0.08:
        return
    now = loop.rows.dur_ns[rows].astype(float)
    yield Finding(
        title=f"moments in fp32: the update takes {duration(taken)}, {percent(loop.share(taken))} of a step",
        evidence=kernel_lines(loop, rows.tolist()),
        edits=[Retime(rows, Estimate(now * 1.1, now * 0.75, now * 0.57))],
        fix="from torchao.optim import AdamW8bit  # or bitsandbytes.optim.AdamW8bit\n"
        "def configure_optimizers(self):\n    return AdamW8bit(self.parameters(), lr=self.lr)",
        risk="moments are rounded to 8 bits in blocks; embeddings are best left in fp32",
        confidence="heuristic",
    )
