"""Autocast's cast behind a norm becomes the norm's own, and changes no bit of the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.verify import verify


class Block(nn.Module):
    """A residual sum, a norm, and layers behind it."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x):
        x = x + self.first(x)
        y = self.norm(x)
        return x + sum(layer(y) for layer in self.layers)


def collected(model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = torch.bfloat16) -> StepRewrite:
    step = StepRewrite(model, "forward")
    assert step.install() == ""
    with step.collecting(), torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        model(x)
    return step


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])]


def norm_site(step: StepRewrite):
    (site,) = [site for site in step.sites() if site.kind == "norm"]
    return site


def test_the_norm_gives_what_the_layer_behind_it_reads() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, 16, requires_grad=True)
    site = norm_site(collected(Block(), x))
    norm, total = site.original(*site.examples[0].args)
    assert norm.dtype is torch.bfloat16
    assert total.dtype is torch.float32
    assert site.what == "x + residual, LayerNorm"


def test_a_step_with_the_cast_written_out_is_the_eager_one_to_the_bit() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(3, 8, 16)
    expected = results(model, x)
    step = collected(model, x.requires_grad_())
    assert "torch.bfloat16" in step.rewriter.graphs[0]._plain.code
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), expected, strict=True))


@pytest.mark.parametrize(("layers", "dtype"), [(2, torch.bfloat16), (1, None)])
def test_a_norm_that_several_layers_read_or_that_none_rounds_stays_as_it_is(layers, dtype) -> None:
    # Several would add their gradients in 16 bits, where each is widened by itself.
    torch.manual_seed(0)
    x = torch.randn(3, 8, 16, requires_grad=True)
    step = collected(Block(layers), x, dtype)
    assert "to(torch.bfloat16)" not in step.rewriter.graphs[0]._plain.code
    site = norm_site(step)
    assert site.original(*site.examples[0].args)[0].dtype is torch.float32


def test_the_bundled_kernel_makes_the_cast() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, 16, requires_grad=True)
    site = norm_site(collected(Block(), x))
    (ours,) = [c for c in site.candidates if c.source == "bundled"]
    y, _ = ours.call(*site.examples[0].args)
    assert y.dtype is torch.bfloat16
    # Rounding is the interpreter's own; shapes, dtypes and gradients are held against the original's.
    assert "dtype" not in verify(site, ours, adversarial=False).refused


class Convolved(nn.Module):
    """A U-Net's block: what reads the activation of a norm, or the norm itself, is a convolution."""

    def __init__(self, readers: int = 1, activation: nn.Module | None = None, kept: bool = False) -> None:
        super().__init__()
        # In float32, as what CUDA's autocast gives to a norm; the CPU's leaves 16 bits as they are.
        self.scale, self.norm = nn.Parameter(torch.randn(8, 1, 1)), nn.GroupNorm(2, 8)
        self.activation, self.kept = activation, kept
        self.readers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(readers))

    def forward(self, x):
        x = x * self.scale
        y = h = self.norm(x)
        if self.activation is not None:
            h = self.activation(h)
        out = x + sum(reader(h) for reader in self.readers)
        return out + y if self.kept else out


ACTIVATIONS = [None, nn.SiLU(), nn.SiLU(inplace=True), nn.ReLU(), nn.GELU(approximate="tanh")]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_cast_before_a_convolution_is_written_out_and_changes_no_bit(activation) -> None:
    torch.manual_seed(0)
    model, x = Convolved(activation=activation), torch.randn(2, 8, 6, 6)
    expected = results(model, x)
    step = collected(model, x.requires_grad_())
    assert step.rewriter.graphs[0]._plain.code.count("to(torch.bfloat16)") == 1
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), expected, strict=True))


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (Convolved(2, nn.SiLU()), torch.bfloat16),
        (Convolved(1, nn.SiLU(), kept=True), torch.bfloat16),
        (Convolved(1, nn.Softplus()), torch.bfloat16),
        (Convolved(1, nn.SiLU()), None),
    ],
    ids=["two convolutions", "the norm is used elsewhere", "no activation that is known", "no autocast"],
)
def test_no_cast_is_written_where_more_than_one_convolution_reads_or_none_rounds(model, dtype) -> None:
    torch.manual_seed(0)
    step = collected(model, torch.randn(2, 8, 6, 6, requires_grad=True), dtype)
    assert "to(torch.bfloat16)" not in step.rewriter.graphs[0]._plain.code
