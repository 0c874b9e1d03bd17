"""Loops as they should be: what is found in them is found for nothing."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.payoff.case import Loop, Scale, well_tuned
from benchmarks.payoff.data import Stored, image_batch, loader
from benchmarks.payoff.networks import resnet
from benchmarks.payoff.training import Training, allow_tf32, sgd
from benchmarks.payoff.transformer import Shape, language_model


@well_tuned(
    "a compiled GPT in bf16: fused attention and AdamW, padded vocabulary, TF32 for what is left in fp32",
    warmup=15,
)
def tuned_gpt(n: Scale) -> Loop:
    loop = language_model(n, Shape.of(n))
    loop.module.net = n.compile(loop.module.net)
    loop.module.loss = n.compile(loop.module.loss)
    loop.around = allow_tf32
    return loop


@well_tuned(
    "a small compiled ResNet in bf16 and channels_last: fused SGD, pinned batches from four workers",
    on_device=False,
    warmup=25,
)
def tuned_resnet(n: Scale) -> Loop:
    net = n.compile(resnet(n, (1, 2, 2, 1)))
    images, labels = image_batch(n(64, 4), n(224, 32))
    stored = Stored([(images.to(torch.bfloat16).contiguous(memory_format=torch.channels_last), labels)], 0.0)
    batches = loader(stored, n(4, 0), batch_size=None, pin_memory=torch.cuda.is_available())
    loop = Loop(Training(net, nn.functional.cross_entropy, sgd(momentum=0.9)), batches, "bf16-mixed")
    loop.around = allow_tf32
    return loop
