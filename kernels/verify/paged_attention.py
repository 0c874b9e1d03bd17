"""Paged attention over blocks in random order: a window, a cap, several queries; and writing to the cache."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import paged_attention as family
from .probe import Probe

_LENGTHS = (70, 0, 33)


def _inputs(
    heads: int, kv_heads: int, dim: int, block_size: int, queries: int
) -> Callable[[torch.device, torch.dtype], Mapping[str, Any]]:
    def make(device: torch.device, dtype: torch.dtype) -> Mapping[str, Any]:
        width = -(-max(_LENGTHS) // block_size)
        blocks = torch.randperm(len(_LENGTHS) * width, device=device)
        cache = (blocks.numel(), block_size, kv_heads, dim)
        k, v = (torch.randn(cache, device=device).to(dtype) for _ in range(2))
        return {
            "q": torch.randn(len(_LENGTHS), queries, heads, dim, device=device).to(dtype),
            "k_cache": k,
            "v_cache": v,
            "block_table": blocks.view(len(_LENGTHS), width).int(),
            "context_lens": torch.tensor(_LENGTHS, dtype=torch.int32, device=device),
        }

    return make


def _pair(options: dict[str, Any]) -> tuple[Any, Any]:
    def ours(**given: Tensor) -> Any:
        return family.paged_attention(**given, return_lse=True, **options)  # type: ignore[arg-type]

    def reference(**given: Tensor) -> Any:
        return family.paged_attention_reference(**given, **options)  # type: ignore[arg-type]

    return ours, reference


def _rows(device: torch.device, dtype: torch.dtype) -> Mapping[str, Any]:
    return {"key": torch.randn(5, 3, 24, device=device).to(dtype)}


def _written(key: Tensor) -> tuple[Tensor, Tensor]:
    caches = [torch.zeros(4, 8, *key.shape[1:], dtype=key.dtype, device=key.device) for _ in range(2)]
    family.write_to_cache(key, -key, caches[0], caches[1], _slots(key))
    return caches[0], caches[1]


def _assigned(key: Tensor) -> tuple[Tensor, Tensor]:
    cache = torch.zeros(32, *key.shape[1:], dtype=key.dtype, device=key.device)
    cache[_slots(key)] = key
    return cache.view(4, 8, *key.shape[1:]), -cache.view(4, 8, *key.shape[1:])


def _slots(key: Tensor) -> Tensor:
    return torch.tensor([31, 0, 9, 8, 17], device=key.device)


def probes() -> Iterator[Probe]:
    """Blocks smaller and larger than a tile; heads that share keys; a sequence without tokens."""
    settings: list[tuple[str, int, int, int, int, int, dict[str, Any]]] = [
        ("paged_attention", 8, 2, 128, 16, 1, {}),
        ("paged_attention, window", 2, 1, 80, 64, 3, {"window_left": 20}),
        ("paged_attention, soft-capped", 2, 2, 64, 16, 1, {"softcap": 20.0}),
    ]
    for name, heads, kv_heads, dim, block_size, queries, options in settings:
        ours, reference = _pair(options)
        yield Probe(
            name, f"{len(_LENGTHS)}x{queries}x{heads}/{kv_heads}x{dim} in {block_size}", ours, reference,
            _inputs(heads, kv_heads, dim, block_size, queries), options={"gradients": False, "ulps": 4.0},
        )  # fmt: skip
    yield Probe("write_to_cache", "5x3x24", _written, _assigned, _rows, options={"gradients": False})
