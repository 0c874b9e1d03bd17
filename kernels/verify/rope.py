"""Rotary embedding of queries and keys, half-split and interleaved, whole and partial."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import rope as family
from .probe import Probe


def probes() -> Iterator[Probe]:
    """Grouped keys; a table in fp32."""
    for interleaved, dim, rotary in ((False, 128, 128), (True, 80, 32)):
        tokens = 9

        def inputs(
            device: torch.device, dtype: torch.dtype, dim: int = dim, tokens: int = tokens
        ) -> Mapping[str, Any]:
            return {
                name: torch.randn(2, heads, tokens, dim, device=device).to(dtype)
                for name, heads in (("q", 6), ("k", 2))
            }

        def tables(q: Tensor, dtype: torch.dtype, rotary: int = rotary) -> tuple[Tensor, Tensor]:
            at = torch.arange(q.shape[-2], device=q.device, dtype=torch.float32)
            angles = torch.outer(at, torch.logspace(0, -3, rotary // 2, device=q.device))
            return angles.cos().to(dtype), angles.sin().to(dtype)

        def ours(q: Tensor, k: Tensor, interleaved: bool = interleaved, tables: Any = tables) -> Any:
            return family.rope(q, k, *tables(q, torch.float32), interleaved=interleaved)

        def reference(q: Tensor, k: Tensor, interleaved: bool = interleaved, tables: Any = tables) -> Any:
            # Eager in fp32, rounded once, is the stricter measure.
            wide = torch.promote_types(q.dtype, torch.float32)
            cos, sin = (table.to(wide) for table in tables(q, torch.float32))
            out = family.rope_reference(q.to(wide), k.to(wide), cos, sin, interleaved=interleaved)
            return tuple(o.to(q.dtype) for o in out if o is not None)

        name = f"rope, {rotary} of {dim}{', interleaved' * interleaved}"
        yield Probe(name, f"2x6/2x{tokens}x{dim}", ours, reference, inputs)
