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
backward through the same graph, whose buffer has been handed out.

Rows whose length is odd start at addresses that no wide load may touch. So columns count from the last
aligned address at or before the row, in groups of 16 bytes. Groups that lie within the row are moved whole,
in tiles, all but the last without masks; what is left at its two ends, less than a group each, by elements.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._device import device_reasons, dtype_reasons, guard, refuse, sm_count
from ._family import Family
from ._launch import LaunchTable, next_power_of_2
from ._math import exp, widened
from ._ops import NAMESPACE, operator
from ._triton import tl, triton

FAMILY = Family(
    what="cross-entropy on 16-bit logits without an fp32 copy, smoothing, z-loss",
    public=("cross_entropy", "CrossEntropyLoss"),
    replaces=("torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss"),
)

REDUCTIONS = ("mean", "sum", "none")
_LOAD_BYTES = 16

#: Size: classes. Of the loss alone: a row is read once.
LOSS = LaunchTable(
    "cross_entropy_loss",
    {
        "default": [
            (1024, {"BLOCK": 1024, "num_warps": 4}),
            (8192, {"BLOCK": 2048, "num_warps": 8}),
            (None, {"BLOCK": 4096, "num_warps": 16}),
        ],
        # 32 logits a thread, and registers for four such programs.
        "sm_90": [
            (1024, {"BLOCK": 1024, "num_warps": 4, "maxnreg": 40}),
            (8192, {"BLOCK": 2048, "num_warps": 8, "maxnreg": 40}),
            (None, {"BLOCK": 8192, "num_warps": 8, "maxnreg": 64}),
        ],
        "interpreter": [(None, {"BLOCK": 512, "num_warps": 1})],
    },
)
#: Size: classes. Of the gradient, with or without the loss before it.
ROWS = LaunchTable(
    "cross_entropy_rows",
    {
        "default": [
            (1024, {"BLOCK": 1024, "num_warps": 4}),
            (8192, {"BLOCK": 2048, "num_warps": 8}),
            (None, {"BLOCK": 4096, "num_warps": 16}),
        ],
        # Fewer rows under way, with more bytes of each: the second sweep is to find its row in the cache.
        "sm_90": [
            (1024, {"BLOCK": 1024, "num_warps": 4, "maxnreg": 40}),
            (8192, {"BLOCK": 2048, "num_warps": 8, "maxnreg": 40}),
            (32768, {"BLOCK": 4096, "num_warps": 16, "maxnreg": 40}),
            (None, {"BLOCK": 8192, "num_warps": 16, "maxnreg": 64}),
        ],
        "interpreter": [(None, {"BLOCK": 512, "num_warps": 1})],
    },
)
#: Size: elements.
SCALE = LaunchTable(
    "cross_entropy_scale",
    {
        "default": [(None, {"BLOCK": 4096, "programs_per_sm": 4, "num_warps": 8})],
        "interpreter": [(None, {"BLOCK": 1024, "programs_per_sm": 2, "num_warps": 1})],
    },
)


@triton.jit
def _row(row, x_stride, n_cols, kept, GROUP: tl.constexpr):
    """Where a row lies: its aligned base; from there its first element, first and last whole group, and end.

    Of a row that is not kept nothing is to be read: it ends where it begins.
    """
    base = (row * x_stride) // GROUP * GROUP
    shift = (row * x_stride - base).to(tl.int32)
    stop = shift + tl.where(kept, n_cols, 0)
    first = tl.cdiv(shift, GROUP) * GROUP
    return base, shift, first, tl.maximum(stop // GROUP * GROUP, first), stop


@triton.jit
def _joined(x, peak, total):
    """Each group's peak and its sum of exp(x - peak), with x taken in.

    Differences first: the largest term is then exactly 1, and a loss near 0 not off by roundings of 1.
    """
    new_peak = tl.maximum(peak, tl.max(x, axis=1))
    # While all logits so far are -inf, subtract 0 so that exp gives 0 and not NaN.
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, total * exp(peak - safe, False) + tl.sum(exp(x - safe[:, None], False), axis=1)


@triton.jit
def _gradient(x, top_2, owed, push):
    return tl.exp2(tl.fma(x, 1.4426950408889634, -top_2)) * owed - push


# The batch's size changes from step to step, and must not call for another compilation.
@triton.jit(do_not_specialize=["n_rows"])
def _cross_entropy_kernel(
    x_ptr, target_ptr, loss_weight_ptr, grad_weight_ptr, loss_ptr, lse_ptr, grad_ptr,
    x_stride, grad_weight_stride, n_rows, n_cols, n_written, ignore_index, smoothing, z_weight,
    SMOOTH: tl.constexpr, KNOWN_LSE: tl.constexpr, GRADIENT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # A tile is groups of one wide load each. A group has its own running peak and sum: they stay within a
    # thread, and no thread waits for another before the row is done.
    groups = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP
    at = groups + tl.arange(0, GROUP)[None, :]
    side = tl.arange(0, 2 * GROUP)
    # Rows that are read again for the gradient are to stay in the cache until then.
    POLICY: tl.constexpr = "evict_last" if GRADIENT else "evict_first"
    target = tl.load(target_ptr + tl.program_id(0)).to(tl.int64)
    if AHEAD and not KNOWN_LSE:
        base, _, first, tail, _ = _row(
            tl.program_id(0).to(tl.int64), x_stride, n_cols, target != ignore_index, GROUP
        )
        coming = tl.load(x_ptr + base + first + at, mask=first + groups < tail, eviction_policy=POLICY)
    for turn in range(tl.cdiv(n_rows - tl.program_id(0), tl.num_programs(0))):
        row = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        if AHEAD:
            following = row + tl.num_programs(0)
            next_target = tl.load(target_ptr + following, mask=following < n_rows, other=0).to(tl.int64)
        kept = target != ignore_index
        real = (target >= 0) & (target < n_cols)
        picked = tl.load(x_ptr + row * x_stride + target, mask=kept & real, other=float("nan")).to(tl.float32)
        base, shift, first, tail, stop = _row(row, x_stride, n_cols, kept, GROUP)
        x_row = x_ptr + base
        # Groups from `first` to `tail` lie within the row, those up to `whole` in tiles that need no masks.
        whole = first + (tail - first) // BLOCK * BLOCK
        # What is left at the row's ends, less than a group each.
        cols = tl.where(side < GROUP, first - GROUP + side, tail - GROUP + side)
        inside = (cols >= shift) & (cols < stop)
        ends = tl.load(x_row + cols, mask=inside, other=float("-inf")).to(tl.float32)

        if KNOWN_LSE:
            top = tl.load(lse_ptr + 2 * row)
            total = tl.load(lse_ptr + 2 * row + 1)
        else:
            peaks = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
            sums = tl.zeros([BLOCK // GROUP], tl.float32)
            spread = tl.zeros([BLOCK // GROUP], tl.float32)
            pivot = tl.where(picked == float("-inf"), 0.0, picked)
            if not AHEAD:
                coming = tl.load(x_row + first + at, mask=first + groups < tail, eviction_policy=POLICY)
            # The next tile is under way while this one is summed.
            for start in range(first, whole, BLOCK):
                x = widened(coming)
                ahead = start + BLOCK
                coming = tl.load(x_row + ahead + at, mask=ahead + groups < tail, eviction_policy=POLICY)
                if SMOOTH:
                    spread += tl.sum(x - pivot, axis=1)
                peaks, sums = _joined(x, peaks, sums)
            for start in range(whole, tail, BLOCK):
                there = start + groups < tail
                x = tl.where(there, widened(coming), float("-inf"))
                if SMOOTH:
                    spread += tl.sum(tl.where(there, x - pivot, 0.0), axis=1)
                peaks, sums = _joined(x, peaks, sums)
            if AHEAD:
                # So is the next row's first tile while this row is finished.
                next_base, _, next_first, next_tail, _ = _row(
                    following, x_stride, n_cols, (next_target != ignore_index) & (following < n_rows), GROUP
                )
                coming = tl.load(
                    x_ptr + next_base + next_first + at, mask=next_first + groups < next_tail,
                    eviction_policy=POLICY,
                )  # fmt: skip
            top = tl.maximum(tl.max(peaks, axis=0), tl.max(ends, axis=0))
            safe = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(sums * exp(peaks - safe, False), axis=0) + tl.sum(exp(ends - safe, False), axis=0)
            beyond = tl.log(total)
            lse = top + beyond
            # Differences first: logits may be large and close together.
            loss = (top - picked) + beyond + z_weight * lse * lse
            if SMOOTH:
                spread_ends = tl.sum(tl.where(inside, ends - pivot, 0.0), axis=0)
                loss -= smoothing / n_cols * (tl.sum(spread, axis=0) + spread_ends)
            loss = tl.where(kept, loss, 0.0)
            if loss_weight_ptr is not None:
                loss *= tl.load(loss_weight_ptr)
            tl.store(loss_ptr + row, loss)
            if lse_ptr is not None:
                tl.store(lse_ptr + 2 * row, top)
                tl.store(lse_ptr + 2 * row + 1, total)

        if GRADIENT:
            grad_row = grad_ptr + base
            weight = 1.0
            if grad_weight_ptr is not None:
                weight = tl.load(grad_weight_ptr + row * grad_weight_stride).to(tl.float32)
            weight = tl.where(real, weight, float("nan"))
            pull = 1.0 + 2.0 * z_weight * (top + tl.log(total))
            share = tl.div_rn(pull * weight, total)
            push = smoothing / n_cols * weight
            # x log2(e) - top log2(e) in one instruction: what rounding the latter leaves out, known exactly,
            # all powers owe alike.
            top_2 = top * 1.4426950408889634
            owed = share * tl.exp2(-tl.fma(top, 1.4426950408889634, -top_2))
            for start in range(first, whole, BLOCK):
                x = widened(tl.load(x_row + start + at, eviction_policy="evict_first"))
                g = _gradient(x, top_2, owed, push).to(grad_ptr.dtype.element_ty)
                tl.store(grad_row + start + at, g, eviction_policy="evict_first")
            for start in range(whole, tail, BLOCK):
                there = start + groups < tail
                x = widened(tl.load(x_row + start + at, mask=there, eviction_policy="evict_first"))
                g = _gradient(x, top_2, owed, push).to(grad_ptr.dtype.element_ty)
                tl.store(grad_row + start + at, g, mask=there, eviction_policy="evict_first")
            g = _gradient(ends, top_2, owed, push)
            tl.store(grad_row + cols, g.to(grad_ptr.dtype.element_ty), mask=inside)
            # Columns past the classes are written too, and all of a row that does not count.
            last = shift + n_written
            nothing = tl.zeros([EDGE // GROUP, GROUP], grad_ptr.dtype.element_ty)
            for start in range(tl.where(stop < last, stop // GROUP * GROUP, last), last, EDGE):
                rest = start + tl.arange(0, EDGE // GROUP)[:, None] * GROUP
                rest_at = rest + tl.arange(0, GROUP)[None, :]
                filled = (rest >= stop) & (rest + GROUP <= last)
                tl.store(grad_row + rest_at, nothing, mask=filled)
                ragged = (rest_at >= stop) & (rest_at < last) & (filled == 0)
                tl.store(grad_row + rest_at, nothing, mask=ragged)
            # The target's own is set right when all are written, which spares a comparison an element. Summed
            # so that a single class, whose share is all, gets exactly 0.
            tl.debug_barrier()
            g = exp(picked - top, False) * share - weight + smoothing * ((n_cols - 1.0) / n_cols) * weight
            tl.store(grad_ptr + row * x_stride + target, g.to(grad_ptr.dtype.element_ty), mask=kept & real)
        if AHEAD:
            target = next_target


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    # The usual factor is 1: then nothing is read, and no one waits to know.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(tl.where(factor == 1.0, n, first), n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
        tl.store(x_ptr + at, x * factor, mask=at < n)


def launch_rows(
    logits: Tensor, target: Tensor, *, ignore_index: int, label_smoothing: float, z_loss: float,
    loss: Tensor | None = None, lse: Tensor | None = None, grad: Tensor | None = None,
    loss_weight: Tensor | None = None, grad_weight: Tensor | None = None,
    columns: int | None = None,
) -> None:  # fmt: skip
    """Fill what is given of `loss`, `lse` and `grad`.

    Args:
        logits: (rows, classes or more), columns contiguous.
        target: (rows,), contiguous.
        ignore_index: target of rows that do not count.
        label_smoothing: 0 to 1.
        z_loss: weight of ``lse ** 2``.
        loss: (rows,) fp32, written; None if `lse` is known and read instead.
        lse: (rows, 2) fp32, written, or read where `loss` is None: the largest logit, and the sum of
            exp(x - that). As one number, fp32 would round the sum away where logits are large.
        grad: of the logits' shape and row stride; may be `logits` itself. All columns are written, those past
            the classes with 0.
        loss_weight: fp32 scalar that multiplies every loss.
        grad_weight: scalar, or one a row, that multiplies the gradient.
        columns: classes, if fewer than the logits' columns.
    """
    n_rows, n_written = logits.shape
    if not n_rows or not n_written:
        return
    n_cols = n_written if columns is None else columns
    group = max(_LOAD_BYTES // logits.element_size(), 1)
    if logits.data_ptr() % _LOAD_BYTES or (grad is not None and grad.data_ptr() % _LOAD_BYTES):
        group = 1
    params = dict((LOSS if grad is None else ROWS).pick(n_cols, logits.device))
    params["BLOCK"] = min(params["BLOCK"], max(next_power_of_2(n_cols), 64))
    # One wide store a thread.
    params["EDGE"] = min(params["BLOCK"], 32 * params["num_warps"] * group)
    per_row = grad_weight is not None and grad_weight.numel() > 1
    # As many rows under way as the cache holds until their second sweep; without a limit, a program a row.
    programs = min(n_rows, params.pop("programs_per_sm", n_rows) * sm_count(logits.device))
    _cross_entropy_kernel[(programs,)](
        logits, target, loss_weight, grad_weight, loss, lse, grad,
        logits.stride(0), int(per_row), n_rows, n_cols, n_written,
        ignore_index, label_smoothing, z_loss,
        SMOOTH=label_smoothing != 0.0, KNOWN_LSE=loss is None, GRADIENT=grad is not None,
        GROUP=group, AHEAD=programs < n_rows, **params,
    )  # fmt: skip


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
