"""Sites with candidates that are right or wrong in one known way, and clocks that say what they are told."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from advisor.swap.clocks import Call
from advisor.swap.decide import Terms
from advisor.swap.site import Candidate, Example, Site
from advisor.swap.tensors import stand_in


class SlowNorm(nn.Module):
    """LayerNorm in plain code."""

    def __init__(self, size: int = 8, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def right(module: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, (x.shape[-1],), module.weight, module.bias, module.eps)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 1.001


class _FirstDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Tensor:
        dw = dw.clone()
        dw[0] = 0
        return dw


def wrong_value(module: nn.Module, x: Tensor) -> Tensor:
    y = right(module, x)
    return y + 1e-4 * (torch.arange(x.shape[-1]) == 3)


def wrong_gradient(module: nn.Module, x: Tensor) -> Tensor:
    return _WrongGradient.apply(right(module, x))


def wrong_weight_gradient(module: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.layer_norm(
        x, (x.shape[-1],), _FirstDropped.apply(module.weight), module.bias, module.eps
    )


def not_a_number(module: nn.Module, x: Tensor) -> Tensor:
    return right(module, x) / torch.where(torch.arange(x.shape[-1]) == 2, torch.nan, 1.0)


def raising(module: nn.Module, x: Tensor) -> Tensor:
    raise RuntimeError("no kernel image is available")


def out_of_memory(module: nn.Module, x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def writes_input(module: nn.Module, x: Tensor) -> Tensor:
    y = right(module, x)
    x.data.mul_(2.0)  # unseen by the version counter
    return y


def writes_weight(module: nn.Module, x: Tensor) -> Tensor:
    y = right(module, x)
    module.weight.data.add_(1.0)  # unseen by the version counter
    return y


def nondeterministic(module: nn.Module, x: Tensor) -> Tensor:
    # Within what rounding allows, so that only a second run tells.
    noise = 1 + torch.empty_like(x).uniform_(0, 1e-7)
    with torch.random.fork_rng([]):
        torch.random.seed()
        noise = 1 + torch.empty_like(x).uniform_(0, 1e-7)
    return right(module, x) * noise


def other_eps(module: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, (x.shape[-1],), module.weight, module.bias, 2 * module.eps)


def other_dtype(module: nn.Module, x: Tensor) -> Tensor:
    return right(module, x).double()


def other_shape(module: nn.Module, x: Tensor) -> Tensor:
    return right(module, x)[None]


def swallows_nan(module: nn.Module, x: Tensor) -> Tensor:
    return right(module, torch.nan_to_num(x))


def transposed(module: nn.Module, x: Tensor) -> Tensor:
    return right(module, x).transpose(0, 1).contiguous().transpose(0, 1)


def leaves_grad_mode_off(module: nn.Module, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    raise RuntimeError("half-way")


def candidate(call: Callable[..., Any], name: str = "", **options: Any) -> Candidate:
    return Candidate(name or call.__name__, call, "bundled", **options)


def site(*calls: Callable[..., Any], shape: tuple[int, ...] = (6, 5, 8), **options: Any) -> Site:
    """A plain-code norm, seen once, with these candidates."""
    module = SlowNorm(shape[-1])
    example = Example((stand_in(module), torch.randn(shape, requires_grad=True)))
    candidates = [c if isinstance(c, Candidate) else candidate(c) for c in calls]
    return Site("norm", ["norm"], "module", "SlowNorm", SlowNorm.forward, [example], candidates, **options)


def random_site(*calls: Callable[..., Any], p: float = 0.2) -> Site:
    """Dropout, seen once."""

    def dropout(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, p)

    example = Example((torch.randn(16, 64, requires_grad=True),), rng=True)
    return Site("norm", ["drop"], "pattern", "dropout", dropout, [example], [candidate(c) for c in calls])


class ToldClock:
    """Says what it is told: times and peaks by the order of the calls; runs nothing."""

    def __init__(
        self,
        times_ns: Mapping[str, float],
        peaks: Mapping[str, int] | None = None,
        spread: float = 0.0,
        hosts_ns: Mapping[str, float] | None = None,
    ) -> None:
        self._times, self._spread = times_ns, spread
        self._peaks = list(peaks.values()) if peaks else None
        self.host_ns = dict(hosts_ns or {})

    def times(self, calls: Mapping[str, Call], budget_s: float) -> dict[str, list[float]]:
        return {
            name: [self._times[name] * (1 + self._spread * (i - 10) / 10) for i in range(21)]
            for name in calls
        }

    def peak_bytes(self, call: Call) -> int | None:
        return self._peaks.pop(0) if self._peaks else None


def terms(times_ns: Mapping[str, float], peaks: Mapping[str, int] | None = None, **options: Any) -> Terms:
    spread, hosts_ns = options.pop("spread", 0.0), options.pop("hosts_ns", None)
    return replace(Terms(clock=ToldClock(times_ns, peaks, spread, hosts_ns)), **options)
