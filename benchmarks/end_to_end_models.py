"""The models of `benchmarks/end_to_end.py` as LightningModules, with made-up data; large and tiny."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def lightning() -> Any:
    """The Lightning package that is installed."""
    name = "lightning" if importlib.util.find_spec("lightning") else "pytorch_lightning"
    return importlib.import_module("lightning.pytorch" if name == "lightning" else name)


@dataclass(frozen=True)
class Task:
    """A model and what it is trained on.

    Attributes:
        build: makes the model.
        batch: makes one batch, from a generator.
        loss: of model and batch.
        precision: of the Trainer.
        optimizer: further arguments of AdamW.
        needs: packages that must be installed.
        liger: applies Liger's kernels to the package's classes, where it has any for this model.
        sdpa: makes the model with PyTorch's own attention in place of scores that are written out.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    precision: str = "bf16-mixed"
    optimizer: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    liger: Callable[[], None] | None = None
    sdpa: Callable[[], nn.Module] | None = None

    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def module(task: Task, build: Callable[[], nn.Module] | None = None) -> Any:
    """The task as a LightningModule, with the model that `build` makes, or else its own."""
    light = lightning()

    class Loop(light.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = (build or task.build)()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return task.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-4, **task.optimizer)

    return Loop()


class Attention(nn.Module):
    """Causal, with the scores written out, or by PyTorch's own."""

    def __init__(self, width: int, heads: int, tokens: int, sdpa: bool = False) -> None:
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer(
            "mask", torch.tril(torch.ones(tokens, tokens, dtype=torch.bool)), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        if self.sdpa:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            mixed = scores.masked_fill(~self.mask[:tokens, :tokens], float("-inf")).softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, tokens: int, sdpa: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, tokens, sdpa)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2's shape, with attention, bias, GELU and LayerNorm each written out."""

    def __init__(
        self, vocabulary: int, tokens: int, width: int, layers: int, heads: int, sdpa: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, tokens, sdpa) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Chain(nn.Module):
    """An MLP-mixer's chains: linear with bias, GELU, LayerNorm, over tokens and over channels in turn."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.ModuleList(_chain(tokens) for _ in range(layers))
        self.channels = nn.ModuleList(_chain(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + tokens(x.transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return self.head(x.mean(1))


def _chain(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inside), nn.GroupNorm(8, outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    """Diffusion's shape: GroupNorm, SiLU and convolution, three levels down and up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b) for a, b in zip([width, *widths], widths, strict=False))
        self.up = nn.ModuleList(
            Residual(a + b, b) for a, b in zip([widths[-1], *widths[:0:-1]], widths[::-1], strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.enter(x), []
        for part in self.down:
            x = part(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for part in self.up:
            x = part(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.leave(x)


def _text(batch: int, tokens: int, vocabulary: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Each token follows from the one before, with some noise: there is something to learn."""

    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        start = torch.randint(vocabulary, (batch, 1), generator=generator)
        steps = torch.randint(1, 4, (batch, tokens + 1), generator=generator)
        return ((start + steps.cumsum(1)) % vocabulary,)

    return make


def _images(batch: int, size: int, classes: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Noise, the brighter the higher the label."""

    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        label = torch.randint(classes, (batch,), generator=generator)
        noise = torch.randn(batch, 3, size, size, generator=generator)
        return noise + label.view(-1, 1, 1, 1) / classes, label

    return make


def _next_token(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    (ids,) = batch
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _huggingface(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    ids = batch[0][:, :-1].contiguous()  # some models view their labels
    return model(input_ids=ids, labels=ids).loss


def _label(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _denoise(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    clean = batch[0]
    return F.mse_loss(model(clean + 0.1 * torch.randn_like(clean)).float(), clean)


def _sequence(batch: int, tokens: int, width: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        label = torch.randint(10, (batch,), generator=generator)
        return torch.randn(batch, tokens, width, generator=generator) + label.view(-1, 1, 1) / 10, label

    return make


def _llama(tiny: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    large = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 32000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} if tiny else {
        "num_attention_heads": 16, "num_key_value_heads": 8,
    }  # fmt: skip
    config = LlamaConfig(**(size if tiny else large), **heads, attn_implementation="eager", use_cache=False)
    return LlamaForCausalLM(config)


def _bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**(size if tiny else {}), attn_implementation="eager")
    return BertForMaskedLM(config)


def _timm(tiny: bool) -> nn.Module:
    import timm

    name = "vit_tiny_patch16_224" if tiny else "vit_base_patch16_224"
    return timm.create_model(name, num_classes=100)


def _resnet(tiny: bool) -> nn.Module:
    import torchvision

    return (torchvision.models.resnet18 if tiny else torchvision.models.resnet50)(num_classes=100)


def _liger_llama() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()


def tasks(tiny: bool) -> dict[str, Task]:
    """By name, those that matter most first; tiny ones train on a CPU."""
    single = {"foreach": False, "fused": False}
    gpt = (512, 64, 64, 2, 4) if tiny else (50257, 1024, 768, 12, 12)
    vocabulary, tokens = gpt[:2]
    chain = (16, 64, 2) if tiny else (256, 2048, 6)
    return {
        "gpt2": Task(
            lambda: GPT(*gpt), _text(2 if tiny else 8, tokens, vocabulary), _next_token, optimizer=single,
            sdpa=lambda: GPT(*gpt, sdpa=True),
        ),
        "mixer": Task(lambda: Chain(*chain), _sequence(2 if tiny else 64, *chain[:2]), _label),
        "llama": Task(
            lambda: _llama(tiny), _text(2 if tiny else 4, 32 if tiny else 1024, 512 if tiny else 32000),
            _huggingface, needs=("transformers",), liger=_liger_llama,
        ),
        "bert": Task(
            lambda: _bert(tiny), _text(2 if tiny else 16, 32 if tiny else 512, 30000), _huggingface,
            needs=("transformers",),
        ),
        "vit": Task(lambda: _timm(tiny), _images(2 if tiny else 64, 224, 100), _label, needs=("timm",)),
        "unet": Task(
            lambda: UNet(8 if tiny else 128), _images(2 if tiny else 16, 16 if tiny else 64, 10), _denoise
        ),
        "resnet50": Task(
            lambda: _resnet(tiny), _images(2 if tiny else 64, 32 if tiny else 224, 100), _label,
            "bf16-mixed" if tiny else "16-mixed", needs=("torchvision",),
        ),
    }  # fmt: skip
