"""Faults whose cure gains nothing, since something else holds the loop up."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.payoff.case import BEHIND_INPUT, Loop, Scale, pair
from benchmarks.payoff.cases.attention import Explicit
from benchmarks.payoff.data import feature_batch, image_batch, resident, slow_storage
from benchmarks.payoff.networks import DeepMlp, NormChain, bias_gelu_norm, resnet
from benchmarks.payoff.training import Training, adamw, allow_tf32, projection, sgd, token_loss
from benchmarks.payoff.transformer import Shape, causal, language_model

#: Well above what any of these loops takes on the device or the host.
_WAIT_S = 0.04
_BEHIND = {"on_device": False, "gains": False, "nothing_from": BEHIND_INPUT, "warmup": 8}


@pair(
    "attention.explicit",
    title="attention by hand in a loop that waits for storage",
    fix="scaled_dot_product_attention(is_causal=True)",
    tolerance=1e-2,
    **_BEHIND,
)
def attention_behind_loader(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, vocabulary=8192)
    attend = causal if fixed else Explicit(shape.length)
    return language_model(n, shape, attend=attend, batches=slow_storage([shape.tokens()], n, _WAIT_S))


@pair(
    "fusion.chain",
    title="x + bias, GELU and LayerNorm in a loop that waits for storage",
    fix="torch.compile of the three",
    tolerance=2e-2,
    **_BEHIND,
)
def bias_gelu_layernorm(fixed: bool, n: Scale) -> Loop:
    rows, width, repeat = n(512, 4), n(2048, 16), n(64, 2)
    layer = n.compile(bias_gelu_norm) if fixed else bias_gelu_norm
    batches = slow_storage([feature_batch(rows, width, torch.bfloat16)], n, _WAIT_S)
    return Loop(Training(NormChain(n(12, 2), width, layer, repeat), projection, sgd()), batches, "bf16-true")


@pair(
    "optimizer.fused",
    title="AdamW that loops over its parameters, in a loop that waits for storage",
    fix="AdamW(fused=True)",
    **_BEHIND,
)
def optimizer_behind_loader(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, layers=6, length=512)
    make = adamw() if fixed else adamw(fused=False, foreach=False)
    return language_model(n, shape, optimizer=make, batches=slow_storage([shape.tokens()], n, _WAIT_S))


@pair(
    "layout.channels_last",
    title="convolutions on NCHW tensors in a loop that waits for storage",
    fix="model and images in torch.channels_last",
    tolerance=2e-2,
    **_BEHIND,
)
def channels_last_behind_loader(fixed: bool, n: Scale) -> Loop:
    layout = torch.channels_last if fixed else torch.contiguous_format
    images, labels = image_batch(n(64, 4), n(160, 32))
    batches = slow_storage([(images.contiguous(memory_format=layout), labels)], n, _WAIT_S)
    net = resnet(n, layout=layout)
    return Loop(Training(net, nn.functional.cross_entropy, sgd(momentum=0.9)), batches, "bf16-mixed")


class ReadsLoss(Training):
    """Training that keeps its losses, as numbers or as tensors."""

    as_number = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.losses: deque[Any] = deque(maxlen=64)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        kept = loss.detach().clone()
        self.losses.append(kept.item() if self.as_number else kept)
        return loss


class KeepsLoss(ReadsLoss):
    """The same without a wait."""

    as_number = False


@pair(
    "host.sync",
    title="loss.item() in each step of a loop that the device limits",
    fix="the loss stays a tensor on the device",
    gains=False,
    nothing_from=("host", "input"),
)
def sync_behind_device(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=2048, heads=16, layers=4, batch=16, vocabulary=8192)
    return language_model(n, shape, loss=token_loss, training=KeepsLoss if fixed else ReadsLoss)


@pair(
    "precision.tf32",
    title="fp32 products on the plain units in a loop that the host limits",
    fix='torch.set_float32_matmul_precision("high")',
    tolerance=1e-2,
    gains=False,
    nothing_from=("precision", "layout", "shape", "kernel", "attention", "loss", "input"),
)
def tf32_behind_host(fixed: bool, n: Scale) -> Loop:
    width = n(512, 16)
    module = Training(DeepMlp(n(48, 2), width), projection)
    loop = Loop(module, resident(feature_batch(n(256, 4), width), n))
    if fixed:
        loop.around = allow_tf32
    return loop
