"""Faults of the same kinds in other loops: written once the rules were settled, to see whether they hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.payoff.case import Loop, Scale, pair
from benchmarks.payoff.cases.fusion import RmsNorm
from benchmarks.payoff.cases.memory import checkpointed
from benchmarks.payoff.cases.shape import pad_vocabulary
from benchmarks.payoff.data import Augmented, feature_batch, image_batch, loader, resident
from benchmarks.payoff.networks import DeepMlp, WideMlp, resnet
from benchmarks.payoff.training import Training, adamw, allow_tf32, projection, sgd, token_loss
from benchmarks.payoff.transformer import Shape, direct, language_model


def bidirectional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that sees everything, on whichever backend is the fastest."""
    return nn.functional.scaled_dot_product_attention(q, k, v)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in einsums, with the softmax in fp32."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k)
    return torch.einsum("bhqk,bhkd->bhqd", scores.float().softmax(-1).to(v.dtype), v)


@pair("attention.explicit", title="attention by einsum", fix="scaled_dot_product_attention", tolerance=1e-2)
def other_attention(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, layers=6, length=512, batch=32, vocabulary=30528)
    return language_model(n, shape, attend=bidirectional if fixed else by_einsum)


@pair("precision.tf32", title="fp32 layers of 4096", fix="TF32", tolerance=1e-2)
def other_tf32(fixed: bool, n: Scale) -> Loop:
    width = n(4096, 16)
    loop = Loop(
        Training(WideMlp(n(6, 2), width), projection, sgd()), resident(feature_batch(n(4096, 8), width), n)
    )
    if fixed:
        loop.around = allow_tf32
    return loop


def _images(n: Scale, batch: int, pixels: int) -> tuple[Tensor, Tensor]:
    return image_batch(n(batch, 4), n(pixels, 32))


@pair("precision.mixed", title="a ResNet in fp32 with TF32", fix="bf16-mixed", tolerance=5e-2)
def other_mixed_precision(fixed: bool, n: Scale) -> Loop:
    images, labels = _images(n, 128, 224)
    batch = (images.contiguous(memory_format=torch.channels_last), labels)
    module = Training(resnet(n), nn.functional.cross_entropy, sgd(momentum=0.9))
    return Loop(module, resident(batch, n), "bf16-mixed" if fixed else "32-true", around=allow_tf32)


@pair("shape.alignment", title="a vocabulary of 32003", fix="32064 rows", tolerance=1e-2)
def other_vocabulary(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=1024, heads=16, layers=6, length=512, batch=16)
    loop = language_model(n, Shape(**{**vars(shape), "vocabulary": n(32003, 601)}))
    if fixed:
        pad_vocabulary(loop.module.net)
    return loop


@pair("optimizer.fused", title="Adam that loops over a ResNet's parameters", fix="Adam(fused=True)")
def other_optimizer(fixed: bool, n: Scale) -> Loop:
    optimizer = adamw() if fixed else adamw(fused=False, foreach=False)
    images, labels = _images(n, 64, 224)
    batch = (images.contiguous(memory_format=torch.channels_last), labels)
    return Loop(Training(resnet(n), nn.functional.cross_entropy, optimizer), resident(batch, n), "bf16-mixed")


@pair("layout.channels_last", title="a deeper ResNet on NCHW tensors", fix="channels_last", tolerance=2e-2)
def other_layout(fixed: bool, n: Scale) -> Loop:
    layout = torch.channels_last if fixed else torch.contiguous_format
    images, labels = _images(n, 96, 160)
    module = Training(resnet(n, (3, 4, 12, 3), layout), nn.functional.cross_entropy, sgd(momentum=0.9))
    return Loop(module, resident((images.contiguous(memory_format=layout), labels), n), "bf16-mixed")


class ChecksLoss(Training):
    """Training that looks whether the loss and each weight are finite, on the host."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for weight in self.parameters():
            if weight.dim() > 1 and not torch.isfinite(weight).all():
                raise FloatingPointError("a weight is not finite")
        return loss


@pair("host.sync", title="each weight is checked on the host in each step", fix="without the check")
def other_sync(fixed: bool, n: Scale) -> Loop:
    width = n(1024, 16)
    module = (Training if fixed else ChecksLoss)(DeepMlp(n(24, 2), width), projection)
    return Loop(module, resident(feature_batch(n(8192, 8), width), n), "bf16-mixed")


@pair("loss.cross_entropy", title="eager cross-entropy over 128256 classes", fix="compiled", tolerance=1e-2)
def other_cross_entropy(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=1024, heads=16, layers=2, length=2048, batch=2, vocabulary=128256)
    return language_model(n, shape, loss=n.compile(token_loss) if fixed else token_loss)


@pair("fusion.norm", title="RMSNorm by hand under autocast", fix="F.rms_norm", tolerance=1e-2)
def other_norm(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=2048, heads=16, layers=4, length=2048, batch=4, vocabulary=8192)
    return language_model(n, shape, norm=lambda width: RmsNorm(width, not fixed))


@pair("memory.checkpointing", title="every block of twelve checkpointed", fix="without")
def other_checkpointing(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, layers=12, length=2048, batch=4, vocabulary=8192)
    return language_model(n, shape, precision="bf16-true", run=direct if fixed else checkpointed)


@pair(
    "host.launch_bound", title="a transformer on one short text", fix="CUDA graphs", tolerance=1e-2, warmup=15
)
def other_launches(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=512, heads=8, layers=8, length=128, batch=1, vocabulary=8192)
    loop = language_model(n, shape, precision="bf16-true")
    if fixed:
        n.compile(loop.module.net, mode="reduce-overhead")
    return loop


@pair(
    "input.dataloader", title="larger images augmented in place", fix="num_workers=8",
    on_device=False, warmup=15,
)  # fmt: skip
def other_loader(fixed: bool, n: Scale) -> Loop:
    workers = n(8, 1) if fixed else 0
    data = Augmented(n(192, 32), 1)
    batches = loader(data, workers, batch_size=n(24, 2), pin_memory=torch.cuda.is_available())
    net = resnet(n, (3, 4, 6, 3))
    return Loop(Training(net, nn.functional.cross_entropy, sgd(momentum=0.9)), batches, "bf16-mixed")
