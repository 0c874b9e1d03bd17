"""A zoo of operators: many dtypes, shapes and layouts, forward and backward, each run once in a window.

A case is a function that builds its inputs and returns what to run. Cases lie in `benchmarks/counters/cases`,
a file a family, and register themselves:

    @case(dtype=(torch.bfloat16, torch.float16))
    def mm(m: Maker, dtype: torch.dtype) -> Run:
        a, b = m.normal(8192, 1024, dtype=dtype), m.normal(1024, 4096, dtype=dtype)
        return m.forward_backward(torch.mm, a, b)

Inputs depend on the case's name alone, so every process runs the same kernels in the same order.

    python -m benchmarks.counters.zoo --device cpu --tiny        does each case run at all?
    python -m benchmarks.counters.zoo --list
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import pkgutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

Run = Callable[[], Any]
Window = Callable[[str], AbstractContextManager[Any]]

#: Up to this a dimension stays as it is in a tiny run; above, it keeps its remainder, so odd stays odd.
_TINY = 16
#: Runs before the window: library handles, heuristics, autotuning and compilation are done then.
_WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """One entry of the zoo; `name` is ``family.function`` with its variant in brackets."""

    name: str
    build: Callable[..., Run]
    variant: dict[str, Any] = field(default_factory=dict)
    cuda_only: bool = False

    @property
    def family(self) -> str:
        """The file that the case lies in."""
        return self.name.partition(".")[0]


_CASES: dict[str, Case] = {}


def case(*, cuda_only: bool = False, **variants: Sequence[Any]) -> Callable[[Callable[..., Run]], Any]:
    """Register a case, once for each combination of the variants' values."""

    def register(build: Callable[..., Run]) -> Callable[..., Run]:
        family = build.__module__.rpartition(".")[2]
        for values in itertools.product(*variants.values()):
            text = ",".join(str(value).replace("torch.", "") for value in values)
            name = f"{family}.{build.__name__}" + (f"[{text}]" if text else "")
            if name in _CASES:
                raise ValueError(f"two cases are called {name}")
            variant = dict(zip(variants, values, strict=True))
            _CASES[name] = Case(name, build, variant, cuda_only)
        return build

    return register


def all_cases() -> list[Case]:
    """Every case, family by family."""
    cases = importlib.import_module("benchmarks.counters.cases")
    for module in sorted(m.name for m in pkgutil.iter_modules(cases.__path__)):
        importlib.import_module(f"{cases.__name__}.{module}")
    return list(_CASES.values())


def interleaved(cases: Iterable[Case]) -> list[Case]:
    """The cases with families taking turns, so that a run cut short still has some of each."""
    families: dict[str, list[Case]] = {}
    for entry in cases:
        families.setdefault(entry.family, []).append(entry)
    longest = max(map(len, families.values()), default=0)
    placed = [
        (place * longest / len(family), entry)
        for family in families.values()
        for place, entry in enumerate(family)
    ]
    return [entry for _, entry in sorted(placed, key=lambda item: item[0])]


@dataclass
class Maker:
    """Builds the inputs of cases.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: shrink every dimension, to try the cases where there is no GPU.
    """

    device: str = "cuda"
    tiny: bool = False

    def size(self, n: int) -> int:
        """A dimension: itself, or a small stand-in."""
        return n if not self.tiny or n <= _TINY else _TINY + n % _TINY

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
        """Normally distributed values; takes part in a backward pass unless told not to."""
        values = torch.randn([self.size(n) for n in shape], device=self.device).to(dtype)
        return values.requires_grad_(grad and (dtype.is_floating_point or dtype.is_complex))

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values in (0, 1], without gradients."""
        return torch.rand([self.size(n) for n in shape], device=self.device).clamp_(1e-3).to(dtype)

    def integers(
        self, high: int, *shape: int, dtype: torch.dtype = torch.int64, low: int = 0
    ) -> torch.Tensor:
        """Whole numbers from `low` to below `high`."""
        sizes = [self.size(n) for n in shape]
        return torch.randint(low, self.size(high), sizes, device=self.device, dtype=dtype)

    def mask(self, *shape: int, share: float = 0.5) -> torch.Tensor:
        """Booleans, this share of them true."""
        return torch.rand([self.size(n) for n in shape], device=self.device) < share

    def forward(self, function: Callable[..., Any], *inputs: Any) -> Run:
        """The forward pass alone."""

        def run() -> Any:
            with torch.no_grad():
                return function(*inputs)

        return run

    def forward_backward(self, function: Callable[..., torch.Tensor], *inputs: Any) -> Run:
        """The forward pass, and the gradients of all inputs that want one."""
        wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        upstream = torch.randn_like(function(*inputs))

        def run() -> Any:
            return torch.autograd.grad(function(*inputs), wanted, upstream)

        return run

    def module_forward_backward(self, module: torch.nn.Module, *inputs: Any) -> Run:
        """A module's forward and backward pass, its parameters' gradients included."""
        wanted = [
            p for p in (*module.parameters(), *inputs) if isinstance(p, torch.Tensor) and p.requires_grad
        ]
        upstream = torch.randn_like(_first(module(*inputs)))

        def run() -> Any:
            return torch.autograd.grad(_first(module(*inputs)), wanted, upstream)

        return run


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """TF32 for matrix products and convolutions on or off."""
    was = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = was


def with_tf32(on: bool, run: Run) -> Run:
    """The same run with TF32 on or off."""

    def inside() -> Any:
        with tf32(on):
            return run()

    return inside


def run_cases(
    cases: Iterable[Case],
    maker: Maker,
    window: Window = lambda _name: nullcontext(),
    progress: Callable[[str], None] = lambda _name: None,
) -> dict[str, str]:
    """Run cases one after the other, each warmed up and then once in a window of its own.

    Returns:
        By name, why a case was left out: this device or build cannot do it.
    """
    left_out: dict[str, str] = {}
    for entry in cases:
        progress(entry.name)
        try:
            if entry.cuda_only and maker.device == "cpu":
                raise NotImplementedError("needs CUDA")
            torch.manual_seed(zlib.crc32(entry.name.encode()))
            run = entry.build(maker, **entry.variant)
            for _ in range(_WARM_UP):
                run()
            synchronize(maker.device)
            with window(entry.name):
                run()
                synchronize(maker.device)
        except Exception as error:  # noqa: BLE001 - whatever one case cannot do, the others go on
            left_out[entry.name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        run = None  # type: ignore[assignment]
        gc.collect()
        if maker.device != "cpu":
            torch.cuda.empty_cache()
    return left_out


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    """Run the zoo and say which cases cannot run here."""
    options = argparse.ArgumentParser(description="Run the zoo of operators once.")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="small shapes, to find errors without a GPU")
    options.add_argument("--only", default="", help="run cases whose names contain this")
    options.add_argument("--list", action="store_true", help="list the cases and stop")
    args = options.parse_args()
    cases = [entry for entry in all_cases() if args.only in entry.name]
    if args.list:
        print(*(entry.name for entry in cases), sep="\n")
        return
    left_out = run_cases(cases, Maker(args.device, args.tiny))
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    print(f"{len(cases) - len(left_out)} of {len(cases)} cases ran")


if __name__ == "__main__":
    # One registry, whether this file is run or imported by the cases.
    importlib.import_module("benchmarks.counters.zoo").main()
