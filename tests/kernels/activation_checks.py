"""Activations as device functions, held to torch's own."""

import torch
import torch.nn.functional as F
from advisor.kernels._math import activation, activation_gradient, tanh
from advisor.kernels._triton import tl, triton
from torch import Tensor

from tests.kernels.checks import assert_as_accurate


@triton.jit
def apply(
    x_ptr, y_ptr, NAME: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr, ROUGH: tl.constexpr = 0
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    if SLOPE:
        y = activation_gradient(x, NAME, ROUGH == 0, ROUGH)
    elif NAME == "tanh":
        y = tanh(x)
    else:
        y = activation(x, NAME, ROUGH)
    tl.store(y_ptr + at, y)


def _torch_activation(name: str, x: Tensor) -> Tensor:
    return {
        "none": lambda: x,
        "relu": lambda: F.relu(x),
        "relu_squared": lambda: F.relu(x).square(),
        "silu": lambda: F.silu(x),
        "gelu": lambda: F.gelu(x),
        "gelu_tanh": lambda: F.gelu(x, approximate="tanh"),
        "tanh": lambda: torch.tanh(x),
    }[name]()


def _points(device: torch.device) -> Tensor:
    spread = torch.linspace(-12, 12, 1000)
    edges = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 1e4, -1e4, 65504, -65504, 0.25, -0.25, 1e-30, 3e-39])
    return torch.cat([spread, edges, torch.randn(12)]).to(device)


def check_values(name: str, device: torch.device) -> None:
    """An activation is as near to float64's as torch's is, wherever it bends."""
    x = _points(device)
    y = torch.empty_like(x)
    apply[(1,)](x, y, name, False, x.numel())
    assert_as_accurate(y, _torch_activation(name, x), _torch_activation(name, x.double()))


def check_slopes(name: str, device: torch.device) -> None:
    """The same of its gradient."""
    x = _points(device)
    y = torch.empty_like(x)
    apply[(1,)](x, y, name, True, x.numel())
    rough, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    (eager,) = torch.autograd.grad(_torch_activation(name, rough).sum(), rough)
    (truth,) = torch.autograd.grad(_torch_activation(name, exact).sum(), exact)
    assert_as_accurate(y, eager, truth, factor=3)


def check_rough(name: str, device: torch.device, rough_as: int = 1) -> None:
    """Both, for results in bfloat16 and in this way, are as near once rounded as torch's in bfloat16."""
    x = _points(device).bfloat16()
    rough, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    eager, truth = _torch_activation(name, rough), _torch_activation(name, exact)
    slopes = [torch.autograd.grad(y.sum(), of)[0] for y, of in ((eager, rough), (truth, exact))]
    for slope, theirs, true in ((False, eager, truth), (True, *slopes)):
        y = torch.empty(x.shape, device=device)
        apply[(1,)](x.float(), y, name, slope, x.numel(), rough_as)
        assert_as_accurate(y.bfloat16(), theirs.detach(), true.detach(), factor=3 if slope else 2)
