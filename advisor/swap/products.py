"""In which dtypes code multiplies matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = frozenset(
    [
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "matmul", "convolution",
        "convolution_backward", "linear_backward",
    ]
)  # fmt: skip


class Products(TorchDispatchMode):
    """Within it, notes which floats matrix products are made of, backward included.

    Attributes:
        dtype: the coarsest of them; None as long as there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and look at what it multiplies."""
        name = func.name().partition("::")[2].partition(".")[0]
        if name in _PRODUCTS or "scaled_dot_product" in name:
            floats = {a.dtype for a in tree_leaves(args) if isinstance(a, Tensor) and a.is_floating_point()}
            known = {self.dtype} if self.dtype is not None else set()
            self.dtype = max(floats | known, key=lambda dtype: torch.finfo(dtype).eps, default=None)
        call: Callable[..., Any] = func
        return call(*args, **(kwargs or {}))
