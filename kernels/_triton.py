"""Triton, or a stand-in that lets the kernels be imported without it and names it when one is launched."""

import os
from typing import Any

_MISSING = (
    "the bundled kernels need Triton, which is not installed: pip install triton "
    "(it comes with the CUDA and ROCm builds of PyTorch on Linux)"
)


class _Absent:
    """Answers to everything that a kernel's source names at import."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `@triton.jit` gets a function, `@triton.jit(...)` does not; either way a launch must say what lacks.
        return self

    def __getitem__(self, grid: Any) -> Any:
        raise ImportError(_MISSING)


try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:
    triton = tl = libdevice = _Absent()

#: True where kernels run on the CPU, under Triton's interpreter: the variable was set before this import.
INTERPRETED = not isinstance(triton, _Absent) and os.environ.get("TRITON_INTERPRET", "") in (
    "1",
    "true",
    "on",
)


def require_triton() -> None:
    """Check that kernels can be launched.

    Raises:
        ImportError: Triton is not installed.
    """
    if isinstance(triton, _Absent):
        raise ImportError(_MISSING)


def available() -> bool:
    """Whether Triton is installed."""
    return not isinstance(triton, _Absent)


__all__ = ["INTERPRETED", "available", "libdevice", "require_triton", "tl", "triton"]
