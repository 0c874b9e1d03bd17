"""A kernel that is compiled before its first launch, as Triton goes about it, without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advisor.swap import ahead, background
from advisor.swap.site import Candidate


class Kernel:
    """Scales rows; what `triton.runtime.jit.JITFunction.run` does with its table and with the mode in force.

    Args:
        compiler: called for each compilation, before it is done.
    """

    def __init__(self, compiler: Callable[[], object] = lambda: None) -> None:
        self.table: dict[Any, Any] = {}
        self.compiled_in: list[str] = []
        self.launches = 0
        self._compiler = compiler

    def __call__(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        key = (x.dtype, x.shape[0] == 1)
        kernel = self.table.get(key)
        if kernel is None:
            kernel = self._compile(key)
        if hasattr(kernel, "result"):
            kernel = kernel.result()
        kernel.run(out, x, weight)

    def _compile(self, key: Any) -> Any:
        from triton.runtime._async_compile import active_mode

        mode = active_mode.get()
        if mode is not None:
            return mode.submit((id(self), key), self._made, lambda made: self.table.__setitem__(key, made))
        self.table[key] = self._made()
        return self.table[key]

    def _made(self) -> Any:
        self.compiled_in.append(threading.current_thread().name)
        self._compiler()
        return SimpleNamespace(run=self._run)

    def _run(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        self.launches += 1
        torch.mul(x, weight, out=out)


def scale_by(kernel: Kernel) -> Callable[..., Tensor]:
    """``x * weight`` of a module, forward and backward by that kernel."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            out = torch.empty_like(x, dtype=torch.result_type(x, weight))
            kernel(out, x, weight)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            dx = torch.empty_like(x)
            kernel(dx, gradients[0], weight)
            return dx, (gradients[0] * x).flatten(0, -2).sum(0)

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return Scale.apply(x, module.weight)  # type: ignore[no-any-return]

    return call


def offered(kernel: Kernel, name: str = "planted.compiled") -> Candidate:
    """As a candidate."""
    return Candidate(name, scale_by(kernel), "bundled", "self.scale = Scale(width)")


def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples count as a GPU's, and kernels as Triton's own rather than its interpreter's."""
    monkeypatch.setattr(ahead, "_on_gpu", lambda example: True)
    monkeypatch.setattr(ahead.torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(background, "INTERPRETED", False)


def compilers() -> list[str]:
    """Threads of ours that are alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith("advisor-swap")]
