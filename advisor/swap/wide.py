"""Run code as written, but in float64: casts to narrower floats within it are passed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float16, torch.bfloat16, torch.float32)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class Widened(TorchFunctionMode):
    """Within it, whatever torch function names a float dtype gets `dtype` instead.

    So ``x.float()``, ``softmax(x, -1, dtype=torch.float32).to(q.dtype)`` or a traced ``to(torch.bfloat16)``
    round nothing, and the code gives what it would in exact arithmetic.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func` with every narrow float dtype exchanged."""
        if func in _CASTS:
            return args[0].to(self.dtype)
        wide = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        return func(*[self._wide(value) for value in args], **wide)

    def _wide(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value in _NARROW else value
