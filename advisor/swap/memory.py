"""When a step's peak of device memory counts as grown."""

from __future__ import annotations

#: By what share two peaks of one loop may differ.
NOISE = 0.01
#: What the libraries of matrix products keep as workspaces: 32 MiB on Hopper (cuBLAS, "Results
#: reproducibility"), for each stream that they are called on, and a recording has one of its own.
WORKSPACES_BYTES = 2**26


def grows(before_bytes: int, after_bytes: int, allowed: float = 0.0) -> bool:
    """Whether a peak is larger than another by more than is allowed and noise and workspaces explain.

    Args:
        before_bytes, after_bytes: the peaks.
        allowed: share of the first.
    """
    return after_bytes > before_bytes * (1 + allowed) + max(NOISE * before_bytes, WORKSPACES_BYTES)
