"""Linear layer and cross-entropy in one, so that the full logits need not be held.

With x (tokens, hidden), weight W (classes, hidden) and a bias b, logits = x W^T + b, and G the gradient of
the summed loss with respect to the logits (see `cross_entropy`), times the weight of a row (1 over the rows
that count, for the mean):

    dx = G W        dW = G^T x        db = sum of G over tokens

The matrix products are PyTorch's; three of 2 * tokens * hidden * classes FLOPs are the floor. A chunk of
tokens at a time, the logits are made in a buffer of the kernel's own, G is written over them, and both
gradients are taken from it: all in the forward, so that nothing is computed twice, and the backward
multiplies small tensors. ``fast`` takes all tokens in one chunk; ``memory`` takes chunks of about 50 MiB of
logits.

G is kept without the row's weight, as numbers between -1 and 1: 16-bit formats hold them well, while 1/tokens
of them would underflow in fp16. The weight and the loss's own gradient multiply the finished dx and dW, which
for more than one chunk are summed in fp32.

A vocabulary such as 50257 gives rows that no wide load or bulk copy can address, and the matrix products
crawl. So the weight is copied once into rows of a multiple of 64 classes (0 beyond the last), which is also
where autocast's cast to 16 bits happens; the padding never reaches the loss.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._device import device_reasons, dtype_reasons, refuse
from ._family import Family
from ._launch import cdiv
from ._ops import autocast_dtype, operator
from .cross_entropy import cross_entropy_reference, launch_rows, mean_weight, setting_reasons

FAMILY = Family(
    what="linear layer and cross-entropy, logits whole or in chunks",
    public=("linear_cross_entropy", "LinearCrossEntropy"),
    replaces=("cross_entropy(x @ weight.T, target)",),
    differs="targets are class indices; no class weights",
)

VARIANTS = ("auto", "fast", "memory")
_CLASSES_MULTIPLE = 64
_TOKENS_MULTIPLE = 128
_CHUNK_BYTES = 50 << 20
#: The largest logits that ``auto`` holds whole.
FAST_LIMIT_BYTES = 2 << 30


def chunk_tokens(tokens: int, classes: int, itemsize: int, variant: str) -> int:
    """Tokens whose logits are held at a time.

    Args:
        tokens: all of them.
        classes: of the vocabulary.
        itemsize: bytes of a logit.
        variant: one of `VARIANTS`; ``auto`` holds all logits up to `FAST_LIMIT_BYTES`.
    """
    row_bytes = _padded(classes) * itemsize
    if variant == "fast" or (variant == "auto" and tokens * row_bytes <= FAST_LIMIT_BYTES):
        return max(tokens, 1)
    return max(_CHUNK_BYTES // row_bytes // _TOKENS_MULTIPLE, 1) * _TOKENS_MULTIPLE


def _padded(classes: int) -> int:
    return cdiv(classes, _CLASSES_MULTIPLE) * _CLASSES_MULTIPLE


def _pad(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows up to a multiple of 64, 0 beyond the last, in `dtype`; the tensor itself where it is so."""
    rows = weight.shape[0]
    if weight.dtype == dtype and _padded(rows) == rows and weight.is_contiguous():
        return weight
    out = torch.empty(_padded(rows), *weight.shape[1:], dtype=dtype, device=weight.device)
    out[:rows].copy_(weight)
    out[rows:].zero_()
    return out


def _product_scale(dtype: torch.dtype, tokens: int) -> float:
    """A power of two that keeps a sum over tokens within fp16; exact, undone on the fp32 side."""
    return 0.5 ** max(tokens - 1, 0).bit_length() if dtype == torch.float16 else 1.0


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` with an fp32 total of 16-bit factors."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and "dtype_out" in torch.ops.aten.addmm.overloads():
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        # Before torch 2.8 a product has its factors' dtype: each chunk's is rounded once, the sum is not.
        total += a @ b


class _Sums:
    """The gradients of one pass over the chunks, without the rows' common weight."""

    def __init__(
        self, x: Tensor, classes: int, chunked: bool, wants_x: bool, wants_weight: bool, wants_bias: bool
    ) -> None:
        self.scale = _product_scale(x.dtype, x.shape[0])
        self.x = torch.empty_like(x) if wants_x else None
        self.bias = (
            torch.zeros(_padded(classes), dtype=torch.float32, device=x.device) if wants_bias else None
        )
        self.chunked = chunked
        self.weight: Tensor | None = None
        if wants_weight and (chunked or not x.shape[0]):
            shape = (_padded(classes), x.shape[1])
            self.weight = torch.zeros(shape, dtype=torch.float32, device=x.device)
        self.wants_weight = wants_weight

    def add(self, rows: slice, grad: Tensor, x: Tensor, weight: Tensor) -> None:
        """Take in a chunk: its logits' gradient, its tokens, and the padded weight."""
        if self.x is not None:
            torch.mm(grad, weight, out=self.x[rows])
        if self.wants_weight:
            scaled = x if self.scale == 1.0 else x * self.scale
            if self.weight is None:
                self.weight = grad.t() @ scaled
            else:
                _add_product(self.weight, grad.t(), scaled)
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=torch.float32)


def _pass(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, classes: int, chunk: int,
    settings: tuple[int, float, float], losses: Tensor | None, lse: Tensor | None,
    grad_weight: Tensor | None, sums: _Sums | None,
) -> None:  # fmt: skip
    """Visit the chunks: losses or known log-sum-exps, and gradients into `sums` if given."""
    ignore_index, label_smoothing, z_loss = settings
    logits = x.new_empty(min(chunk, x.shape[0]), weight.shape[0])
    for start in range(0, x.shape[0], chunk):
        rows = slice(start, min(start + chunk, x.shape[0]))
        part = logits[: rows.stop - start]
        if bias is None:
            torch.mm(x[rows], weight.t(), out=part)
        else:
            torch.addmm(bias, x[rows], weight.t(), out=part)
        per_row = grad_weight is not None and grad_weight.dim() > 0
        launch_rows(
            part, target[rows], columns=classes,
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
            loss=None if losses is None else losses[rows], lse=None if lse is None else lse[rows],
            grad=None if sums is None else part,
            grad_weight=grad_weight[rows] if per_row and grad_weight is not None else grad_weight,
        )  # fmt: skip
        if sums is not None:
            sums.add(rows, part, x[rows], weight)


def _gradient_fakes(
    x: Tensor, weight: Tensor, bias: Tensor | None, wants_x: bool, wants_weight: bool, wants_bias: bool,
    chunked: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.float32 if chunked else x.dtype
    return (
        x.new_empty(x.shape if wants_x else 0),
        weight.new_empty(weight.shape if wants_weight else 0, dtype=wide),
        x.new_empty(weight.shape[0] if wants_bias else 0, dtype=torch.float32),
    )


def _finished(sums: _Sums, x: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients without padding; those that are not wanted, empty."""
    wide = torch.float32 if sums.chunked else x.dtype
    return (
        x.new_empty(0) if sums.x is None else sums.x,
        x.new_empty(0, dtype=wide) if sums.weight is None else sums.weight[:classes].to(wide),
        x.new_empty(0, dtype=torch.float32) if sums.bias is None else sums.bias[:classes],
    )


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, compute: torch.dtype,
    ignore_index: int, label_smoothing: float, z_loss: float, reduction: str, chunk: int,
    wants_x: bool, wants_weight: bool, wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    lse = x.new_empty(x.shape[0], 2, dtype=torch.float32)
    loss = lse.new_empty(x.shape[0] if reduction == "none" else ())
    like = x.new_empty(x.shape, dtype=compute)
    grads = _gradient_fakes(like, weight, bias, wants_x, wants_weight, wants_bias, chunk < x.shape[0])
    return (loss, lse, lse.new_empty(()), *grads)


def _setup(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *ctx.settings, ctx.chunk, ctx.wants_x, ctx.wants_weight, ctx.wants_bias = inputs
    _, lse, row_weight, dx, dweight, dbias = output
    ctx.mark_non_differentiable(lse, row_weight, dx, dweight, dbias)
    ctx.set_materialize_grads(False)
    ctx.late = ctx.settings[4] == "none"
    ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
    ctx.scale = _product_scale(ctx.settings[0], x.shape[0])
    ctx.save_for_backward(x, *((weight, bias, target, lse) if ctx.late else (row_weight, dx, dweight, dbias)))


def _backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    rest = (None,) * 10
    if dloss is None:
        return (None, None, None, *rest)
    wants = (*ctx.needs_input_grad[:3],)
    if ctx.late:
        x, weight, bias, target, lse = ctx.saved_tensors
        grads = gradient_op(
            dloss, x, weight, bias, target, lse, *ctx.settings[:4], ctx.chunk, *(bool(w) for w in wants)
        )
        factor: Tensor | None = None
    else:
        x, row_weight, *grads = ctx.saved_tensors
        factor = dloss * row_weight
    out = [
        scaled_op(g, factor, 1.0 / ctx.scale if i == 1 else 1.0, dtype, x) if want else None
        for i, (g, dtype, want) in enumerate(zip(grads, ctx.dtypes, wants, strict=True))
    ]
    return (*out, *rest)


@operator(
    "linear_cross_entropy_scale",
    fake=lambda grad, factor, scale, dtype, source: torch.empty(grad.shape, dtype=dtype, device=grad.device),
)
def scaled_op(
    grad: Tensor, factor: Tensor | None, scale: float, dtype: torch.dtype, source: Tensor
) -> Tensor:
    """``grad * factor * scale``, multiplied in fp32 and rounded once, to `dtype`.

    `source` is what `grad` was computed from: an edge of the graph, so that a second derivative is refused
    where it would otherwise lack a term.
    """
    out = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    if factor is None:
        return out.copy_(grad if scale == 1.0 else grad.float() * scale)
    # A factor without dimensions would be rounded to the gradient's dtype first.
    whole = (factor.float() * scale).view((1,) * grad.dim())
    return torch.mul(grad, whole, out=out)


def _gradient_fake(
    dloss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor,
    compute: torch.dtype, ignore_index: int, label_smoothing: float, z_loss: float, chunk: int,
    wants_x: bool, wants_weight: bool, wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    like = x.new_empty(x.shape, dtype=compute)
    return _gradient_fakes(like, weight, bias, wants_x, wants_weight, wants_bias, chunk < x.shape[0])


@operator("linear_cross_entropy_backward", fake=_gradient_fake)
def gradient_op(
    dloss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor,
    compute: torch.dtype, ignore_index: int, label_smoothing: float, z_loss: float, chunk: int,
    wants_x: bool, wants_weight: bool, wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients for a loss gradient of its own for each row; the logits are made again."""
    classes = weight.shape[0]
    x = x.to(compute).contiguous()
    sums = _Sums(x, classes, chunk < x.shape[0], wants_x, wants_weight, wants_bias)
    _pass(
        x, _pad(weight, compute), None if bias is None else _pad(bias, compute), target.contiguous(), classes,
        chunk, (ignore_index, label_smoothing, z_loss), None, lse, dloss.float().contiguous(), sums,
    )  # fmt: skip
    return _finished(sums, x, classes)


@operator("linear_cross_entropy", fake=_forward_fake, backward=_backward, setup_context=_setup)
def linear_cross_entropy_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, compute: torch.dtype,
    ignore_index: int, label_smoothing: float, z_loss: float, reduction: str, chunk: int,
    wants_x: bool, wants_weight: bool, wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss, log-sum-exp of each row in two parts, the mean's weight, and the gradients without that weight.

    Gradients that are not wanted, and all for reduction ``none``, are empty.
    """
    classes = weight.shape[0]
    x, target = x.to(compute).contiguous(), target.contiguous()
    losses = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    lse = losses.new_empty(x.shape[0], 2)
    row_weight = mean_weight(target, ignore_index, reduction)
    sums = _Sums(x, classes, chunk < x.shape[0], wants_x, wants_weight, wants_bias)
    _pass(
        x, _pad(weight, compute), None if bias is None else _pad(bias, compute), target, classes, chunk,
        (ignore_index, label_smoothing, z_loss), losses, lse, None,
        sums if wants_x or wants_weight or wants_bias else None,
    )  # fmt: skip
    loss = losses if reduction == "none" else losses.sum() * row_weight
    return (loss, lse, row_weight, *_finished(sums, x, classes))


def linear_cross_entropy_reference(
    x: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """The same in plain PyTorch, with the logits in the inputs' dtype."""
    return cross_entropy_reference(
        F.linear(x, linear_weight, linear_bias), target,
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction,
    )  # fmt: skip


def unsupported_reasons(
    x: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None, *,
    reduction: str = "mean", label_smoothing: float = 0.0, variant: str = "auto",
) -> list[str]:  # fmt: skip
    """Why the kernel cannot take these arguments; empty if it can."""
    reasons = device_reasons(x, linear_weight, target, linear_bias)
    reasons += dtype_reasons(x, linear_weight, linear_bias)
    if target.dtype not in (torch.int64, torch.int32):
        reasons.append(f"targets of {target.dtype}: the kernel takes class indices, int64 or int32")
    if x.dim() == 0 or x.shape[:-1] != target.shape:
        reasons.append(f"input {tuple(x.shape)} and targets {tuple(target.shape)}: one target for each row")
    if linear_weight.dim() != 2 or not linear_weight.shape[0] or linear_weight.shape[1:] != x.shape[-1:]:
        reasons.append(
            f"weight {tuple(linear_weight.shape)}: (classes, {x.shape[-1] if x.dim() else 'hidden'})"
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        reasons.append(f"bias {tuple(linear_bias.shape)}: (classes,)")
    if variant not in VARIANTS:
        reasons.append(f"variant {variant!r}: one of {', '.join(VARIANTS)}")
    autocast = autocast_dtype(x) is not None
    kinds = {t.dtype for t in (x, linear_weight, linear_bias) if t is not None}
    if not autocast and len(kinds) > 1:
        reasons.append("input, weight and bias differ in dtype outside autocast")
    return reasons + setting_reasons(reduction, label_smoothing)


def linear_cross_entropy(
    x: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
    variant: str = "auto",
) -> Tensor:  # fmt: skip
    """Cross-entropy of ``x @ linear_weight.T + linear_bias`` with class indices.

    Under autocast the products are in its dtype, as `torch.nn.functional.linear`'s are, and the gradients of
    fp32 parameters are fp32. The gradients are computed in the forward (except for ``none``), where those
    wanted are known from `requires_grad` and grad mode.

    Args:
        x: (..., hidden).
        linear_weight: (classes, hidden), as `torch.nn.Linear` keeps it.
        target: (...,) int64 or int32.
        linear_bias: (classes,), or None.
        ignore_index: rows with this target do not count.
        label_smoothing: 0 to 1.
        z_loss: weight of the squared log-sum-exp that is added to each row's loss.
        reduction: ``mean``, ``sum`` or ``none`` (whose backward computes the logits again).
        variant: ``fast`` holds all logits in the forward, ``memory`` about 50 MiB of them, ``auto`` is fast
            up to `FAST_LIMIT_BYTES`.

    Returns:
        fp32: a scalar, or (...,) for ``none``.

    Raises:
        UnsupportedError: see `unsupported_reasons`.
    """
    refuse(
        unsupported_reasons(
            x, linear_weight, target, linear_bias,
            reduction=reduction, label_smoothing=label_smoothing, variant=variant,
        ),
        "linear_cross_entropy",
    )  # fmt: skip
    compute = autocast_dtype(x) or x.dtype
    rows, flat = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    early = torch.is_grad_enabled() and reduction != "none"
    wants = [early and t is not None and t.requires_grad for t in (x, linear_weight, linear_bias)]
    chunk = chunk_tokens(rows.shape[0], linear_weight.shape[0], compute.itemsize, variant)
    loss = linear_cross_entropy_op(
        rows, linear_weight, linear_bias, flat, compute, ignore_index, label_smoothing, z_loss, reduction,
        chunk, *wants,
    )[0]  # fmt: skip
    return loss.view(target.shape) if reduction == "none" else loss


class LinearCrossEntropy(nn.Module):
    """A head and its loss: parameters named and shaped as `torch.nn.Linear`'s; see `linear_cross_entropy`."""

    def __init__(
        self, in_features: int, num_classes: int, bias: bool = False, *, ignore_index: int = -100,
        label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean", variant: str = "auto",
        **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        head = nn.Linear(in_features, num_classes, bias=bias, **factory)
        self.weight, self.bias = head.weight, head.bias
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss,
            "reduction": reduction, "variant": variant,
        }  # fmt: skip

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Input (..., in_features) and targets (...,)."""
        return linear_cross_entropy(x, self.weight, target, linear_bias=self.bias, **self.options)
