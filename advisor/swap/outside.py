"""Swap outside a Trainer: one call on a model and what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from advisor.swap.decide import Progress, Terms
from advisor.swap.guard import kept_state
from advisor.swap.session import Swapper
from advisor.swap.tensors import devices_of
from advisor.swap.warn import info


def swap_model(
    model: nn.Module,
    inputs: Any,
    kinds: str | Collection[str] = "auto",
    loss: Callable[[Any], Any] | None = None,
    *,
    optimizers: Sequence[Optimizer] = (),
    allow_cpu: bool = False,
    allow_memory: bool = False,
    deterministic: bool | None = None,
    budget_s: float = 10.0,
    progress: Progress | None = None,
) -> Swapper:
    """Make a model faster in place, where a faster kernel proves right on its own tensors.

        done = advisor.swap(model, batch)
        print(done)
        done.restore()

    or, restored at the end, ``with advisor.swap(model, batch) as done: ...``. The model is called once (under
    the autocast that is in force); its buffers, gradients and the random numbers are afterwards as before.

    Args:
        model: on a GPU.
        inputs: what it is called with: a tuple of arguments, a mapping of keywords, or the one argument.
        kinds: ``"auto"``, one of `advisor.swap.site.KINDS`, or several.
        loss: of the model's result. If it is a module, it is looked at too.
        optimizers: whose step may be fused.
        allow_cpu: swap on the CPU too.
        allow_memory: keep what needs more memory too.
        deterministic: take only what gives the same bits in every run; as torch is set unless given.
        budget_s: for trying; what is left over then is left as it is.
        progress: told before each site: sites done, sites in all, which.

    Raises:
        UsageError: an unknown kind.
    """
    terms = Terms(allow_memory=allow_memory, budget_s=budget_s)
    sure = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    whole = nn.ModuleDict({"model": model, "loss": loss}) if isinstance(loss, nn.Module) else model
    swapper = Swapper(
        whole,
        optimizers,
        kinds,
        terms=replace(terms, deterministic=sure),
        allow_cpu=allow_cpu,
        progress=progress,
    )
    if swapper.unable:
        info(swapper.unable)
        return swapper
    args, kwargs = _call(inputs)
    kept = kept_state(devices_of([model, args, kwargs]))
    with swapper.watch(), kept, _kept_buffers(whole), torch.enable_grad():
        result = model(*args, **kwargs)
        if loss is not None:
            loss(result)
    swapper.decide()
    swapper.apply()
    swapper.release()
    return swapper


def _call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Running statistics and the like are after it as before it."""
    before: list[tuple[nn.Module, str, Tensor, Tensor]] = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not nn.parameter.is_lazy(buffer)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, old in before:
                # One that a call replaces, such as a count, is put back as the same object.
                module._buffers[name] = buffer
                # Not by their versions, which batch norm leaves as they are; nor where nothing was changed.
                if not torch.equal(buffer, old):
                    # Not in the eyes of autograd, which may hold it for a backward that is still to come.
                    buffer.data.copy_(old)
