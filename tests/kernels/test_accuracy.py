"""The rule of accuracy with a GPU's approximate instructions, emulated at their documented largest error."""

import numpy as np
import pytest
import torch
from advisor.kernels import _norm_rows, norm
from advisor.kernels import softmax as sm
from advisor.kernels._math import ACTIVATIONS
from torch import Tensor

from tests.kernels import hardware
from tests.kernels.activation_checks import apply, check_rough, check_slopes, check_values
from tests.kernels.checks import check

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2])
def seed(request, device, monkeypatch):
    """Which errors the instructions make."""
    if device.type == "cuda":
        pytest.skip("a GPU has instructions of its own")
    hardware.install(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("name", [*ACTIVATIONS, "tanh"])
def test_an_activation_is_as_exact_as_torchs(seed, name):
    check_values(name, CPU)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_gradient_of_an_activation_is_as_exact_as_torchs(seed, name):
    # GIVEN points where one less a sigmoid cancels, to be multiplied by as much as 400
    check_slopes(name, CPU)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_rough_activation_is_as_exact_in_bfloat16_as_torchs(seed, name):
    check_rough(name, CPU)


def test_a_rough_slope_from_its_sigmoid_is_as_exact_in_bfloat16_as_torchs(seed):
    check_rough("gelu", CPU, 2)


def test_a_rough_slope_from_its_sigmoid_keeps_its_relative_accuracy_down_the_tail():
    x = torch.linspace(-5.5, -2, 1024)
    y = torch.empty_like(x)
    apply[(1,)](x, y, "gelu", True, x.numel(), 2)
    far = x.double()
    truth = torch.special.ndtr(far) + far * (-far * far / 2).exp() / (2 * torch.pi) ** 0.5
    assert ((y - truth) / truth).abs().max() < 2**-8
    # AND stays a number where its polynomial would not
    edges = torch.tensor([1e15, -1e15, 3e38, -3e38, 0.0, 12.0, -12.0, 40.0])
    y = torch.empty_like(edges)
    apply[(1,)](edges, y, "gelu", True, edges.numel(), 2)
    assert y.tolist() == pytest.approx([1, 0, 1, 0, 0.5, 1, 0, 1], abs=4e-4)


def test_a_rough_gelu_keeps_its_relative_accuracy_down_the_tail():
    # GIVEN what a norm after it would blow up
    x = torch.linspace(-5.5, 5.5, 1024)
    y = torch.empty_like(x)
    apply[(1,)](x, y, "gelu", False, x.numel(), 1)
    truth = x.double() * torch.special.ndtr(x.double())
    assert ((y - truth) / truth).abs().max() < 2**-9


class _CudasSoftmax(torch.autograd.Function):
    """Softmax as PyTorch's CUDA kernel computes it; its sums, by trees, are taken to be exact."""

    @staticmethod
    def forward(ctx, z: Tensor, seed: int) -> Tensor:
        below = z - z.amax(-1, keepdim=True)
        e = torch.from_numpy(hardware.expf(below.numpy(), seed))
        y = e / e.double().sum(-1, keepdim=True).float()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        g = dy * y
        return g - y * g.double().sum(-1, keepdim=True).float(), None


@pytest.mark.parametrize(("columns", "scale"), [(777, 1.0), (777, 2.0), (16385, 2.0)])
def test_softmax_in_fp32_is_as_exact_as_cudas(seed, columns, scale):
    torch.manual_seed(seed)
    check(
        lambda x: sm.softmax(x, scale=scale),
        lambda x: sm.softmax_reference(x, scale=scale),
        {"x": torch.randn(5, columns) * 3},
        eager=lambda x: _CudasSoftmax.apply(x * scale, seed),
    )


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_softmax_in_fp16_is_as_exact_as_in_fp32_and_rounded(seed, shift):
    x = (torch.randn(5, 777) * 3 + shift).half()
    check(
        sm.softmax,
        lambda x: torch.softmax(x.to(torch.promote_types(x.dtype, torch.float32)), -1).to(x.dtype),
        {"x": x},
    )


@pytest.mark.parametrize("cols", [1000, 1024])
def test_layer_norm_of_rows_far_from_zero_is_as_exact_as_torchs(seed, cols, monkeypatch):
    # GIVEN warps that wait for each other once where rows fill their tile
    row = {"ROWS": 1, "num_warps": 4, "JOIN": 1}
    monkeypatch.setattr(_norm_rows.FORWARD, "rows", {"default": ((None, row),)})
    x = torch.randn(7, cols) + 1000
    check(
        lambda x: norm.layer_norm(x, cols),
        lambda x: norm.layer_norm_reference(x, cols),
        {"x": x},
    )


def test_an_emulated_instruction_is_off_by_no_more_than_documented_and_not_by_nothing():
    x = np.linspace(-20, 20, 1001, dtype=np.float32)
    off = hardware.exp2(x, 1) / np.exp2(x.astype(np.float64)) - 1
    assert 1.5 * 2**-23 < np.abs(off).max() <= 2.6 * 2**-23
    assert hardware.exp2(np.zeros(1, np.float32)) == 1
    assert (hardware.exp2(x, 1) == hardware.exp2(x, 1)).all()
    assert (hardware.exp2(x, 1) != hardware.exp2(x, 2)).any()
