"""The kernel behind `cross_entropy`: a row's loss, its gradient, or both. See there for the mathematics.

Rows whose length is odd start at addresses that no wide load may touch. So columns count from the last
aligned address at or before the row, in groups of 16 bytes. Groups that lie within the row are moved whole,
in tiles, all but the last without masks; what is left at its two ends, less than a group each, by elements.
"""

from torch import Tensor

from ._launch import LaunchTable, next_power_of_2
from ._math import exp, widened
from ._triton import tl, triton

_LOAD_BYTES = 16

#: Size: classes. Of the loss alone: a row is read once, and leaves the cache first unless KEPT.
LOSS = LaunchTable(
    "cross_entropy_loss",
    {
        "default": [
            (1024, {"BLOCK": 1024, "num_warps": 4}),
            (8192, {"BLOCK": 2048, "num_warps": 8}),
            (None, {"BLOCK": 4096, "num_warps": 16}),
        ],
        # 32 logits a thread, and registers for eight such programs.
        "sm_90": [
            (1024, {"BLOCK": 1024, "num_warps": 4, "maxnreg": 40}),
            (8192, {"BLOCK": 2048, "num_warps": 8, "maxnreg": 40}),
            (None, {"BLOCK": 4096, "num_warps": 4, "maxnreg": 64, "KEPT": 1}),
        ],
        "interpreter": [(None, {"BLOCK": 512, "num_warps": 1, "KEPT": 1})],
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


@triton.jit
def _cross_entropy_kernel(
    x_ptr, target_ptr, loss_weight_ptr, grad_weight_ptr, loss_ptr, lse_ptr, grad_ptr,
    x_stride, grad_weight_stride, n_cols, n_written, ignore_index, smoothing, z_weight,
    SMOOTH: tl.constexpr, KNOWN_LSE: tl.constexpr, GRADIENT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, EDGE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    # A tile is groups of one wide load each. A group has its own running peak and sum: they stay within a
    # thread, and no thread waits for another before the row is done.
    groups = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP
    at = groups + tl.arange(0, GROUP)[None, :]
    side = tl.arange(0, 2 * GROUP)
    # Rows that are read again for the gradient are to stay in the cache until then.
    POLICY: tl.constexpr = "evict_last" if GRADIENT else "" if KEPT else "evict_first"
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
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
    params.setdefault("KEPT", 0)
    params["BLOCK"] = min(params["BLOCK"], max(next_power_of_2(n_cols), 64))
    # One wide store a thread.
    params["EDGE"] = min(params["BLOCK"], 32 * params["num_warps"] * group)
    per_row = grad_weight is not None and grad_weight.numel() > 1
    _cross_entropy_kernel[(n_rows,)](
        logits, target, loss_weight, grad_weight, loss, lse, grad,
        logits.stride(0), int(per_row), n_cols, n_written,
        ignore_index, label_smoothing, z_loss,
        SMOOTH=label_smoothing != 0.0, KNOWN_LSE=loss is None, GRADIENT=grad is not None,
        GROUP=group, **params,
    )  # fmt: skip
