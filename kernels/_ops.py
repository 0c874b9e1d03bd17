"""Registration of the bundled operators with PyTorch: namespace ``advisor_kernels``.

`torch.library.Library` is used rather than `torch.library.custom_op`: the same schema, fake and autograd
registrations at several µs less host time for a forward and backward, which short kernels wait for.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ._device import device_reasons, guard, refuse

NAMESPACE = "advisor_kernels"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def operator(
    name: str,
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    random: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as ``advisor_kernels::<name>``; what comes back calls the operator.

    The schema comes from the annotations (which must not be strings). The function runs below autograd, with
    the device of its first tensor current, and must neither change nor return its inputs.

    Args:
        name: of the operator.
        fake: same arguments; gives empty outputs of the right shape, dtype and strides without reading data.
        backward: ``(ctx, *output_gradients) -> gradient or None per argument``. Left out, as for operators
            that are themselves gradients, differentiating raises instead of giving a wrong result.
        setup_context: ``(ctx, inputs, output) -> None``, saves what `backward` needs.
        random: the result differs from call to call with the same arguments.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = torch.library.infer_schema(function, mutates_args=())
        tags = [torch.Tag.pt2_compliant_tag] + [torch.Tag.nondeterministic_seeded] * random
        _LIBRARY.define(name + schema, tags=tuple(tags))
        _LIBRARY.impl(name, _on_device(function, name), "CompositeExplicitAutograd")
        qualified = f"{NAMESPACE}::{name}"
        torch.library.register_fake(qualified, fake, lib=_LIBRARY)
        torch.library.register_autograd(
            qualified, backward or _no_second_derivative(name), setup_context=setup_context, lib=_LIBRARY
        )
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return register


def _on_device(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        refuse(device_reasons(*tensors), name)
        with guard(tensors[0].device):
            return function(*args, **kwargs)

    return guarded


def _no_second_derivative(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            f"{NAMESPACE}::{name} has no second derivative: the bundled kernels are differentiable once. "
            "Use the PyTorch operator where gradients of gradients are needed"
        )

    return backward


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of an enclosing autocast region for `x`'s device, or None outside any."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
