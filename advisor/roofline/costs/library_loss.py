"""Cross-entropy of Liger and flash-attn (``liger_kernel/ops``, ``flash_attn/losses``)."""

from __future__ import annotations

from advisor.roofline.costs.args import Unknown, footprint, itemsize, tensor, vector_pipe
from advisor.roofline.costs.conventions import ADD, EXP, FMA, MUL
from advisor.roofline.costs.model import Arg, Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, cost

#: The family of operators that these count under.
FAMILY = "loss"

#: FLOPs an element of the loss and of its gradient, which sweep a row of logits.
_LOSS = EXP + 2 * ADD
_GRADIENT = EXP + 2 * ADD + FMA + MUL


def _size(x: Tensor) -> float:
    return x.numel * itemsize(x.dtype)


def _at(arguments: tuple[Arg, ...], index: int) -> Tensor:
    return tensor(OpCall("", arguments), index)


@cost("LigerCrossEntropyFunction")
def loss_and_gradient(call: OpCall) -> Cost:
    """Liger writes the gradient over the logits in the forward pass; a row's second sweep finds it cached."""
    logits, target = tensor(call, 0), tensor(call, 1)
    flops = float((_LOSS + _GRADIENT) * logits.numel)
    return Cost(flops, footprint(logits) + footprint(target), _size(logits), vector_pipe(logits.dtype))


@cost("LigerFusedLinearCrossEntropyFunction")
def chunked_loss(call: OpCall) -> Result:
    """Beside the matrix products, which are ``aten::mm``: the loss of a chunk of rows for each launch."""
    x, weight = tensor(call, 0), tensor(call, 1)
    if len(x.shape) != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise Unknown("input and weight contradict each other")
    losses = [launch for launch in call.launches if "cross_entropy" in launch.name]
    if not losses:
        raise Unknown("chunks not recorded")
    elements = x.shape[0] * weight.shape[0] / len(losses)
    size = elements * itemsize(x.dtype)
    each = Cost((_LOSS + _GRADIENT) * elements, size, size, "vector_fp32")
    return tuple(each if launch in losses else None for launch in call.launches)


@cost("CrossEntropyLoss")
def flash_loss(call: OpCall) -> Cost:
    """flash-attn's: logits and labels in, a loss and a log-sum-exp a row out."""
    logits, labels = tensor(call, 0), tensor(call, 1)
    if len(logits.shape) != 2 or labels.numel != logits.shape[0]:
        raise Unknown("logits and labels contradict each other")
    read = footprint(logits) + footprint(labels)
    return Cost(float(_LOSS * logits.numel), read, 12.0 * labels.numel, vector_pipe(logits.dtype))


@cost("CrossEntropyLossBackward", partner="CrossEntropyLoss")
def flash_loss_backward(call: OpCall) -> Cost:
    """The gradient, of the logits' size, from the logits and the log-sum-exp."""
    logits, labels = _at(call.partner, 0), _at(call.partner, 1)
    if len(logits.shape) != 2 or labels.numel != logits.shape[0]:
        raise Unknown("logits and labels contradict each other")
    read = footprint(logits) + footprint(labels) + 8.0 * labels.numel
    return Cost(float(_GRADIENT * logits.numel), read, _size(logits), vector_pipe(logits.dtype))
