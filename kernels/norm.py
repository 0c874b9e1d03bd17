"""LayerNorm and RMSNorm over the last dimensions.

With n columns, m = mean(x) and r = 1 / sqrt(mean((x - m)^2) + eps) (RMSNorm: m = 0), o the weight's offset:

    h = (x - m) r            y = h (o + w) + b
    g = dy (o + w)           dx = r (g - h mean(g h) - mean(g))        (RMSNorm: without mean(g))
    dw = sum of dy h         db = sum of dy, over rows

(Ba et al., "Layer normalization", 2016; Zhang and Sennrich, "Root mean square layer normalization", 2019.)
m and r are saved, 8 bytes a row; h is computed again. Compulsory bytes an element: read 1, write 1 forward;
read 2, write 1 backward.

Forward: a row is read once and stays in registers. Backward: a few programs a multiprocessor walk over the
rows, the next ones on their way from memory while these are worked on, and keep dw and db in registers; each
program writes one fp32 row of partials, which a second small kernel adds up in a fixed order. Wider rows
(over 32 k columns, 16 k backward) are walked in blocks, twice, the second time from the L2 cache. Where dw
and db do not fit into registers (both over 8 k columns, or 16 k on Hopper; dw alone over 16 k), they read x
and dy once more. The kernels stand in `_norm_rows` and `_norm_wide`.

Casting: ``"fp32"`` rounds once, at the end, as PyTorch and Gemma do (Gemma has offset 1). ``"llama"`` rounds
h to x's dtype before the weight, as Hugging Face's Llama does, and gives the promoted dtype of x and weight.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._device import device_reasons, dtype_reasons, refuse
from ._family import Family
from ._norm_rows import handed_out, launch_backward, launch_forward, parts_wanted, weight_dtypes
from ._ops import operator

FAMILY = Family(
    what="LayerNorm, RMSNorm with Gemma's offset and Llama's casting, any row length",
    public=("layer_norm", "rms_norm", "FusedLayerNorm", "RMSNorm"),
    replaces=(
        "torch.nn.LayerNorm",
        "torch.nn.RMSNorm",
        "torch.nn.functional.layer_norm",
        "torch.nn.functional.rms_norm",
    ),
)


def _forward_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, is_rms: bool,
    round_first: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    stats = x.new_empty(1 if is_rms else 2, x.numel() // max(x.shape[-1], 1), dtype=torch.float32)
    return torch.empty(x.shape, dtype=dtype, device=x.device), stats


def _forward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _, ctx.offset, ctx.is_rms, ctx.round_first, _ = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _forward_backward(ctx: Any, dy: Tensor, _stats: Any) -> tuple[Any, ...]:
    x, weight, bias, stats = ctx.saved_tensors
    parts = parts_wanted(ctx, 1)
    dx, *grads = _norm_backward(dy, x, weight, bias, stats, ctx.offset, ctx.is_rms, ctx.round_first, parts)
    return dx, *handed_out(ctx, grads, 1), None, None, None, None, None


def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, offset: float,
    is_rms: bool, round_first: bool, parts: int,
) -> list[Tensor]:  # fmt: skip
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return [dx, *[x.new_empty(x.shape[-1], dtype=d) for d in weight_dtypes(weight, bias, parts)]]


@operator("norm_backward", fake=_backward_fake)
def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, offset: float,
    is_rms: bool, round_first: bool, parts: int,
) -> list[Tensor]:  # fmt: skip
    dx, _, grads = launch_backward(
        dy, None, x, weight, bias, stats, None, 0.0, offset, is_rms, round_first, parts, None
    )
    return [dx, *grads]


@operator("norm", fake=_forward_fake, backward=_forward_backward, setup_context=_forward_setup)
def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, is_rms: bool,
    round_first: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, _, stats = launch_forward(x, None, None, 0.0, weight, bias, eps, offset, is_rms, round_first, dtype)
    return y, stats


def as_columns(x: Tensor, normalized_shape: Sequence[int] | int) -> tuple[Tensor, list[int]]:
    """`x` with its last dimensions, those of `normalized_shape`, as one, and that shape as a list.

    Raises:
        UnsupportedError: the last dimensions are not these.
    """
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if not shape or list(x.shape[-len(shape) :]) != shape:
        refuse([f"normalized_shape {shape} is not the end of the input's shape {list(x.shape)}"], "norm")
    return (x if len(shape) == 1 else x.flatten(-len(shape))), shape


def unsupported_reasons(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None
) -> list[str]:
    """Why these tensors cannot be normalised by the bundled kernels; empty if they can."""
    reasons = device_reasons(x, weight, bias, residual) + dtype_reasons(x, weight, bias, residual)
    if x.dim() == 0:
        reasons.append("a 0-d tensor has no rows")
    elif x.numel() > 0 and x.numel() // x.shape[-1] >= 2**31:
        reasons.append("2^31 rows or more")
    return reasons


def follows_autocast(x: Tensor, operator_name: str) -> torch.dtype:
    """The dtype that eager PyTorch's operator gives: fp32 inside autocast if it is on its list, else x's."""
    if not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    key = "AutocastCPU" if x.device.type == "cpu" else "AutocastCUDA"
    listed = torch._C._dispatch_has_kernel_for_dispatch_key(operator_name, key)
    return torch.float32 if listed else x.dtype


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.layer_norm` in one kernel, and one plus a small one backward.

    Args:
        x: (..., *normalized_shape), fp32, fp16 or bf16; rows may have any stride.
        normalized_shape: the last dimensions.
        weight: of that shape, of any of those dtypes, or None.
        bias: the same.
        eps: added to the variance.
        out_dtype: of the result; as eager PyTorch has it unless given (fp32 inside CUDA autocast, else x's).
            A consumer that casts down at once, as a linear layer does, is served as well by its own dtype.

    Raises:
        UnsupportedError: see `unsupported_reasons`.
    """
    rows, shape = as_columns(x, normalized_shape)
    refuse(unsupported_reasons(rows, weight, bias), "layer_norm")
    dtype = out_dtype or follows_autocast(x, "aten::layer_norm")
    y, _ = _norm(rows, _flat(weight, shape), _flat(bias, shape), eps, 0.0, False, False, dtype)
    return y.view(x.shape)


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    casting: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.rms_norm`, and the variants of Llama and Gemma.

    Args:
        x: (..., *normalized_shape), fp32, fp16 or bf16; rows may have any stride.
        normalized_shape: the last dimensions.
        weight: of that shape, of any of those dtypes, or None.
        eps: added to the mean square; x's dtype's machine epsilon unless given, as PyTorch has it.
        offset: added to the weight: 1 for Gemma.
        casting: ``"fp32"`` or ``"llama"``, see the module's docstring.
        out_dtype: of the result; as eager PyTorch (or Llama) has it unless given.

    Raises:
        UnsupportedError: see `unsupported_reasons`.
        ValueError: unknown casting.
    """
    rows, shape = as_columns(x, normalized_shape)
    refuse(unsupported_reasons(rows, weight), "rms_norm")
    dtype = out_dtype or rms_dtype(x, weight, casting)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y, _ = _norm(rows, _flat(weight, shape), None, eps, offset, True, casting == "llama", dtype)
    return y.view(x.shape)


def rms_dtype(x: Tensor, weight: Tensor | None, casting: str) -> torch.dtype:
    """Of an RMSNorm's result by its casting.

    Raises:
        ValueError: unknown casting.
    """
    if casting == "llama":
        return x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    if casting != "fp32":
        raise ValueError(f"casting {casting!r}: give 'fp32' or 'llama'")
    return follows_autocast(x, "aten::rms_norm")


def _flat(weight: Tensor | None, shape: list[int]) -> Tensor | None:
    if weight is None:
        return None
    if list(weight.shape) != shape:
        refuse([f"a weight or bias of shape {list(weight.shape)} for normalized_shape {shape}"], "norm")
    return weight.reshape(-1).contiguous()


def layer_norm_reference(
    x: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The same in plain PyTorch."""
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    return F.layer_norm(x, shape, weight, bias, eps)


def rms_norm_reference(
    x: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    casting: str = "fp32",
) -> Tensor:
    """The same in plain PyTorch: in x's dtype or fp32, whichever is finer."""
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    dims = tuple(range(-len(shape), 0))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    h = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    if casting == "llama":
        return h.to(x.dtype) if weight is None else (offset + weight) * h.to(x.dtype)
    return (h if weight is None else h * (offset + weight.to(h.dtype))).to(x.dtype)


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` on the bundled kernel: same arguments, same parameter names."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimensions of `input`."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` on the bundled kernel: same arguments, same parameter names, and its kin's variants.

    Args:
        offset: added to the weight; with 1, as in Gemma, weights start from 0.
        casting: ``"fp32"`` or ``"llama"``.
    """

    # On the class, so that an instance whose class is exchanged for this one has them.
    offset: float = 0.0
    casting: str = "fp32"

    def __init__(self, *args: Any, offset: float = 0.0, casting: str = "fp32", **kwargs: Any) -> None:
        self.offset, self.casting = offset, casting
        super().__init__(*args, **kwargs)

    def reset_parameters(self) -> None:
        """Weights such that weight + offset is 1."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimensions of `x`."""
        return rms_norm(
            x, self.normalized_shape, self.weight, self.eps, offset=self.offset, casting=self.casting
        )
