"""`nn.Softmax` and `nn.LogSoftmax` over the last dimension."""

from __future__ import annotations

from torch import Tensor, nn

from advisor.kernels import softmax as kernels
from advisor.swap.kinds.registry import Offer, kind
from advisor.swap.site import Candidate, Example


def _is_one(module: nn.Module) -> bool:
    return type(module).forward in (nn.Softmax.forward, nn.LogSoftmax.forward)


@kind("softmax", watches=_is_one)
def softmax(module: nn.Module, example: Example) -> Offer | str:
    """The bundled kernel."""
    x = example.args[0] if len(example.args) == 1 and not example.kwargs else None
    if not isinstance(x, Tensor):
        return "is not called with one tensor"
    dim = getattr(module, "dim", None)
    if dim is None or x.dim() == 0 or dim % x.dim() != x.dim() - 1:
        return f"works along dimension {dim}, the kernel along the last"
    log = type(module).forward is nn.LogSoftmax.forward

    def call(_module: nn.Module, x: Tensor) -> Tensor:
        return kernels.softmax(x, log=log)

    name = "log_softmax" if log else "softmax"
    # The package's attribute `softmax` is the module of that name.
    home = "advisor.kernels" if log else "advisor.kernels.softmax"
    found = Candidate(
        f"advisor.kernels.{name}",
        call,
        "bundled",
        permanent=f"from {home} import {name}\n{name}(x)",
        unsupported=lambda e: kernels.unsupported_reasons(e.args[1]),
    )
    return Offer([found])
