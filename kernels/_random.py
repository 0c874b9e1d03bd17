"""Dropout on torch's random numbers.

A launch takes its seed from torch's generator of the device, as one int64 that stays on the device: so
`torch.manual_seed` governs it, every call differs, activation checkpointing restores it, CUDA graphs advance
it, and nothing waits for the GPU. The seed is saved and the backward draws the same mask again; no mask is
stored. From the seed, Philox 4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC'11: the fewest that pass BigCrush) gives 16 bits an element, so that p is exact to 2^-17.

The masks are not those of `torch.nn.functional.dropout` with the same seed; only their law is the same.
"""

import torch

from ._triton import tl, triton


def draw_seed(device: torch.device) -> torch.Tensor:
    """One int64 from torch's generator of `device`, shape (1,), on it."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def keep_threshold(p: float) -> int:
    """An element is kept where its 16 random bits lie below this; 65536 keeps all, 0 none."""
    return round((1.0 - p) * 65536)


def keep_scale(p: float) -> float:
    """What a kept element is multiplied by: the inverse of the share that is kept, 0 where none is."""
    threshold = keep_threshold(p)
    return 65536 / threshold if threshold else 0.0


@triton.jit
def keep_8(seed, group, lane, THRESHOLD: tl.constexpr):
    """Which of 8 consecutive elements are kept.

    Args:
        seed: int64 scalar.
        group: int64 block, shape [..., 1]: the element's linear index over 8.
        lane: int32 block, shape [1, ..., 8]: the index within the group, 0..7.
    """
    return kept_halves(seed, group, lane // 2, lane % 2, THRESHOLD)


@triton.jit
def kept_halves(seed, draw, word, half, THRESHOLD: tl.constexpr):
    """Which elements are kept, each of which has 16 bits of one of the 4 words of a draw.

    Args:
        seed: int64 scalar.
        draw: int64 block, the draw's number.
        word: int32 block that broadcasts with it, 0..3.
        half: likewise, 0 or 1.
    """
    r0, r1, r2, r3 = tl.randint4x(seed, draw, n_rounds=7)
    bits = tl.where(word < 2, tl.where(word < 1, r0, r1), tl.where(word < 3, r2, r3)).to(tl.uint32)
    return tl.where(half == 0, bits & 0xFFFF, bits >> 16) < THRESHOLD
