"""Cross-entropy over the last dimension: 16-bit logits in, no fp32 copy, no host synchronisation.

For a row of logits x with target class y, V classes, label smoothing e and z-loss weight z:

    lse  = log sum_j exp(x_j)
    loss = lse - x_y - (e / V) sum_j (x_j - x_y) + z lse^2
    dx_j = exp(x_j - lse) (1 + 2 z lse) - e / V - (1 - e) [j = y]       times the row's weight

A row whose target is `ignore_index` has loss and gradient 0 and its logits are not read. The mean divides by
the number of the other rows (NaN if there are none, as in PyTorch), which stays on the device. A target
outside 0..V-1 gives NaN. z-loss: Chowdhery et al., "PaLM", 2022, section 5.

One program takes a row. It finds lse in one sweep (running maximum, rescaled sum), and where a gradient is
wanted sweeps again while the row is still in the L2 cache: forward and backward then read and write each
logit once, instead of reading it twice. That gradient, written in the forward, waits for the loss's own
gradient g: the backward multiplies it by g in place, in the kernel's own buffer and only if g is not 1, which
the device decides. Where this is not right the gradient is computed in the backward: for fp16, whose unscaled
gradients underflow before a gradient scaler's g reaches them; for reduction ``none``; and in a second
backward through the same graph, whose buffer has been handed out. The kernel stands in
`_cross_entropy_rows`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._cross_entropy_rows import launch_rows
from ._device import device_reasons, dtype_reasons, guard, refuse, sm_count
from ._family import Family
from ._launch import LaunchTable
from ._ops import NAMESPACE, operator
from ._triton import tl, triton

FAMILY = Family(
    what="cross-entropy on 16-bit logits without an fp32 copy, smoothing, z-loss",
    public=("cross_entropy", "CrossEntropyLoss"),
    replaces=("torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss"),
    differs="classes come last; targets are class indices; no class weights",
)

REDUCTIONS = ("mean", "sum", "none")

#: Size: elements.
SCALE = LaunchTable(
    "cross_entropy_scale",
    {
        "default": [(None, {"BLOCK": 4096, "programs_per_sm": 4, "num_warps": 8})],
        "interpreter": [(None, {"BLOCK": 1024, "programs_per_sm": 2, "num_warps": 1})],
    },
)


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    # The usual factor is 1: then nothing is read, and no one waits to know.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(tl.where(factor == 1.0, n, first), n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
        tl.store(x_ptr + at, x * factor, mask=at < n)


def mean_weight(target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """What multiplies each row's loss: fp32 scalar on the device, 1 over the rows that count for ``mean``."""
    if reduction != "mean":
        return torch.ones((), dtype=torch.float32, device=target.device)
    return (target != ignore_index).sum().reciprocal()


def _aligned_rows(logits: Tensor) -> Tensor:
    """Rows that do not overlap, with contiguous columns: the tensor itself where it is so."""
    apart = logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1]
    return logits if apart else logits.contiguous()


def _empty_gradient(logits: Tensor) -> Tensor:
    """A gradient whose rows are as far apart as the logits', so that both are aligned alike."""
    apart = logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1]
    row = logits.stride(0) if apart else logits.shape[1]
    return logits.new_empty_strided(logits.shape, (row, 1))


def _forward_fake(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str, gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    lse = logits.new_empty(logits.shape[0], 2, dtype=torch.float32)
    loss = lse.new_empty(logits.shape[0] if reduction == "none" else ())
    grad = _empty_gradient(logits) if gradient else logits.new_empty(0)
    return loss, lse, lse.new_empty(()), grad


def _setup(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    logits, target, *ctx.settings, gradient = inputs
    _, lse, weight, grad = output
    ctx.mark_non_differentiable(lse, weight, grad)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, lse, weight)
    # Not a saved tensor: the backward changes it, and hands it out once.
    ctx.grad = grad if gradient else None


def _backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,) * 7
    logits, target, lse, weight = ctx.saved_tensors
    grad, ctx.grad = ctx.grad, None
    # Grad mode is on here only if a second derivative is wanted, which the other branch refuses in words.
    if grad is not None and not torch.is_grad_enabled():
        scale_in_place(grad, dloss)
    else:
        grad = gradient_op(dloss, logits, target, lse, weight, *ctx.settings)
    return grad, None, None, None, None, None, None


@torch.library.custom_op(f"{NAMESPACE}::cross_entropy_scale", mutates_args=("grad",))
def scale_in_place(grad: Tensor, factor: Tensor) -> None:
    """Multiply a gradient of this module's own by a scalar on the device, if that is not 1."""
    if not grad.numel():
        return
    span = (grad.shape[0] - 1) * grad.stride(0) + grad.shape[1]
    params = dict(SCALE.pick(span, grad.device))
    programs = params.pop("programs_per_sm") * sm_count(grad.device)
    with guard(grad.device):
        _scale_kernel[(programs,)](grad, factor, span, **params)


@operator(
    "cross_entropy_backward",
    fake=lambda dloss, logits, target, lse, weight, *settings: _empty_gradient(logits),
)
def gradient_op(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, weight: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, reduction: str,
) -> Tensor:  # fmt: skip
    """The logits' gradient, computed from the logits again."""
    logits = _aligned_rows(logits)
    grad = _empty_gradient(logits)
    launch_rows(
        logits, target.contiguous(),
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, lse=lse, grad=grad,
        grad_weight=dloss.contiguous() if reduction == "none" else dloss * weight,
    )  # fmt: skip
    return grad


@operator("cross_entropy", fake=_forward_fake, backward=_backward, setup_context=_setup)
def cross_entropy_op(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str, gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, log-sum-exp of each row in two parts, the mean's weight, and the gradient or an empty tensor."""
    logits, target = _aligned_rows(logits), target.contiguous()
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    lse = losses.new_empty(logits.shape[0], 2)
    weight = mean_weight(target, ignore_index, reduction)
    grad = _empty_gradient(logits) if gradient else None
    launch_rows(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
        loss=losses, lse=lse, grad=grad, loss_weight=weight, grad_weight=weight,
    )  # fmt: skip
    # The weight again for no rows at all, whose mean is NaN.
    loss = losses if reduction == "none" else losses.sum() if losses.numel() else losses.sum() * weight
    return loss, lse, weight, logits.new_empty(0) if grad is None else grad


def cross_entropy_reference(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """The same in plain PyTorch, on logits cast to fp32 as under autocast (fp64 stays)."""
    classes = logits.shape[-1]
    rows, flat = logits.reshape(-1, classes), target.reshape(-1)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    losses = F.cross_entropy(
        rows, flat.long(), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    if z_loss:
        kept = flat != ignore_index
        losses = losses + z_loss * torch.where(kept, rows.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total / (flat != ignore_index).sum() if reduction == "mean" else total


def unsupported_reasons(
    logits: Tensor, target: Tensor, *, reduction: str = "mean", label_smoothing: float = 0.0
) -> list[str]:
    """Why the kernel cannot take these arguments; empty if it can."""
    reasons = device_reasons(logits, target) + dtype_reasons(logits)
    if target.dtype not in (torch.int64, torch.int32):
        reasons.append(f"targets of {target.dtype}: the kernel takes class indices, int64 or int32")
    if logits.dim() == 0 or logits.shape[:-1] != target.shape:
        reasons.append(
            f"logits {tuple(logits.shape)} and targets {tuple(target.shape)}: classes come last, "
            "and the other dimensions must be the targets'"
        )
    elif not logits.shape[-1]:
        reasons.append("no classes")
    return reasons + setting_reasons(reduction, label_smoothing)


def setting_reasons(reduction: str, label_smoothing: float) -> list[str]:
    """What is wrong with the loss's settings."""
    reasons = []
    if reduction not in REDUCTIONS:
        reasons.append(f"reduction {reduction!r}: one of {', '.join(REDUCTIONS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        reasons.append(f"label smoothing {label_smoothing}: 0 to 1")
    return reasons


def cross_entropy(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, reduction: str = "mean", gradient_in_forward: bool | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of logits with class indices, as `torch.nn.functional.cross_entropy`, classes last.

    Args:
        logits: (..., classes). Rows may lie apart, columns may not.
        target: (...,) int64 or int32.
        ignore_index: rows with this target do not count.
        label_smoothing: 0 to 1.
        z_loss: weight of the squared log-sum-exp that is added to each row's loss.
        reduction: ``mean``, ``sum`` or ``none``.
        gradient_in_forward: write the gradient in the forward, which saves a third of the traffic and holds
            it from then on. By default where it is right: bf16 and fp32, reduced, not compiled. Never without
            need: no gradient is written where none is required.

    Returns:
        fp32 whatever the logits' dtype, as under autocast: a scalar, or (...,) for ``none``.

    Raises:
        UnsupportedError: see `unsupported_reasons`; or a gradient in the forward with reduction ``none``.
    """
    reasons = unsupported_reasons(logits, target, reduction=reduction, label_smoothing=label_smoothing)
    if gradient_in_forward and reduction == "none":
        reasons.append("the gradient cannot be written in the forward with reduction 'none'")
    refuse(reasons, "cross_entropy")
    early = gradient_in_forward
    if early is None:
        early = logits.dtype != torch.float16 and reduction != "none"
    # A compiler would copy the buffer that the backward changes.
    early = early and logits.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    loss = cross_entropy_op(
        logits.reshape(-1, logits.shape[-1]), target.reshape(-1),
        ignore_index, label_smoothing, z_loss, reduction, early,
    )[0]  # fmt: skip
    return loss.view(target.shape) if reduction == "none" else loss


class CrossEntropyLoss(nn.Module):
    """`torch.nn.CrossEntropyLoss` for class indices without class weights; see `cross_entropy`."""

    def __init__(
        self, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
        reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logits (..., classes) and targets (...,)."""
        return cross_entropy(
            logits, target, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing,
            z_loss=self.z_loss, reduction=self.reduction,
        )  # fmt: skip
