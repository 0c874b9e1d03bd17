"""`nn.MultiheadAttention` where the weights are not asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from advisor.kernels import attention as flash
from advisor.swap.kinds.registry import Offer, kind
from advisor.swap.site import Candidate, Example
from advisor.swap.tensors import devices_of

#: By name for a reader; and whether its backward gives the same bits in every run. Not cuDNN's, whose
#: backward goes wrong with gradients laid out in two ways: see ``docs/swap.md``.
_BACKENDS = {
    "flash": (SDPBackend.FLASH_ATTENTION, False),
    "memory-efficient": (SDPBackend.EFFICIENT_ATTENTION, False),
}


_ON_CPU = ("flash",)


def _is_one(module: nn.Module) -> bool:
    return type(module).forward is nn.MultiheadAttention.forward


@kind("attention", watches=_is_one)
def attention(module: nn.Module, example: Example) -> Offer | str:
    """The bundled kernel between the module's projections, and each backend of torch's own attention."""
    assert isinstance(module, nn.MultiheadAttention)
    weights = example.args[4] if len(example.args) > 4 else example.kwargs.get("need_weights", True)
    if weights:
        return "returns its weights: call it with need_weights=False where they are not used"
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "adds keys of its own"
    candidates = [_bundled()] if module._qkv_same_embed_dim else []
    return Offer(candidates + [_backend(name) for name in _BACKENDS])


def _backend(name: str) -> Candidate:
    backend, deterministic = _BACKENDS[name]
    original: Callable[..., Any] = nn.MultiheadAttention.forward

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(backend):
            return original(module, *args, **kwargs)

    return Candidate(
        f"torch SDPA ({name})",
        call,
        "torch",
        permanent=f"with torch.nn.attention.sdpa_kernel(SDPBackend.{backend.name}):\n    ...",
        unsupported=lambda example: _no_such_device(name, example),
        deterministic=deterministic,
    )


def _no_such_device(name: str, example: Example) -> list[str]:
    kinds = {d.type for d in devices_of((example.args[1:], dict(example.kwargs)))}
    return [] if name in _ON_CPU or kinds == {"cuda"} else [f"runs on a GPU, not on {', '.join(kinds)}"]


def _bundled() -> Candidate:
    return Candidate(
        "advisor.kernels.attention",
        _forward,
        "bundled",
        permanent="from advisor.kernels.attention import attention\n"
        "attention(q, k, v, mask, causal=is_causal)",
        unsupported=_unsupported,
    )


def _forward(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    q, k, v = _projected(module, query, key, value)
    # The hint goes instead of the mask that it describes, as in torch's own forward.
    causal = is_causal and key_padding_mask is None
    mask = None if causal else _mask(attn_mask, key_padding_mask, q)
    dropped = module.dropout if module.training else 0.0
    out = flash.attention(q, k, v, mask, causal=causal, dropout_p=dropped)
    batched = query.dim() == 3
    out = out.transpose(1, 2).flatten(2)
    if not batched:
        out = out[0]
    elif not module.batch_first:
        out = out.transpose(0, 1)
    result = F.linear(out, module.out_proj.weight, module.out_proj.bias)
    return result.contiguous(), None


def _projected(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Each as (batch, heads, tokens, head dim)."""
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if query is key and key is value:
        made = F.linear(query, weight, bias).chunk(3, -1)
    else:
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        parts = zip((query, key, value), weight.chunk(3), biases, strict=True)
        made = tuple(F.linear(x, w, b) for x, w, b in parts)

    def heads(t: Tensor) -> Tensor:
        t = t[None] if t.dim() == 2 else t if module.batch_first else t.transpose(0, 1)
        return t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)

    q, k, v = (heads(t) for t in made)
    return q, k, v


def _mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks as one for the kernel, in which a bool is True where a key is seen."""

    def readable(mask: Tensor | None) -> Tensor | None:
        return ~mask if mask is not None and mask.dtype == torch.bool else mask

    seen, kept = readable(attn_mask), readable(padding)
    if seen is not None and seen.dim() == 3:
        seen = seen.view(q.shape[0], -1, *seen.shape[1:])
    if kept is not None:
        kept = kept.view(q.shape[0], 1, 1, -1)
    if seen is None or kept is None:
        return kept if seen is None else seen
    if seen.dtype == kept.dtype == torch.bool:
        return seen & kept

    def added(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask
        return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)

    return added(seen) + added(kept)


def _unsupported(example: Example) -> list[str]:
    module, *tensors = example.args
    names = ("query", "key", "value")
    query, key, value = (*tensors[:3], *(example.kwargs[n] for n in names[len(tensors[:3]) :]))
    with torch.no_grad():
        q, k, v = _projected(module, query, key, value)
    if example.autocast is not None:
        q, k, v = (t.to(example.autocast) for t in (q, k, v))
    return flash.unsupported_reasons(q, k, v, dropout_p=module.dropout if module.training else 0.0)
