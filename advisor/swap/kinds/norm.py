"""LayerNorm and RMSNorm, by torch or by anyone: recognised by what they compute, not by their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.kernels import norm as kernels
from advisor.swap.kinds.registry import Offer, kind
from advisor.swap.play import as_called
from advisor.swap.site import Candidate, Example
from advisor.swap.tensors import stand_in
from advisor.swap.wide import Widened

_ROWS = 4
#: So that eps counts in one row and not in another, and a mean is there to be taken off.
_SCALES = (1.0, 1e-4, 3.0, 0.02)
_MEANS = (0.5, 0.0, -2.0, 0.01)


@dataclass(frozen=True)
class Formula:
    """What a norm computes.

    Attributes:
        rms: no mean is taken off.
        eps: under the root; None for the input dtype's machine epsilon.
        offset: added to the weight.
        shape: of the dimensions that are normalised.
        weight, bias: names of the parameters, or None.
    """

    rms: bool
    eps: float | None
    offset: float
    shape: tuple[int, ...]
    weight: str | None
    bias: str | None

    def exact(self, module: nn.Module, x: Tensor) -> Tensor:
        """The same in plain arithmetic."""
        dims = tuple(range(-len(self.shape), 0))
        centred = x if self.rms else x - x.mean(dims, keepdim=True)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        y = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
        if self.weight:
            y = y * (self.offset + getattr(module, self.weight))
        return y + getattr(module, self.bias) if self.bias else y


def _looks_like_one(module: nn.Module) -> bool:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return True
    other = (nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.PReLU)
    if isinstance(module, other) or any(True for _ in module.children()) or module._buffers:
        return False
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    return 1 <= len(shapes) <= 2 and len(set(shapes)) == 1 and len(shapes[0]) == 1 and shapes[0][0] > 1


@kind("norm", watches=_looks_like_one)
def norm(module: nn.Module, example: Example) -> Offer | str:
    """The bundled kernel, and torch's own where the module is none of torch's."""
    if len(example.args) != 1 or example.kwargs or not isinstance(example.args[0], Tensor):
        return "is not called with one tensor"
    x = example.args[0]
    formula = recognised(module, x)
    if formula is None:
        return "computes neither LayerNorm nor RMSNorm"
    rounded = rounding(module, formula, x, example)
    if rounded is None:
        return f"does not round as any known norm does, on {str(x.dtype).removeprefix('torch.')}"
    formula, casting, dtype = rounded
    candidates = [_bundled(formula, casting, dtype)]
    torchs = _torchs(formula, casting, dtype)
    if torchs is not None and type(module).forward not in (nn.LayerNorm.forward, nn.RMSNorm.forward):
        candidates.append(torchs)
    # An eps that is the dtype's own would be another one in float64.
    return Offer(candidates, reference=formula.exact)


def recognised(module: nn.Module, x: Tensor) -> Formula | None:
    """Which formula a module computes, tried in float64 on random numbers with random parameters."""
    sizes = [p.shape for p in module._parameters.values() if p is not None]
    shape = tuple(sizes[0] if sizes else getattr(module, "normalized_shape", ()))
    if not shape or tuple(x.shape[-len(shape) :]) != shape or math.prod(shape) < 2:
        return None
    probe = stand_in(module, lambda p: torch.randn(p.shape, dtype=torch.float64, device=p.device))
    rows = torch.randn(_ROWS, *shape, dtype=torch.float64, device=x.device)
    factors, means = (
        torch.tensor(v, dtype=torch.float64, device=x.device).view(-1, *[1] * len(shape))
        for v in (_SCALES, _MEANS)
    )
    rows = (rows + means) * factors
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False), Widened():
            result = probe(rows)
    except Exception:  # noqa: BLE001
        return None
    if not isinstance(result, Tensor) or result.shape != rows.shape:
        return None
    for formula in _formulas(module, shape):
        if torch.allclose(result.double(), formula.exact(probe, rows), rtol=1e-8, atol=1e-10):
            return formula
    return None


def _formulas(module: nn.Module, shape: tuple[int, ...]) -> Iterator[Formula]:
    names = [name for name, p in module._parameters.items() if p is not None]
    weight, bias = [*names, None, None][:2]
    settings = (v for k, v in vars(module).items() if not k.startswith("_"))
    numbers: list[float | None] = [v for v in settings if type(v) is float and 0.0 <= v < 0.1]
    # Some write it into the code rather than into an attribute.
    epsilons = list(dict.fromkeys([*numbers, None, 1e-5, 1e-6, 1e-8, 1e-12]))
    for eps in epsilons:
        for rms in (True, False):
            for offset in (0.0, 1.0) if weight and rms else (0.0,):
                yield Formula(rms, eps, offset, shape, weight, bias)


def rounding(
    module: nn.Module, formula: Formula, x: Tensor, example: Example
) -> tuple[Formula, str, torch.dtype] | None:
    """What a module does at the dtypes of a call.

    Returns:
        The formula with the eps that these dtypes have, where it rounds (the kernels' ``"fp32"`` or
        ``"llama"``), and the dtype of its result. None if it does nothing of the kind: the formula is also
        what errors are measured against, so that it must be right.
    """
    probe = stand_in(module, torch.randn_like)
    scales = torch.tensor((1.0, 0.03, 3.0, 0.01), device=x.device).view(-1, 1, *[1] * len(formula.shape))
    rows = (torch.randn(4, 16, *formula.shape, device=x.device) * scales).to(x.dtype)
    with as_called(Example((rows,), autocast=example.autocast, grad=False)):
        result = probe(rows)
    epsilons = [formula.eps]
    if formula.eps is None:
        # The input's, or that of the dtype in which torch computes.
        epsilons = [torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps]
    rounds = formula.rms and not formula.bias and x.dtype != torch.float32
    castings = ("fp32", "llama") if rounds else ("fp32",)
    tried = [(replace(formula, eps=eps), c) for eps in dict.fromkeys(epsilons) for c in castings]
    off, (found, casting) = min(
        ((_off(probe, formula, c, rows, result), (formula, c)) for formula, c in tried),
        key=lambda one: one[0],
    )
    return (found, casting, result.dtype) if off < 2 * torch.finfo(result.dtype).eps else None


def _off(probe: nn.Module, formula: Formula, casting: str, rows: Tensor, result: Tensor) -> float:
    """How far a module's result is from a formula's, if it rounds there, relative."""
    with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
        if casting == "llama":
            weight = getattr(probe, formula.weight) if formula.weight else None
            expected = kernels.rms_norm_reference(
                rows, formula.shape, weight, formula.eps, offset=formula.offset, casting=casting
            )
        else:
            expected = formula.exact(stand_in(probe, lambda p: p.double()), rows.double()).to(result.dtype)
        off = (expected.double() - result.double()).abs().mean()
        return float(off / result.double().abs().mean())


def _parameters(formula: Formula, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    weight = getattr(module, formula.weight) if formula.weight else None
    return weight, getattr(module, formula.bias) if formula.bias else None


def _bundled(formula: Formula, casting: str, dtype: torch.dtype) -> Candidate:
    def layer_norm(module: nn.Module, x: Tensor) -> Tensor:
        weight, bias = _parameters(formula, module)
        assert formula.eps is not None
        return kernels.layer_norm(x, formula.shape, weight, bias, formula.eps, out_dtype=dtype)

    def rms_norm(module: nn.Module, x: Tensor) -> Tensor:
        weight, _ = _parameters(formula, module)
        return kernels.rms_norm(
            x, formula.shape, weight, formula.eps, offset=formula.offset, casting=casting, out_dtype=dtype
        )

    def unsupported(example: Example) -> list[str]:
        module, x = example.args
        if formula.rms and formula.bias:
            return ["an RMSNorm with a bias"]
        if not formula.rms and formula.eps is None:
            return ["a LayerNorm without a fixed eps"]
        return kernels.unsupported_reasons(x, *_parameters(formula, module))

    name = "rms_norm" if formula.rms else "layer_norm"
    options = []
    if formula.offset:
        options.append(f"offset={formula.offset:g}")
    if casting != "fp32":
        options.append(f'casting="{casting}"')
    made = "RMSNorm" if formula.rms else "FusedLayerNorm"
    size = ", ".join(map(str, formula.shape))
    arguments = ", ".join([size if len(formula.shape) == 1 else f"({size})", f"eps={formula.eps}", *options])
    return Candidate(
        f"advisor.kernels.{name}",
        rms_norm if formula.rms else layer_norm,
        "bundled",
        permanent=f"from advisor.kernels import {made}\n{made}({arguments})",
        unsupported=unsupported,
    )


def _torchs(formula: Formula, casting: str, dtype: torch.dtype) -> Candidate | None:
    if formula.offset or casting != "fp32" or (formula.rms and formula.bias):
        return None
    function: Callable[..., Any] = F.rms_norm if formula.rms else F.layer_norm
    name = function.__name__

    def call(module: nn.Module, x: Tensor) -> Tensor:
        weight, bias = _parameters(formula, module)
        vectors = [weight] if formula.rms else [weight, bias]
        return function(x, formula.shape, *vectors, eps=formula.eps).to(dtype)

    vectors = "self.weight" if formula.rms else "self.weight, self.bias"
    return Candidate(
        f"torch.nn.functional.{name}",
        call,
        "torch",
        permanent=f"F.{name}(x, {formula.shape}, {vectors}, eps={formula.eps})",
    )
