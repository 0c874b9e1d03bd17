"""Convolutions of 1 to 3 dimensions, grouped, depthwise, transposed; forward and both gradients.

``2 n c_out out_spatial (c_in / groups) kernel`` FLOPs forward, as many for each of the two gradients: each is
the same set of multiply-adds, summed over another index (Dumoulin & Visin, A guide to convolution arithmetic,
2016). Winograd and FFT kernels are counted by this direct form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import Unknown, booleans, flag, integer, integers, itemsize, tensor, text
from advisor.roofline.costs.model import Cost, Launch, OpCall, Tensor
from advisor.roofline.costs.registry import Result, cost, split
from advisor.roofline.costs.tiles import convolution_flops
from advisor.roofline.costs.traffic import outgrows_cache

#: Positions of stride, padding, dilation, groups and, if it has one, the transposed flag or output padding.
_FORWARD = {
    "aten::convolution": (3, 4, 5, 8, 6), "aten::_convolution": (3, 4, 5, 8, 6),
    "aten::convolution_overrideable": (3, 4, 5, 8, 6), "aten::cudnn_convolution": (3, 2, 4, 5, None),
    "aten::miopen_convolution": (4, 3, 5, 6, None),
    "aten::miopen_depthwise_convolution": (4, 3, 5, 6, None),
    "aten::mkldnn_convolution": (4, 3, 5, 6, None), "aten::cudnn_convolution_relu": (3, 4, 5, 6, None),
    "aten::miopen_convolution_relu": (3, 4, 5, 6, None),
    "aten::cudnn_convolution_add_relu": (5, 6, 7, 8, None),
    "aten::_conv_depthwise2d": (4, 5, 6, None, None), "aten::conv_depthwise3d": (4, 5, 6, None, None),
    "aten::_slow_conv2d_forward": (4, 5, None, None, None), "aten::thnn_conv2d": (4, 5, None, None, None),
    "aten::slow_conv3d_forward": (4, 5, None, None, None),
    "aten::_nnpack_spatial_convolution": (4, 3, None, None, None),
    "aten::slow_conv_dilated2d": (4, 5, 6, None, None),
    "aten::slow_conv_dilated3d": (4, 5, 6, None, None),
}  # fmt: skip


@dataclass(frozen=True)
class _Problem:
    """One convolution, seen from the side that the window slides over and the side with an element a window.

    Attributes:
        wide: the input of a plain convolution, the output of a transposed one.
        narrow: the other.
        weight: shape of the weight.
        flops: of the forward pass.
        touched: share of `wide` that any window covers (under 1 where the stride leaps over elements).
        strides: of the window, one a dimension.
    """

    wide: tuple[int, ...]
    narrow: tuple[int, ...]
    weight: tuple[int, ...]
    flops: float
    touched: float
    strides: tuple[int, ...]

    def executed(self, kernel: str) -> float:
        """FLOPs that this kernel executes: whole tiles, where its name tells them."""
        if self.wide[1] != self.weight[1]:
            return self.flops
        narrow, wide, taps = self.weight[0], self.weight[1], math.prod(self.weight[2:])
        positions = self.narrow[0] * math.prod(self.narrow[2:])
        if roles.role(kernel) == "dgrad":
            # Positions of one remainder modulo the strides meet the same taps: each is a product of its own.
            positions = math.ceil(self.wide[0] * math.prod(self.wide[2:]) / math.prod(self.strides))
        plain = 2.0 * positions * narrow * wide * taps
        return self.flops * max(1.0, convolution_flops(kernel, positions, narrow, wide, taps) / plain)

    @property
    def phases(self) -> int:
        """Products that make up a strided data gradient: remainders modulo the strides that meet a tap."""
        return math.prod(min(step, size) for step, size in zip(self.strides, self.weight[2:], strict=True))


def _problem(
    wide: Sequence[int], narrow: Sequence[int], weight: Sequence[int], stride: Sequence[int]
) -> _Problem:
    spatial = len(weight) - 2
    if spatial < 1 or not len(wide) == len(narrow) == len(weight) or wide[0] != narrow[0]:
        raise Unknown("ranks or batches differ")
    if narrow[1] != weight[0] or wide[1] % weight[1]:
        raise Unknown("channels differ")
    strides = tuple(stride) * spatial if len(stride) == 1 else tuple(stride)
    if len(strides) != spatial or min(strides) < 1:
        raise Unknown("strides do not fit")
    touched = math.prod(
        min(1.0, out * kernel / size) if kernel < step else 1.0
        for size, out, kernel, step in zip(wide[2:], narrow[2:], weight[2:], strides, strict=True)
    )
    flops = 2.0 * math.prod(narrow) * math.prod(weight[1:])
    return _Problem(tuple(wide), tuple(narrow), tuple(weight), flops, touched, strides)


def _listed(call: OpCall, position: int | None, default: tuple[int, ...], spatial: int) -> tuple[int, ...]:
    values = default if position is None else integers(call, position)
    return values * spatial if len(values) == 1 else values


def _out_shape(
    x: Tensor, w: Tensor, stride: Sequence[int], pad: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    spatial = [
        (size + 2 * p - d * (kernel - 1) - 1) // s + 1
        for size, kernel, s, p, d in zip(x.shape[2:], w.shape[2:], stride, pad, dilation, strict=True)
    ]
    if any(size < 1 for size in spatial):
        raise Unknown("the kernel does not fit the input")
    return (x.shape[0], w.shape[0], *spatial)


def _transposed_out(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    extra: Sequence[int],
    groups: int,
) -> tuple[int, ...]:
    spatial = [
        (size - 1) * s - 2 * p + d * (kernel - 1) + e + 1
        for size, kernel, s, p, d, e in zip(
            x.shape[2:], w.shape[2:], stride, pad, dilation, extra, strict=True
        )
    ]
    return (x.shape[0], w.shape[1] * groups, *spatial)


def _batched(x: Tensor, w: Tensor) -> Tensor:
    """An unbatched input as a batch of one."""
    return Tensor((1, *x.shape), x.dtype) if len(x.shape) == len(w.shape) - 1 else x


@cost(*_FORWARD)
def forward(call: OpCall) -> Result:
    """Reads input and weight, writes the output; layout kernels beside it are copies."""
    at_stride, at_padding, at_dilation, at_groups, at_transposed = _FORWARD[call.name]
    w = tensor(call, 1)
    x = _batched(tensor(call, 0), w)
    spatial = len(w.shape) - 2
    if not call.concrete and at_transposed is None and call.following is not None:
        y = _plausible_result(x, w, call.following)
        problem = _problem(
            x.shape, y, w.shape, [max(1, round(a / b)) for a, b in zip(x.shape[2:], y[2:], strict=True)]
        )
        return _forward_cost(call, x.dtype, problem, problem.wide, problem.narrow, problem.touched)
    stride = _listed(call, at_stride, (1,), spatial)
    pad = _listed(call, at_padding, (0,), spatial)
    dilation = _listed(call, at_dilation, (1,), spatial)
    groups = integer(call, at_groups) if at_groups is not None and text(call, at_groups) else 1
    if at_transposed is not None and flag(call, at_transposed):
        return _transposed(
            call, x, w, stride, pad, dilation, _listed(call, at_transposed + 1, (0,), spatial), groups
        )
    y = _out_shape(x, w, stride, pad, dilation)
    if at_groups is not None and x.shape[1] != w.shape[1] * groups:
        raise Unknown("groups and channels contradict each other")
    problem = _problem(x.shape, y, w.shape, stride)
    return _forward_cost(call, x.dtype, problem, problem.wide, problem.narrow, problem.touched)


def _plausible_result(x: Tensor, w: Tensor, following: Tensor) -> tuple[int, ...]:
    """The shape of what the next operator takes, if it can be this convolution's result.

    Batch and channels have to be the result's, and the sides those of some whole stride with the padding that
    keeps a side at stride 1: traces before PyTorch 2.0 record no values.
    """
    shape = following.shape
    if len(shape) != len(x.shape) or shape[:2] != (x.shape[0], w.shape[0]) or following.dtype != x.dtype:
        raise Unknown("what follows is not the result")
    for size, kernel, out in zip(x.shape[2:], w.shape[2:], shape[2:], strict=True):
        step = max(1, round(size / out)) if out else 0
        if not step or out not in ((size - 1) // step + 1, (size - kernel) // step + 1):
            raise Unknown("what follows is not the result")
    return shape


@cost("aten::cudnn_convolution_transpose", "aten::miopen_convolution_transpose")
def transpose_forward(call: OpCall) -> Result:
    """A transposed convolution: each input element multiplies the whole kernel."""
    first = 2 if "cudnn" in call.name else 3
    x, w = tensor(call, 0), tensor(call, 1)
    spatial = len(w.shape) - 2
    pad, extra, stride, dilation = (_listed(call, first + index, (1,), spatial) for index in range(4))
    return _transposed(call, x, w, stride, pad, dilation, extra, integer(call, first + 4))


def _transposed(
    call: OpCall,
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    extra: Sequence[int],
    groups: int,
) -> Result:
    y = _transposed_out(x, w, stride, pad, dilation, extra, groups)
    if min(y) < 1:
        raise Unknown("sizes leave no output")
    problem = _problem(y, x.shape, w.shape, stride)
    return _forward_cost(call, x.dtype, problem, problem.narrow, problem.wide, 1.0)


def _forward_cost(
    call: OpCall, dtype: str, problem: _Problem, x: tuple[int, ...], y: tuple[int, ...], touched: float
) -> Result:
    width = itemsize(dtype)
    read = width * (math.prod(x) * touched + math.prod(problem.weight))
    written = width * math.prod(y)
    whole = Cost(
        problem.flops, read, written, roles.matrix_pipe("", dtype, call.settings, "allow_tf32_cudnn")
    )
    if not call.launches:
        return whole
    shapes = (x, problem.weight, y)
    is_main = _main(call.launches)
    main = [launch for launch, multiplies in zip(call.launches, is_main, strict=True) if multiplies]
    shares = iter(split(_as_executed(whole, problem, main[0], dtype, call), main) if main else ())
    return tuple(
        next(shares) if multiplies else _beside(launch, shapes, width, y)
        for launch, multiplies in zip(call.launches, is_main, strict=True)
    )


def _as_executed(whole: Cost, problem: _Problem, launch: Launch, dtype: str, call: OpCall) -> Cost:
    """An ideal cost as this kernel has it: its pipe, its tiles, what a strided data gradient reads again."""
    flops = problem.executed(launch.name)
    again = 0.0
    if roles.role(launch.name) == "dgrad" and "strided" in launch.name:
        gradient = itemsize(dtype) * math.prod(problem.narrow)
        again = (problem.phases - 1) * gradient if outgrows_cache(call, gradient) else 0.0
    pipe = roles.matrix_pipe(launch.name, dtype, call.settings, "allow_tf32_cudnn")
    return Cost(flops, whole.bytes_read + again, whole.bytes_written, pipe, again, flops - whole.flops)


@cost("aten::convolution_backward", "aten::convolution_backward_overrideable")
def backward(call: OpCall) -> Result:
    """Data gradient: reads dy and weight, writes dx. Weight gradient: reads x and dy, writes dweight.

    Kernels that no name tells apart follow PyTorch's order: the data gradient is launched before the
    weight's.
    """
    grad, x, w = tensor(call, 0), tensor(call, 1), tensor(call, 2)
    stride = integers(call, 4)
    wanted = booleans(call, 10) if "overrideable" not in call.name else booleans(call, 9)
    transposed = flag(call, 7) if "overrideable" not in call.name else flag(call, 6)
    x, grad = _batched(x, w), _batched(grad, w)
    problem = (
        _problem(grad.shape, x.shape, w.shape, stride)
        if transposed
        else _problem(x.shape, grad.shape, w.shape, stride)
    )
    return _gradients(call, problem, x, grad, w, wants_data=wanted[0], wants_weight=wanted[1])


@cost(
    "aten::cudnn_convolution_backward",
    "aten::miopen_convolution_backward",
    "aten::mkldnn_convolution_backward",
    "aten::thnn_conv2d_backward",
    "aten::_slow_conv2d_backward",
)
def old_backward(call: OpCall) -> Result:
    """Before PyTorch 1.11 each library had its own: input, gradient, weight, then the sizes."""
    x, grad, w = tensor(call, 0), tensor(call, 1), tensor(call, 2)
    if "thnn" in call.name or "slow" in call.name:
        x, grad = grad, x
    spatial = len(w.shape) - 2
    stride = tuple(max(1, round(a / b)) for a, b in zip(x.shape[2:], grad.shape[2:], strict=True))[:spatial]
    mask = next(
        (value for value in reversed(call.concrete) if value.lower().startswith(("[true", "[false"))), ""
    )
    wanted = (
        [item.strip() == "true" for item in mask.strip("[]").lower().split(",")] if mask else [True, True]
    )
    return _gradients(call, _problem(x.shape, grad.shape, w.shape, stride), x, grad, w, *wanted[:2])


@cost("aten::cudnn_convolution_backward_input", "aten::miopen_convolution_backward_input")
def backward_input(call: OpCall) -> Result:
    """The data gradient alone: size of x, dy, weight."""
    shape, grad, w = integers(call, 0), tensor(call, 1), tensor(call, 2)
    x = Tensor(shape, grad.dtype)
    return _gradients(
        call, _problem(shape, grad.shape, w.shape, (1,)), x, grad, w, wants_data=True, wants_weight=False
    )


@cost("aten::cudnn_convolution_backward_weight", "aten::miopen_convolution_backward_weight")
def backward_weight(call: OpCall) -> Result:
    """The weight gradient alone: size of the weight, dy, x."""
    shape, grad, x = integers(call, 0), tensor(call, 1), tensor(call, 2)
    w = Tensor(shape, grad.dtype)
    return _gradients(
        call, _problem(x.shape, grad.shape, shape, (1,)), x, grad, w, wants_data=False, wants_weight=True
    )


def _gradients(
    call: OpCall, problem: _Problem, x: Tensor, grad: Tensor, w: Tensor, wants_data: bool, wants_weight: bool
) -> Result:
    width = itemsize(grad.dtype)
    size_x, size_grad, size_w = (width * math.prod(item.shape) for item in (x, grad, w))
    data = Cost(problem.flops, size_grad + size_w, size_x)
    weight = Cost(problem.flops, size_grad + size_x * problem.touched, size_w)
    if not call.launches:
        wanted = [part for part, wants in ((data, wants_data), (weight, wants_weight)) if wants]
        pipe = roles.matrix_pipe("", grad.dtype, call.settings, "allow_tf32_cudnn")
        return Cost(
            sum(part.flops for part in wanted),
            size_grad + (size_w if wants_data else 0.0) + (size_x if wants_weight else 0.0),
            sum(part.bytes_written for part in wanted),
            pipe,
        )
    parts = _gradient_parts(call.launches, wants_data, wants_weight)
    shares = {}
    for part, whole in (("dgrad", data), ("wgrad", weight)):
        members = [launch for launch, name in zip(call.launches, parts, strict=True) if name == part]
        shares[part] = iter(
            split(_as_executed(whole, problem, members[0], grad.dtype, call), members) if members else ()
        )
    shapes = (x.shape, w.shape, grad.shape)
    results = [
        x.shape if part == "dgrad" else w.shape if part == "wgrad" else None for part in _looking_ahead(parts)
    ]
    return tuple(
        next(shares[part]) if part else _beside(launch, shapes, width, result or w.shape)
        for launch, part, result in zip(call.launches, parts, results, strict=True)
    )


def _looking_ahead(parts: Sequence[str]) -> list[str]:
    """For each launch the part of the next multiplying kernel, its own included."""
    ahead, following = [], next((part for part in reversed(parts) if part), "")
    for part in reversed(parts):
        following = part or following
        ahead.append(following)
    return ahead[::-1]


def _gradient_parts(launches: Sequence[Launch], wants_data: bool, wants_weight: bool) -> list[str]:
    """For each launch ``"dgrad"``, ``"wgrad"``, or ``""`` for a kernel beside them."""
    named = [
        roles.role(launch.name) if roles.role(launch.name) in ("dgrad", "wgrad") else ""
        for launch in launches
    ]
    is_main = _main(launches)
    unnamed = [index for index, part in enumerate(named) if not part and is_main[index]]
    if not wants_data or "dgrad" in named:
        rest = ["wgrad"] * len(unnamed)
    elif not wants_weight or "wgrad" in named:
        rest = ["dgrad"] * len(unnamed)
    else:
        rest = ["dgrad"] * ((len(unnamed) + 1) // 2) + ["wgrad"] * (len(unnamed) // 2)
    for index, part in zip(unnamed, rest, strict=True):
        named[index] = part
    return named


def _main(launches: Sequence[Launch]) -> list[bool]:
    """Which launches multiply: the matrix kernels, or where none is known by name all of unknown part."""
    matrix = [roles.is_matrix(launch.name) for launch in launches]
    return matrix if any(matrix) else [roles.role(launch.name) == "other" for launch in launches]


def _beside(
    launch: Launch, shapes: Sequence[tuple[int, ...]], width: float, result: tuple[int, ...]
) -> Cost | None:
    """A kernel that prepares, moves or sums one of the tensors.

    Args:
        launch: the kernel.
        shapes: of the activation, the weight, and the output or its gradient.
        width: bytes an element.
        result: shape of what the multiplying kernel after it writes.
    """
    role = roles.role(launch.name)
    if role == "workspace":
        return Cost(0.0, 0.0, 0.0, "none")
    if role == "clear":
        return Cost(0.0, 0.0, width * math.prod(result), "none")
    if role == "sum_partials":
        moved = width * math.prod(shapes[1])
        return Cost(float(math.prod(shapes[1])), moved, moved)
    moved_shape = {"winograd_data": shapes[0], "winograd_filter": shapes[1], "winograd_output": result}.get(
        role
    )
    if role == "layout":
        moved_shape = _laid_out(launch.grid_blocks, shapes)
    if moved_shape is None:
        return None
    moved = width * math.prod(moved_shape)
    return Cost(0.0, moved, moved, "none")


def _laid_out(blocks: int | None, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The tensor that a layout kernel moves: in 32 x 32 tiles of (channels, positions), a block each."""
    if len({math.prod(shape) for shape in shapes}) == 1:
        return shapes[0]
    if not blocks or blocks < 0:
        return None
    distance = {
        shape: abs(
            math.log(shape[0] * math.ceil(shape[1] / 32) * math.ceil(math.prod(shape[2:]) / 32) / blocks)
        )
        for shape in shapes
    }
    nearest = min(shapes, key=lambda shape: distance[shape])
    return nearest if distance[nearest] < math.log(8) else None
