"""`nn.CrossEntropyLoss` of class indices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from advisor.kernels import cross_entropy as kernels
from advisor.swap.kinds.registry import Offer, kind
from advisor.swap.site import Candidate, Example


def _is_one(module: nn.Module) -> bool:
    return type(module).forward is nn.CrossEntropyLoss.forward


@kind("loss", watches=_is_one)
def loss(module: nn.Module, example: Example) -> Offer | str:
    """The bundled kernel."""
    assert isinstance(module, nn.CrossEntropyLoss)
    tensors = [*example.args, *example.kwargs.values()]
    if len(tensors) != 2 or not all(isinstance(t, Tensor) for t in tensors):
        return "is not called with logits and targets"
    if module.weight is not None:
        return "has class weights, which the kernel does not take"
    logits, target = tensors
    if logits.dim() != 2 or target.dim() != 1:
        return f"logits {tuple(logits.shape)} and targets {tuple(target.shape)}: the kernel has classes last"

    def call(module: nn.CrossEntropyLoss, input: Tensor, target: Tensor) -> Tensor:
        made = kernels.cross_entropy(
            input,
            target,
            ignore_index=module.ignore_index,
            label_smoothing=module.label_smoothing,
            reduction=module.reduction,
        )
        # torch's loss has the logits' dtype, but for autocast.
        return made if torch.is_autocast_enabled(input.device.type) else made.to(input.dtype)

    def unsupported(example: Example) -> list[str]:
        module, *tensors = [*example.args, *example.kwargs.values()]
        return kernels.unsupported_reasons(
            *tensors, reduction=module.reduction, label_smoothing=module.label_smoothing
        )

    settings = {
        "ignore_index": (module.ignore_index, -100),
        "label_smoothing": (module.label_smoothing, 0.0),
        "reduction": (module.reduction, "mean"),
    }
    given = ", ".join(f"{name}={value!r}" for name, (value, usual) in settings.items() if value != usual)
    found = Candidate(
        "advisor.kernels.cross_entropy",
        call,
        "bundled",
        permanent=f"from advisor.kernels import CrossEntropyLoss\nCrossEntropyLoss({given})",
        unsupported=unsupported,
    )
    return Offer([found])
