"""Losses, forward and backward. Reductions to a mean or sum appear as operators of their own."""

from __future__ import annotations

from advisor.roofline.costs.args import (
    Unknown,
    broadcast,
    footprint,
    itemsize,
    optional,
    size_bytes,
    tensor,
    tensors,
    vector_pipe,
)
from advisor.roofline.costs.conventions import ADD, EXP, FMA, LOG, MUL, SIGMOID
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import cost
from advisor.roofline.costs.traffic import FETCH_BYTES, distinct


def _picked(scores: Tensor, target: Tensor) -> float:
    """Bytes fetched to read one class of each position.

    Where classes lie side by side that is a fetch for each; where positions do (images), neighbours that pick
    the same class share one.
    """
    classes = scores.shape[1] if len(scores.shape) > 1 else scores.numel
    side_by_side = scores.strides is None or len(scores.shape) < 3 or scores.strides[1] == 1
    together = 1.0 if side_by_side else max(1.0, FETCH_BYTES / itemsize(scores.dtype))
    return target.numel / together * distinct(together, classes) * FETCH_BYTES


@cost("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_forward(call: OpCall) -> Cost:
    """Reads the targets and, of each row of log-probabilities, the target's entry alone."""
    scores, target, weight = tensor(call, 0), tensor(call, 1), optional(call, 2)
    width = itemsize(scores.dtype)
    read = footprint(target) + min(_picked(scores, target), footprint(scores))
    read += footprint(weight) if weight else 0.0
    return Cost(float(FMA * target.numel), read, 2 * width, vector_pipe(scores.dtype))


@cost("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_backward(call: OpCall) -> Cost:
    """Writes one entry a row into the gradient, which an operator of its own has zeroed."""
    scores, target = tensor(call, 1), tensor(call, 2)
    written = target.numel * itemsize(scores.dtype)
    return Cost(float(2 * target.numel), footprint(target), written, vector_pipe(scores.dtype))


#: FLOPs an element, forward and backward.
_ELEMENTWISE = {
    "mse_loss": (ADD + MUL, ADD + 2 * MUL), "l1_loss": (ADD, ADD + MUL),
    "smooth_l1_loss": (ADD + FMA, ADD + 2 * MUL), "huber_loss": (ADD + FMA, ADD + 2 * MUL),
    "binary_cross_entropy": (2 * LOG + 2 * FMA, FMA + 12),
    "binary_cross_entropy_with_logits": (EXP + LOG + 3 * FMA, SIGMOID + FMA),
    "soft_margin_loss": (EXP + LOG + MUL, EXP + FMA + 10), "kl_div": (LOG + FMA, MUL),
}  # fmt: skip


@cost(*(f"aten::{name}" for name in _ELEMENTWISE))
def elementwise_forward(call: OpCall) -> Cost:
    """Reads input and target (and a weight), writes the loss of each element."""
    x, target = tensor(call, 0), tensor(call, 1)
    shape = broadcast(x.shape, target.shape)
    weight = optional(call, 2) if "binary" in call.name else None
    read = footprint(x) + footprint(target) + (footprint(weight) if weight else 0.0)
    written = size_bytes(shape, x.dtype)
    elements = written / itemsize(x.dtype)
    return Cost(
        _ELEMENTWISE[call.name.removeprefix("aten::")][0] * elements, read, written, vector_pipe(x.dtype)
    )


@cost(*(f"aten::{name}_backward" for name in _ELEMENTWISE))
def elementwise_backward(call: OpCall) -> Cost:
    """Reads the gradient (one number after a mean), input and target; writes the input's gradient."""
    grad, x, target = tensors(call, 0, 1, 2)
    flops = _ELEMENTWISE[call.name.removeprefix("aten::").removesuffix("_backward")][1]
    read = footprint(grad) + footprint(x) + footprint(target)
    return Cost(float(flops * x.numel), read, x.numel * itemsize(x.dtype), vector_pipe(x.dtype))


@cost("aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::_cudnn_ctc_loss", "aten::miopen_ctc_loss")
def ctc(call: OpCall) -> Cost:
    """The recursion over ``2 s + 1`` states a step (Graves et al., 2006): three terms in log space for each.

    Reads the log-probabilities (t, n, c) and writes the states; backward writes the gradient as well.
    """
    first = 1 if "backward" in call.name else 0
    scores, targets = tensor(call, first), tensor(call, first + 1)
    if len(scores.shape) != 3 or len(targets.shape) != 2:
        raise Unknown("concatenated targets: their lengths are not recorded")
    steps, batch, _ = scores.shape
    states = steps * batch * (2 * targets.shape[1] + 1)
    width = itemsize(scores.dtype)
    written = states * width + (scores.numel * width if first else 0.0)
    read = footprint(scores) + (states * width if first else 0.0)
    return Cost(float(states * (3 * EXP + LOG)), read, written, vector_pipe(scores.dtype))
