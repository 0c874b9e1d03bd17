"""Sizes that matrix units cannot load in whole lines."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.payoff.case import Loop, Scale, pair
from benchmarks.payoff.transformer import GatedMlp, Shape, Transformer, language_model


def _padded(weight: Tensor, rows: int, columns: int) -> nn.Parameter:
    """The weight with zeros at its ends, so that the network computes the same."""
    return nn.Parameter(nn.functional.pad(weight.detach(), (0, columns, 0, rows)))


@pair(
    "shape.alignment",
    title="a vocabulary of 50257",
    fix="50304 rows in embedding and head, a multiple of 64",
    tolerance=1e-2,
)
def pad_vocab(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, vocabulary=50257)
    vocabulary = n(50257, 6001)
    loop = language_model(n, Shape(**{**vars(shape), "vocabulary": vocabulary}))
    if fixed:
        pad_vocabulary(loop.module.net)
    return loop


def pad_vocabulary(net: Transformer) -> None:
    """Give embedding and head a multiple of 64 rows."""
    more = -net.head.weight.shape[0] % 64
    net.tokens.weight = _padded(net.tokens.weight, more, 0)
    net.head.weight = _padded(net.head.weight, more, 0)


@pair(
    "shape.alignment",
    title="a feed-forward part of 2731 columns",
    fix="2752 columns, a multiple of 64",
    tolerance=1e-2,
)
def odd_hidden(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=1024, heads=16, hidden=2731, vocabulary=8192)
    loop = language_model(n, Shape(**{**vars(shape), "hidden": n(2731, 27)}), mlp=GatedMlp)
    if fixed:
        for mlp in loop.module.net.modules():
            if isinstance(mlp, GatedMlp):
                _pad_hidden(mlp)
    return loop


def _pad_hidden(mlp: GatedMlp) -> None:
    more = -mlp.gate.weight.shape[0] % 64
    with torch.no_grad():
        mlp.gate.weight = _padded(mlp.gate.weight, more, 0)
        mlp.up.weight = _padded(mlp.up.weight, more, 0)
        mlp.down.weight = _padded(mlp.down.weight, 0, more)
