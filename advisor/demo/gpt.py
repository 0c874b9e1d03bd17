"""A small GPT as it is often written by hand.

It leaves speed on the table where many models do: the attention matrix is materialised, and bias,
GELU, dropout, residual and LayerNorm are separate passes over memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.demo.flavour import pl


@dataclass(frozen=True)
class GPTSize:
    """How large the model and its batch are.

    Attributes:
        vocabulary: number of tokens.
        context: tokens in a sequence.
        width: size of a token's vector; a multiple of `heads`.
        layers: transformer blocks.
        heads: attention heads.
        batch: sequences in a step.
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    batch: int


class Attention(nn.Module):
    """Causal self-attention that writes the whole score matrix to memory."""

    mask: Tensor

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.dropout = nn.Dropout(0.1)
        mask = torch.ones(size.context, size.context, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend: (batch, context, width) to the same shape."""
        batch, context, width = x.shape
        q, k, v = (
            part.view(batch, context, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(self.mask[:context, :context], float("-inf"))
        mixed = self.dropout(scores.softmax(dim=-1)) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, context, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and a residual."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(pl.LightningModule):
    """A decoder-only transformer that predicts the next token."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, context, vocabulary) of int64 tokens (batch, context)."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(place))))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the next token."""
        (tokens,) = batch
        logits = self(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with its default settings."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def tokens(size: GPTSize, steps: int) -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    """Batches of made-up text, enough for `steps` steps: each token follows from the one before, with noise.

    Yields:
        ``[int64 (batch, context + 1)]``.
    """
    count = size.batch * steps
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(size.vocabulary, (count, 1), generator=generator)
    strides = torch.randint(1, 4, (count, size.context + 1), generator=generator)
    text = (start + strides.cumsum(dim=1)) % size.vocabulary
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(text), batch_size=size.batch)
