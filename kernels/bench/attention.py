"""Attention beside the backends of `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

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
#: What cuDNN's kernels and FlashAttention-2 do not take, at (batch, heads, tokens, head dimension).
MODIFIED = ("bool_mask", "bias", "window", "softcap")
MODIFIED_SHAPE = (4, 16, 4096, 128)
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


def _modified(kind: str, heads: int, tokens: int) -> tuple[dict[str, Any], dict[str, Any] | None, float]:
    """Our options, SDPA's (None: it has no such thing), and the share of scores that is seen."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    window = 1024
    at = torch.arange(tokens, device=device)
    if kind == "window":
        near = (at[:, None] >= at) & (at[:, None] - at <= window)
        return {"causal": True, "window": (window, 0)}, {"attn_mask": near}, window / tokens
    if kind == "softcap":
        return {"causal": True, "softcap": 30.0}, None, 0.5
    if kind == "bool_mask":
        mask = torch.rand(tokens, tokens, device=device) > 0.2
        return {"mask": mask}, {"attn_mask": mask}, 1.0
    slopes = torch.linspace(0.01, 0.5, heads, device=device).to(torch.bfloat16)
    bias = (slopes[:, None, None] * at.to(torch.bfloat16))[None]
    expanded = bias.expand(1, heads, tokens, tokens)
    return {"mask": bias}, {"attn_mask": expanded}, 1.0


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
    batch, heads, tokens, dim = MODIFIED_SHAPE
    for kind in MODIFIED[:1] if quick else MODIFIED:
        options, theirs, seen = _modified(kind, heads, tokens)
        variants = {"ours": lambda q, k, v, o=options: attention(q, k, v, **o)}
        if theirs is None:
            variants["eager"] = lambda q, k, v, o=options: attention_reference(q, k, v, **o)
            if not quick:
                variants["compile"] = compiled(variants["eager"])
        else:
            variants |= {name: sdpa(BACKENDS[name], **theirs) for name in ("efficient", "cudnn")}
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
