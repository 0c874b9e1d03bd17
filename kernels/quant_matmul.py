"""Linear layers with int4 or int8 weights: few rows of x, as in decoding, at the speed of reading weights.

With W = s (q - z), see `_quant_format`, and x (rows, in):

    y = x W^T + b        dx = dy W        db = sum of dy over rows

The weight is frozen: there is no gradient for it, its scales or zero points. Compulsory bytes: packed words,
scales and zero points once (a quarter to a half of the 16-bit weight), x and y.

Five ways, by the rows of x:

- One row of 16-bit x and int4, on a GPU where it was the fastest (`STREAM_ROWS`): the words of W go from
  memory to the registers in which the matrix units take them, `_quant_stream`.
- 16-bit x up to `SPLIT_ROWS`, on the matrix units: an element becomes a 16-bit number exactly, without a
  conversion, and the scale multiplies a group's sum in fp32. The warps of a program take turns in the blocks
  of a row, and their sums are added in a fixed order at its end: no atomics, no second launch, bit-equal from
  run to run.
- 16-bit x up to `TILE_ROWS`, likewise, with warps that share out rows of W.
- fp32 x up to `GEMV_ROWS`: products and sums in fp32 on the plain units.
- Beyond, the weight is dequantised into a temporary matrix and PyTorch multiplies; so does the gradient for
  x, wanted where adapters are trained before a frozen layer.

On the matrix units a group with a zero point is s (sum of (u - 8) x - (z - 8) sum of x): infinite x gives
NaN there where eager may give infinity. x whose columns do not fill blocks of 128, or whose rows do not begin
on 16 bytes, is copied first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._device import device_reasons, dtype_reasons, refuse
from ._family import Family
from ._ops import autocast_dtype, operator
from ._quant_format import (
    BLOCK,
    GROUP_SIZES,
    QuantizedWeight,
    blocks_of,
    dequantize,
    quantize_int4,
    quantize_int8,
    words_of,
)
from ._quant_launch import (
    SPLIT_ROWS,
    launch_dequantize,
    launch_gemv,
    launch_split,
    launch_stream,
    launch_tile,
    streams,
)

FAMILY = Family(
    what="linear layers with int4 or int8 weights, for few rows of x as in decoding",
    public=(
        "WeightOnlyLinear", "dequantize", "quantize_int4", "quantize_int8", "quantize_model",
        "weight_only_linear",
    ),
    replaces=("torch.nn.Linear with a frozen weight",),
    differs="the weight is rounded to 4 or 8 bits",
)  # fmt: skip

__all__ = [
    "QuantizedWeight", "WeightOnlyLinear", "dequantize", "quantize_int4", "quantize_int8", "quantize_model",
    "unsupported_reasons", "weight_only_linear", "weight_only_linear_reference",
]  # fmt: skip

#: The most rows of fp32 x for the plain units: beyond, unpacking once and PyTorch's product are faster.
GEMV_ROWS = 8
#: The most rows of 16-bit x, 0 or 1, for the kernel whose words of W go straight to registers.
STREAM_ROWS = 1
#: The most rows of 16-bit x for the matrix units here, with the same beyond.
TILE_ROWS = 256


def _forward_fake(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, bits: int
) -> Tensor:
    return x.new_empty(x.shape[0], packed.shape[0])


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, packed, scale, zero, bias, ctx.bits = inputs
    ctx.in_features, ctx.dtype = x.shape[1], x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(packed, scale, zero)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    packed, scale, zero = ctx.saved_tensors
    dx = db = None
    if ctx.needs_input_grad[0]:
        dx = gradient_op(dy, packed, scale, zero, ctx.bits, ctx.in_features)
    if ctx.needs_input_grad[4]:
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return dx, None, None, None, db, None


def _matrix(
    packed: Tensor, scale: Tensor, zero: Tensor | None, bits: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    """The dequantised weight (out, in), by the kernel; scales and zero points are (groups, out)."""
    out = torch.empty(packed.shape[0], in_features, dtype=dtype, device=packed.device)
    if out.numel():
        launch_dequantize(packed, scale, zero, out, bits)
    return out


@operator(
    "weight_only_linear_backward",
    fake=lambda dy, packed, scale, zero, bits, in_features: dy.new_empty(dy.shape[0], in_features),
)
def gradient_op(
    dy: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bits: int, in_features: int
) -> Tensor:
    """The gradient for x (rows, in): the output's (rows, out) times the dequantised weight."""
    return dy @ _matrix(packed, scale, zero, bits, in_features, dy.dtype)


@operator("weight_only_linear", fake=_forward_fake, backward=_backward, setup_context=_setup)
def forward_op(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, bits: int
) -> Tensor:
    """``x W^T + bias`` for x (rows, in), in x's dtype; scales and zero points are (groups, out)."""
    y = _forward_fake(x, packed, scale, zero, bias, bits)
    if not y.numel():
        return y
    rows = x.shape[0]
    if x.dtype == torch.float32:
        launch = launch_gemv if rows <= GEMV_ROWS else None
    elif rows <= STREAM_ROWS and streams(x, bits):
        launch = launch_stream
    elif rows <= SPLIT_ROWS:
        launch = launch_split
    else:
        launch = launch_tile if rows <= TILE_ROWS else None
    if launch:
        launch(x, packed, scale, zero, bias, y, bits)
    else:
        matrix = _matrix(packed, scale, zero, bits, x.shape[1], x.dtype)
        torch.mm(x, matrix.t(), out=y)
        if bias is not None:
            y += bias
    return y


def weight_only_linear_reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """The same in plain PyTorch, with the weight dequantised to x's dtype."""
    return F.linear(x, dequantize(weight, x.dtype), None if bias is None else bias.to(x.dtype))


def unsupported_reasons(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> list[str]:
    """Why the kernels cannot multiply `x` by this weight; empty if they can."""
    packed, scale, zero, bits, in_features = weight
    reasons = device_reasons(x, packed, scale, zero, bias) + dtype_reasons(x, scale, bias)
    if bits not in (4, 8):
        return [*reasons, f"{bits} bits: 4 or 8"]
    if x.dim() == 0 or x.shape[-1] != in_features:
        reasons.append(f"x of shape {tuple(x.shape)}: (..., {in_features})")
    if packed.dtype != torch.int32 or packed.dim() != 2 or packed.shape[1] != words_of(in_features, bits):
        wanted = f"int32 (out, {words_of(in_features, bits)})"
        reasons.append(f"packed {packed.dtype} of shape {tuple(packed.shape)}: {wanted}")
    columns = blocks_of(in_features) * BLOCK
    widths = {1} if bits == 8 else {columns // size for size in GROUP_SIZES}
    if scale.dim() != 2 or scale.shape[0] != packed.shape[0] or scale.shape[1] not in widths:
        reasons.append(f"scale of shape {tuple(scale.shape)}: ({packed.shape[0]}, one of {sorted(widths)})")
    if zero is not None and (bits == 8 or zero.dtype != torch.uint8 or zero.shape != scale.shape):
        reasons.append("zero points: uint8 of the scales' shape, with 4 bits")
    if bias is not None and bias.shape != packed.shape[:1]:
        reasons.append(f"bias of shape {tuple(bias.shape)}: ({packed.shape[0]},)")
    return reasons


def weight_only_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ dequantize(weight).T + bias`` without making the dequantised matrix, for few rows of x.

    Under autocast x is cast to its dtype, as `torch.nn.functional.linear` casts.

    Args:
        x: (..., in), fp32, fp16 or bf16; rows may have any stride.
        weight: from `quantize_int4` or `quantize_int8`; no gradient goes to it.
        bias: (out,), of any of those dtypes, or None.

    Returns:
        (..., out), contiguous, in x's or autocast's dtype.

    Raises:
        UnsupportedError: see `unsupported_reasons`.
    """
    refuse(unsupported_reasons(x, weight, bias), "weight_only_linear")
    packed, scale, zero, bits, in_features = weight
    x = x.to(autocast_dtype(x) or x.dtype)
    # Not -1: with no columns it would stand for any number of rows.
    rows = x.reshape(x.shape[:-1].numel(), in_features)
    # As the format has them in memory, so that nothing is copied.
    by_group = scale.t().contiguous(), None if zero is None else zero.t().contiguous()
    y = forward_op(rows, packed.contiguous(), *by_group, None if bias is None else bias.contiguous(), bits)
    return y.view(*x.shape[:-1], packed.shape[0])


class WeightOnlyLinear(nn.Module):
    """A frozen `torch.nn.Linear` with int4 or int8 weights; see `weight_only_linear`.

    Words, scales and zero points are buffers, saved with the model; `.half()` and the like change the scales'
    dtype. The bias stays the parameter that it was.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.bits, self.in_features = weight.bits, weight.in_features
        self.register_buffer("packed", weight.packed)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("zero", weight.zero)
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, bits: int = 4, group_size: int = 128, *, symmetric: bool = True
    ) -> "WeightOnlyLinear":
        """Quantise a layer's weight; the bias is shared with it.

        Args:
            linear: the layer, which stays as it is.
            bits: 4 or 8.
            group_size: of int4, 32, 64 or 128; int8 has one scale a row.
            symmetric: int4 without zero points.

        Raises:
            ValueError: other bits or group size, or a weight that is not finite.
        """
        if bits not in (4, 8):
            raise ValueError(f"{bits} bits: give 4 or 8")
        if bits == 8:
            return cls(quantize_int8(linear.weight), linear.bias)
        return cls(quantize_int4(linear.weight, group_size=group_size, symmetric=symmetric), linear.bias)

    @property
    def weight(self) -> QuantizedWeight:
        """What the buffers hold, as `weight_only_linear` and `dequantize` take it."""
        return QuantizedWeight(self.packed, self.scale, self.zero, self.bits, self.in_features)

    @property
    def out_features(self) -> int:
        """Columns of the output."""
        return self.packed.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """Input (..., in_features)."""
        return weight_only_linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes and format, for the module's representation."""
        form = f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"
        if self.bits == 4:
            form += f", group_size={self.weight.group_size}, symmetric={self.zero is None}"
        return f"{form}, bias={self.bias is not None}"


def quantize_model(
    model: nn.Module, bits: int = 4, group_size: int = 128, *, symmetric: bool = True,
    skip: Sequence[str] | Callable[[str, nn.Linear], bool] = ("lm_head",),
) -> nn.Module:  # fmt: skip
    """Put a `WeightOnlyLinear` in place of every `torch.nn.Linear`, not of its subclasses.

    Args:
        model: changed in place; a linear layer itself is given back as a new module.
        bits: 4 or 8.
        group_size: of int4.
        symmetric: int4 without zero points.
        skip: names of layers to leave as they are, by their last part, or a function that says so.

    Returns:
        The model.
    """
    skipped = skip if callable(skip) else lambda name, _: name.rpartition(".")[2] in skip
    made: dict[nn.Module, WeightOnlyLinear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) is not nn.Linear or skipped(name, module):
            continue
        if module not in made:
            made[module] = WeightOnlyLinear.from_linear(module, bits, group_size, symmetric=symmetric)
        if module is model:
            return made[module]
        model.set_submodule(name, made[module])
    return model
