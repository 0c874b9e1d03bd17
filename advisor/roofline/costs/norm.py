"""Normalisation layers: FLOPs an element as ATen's kernels were seen to execute them on an H200.

Layer norm forward 19 (Welford's update), its input gradient 15 and its weight gradients 5; RMS norm forward
4; batch norm in training 14. ``RowwiseMoments``, which rows of unaligned width and group norm take, divides
in full precision at each element: 66, and the kernel that applies its moments 4.

ATen's kernels of 128 threads a row visit long rows twice, and fetch again what the cache has lost by then.
"""

from __future__ import annotations

import re

from advisor.roofline.costs.args import (
    Unknown,
    flag,
    footprint,
    itemsize,
    optional,
    tensor,
    tensors,
    text,
    vector_pipe,
)
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, assign, cost
from advisor.roofline.costs.traffic import missed

_LAYER_FORWARD, _LAYER_INPUT, _LAYER_WEIGHT = 19, 15, 5
_MOMENTS, _APPLY = 66, 4
_RMS_FORWARD, _RMS_INPUT, _RMS_WEIGHT = 4, 10, 3
_BATCH_FORWARD, _BATCH_EVAL, _BATCH_BACKWARD = 14, 2, 14
_WEIGHT_KERNEL = r"gammabeta|gamma_beta|partgrad|gradgamma|dgamma|dweight"


def _small(*args: Tensor | None) -> float:
    return sum(footprint(arg) for arg in args if arg is not None)


def _like(x: Tensor) -> float:
    return x.numel * itemsize(x.dtype)


def _rows(x: Tensor, weight: Tensor | None) -> int:
    """Rows that are normalised, one statistic each; the weight spans a row, else the last dimension does."""
    row = weight.numel if weight else x.shape[-1]
    if not row or x.numel % row:
        raise Unknown("the weight does not span a row")
    return x.numel // row


@cost("aten::native_layer_norm", "aten::_fused_rms_norm")
def row_forward(call: OpCall) -> Result:
    """Reads x, weight and bias; writes y and, in fp32, mean and reciprocal deviation (RMS: the latter)."""
    x, weight, bias = tensor(call, 0), optional(call, 2), None
    is_rms = "rms" in call.name
    if not is_rms:
        bias = optional(call, 3)
    rows = _rows(x, weight)
    statistics = rows * 4.0 * (1 if is_rms else 2)
    flops = float((_RMS_FORWARD if is_rms else _LAYER_FORWARD) * x.numel)
    once, pipe = footprint(x) + _small(weight, bias), vector_pipe(x.dtype)
    again = _visited_twice(call, footprint(x), _like(x), rows)
    main = Cost(flops, once + again, _like(x) + statistics, pipe, again)
    moments = Cost(float(_MOMENTS * x.numel), footprint(x), statistics, pipe)
    apply = Cost(float(_APPLY * x.numel), once + statistics, _like(x), pipe)
    whole = Cost(flops, once, _like(x) + statistics, pipe)
    return assign(call, main, (r"rowwisemoments", moments), (r"layernormforward", apply), whole=whole)


def _visited_twice(call: OpCall, read: float, written: float, rows: int) -> float:
    """Bytes of rows that ``vectorized`` kernels fetch for a second visit."""
    if not any("vectorized" in launch.name for launch in call.launches):
        return 0.0
    return read * missed(call, (read + written) / rows, rows, small_blocks=True)


@cost("aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward")
def row_backward(call: OpCall) -> Result:
    """Two kernels: dx reads dy, x, weight and the statistics; dweight and dbias read all but the weight."""
    is_rms = "rms" in call.name
    grad, x = tensor(call, 0), tensor(call, 1)
    if grad.shape != x.shape:
        raise Unknown("gradient and input differ in shape")
    weight = optional(call, 4 if is_rms else 5)
    statistics = _small(*(tensors(call, 3) if is_rms else tensors(call, 3, 4)))
    both = footprint(grad) + footprint(x) + statistics
    pipe = vector_pipe(x.dtype)
    again = _visited_twice(call, footprint(grad) + footprint(x), _like(x), _rows(x, weight))
    of_input = Cost(
        float((_RMS_INPUT if is_rms else _LAYER_INPUT) * x.numel),
        both + _small(weight) + again,
        _like(x),
        pipe,
        again,
    )
    weights = 0.0 if weight is None else _like(weight) * (1 if is_rms else 2)
    of_weight = Cost(float((_RMS_WEIGHT if is_rms else _LAYER_WEIGHT) * x.numel), both, weights, pipe)
    whole = of_input
    if weight is not None:
        whole = Cost(
            of_input.flops + of_weight.flops, both + _small(weight), of_input.bytes_written + weights, pipe
        )
    return assign(call, of_input, (_WEIGHT_KERNEL, of_weight), whole=whole)


@cost(
    "LigerRMSNormFunction",
    "LigerLayerNormFunction",
    "FusedRMSNormAffineFunction",
    "FusedLayerNormAffineFunction",
)
def library_forward(call: OpCall) -> Cost:
    """Liger's and Apex's autograd functions: x, weight (and bias), like ATen's."""
    x, weight, bias = tensor(call, 0), tensor(call, 1), optional(call, 2)
    is_rms = "RMS" in call.name
    statistics = _rows(x, weight) * 4.0 * (1 if is_rms else 2)
    return Cost(
        float((_RMS_FORWARD if is_rms else _LAYER_FORWARD) * x.numel),
        footprint(x) + _small(weight, None if is_rms else bias),
        _like(x) + statistics,
        vector_pipe(x.dtype),
    )


@cost("_C::rms_norm", "_C::fused_add_rms_norm", "sgl_kernel::rmsnorm", "sgl_kernel::fused_add_rmsnorm")
def serving_rms(call: OpCall) -> Cost:
    """vLLM's and SGLang's: (out, x, weight), or (x, residual, weight), whose sum is kept as the residual."""
    first, second, weight = tensor(call, 0), tensor(call, 1), tensor(call, 2)
    _rows(first, weight)
    if first.shape != second.shape:
        raise Unknown("input and output or residual differ in shape")
    adds = "fused_add" in call.name
    read = footprint(second) + _small(weight) + (footprint(first) if adds else 0.0)
    written = _like(first) * (2 if adds else 1)
    return Cost(float((_RMS_FORWARD + adds) * first.numel), read, written, vector_pipe(first.dtype))


@cost("aten::native_group_norm")
def group_forward(call: OpCall) -> Result:
    """A kernel for each group's moments, a small one for the fused scale and shift, one that applies them."""
    x, weight, bias = tensor(call, 0), optional(call, 1), optional(call, 2)
    whole = Cost(
        float(_LAYER_FORWARD * x.numel), footprint(x) + _small(weight, bias), _like(x), vector_pipe(x.dtype)
    )
    moments = Cost(float(_MOMENTS * x.numel), footprint(x), 0.0, whole.pipe)
    small = _small(weight, bias)
    fused = Cost(small, small, small, whole.pipe)
    apply = Cost(2.0 * x.numel, footprint(x), _like(x), whole.pipe)
    return assign(call, apply, (r"rowwisemoments", moments), (r"computefusedparams", fused), whole=whole)


@cost("aten::native_group_norm_backward")
def group_backward(call: OpCall) -> Result:
    """Inner sums over dy and x, small kernels for the coefficients and the weights, then dx from dy and x."""
    grad, x, weight = tensor(call, 0), tensor(call, 1), optional(call, 4)
    both, pipe = footprint(grad) + footprint(x), vector_pipe(x.dtype)
    sums = Cost(4.0 * x.numel, both, 0.0, pipe)
    small = _small(weight) or itemsize(x.dtype)
    tiny = Cost(small, small, small, pipe)
    apply = Cost(4.0 * x.numel, both, _like(x), pipe)
    whole = Cost(8.0 * x.numel, both + small, _like(x) + 2 * small, pipe)
    return assign(
        call, apply, (r"internalgradients", sums), (r"gammabeta|fusedparams|backwardfused", tiny), whole=whole
    )


def _channels(x: Tensor) -> int:
    if len(x.shape) < 2:
        raise Unknown("no channel dimension")
    return x.shape[1]


def _second_read(call: OpCall, names: str, read: float, written: float, channels: int) -> float:
    """Bytes that a kernel reads again where it visits a channel twice (no ``singleread`` in its name)."""
    visits = (launch.name for launch in call.launches if "singleread" not in launch.name)
    kernels = [name for name in visits if re.search(names, name)]
    return read * missed(call, (read + written) / channels, channels) if kernels else 0.0


@cost(
    "aten::cudnn_batch_norm",
    "aten::native_batch_norm",
    "aten::miopen_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update",
    "aten::_native_batch_norm_legit_no_training",
    "aten::_batch_norm_no_update",
)
def batch_forward(call: OpCall) -> Result:
    """In training statistics a channel, then scale and shift: each reads x; one kernel may do both."""
    x, weight = tensor(call, 0), optional(call, 1)
    per_channel = _channels(x) * 4.0
    training = "no_training" not in call.name and "no_update" not in call.name and _training(call)
    pipe = vector_pipe(x.dtype)
    flops = float((_BATCH_FORWARD if training else _BATCH_EVAL) * x.numel)
    small = per_channel * (4 if weight else 2)
    again = _second_read(call, "bn_fw_tr", footprint(x), _like(x), _channels(x)) if training else 0.0
    whole = Cost(flops, footprint(x) + small + again, _like(x) + (small if training else 0.0), pipe, again)
    statistics = Cost(float((_BATCH_FORWARD - 2) * x.numel), footprint(x), 2 * per_channel, pipe)
    apply = Cost(2.0 * x.numel, footprint(x) + small, _like(x), pipe)
    tiny = Cost(per_channel, 2 * per_channel, 2 * per_channel, pipe)
    return assign(
        call,
        whole,
        (r"finalmean|update_stats|finalize|calc_mean_var_final", tiny),
        (r"collect_statistics|meanvariance|batch_norm_reduce_statistics", statistics),
        (r"transform_input|trainspatialnorm\b|fwdtrainspatialnorm", apply),
        whole=whole,
    )


def _training(call: OpCall) -> bool:
    """The ``training`` flag, which follows the running statistics (absent for ``_legit.no_stats``).

    Traces before PyTorch 2.0 lack it: there the kernels' names tell.
    """
    if call.concrete:
        return flag(call, 5) if text(call, 5).lower() in ("true", "false") else flag(call, 3)
    names = " ".join(launch.name for launch in call.launches).lower()
    if re.search(r"bn_fw_tr|fwdtrain|collect_statistics", names):
        return True
    if re.search(r"bn_fw_inf|fwdinfer|transform_input", names):
        return False
    raise Unknown("training or not is not recorded")


@cost(
    "aten::cudnn_batch_norm_backward",
    "aten::native_batch_norm_backward",
    "aten::miopen_batch_norm_backward",
    "aten::batch_norm_backward",
)
def batch_backward(call: OpCall) -> Result:
    """Sums over dy and x for dweight and dbias, then dx from dy and x; one kernel may do both."""
    a, b = tensor(call, 0), tensor(call, 1)
    if a.shape != b.shape:
        raise Unknown("gradient and input differ in shape")
    per_channel, both, pipe = _channels(a) * 4.0, footprint(a) + footprint(b), vector_pipe(a.dtype)
    again = _second_read(call, "bn_bw|::batch_norm_backward_kernel", both, _like(a), _channels(a))
    whole = Cost(
        float(_BATCH_BACKWARD * a.numel),
        both + 3 * per_channel + again,
        _like(a) + 2 * per_channel,
        pipe,
        again,
    )
    sums = Cost(8.0 * a.numel, both, 2 * per_channel, pipe)
    apply = Cost(6.0 * a.numel, both + 4 * per_channel, _like(a), pipe)
    tiny = Cost(per_channel, 2 * per_channel, 2 * per_channel, pipe)
    return assign(
        call,
        whole,
        (r"finaldscale|dscaledbiasfinal|final", tiny),
        (r"backward_reduce|dscaledbias|bwdspatialdscale", sums),
        (r"backward_elemt|bwdspatialdx", apply),
        whole=whole,
    )


@cost(
    "aten::batch_norm_stats",
    "aten::batch_norm_update_stats",
    "aten::batch_norm_gather_stats_with_counts",
    "aten::batch_norm_gather_stats",
)
def batch_statistics(call: OpCall) -> Cost:
    """SyncBatchNorm's statistics: reads its input, writes two numbers a channel."""
    x = tensor(call, 0)
    return Cost(float((_BATCH_FORWARD - 2) * x.numel), footprint(x), 8.0 * _channels(x), vector_pipe(x.dtype))


@cost("aten::batch_norm_elemt", "aten::batch_norm_backward_reduce", "aten::batch_norm_backward_elemt")
def batch_elements(call: OpCall) -> Cost:
    """SyncBatchNorm's passes: scale and shift; sums over dy and x; dx from dy and x."""
    x = tensor(call, 0)
    read = footprint(x) + (footprint(tensor(call, 1)) if "backward" in call.name else 0.0)
    written = 8.0 * _channels(x) if call.name.endswith("reduce") else _like(x)
    flops = {"aten::batch_norm_elemt": 2, "aten::batch_norm_backward_reduce": 8}.get(call.name, 6)
    return Cost(float(flops * x.numel), read, written, vector_pipe(x.dtype))


@cost("aten::_weight_norm_interface", "aten::_weight_norm_interface_backward")
def weight_norm(call: OpCall) -> Cost:
    """``v * g / |v|`` by rows; backward reads dw and v, writes dv."""
    v = tensor(call, 0)
    read = footprint(v) + (footprint(tensor(call, 1)) if "backward" in call.name else 0.0)
    return Cost(float((8 if "backward" in call.name else 4) * v.numel), read, _like(v), vector_pipe(v.dtype))
