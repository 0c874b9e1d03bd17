"""Optimizer steps, gradient clipping and gradient scaling, for-each and fused."""

from __future__ import annotations

import torch

from benchmarks.counters.zoo import Maker, Run, case

#: Shapes of the parameters that all cases step: some layers of a transformer, with odd and small ones.
_BLOCK = ((2304, 768), (2304,), (768, 768), (768,), (3072, 768), (768, 3072), (768,))
PARAMETERS = ((20011, 768), (1024, 768), *_BLOCK, *_BLOCK, (1000, 513))


def _parameters(m: Maker) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(m.normal(*shape, grad=False)) for shape in PARAMETERS]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


@case(way=("fused", "foreach"))
def adamw(m: Maker, way: str) -> Run:
    return torch.optim.AdamW(_parameters(m), lr=1e-4, foreach=way == "foreach", fused=way == "fused").step


@case(cuda_only=True)
def adamw_fused_capturable(m: Maker) -> Run:
    return torch.optim.AdamW(_parameters(m), lr=1e-4, fused=True, amsgrad=True, capturable=True).step


@case(way=("fused", "foreach"))
def sgd_momentum(m: Maker, way: str) -> Run:
    return torch.optim.SGD(
        _parameters(m),
        lr=1e-3,
        momentum=0.9,
        weight_decay=1e-4,
        foreach=way == "foreach",
        fused=way == "fused",
    ).step


@case()
def sgd_nesterov(m: Maker) -> Run:
    return torch.optim.SGD(_parameters(m), lr=1e-3, momentum=0.9, nesterov=True, foreach=True).step


@case()
def rmsprop(m: Maker) -> Run:
    return torch.optim.RMSprop(_parameters(m), lr=1e-3, foreach=True).step


@case()
def clip_grad_norm(m: Maker) -> Run:
    parameters = _parameters(m)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)


@case()
def clip_grad_value(m: Maker) -> Run:
    parameters = _parameters(m)
    return lambda: torch.nn.utils.clip_grad_value_(parameters, 0.5)


@case(cuda_only=True)
def unscale(m: Maker) -> Run:
    gradients = [p.grad for p in _parameters(m) if p.grad is not None]
    found = torch.zeros((), device=m.device)
    inverse = torch.tensor(1.0, device=m.device)
    return lambda: torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)


@case()
def zero_gradients(m: Maker) -> Run:
    gradients = [p.grad for p in _parameters(m) if p.grad is not None]
    return lambda: torch._foreach_zero_(gradients)


@case()
def moving_average(m: Maker) -> Run:
    ours, theirs = ([p.detach() for p in _parameters(m)] for _ in range(2))
    return lambda: torch._foreach_lerp_(ours, theirs, 0.01)
