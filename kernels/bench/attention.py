"""Attention beside the backends of `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention import attention, attention_reference
from .timing import Case, Variant, compiled, forward, forward_backward

#: (batch, heads, key heads, tokens, head dimension, causal): those of the field, then a grid of lengths.
QUICK = [(4, 16, 16, 4096, 128, True), (8, 12, 12, 1024, 64, True)]
SHAPES = [
    *QUICK,
    (2, 16, 16, 8192, 128, False),
    *[
        (16384 // n, 2048 // dim, 2048 // dim, n, dim, causal)
        for dim in (64, 128)
        for n in (1024, 2048, 4096, 8192, 16384)
        for causal in (True, False)
    ],
    (4, 32, 8, 4096, 128, True),
]
#: At (batch, heads, tokens, dim), what FlashAttention-2 does not take and is a number a score to cuDNN:
#: random bits, which leave no block of scores out; masks as users have them; biases; a soft-cap. And dropout.
MODIFIED_QUICK = ("bool_mask", "causal_padding", "alibi", "bias", "softcap", "dropout")
MODIFIED = (*MODIFIED_QUICK, "padding", "documents", "float_mask", "window")
MODIFIED_SHAPE, DROPOUT_SHAPE = (4, 16, 4096, 128), (16, 12, 512, 64)
WINDOW = 1024
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WAYS: dict[str, Callable[..., Variant]] = {"forward": forward, "forward+backward": forward_backward}


def sdpa(backend: SDPBackend, **options: Any) -> Callable[..., Any]:
    """PyTorch's attention on one backend; raises where that does not take the arguments."""

    def call(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)

    return call


def flops(batch: int, heads: int, tokens: int, dim: int, seen: float, direction: str) -> float:
    """Of matrix products as the field counts them: 4 a score and dimension forward, 10 backward."""
    count = 4.0 * batch * heads * tokens * tokens * dim * seen
    return count if direction == "forward" else 3.5 * count


def traffic(batch: int, heads: int, heads_k: int, tokens: int, dim: int, direction: str) -> int:
    """q, k, v in, output out; then those, the output and its gradient in, three gradients out; bf16."""
    of_q, of_k = (2 * batch * h * tokens * dim for h in (heads, heads_k))
    there = 2 * of_q + 2 * of_k
    return there if direction == "forward" else there + 4 * of_q + 4 * of_k


def inputs(batch: int, heads: int, heads_k: int, tokens: int, dim: int) -> Callable[[], Sequence[Any]]:
    """Makes one set of inputs."""

    def make() -> Sequence[Any]:
        # As a projection leaves them: tokens outside of heads.
        return [
            torch.randn(batch, tokens, h, dim, device="cuda", dtype=torch.bfloat16)
            .transpose(1, 2)
            .requires_grad_()
            for h in (heads, heads_k, heads_k)
        ]

    return make


def mask_of(kind: str, batch: int, tokens: int, device: str) -> Any:
    """A bool mask, True where a key is seen, that broadcasts to (batch, heads, tokens, tokens).

    Args:
        kind: ``bool_mask`` (random, a fifth hidden, the same for all), ``padding`` (keys past the ends of
            sequences of half to full length), ``causal_padding`` (and keys past the query), ``documents``
            (about eight to a sequence, of uneven length, causal within), ``window``.
        batch: sequences.
        tokens: queries, and keys.
        device: of the mask.
    """
    at = torch.arange(tokens, device=device)
    if kind == "bool_mask":
        return torch.rand(tokens, tokens, device=device) > 0.2
    if kind == "window":
        return (at[:, None] >= at) & (at[:, None] - at <= WINDOW)
    if kind == "documents":
        shares = torch.tensor([0.02, 0.2, 0.05, 0.13, 0.3, 0.08, 0.12, 0.1], device=device)
        shares = torch.stack([shares.roll(n) for n in range(batch)])
        own = torch.searchsorted(
            (shares.cumsum(1) * tokens).round(), at.expand(batch, -1).float(), right=True
        )
        return ((own[:, :, None] == own[:, None, :]) & (at[:, None] >= at))[:, None]
    lengths = torch.linspace(0.5, 1.0, batch, device=device).mul(tokens).long()
    padding = (at < lengths[:, None])[:, None, None]
    return padding if kind == "padding" else padding & (at[:, None] >= at)


def _modified(
    kind: str, batch: int, heads: int, tokens: int
) -> tuple[dict[str, Any], dict[str, Any] | None, float]:
    """Our options, SDPA's (None: it has no such thing), and the share of scores that is seen."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    at = torch.arange(tokens, device=device)
    if kind == "dropout":
        return {"dropout_p": 0.1}, {"dropout_p": 0.1}, 1.0
    if kind == "softcap":
        return {"causal": True, "softcap": 30.0}, None, 0.5
    if kind == "alibi":
        slopes = torch.linspace(0.01, 0.5, heads, device=device)
        bias = (slopes[:, None, None] * at)[None].to(torch.bfloat16)
        full = bias.masked_fill(at[:, None] < at, -torch.inf)
        return {"mask": bias, "causal": True}, {"attn_mask": full}, 0.5
    if kind == "bias":
        # One number for each head and distance, as T5 has it.
        distances = torch.randn(heads, 2 * tokens - 1, device=device).to(torch.bfloat16)
        bias = distances[:, at[:, None] - at + tokens - 1][None]
        return {"mask": bias}, {"attn_mask": bias}, 1.0
    mask = mask_of("causal_padding" if kind == "float_mask" else kind, batch, tokens, device)
    # Of random bits each block has some: whoever multiplies blocks multiplies all of them.
    seen = 1.0 if kind == "bool_mask" else float(mask.float().mean())
    if kind == "window":
        return {"causal": True, "window": (WINDOW, 0)}, {"attn_mask": mask}, seen
    if kind == "float_mask":
        mask = torch.zeros(mask.shape, dtype=torch.bfloat16, device=device).masked_fill(~mask, -torch.inf)
    # Not every backend takes one row for all queries.
    theirs = mask.expand(-1, -1, tokens, -1).contiguous() if kind == "padding" else mask
    return {"mask": mask}, {"attn_mask": theirs}, seen


def flex(softcap: float) -> Callable[..., Any]:
    """PyTorch's flex_attention with a soft-cap and a causal mask, compiled: its fastest way to have one."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    kernel = compiled(flex_attention)

    @functools.cache
    def seen(tokens: int) -> Any:
        return create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device="cuda")

    def capped(score: Any, *_: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    return lambda q, k, v: kernel(q, k, v, score_mod=capped, block_mask=seen(q.shape[2]))


def cases(quick: bool) -> Iterator[Case]:
    """Plain attention over lengths, then what other backends do not take."""
    for batch, heads, heads_k, tokens, dim, causal in QUICK if quick else SHAPES:
        variants = {"ours": lambda q, k, v, c=causal: attention(q, k, v, causal=c)}
        names = ("flash", "cudnn") if quick else tuple(BACKENDS)
        variants |= {name: sdpa(BACKENDS[name], is_causal=causal) for name in names}
        for direction, way in WAYS.items():
            yield Case(
                "attention causal" if causal else "attention full",
                f"{batch}x{heads}x{tokens}x{dim}",
                "bf16",
                direction,
                inputs(batch, heads, heads_k, tokens, dim),
                {name: way(function) for name, function in variants.items()},
                traffic(batch, heads, heads_k, tokens, dim, direction),
                flops(batch, heads, tokens, dim, 0.5 if causal else 1.0, direction),
            )
    for kind in MODIFIED_QUICK if quick else MODIFIED:
        batch, heads, tokens, dim = DROPOUT_SHAPE if kind == "dropout" else MODIFIED_SHAPE
        options, theirs, seen = _modified(kind, batch, heads, tokens)
        variants = {"ours": lambda q, k, v, o=options: attention(q, k, v, **o)}
        if theirs is None:
            variants["flex"] = flex(options["softcap"])
            if not quick:
                variants["eager"] = lambda q, k, v, o=options: attention_reference(q, k, v, **o)
                variants["compile"] = torch.compile(variants["eager"], dynamic=False)
        else:
            names = ("efficient", "cudnn", *(["flash"] if kind == "dropout" else []))
            variants |= {name: sdpa(BACKENDS[name], **theirs) for name in names}
        for direction, way in WAYS.items():
            yield Case(
                f"attention {kind}",
                f"{batch}x{heads}x{tokens}x{dim}",
                "bf16",
                direction,
                inputs(batch, heads, heads, tokens, dim),
                {name: way(function) for name, function in variants.items()},
                traffic(batch, heads, heads, tokens, dim, direction),
                flops(batch, heads, tokens, dim, seen, direction),
            )
