"""Memory-bound work in many passes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.payoff.case import Loop, Scale, pair
from benchmarks.payoff.data import feature_batch, resident
from benchmarks.payoff.networks import NormChain, PointwiseChain, bias_gelu_norm, blend
from benchmarks.payoff.training import Training, projection, sgd
from benchmarks.payoff.transformer import GatedMlp, Shape, language_model, silu_gate


class RmsNorm(nn.Module):
    """RMSNorm, by its own operator or by hand."""

    def __init__(self, width: int, by_hand: bool) -> None:
        super().__init__()
        self.weight, self.by_hand = nn.Parameter(torch.ones(width)), by_hand

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype) * self.weight


@pair(
    "fusion.norm",
    title="RMSNorm by hand",
    fix="torch.nn.functional.rms_norm",
    tolerance=1e-2,
)
def decomposed_rmsnorm(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=1024, heads=16, layers=6, hidden=2816, vocabulary=8192)
    return language_model(
        n, shape, precision="bf16-true", norm=lambda width: RmsNorm(width, not fixed), mlp=GatedMlp
    )


def _gated(fixed: bool, n: Scale) -> Loop:
    gated = silu_gate
    if fixed:
        from advisor.kernels import swiglu

        gated = swiglu
    shape = Shape.of(n, width=1024, heads=16, hidden=8192, vocabulary=8192)
    return language_model(n, shape, mlp=lambda shape: GatedMlp(shape, gated))


@pair(
    "fusion.gate",
    title="silu(a) * b in two operators",
    fix="advisor.kernels.swiglu(a, b)",
    tolerance=1e-2,
    interpreter=True,
)
def unfused_gate(fixed: bool, n: Scale) -> Loop:
    return _gated(fixed, n)


def norm_chain(n: Scale, layer: object) -> Loop:
    """A GPU-bound loop of chains that end in a norm."""
    rows, width = n(32768, 8), n(2048, 16)
    module = Training(NormChain(n(12, 2), width, layer), projection, sgd())  # type: ignore[arg-type]
    return Loop(module, resident(feature_batch(rows, width, torch.bfloat16), n), "bf16-true")


@pair(
    "fusion.chain",
    title="x + bias, GELU and LayerNorm in three operators",
    fix="torch.compile of the three",
    tolerance=2e-2,
)
def bias_gelu_layernorm_gpu(fixed: bool, n: Scale) -> Loop:
    return norm_chain(n, n.compile(bias_gelu_norm) if fixed else bias_gelu_norm)


@pair(
    "fusion.chain",
    title="x + bias, GELU and LayerNorm in three operators",
    fix="torch.compile of the whole network",
    tolerance=2e-2,
    range_only="the likely saving lies between that of each chain compiled by itself and of all in one graph",
)
def bias_gelu_layernorm_whole(fixed: bool, n: Scale) -> Loop:
    loop = norm_chain(n, bias_gelu_norm)
    if fixed:
        n.compile(loop.module.net)
    return loop


@pair(
    "fusion.chain",
    title="x + bias, GELU and LayerNorm in three operators",
    fix="advisor.kernels.bias_act_norm",
    tolerance=2e-2,
    interpreter=True,
    range_only="the likely saving is told for torch.compile; the bundled kernel is the best case",
)
def bias_gelu_layernorm_bundled(fixed: bool, n: Scale) -> Loop:
    layer = bias_gelu_norm
    if fixed:
        from advisor.kernels.bias_act_norm import bias_act_norm

        def layer(x: Tensor, bias: Tensor, weight: Tensor, beta: Tensor) -> Tensor:
            return bias_act_norm(x, bias, "gelu", weight, beta)

    return norm_chain(n, layer)


@pair(
    "fusion.chain",
    title="five pointwise operators in a row",
    fix="torch.compile of the five",
    tolerance=2e-2,
)
def pointwise_chain(fixed: bool, n: Scale) -> Loop:
    rows, width = n(32768, 8), n(2048, 16)
    net = PointwiseChain(n(6, 2), width, n.compile(blend) if fixed else blend)
    batches = resident(feature_batch(rows, width, torch.bfloat16), n)
    return Loop(Training(net, projection, sgd()), batches, "bf16-true")
