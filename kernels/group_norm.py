"""GroupNorm and the activation behind it in one pass: y = f(GroupNorm(x)), as before a U-Net's convolutions.

x is (samples, channels, positions), and a group, `D` neighbouring channels of a sample, one run of n = D S
elements. With m = mean(x) and r = 1 / sqrt(mean((x - m)^2) + eps) of a group, w and b of a channel:

    h = (x - m) r            u = h w + b                y = f(u)
    du = dy f'(u)            g = du w                   dx = r (g - h mean(g h) - mean(g))
    P = sum of du h, Q = sum of du over a channel's positions in one sample
    mean(g h) = sum of w P / n, mean(g) = sum of w Q / n over a group's channels
    dw = sum of P, db = sum of Q over samples

(Wu and He, "Group normalization", 2018.) x, m and r are saved, m as two fp32 numbers, so that h is exact
where m is many times the spread; h and u are computed again. The sums that dx needs are those that dw and db
are made of: one fp32 number a plane, added up in a fixed order. Compulsory bytes an element: read 1, write 1
forward; read 2, write 1 backward.

A program holds a group, or several small ones, in registers (`_group_norm_held`): moments in two passes
there. Larger groups, and large ones that are too few, are shared by several programs, in two launches
(`_group_norm_split`): moments by pieces.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._device import device_reasons, dtype_reasons, refuse, sm_count
from ._family import Family
from ._group_norm_held import backward_held, forward_held, tile_of
from ._group_norm_split import backward_split, forward_split
from ._math import ACTIVATIONS
from ._ops import operator
from .activations import bias_activation_reference
from .norm import follows_autocast

FAMILY = Family(
    what="GroupNorm and the activation behind it in one pass",
    public=("group_norm", "FusedGroupNorm"),
    replaces=("torch.nn.GroupNorm", "torch.nn.functional.group_norm", "SiLU(GroupNorm(x))"),
    differs="channels_last is not taken",
)

#: Elements of a group that a program holds without spilling any.
MAX_HELD = 16384
#: Of both its input and its gradient.
MAX_HELD_BACKWARD = 8192
#: Groups of at most so many elements are never shared: a second launch would cost more.
NEVER_SPLIT = 4096
#: Positions of a channel are counted in 32 bits, with room for a tile.
_MAX_POSITIONS = 2**30


def _held(x: Tensor, groups: int, most: int) -> bool:
    """Whether one program holds a group: it fits, and there are groups for half the multiprocessors."""
    tile = tile_of(x.shape[1] // groups, x.shape[2])
    return tile <= most and (tile <= NEVER_SPLIT or 2 * x.shape[0] * groups >= sm_count(x.device))


def _forward_fake(
    x: Tensor, weight: Tensor | None, shift: Tensor | None, groups: int, eps: float, name: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    stats = x.new_empty(3, x.shape[0] * groups, dtype=torch.float32)
    return torch.empty(x.shape, dtype=dtype, device=x.device), stats


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, shift, ctx.groups, _, ctx.name, _ = inputs
    ctx.save_for_backward(x, weight, shift, output[1])
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx: Any, dy: Tensor, _stats: Any) -> tuple[Any, ...]:
    x, weight, shift, stats = ctx.saved_tensors
    of_weight, of_shift = ctx.needs_input_grad[1:3]
    dx, *sums = _group_norm_backward(dy, x, weight, shift, stats, ctx.groups, ctx.name, of_weight or of_shift)
    return dx, sums[0] if of_weight else None, sums[1] if of_shift else None, None, None, None, None


def _dtypes(weight: Tensor | None, shift: Tensor | None, summed: bool) -> list[torch.dtype]:
    return [torch.float32 if t is None else t.dtype for t in (weight, shift)] if summed else []


def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, shift: Tensor | None, stats: Tensor, groups: int, name: str,
    summed: bool,
) -> list[Tensor]:  # fmt: skip
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return [dx, *[x.new_empty(x.shape[1], dtype=d) for d in _dtypes(weight, shift, summed)]]


@operator("group_norm_backward", fake=_backward_fake)
def _group_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, shift: Tensor | None, stats: Tensor, groups: int, name: str,
    summed: bool,
) -> list[Tensor]:  # fmt: skip
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dtypes = _dtypes(weight, shift, summed)
    if not x.numel():
        return [dx, *[torch.zeros(x.shape[1], dtype=d, device=x.device) for d in dtypes]]
    rough = x.dtype == dy.dtype == torch.bfloat16
    way = backward_held if _held(x, groups, MAX_HELD_BACKWARD) else backward_split
    sums = way(dy.contiguous(), x.contiguous(), weight, shift, stats, dx, groups, name, rough, dtypes)
    return [dx, *sums]


@operator("group_norm", fake=_forward_fake, backward=_autograd, setup_context=_setup)
def _group_norm(
    x: Tensor, weight: Tensor | None, shift: Tensor | None, groups: int, eps: float, name: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    stats = torch.empty(3, x.shape[0] * groups, dtype=torch.float32, device=x.device)
    if x.numel():
        rough = x.dtype == dtype == torch.bfloat16
        way = forward_held if _held(x, groups, MAX_HELD) else forward_split
        way(x.contiguous(), weight, shift, y, stats, groups, eps, name, rough)
    return y, stats


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "none",
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``f(torch.nn.functional.group_norm(x, groups, weight, shift, eps))``.

    Args:
        x: (samples, channels, ...), fp32, fp16 or bf16; what is not contiguous is copied.
        groups: into which the channels are divided.
        weight: (channels,) of any of those dtypes, or None.
        shift: the same.
        eps: added to the variance.
        activation: ``none``, ``relu``, ``relu_squared``, ``silu``, ``gelu`` (by erf) or ``gelu_tanh``.
        out_dtype: of the result; as eager PyTorch has it unless given (fp32 inside CUDA autocast, else x's).
            A consumer that casts down at once, as a convolution does, is served as well by its own dtype.

    Raises:
        UnsupportedError: see `unsupported_reasons`.
        ValueError: unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: it must be one of {', '.join(ACTIVATIONS)}")
    refuse(unsupported_reasons(x, groups, weight, shift), "group_norm")
    dtype = out_dtype or follows_autocast(x, "aten::group_norm")
    vectors = [None if v is None else v.contiguous() for v in (weight, shift)]
    flat = x.reshape(*x.shape[:2], x.shape[2:].numel())
    return _group_norm(flat, *vectors, groups, eps, activation, dtype)[0].view(x.shape)


def unsupported_reasons(
    x: Tensor, groups: int, weight: Tensor | None = None, shift: Tensor | None = None
) -> list[str]:
    """Why these cannot be taken: devices, dtypes, shapes and layouts; empty if they can."""
    reasons = device_reasons(x, weight, shift) + dtype_reasons(x, weight, shift)
    if x.dim() < 2:
        return [*reasons, f"a {x.dim()}-d tensor has no channels"]
    samples, channels = x.shape[:2]
    if groups < 1 or channels % groups:
        reasons.append(f"{channels} channels do not divide into {groups} groups")
    shapes = [list(v.shape) for v in (weight, shift) if v is not None and v.shape != (channels,)]
    reasons += [f"a vector of shape {shape} for {channels} channels" for shape in shapes]
    if samples * channels >= 2**31 or x.shape[2:].numel() >= _MAX_POSITIONS:
        reasons.append("2^31 planes or 2^30 positions of one, or more")
    if _channels_last(x):
        reasons.append("channels_last: the kernel takes a channel's positions one after the other")
    return reasons


def _channels_last(x: Tensor) -> bool:
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return layout is not None and not x.is_contiguous() and x.is_contiguous(memory_format=layout)


def group_norm_reference(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "none",
) -> Tensor:
    """The same in plain PyTorch."""
    return bias_activation_reference(F.group_norm(x, groups, weight, shift, eps), None, activation)


class FusedGroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm` on the bundled kernel: same arguments, same parameter names, and an activation.

    Args:
        activation: behind the norm, see `group_norm`.
    """

    # On the class, so that an instance whose class is exchanged for this one has it.
    activation: str = "none"

    def __init__(self, *args: Any, activation: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the groups of `input`, and activate."""
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.activation)
