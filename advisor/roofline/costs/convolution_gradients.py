"""Gradients of convolutions: data and weight, together or each by itself (FLOPs: `convolution_problem`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import booleans, flag, integers, itemsize, tensor
from advisor.roofline.costs.convolution_problem import (
    Problem,
    as_executed,
    batched,
    beside,
    problem_of,
    which_multiply,
)
from advisor.roofline.costs.model import Cost, Launch, OpCall, Tensor
from advisor.roofline.costs.registry import Result, cost, split

#: The family of operators that these count under.
FAMILY = "convolution"


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
    x, grad = batched(x, w), batched(grad, w)
    problem = (
        problem_of(grad.shape, x.shape, w.shape, stride)
        if transposed
        else problem_of(x.shape, grad.shape, w.shape, stride)
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
    return _gradients(call, problem_of(x.shape, grad.shape, w.shape, stride), x, grad, w, *wanted[:2])


@cost("aten::cudnn_convolution_backward_input", "aten::miopen_convolution_backward_input")
def backward_input(call: OpCall) -> Result:
    """The data gradient alone: size of x, dy, weight."""
    shape, grad, w = integers(call, 0), tensor(call, 1), tensor(call, 2)
    x = Tensor(shape, grad.dtype)
    return _gradients(
        call, problem_of(shape, grad.shape, w.shape, (1,)), x, grad, w, wants_data=True, wants_weight=False
    )


@cost("aten::cudnn_convolution_backward_weight", "aten::miopen_convolution_backward_weight")
def backward_weight(call: OpCall) -> Result:
    """The weight gradient alone: size of the weight, dy, x."""
    shape, grad, x = integers(call, 0), tensor(call, 1), tensor(call, 2)
    w = Tensor(shape, grad.dtype)
    return _gradients(
        call, problem_of(x.shape, grad.shape, shape, (1,)), x, grad, w, wants_data=False, wants_weight=True
    )


def _gradients(
    call: OpCall, problem: Problem, x: Tensor, grad: Tensor, w: Tensor, wants_data: bool, wants_weight: bool
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
            split(as_executed(whole, problem, members[0], grad.dtype, call), members) if members else ()
        )
    shapes = (x.shape, w.shape, grad.shape)
    results = [
        x.shape if part == "dgrad" else w.shape if part == "wgrad" else None for part in _looking_ahead(parts)
    ]
    return tuple(
        next(shares[part]) if part else beside(launch, shapes, width, result or w.shape)
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
    is_main = which_multiply(launches)
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
