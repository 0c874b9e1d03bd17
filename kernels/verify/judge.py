"""How a kernel is judged: its error against a float64 reference beside eager PyTorch's own.

    check(ours, reference, {"x": x, "weight": w})

runs `ours(**inputs)`, the reference in the inputs' dtypes (eager) and in float64, the backward of each with
the same random output gradients, and holds every output and gradient to

    error(ours) <= factor * error(eager) + a floor of a few ulp,

by the largest and by the root-mean-square error, where the factor is 2 for outputs and 3 for gradients. It
also sees that shapes and dtypes are eager's, that inputs and incoming gradients are as they were, and that
a second run is bit-equal. `judge` gives the figures, `check` raises where one is too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


class Wrong(AssertionError):
    """A kernel is not as it must be; the message says in what."""


@dataclass(frozen=True)
class Error:
    """One error of one result.

    Attributes:
        what: ``output 0`` or ``gradient of x``.
        measure: ``largest`` or ``rms``.
        dtype: of the result.
        got: ours, against float64.
        eager: eager's, against float64.
        allowed: what ours may be.
    """

    what: str
    measure: str
    dtype: torch.dtype
    got: float
    eager: float
    allowed: float

    @property
    def share(self) -> float:
        """Of what is allowed; up to 1 is right."""
        if self.allowed:
            return self.got / self.allowed
        return float("inf") if self.got else 0.0

    def __str__(self) -> str:
        return f"{self.what}: {self.measure} error {self.got:.3e}, allowed {self.allowed:.3e} ({self.dtype})"


#: Numbers from which on roundings even out in their mean: a loss, one number, may be off by a whole unit.
CALM = 16


def errors(
    ours: Tensor, eager: Tensor, reference: Tensor, *, factor: float, ulps: float, what: str, eps: float = 0.0
) -> list[Error]:
    """The largest and the root-mean-square error of `ours` against `reference` (float64).

    Allowed is `factor` times eager's own and a floor: `ulps` units in the last place of the largest magnitude
    for the largest error, and a quarter of `ulps` of the root-mean-square magnitude for the other, unless
    there are so few numbers that their mean is no calmer than the largest. A unit is that of the dtype, or of
    `eps` where that is coarser, as for what 16-bit products gave and was then cast to fp32.

    Raises:
        Wrong: shape or dtype are not eager's, or what is infinite or NaN is not so where eager's is.
    """
    _must(ours.shape == eager.shape, f"{what}: shape {tuple(ours.shape)}, eager's {tuple(eager.shape)}")
    _must(ours.dtype == eager.dtype, f"{what}: dtype {ours.dtype}, eager's {eager.dtype}")
    mine, theirs, truth = ours.double(), eager.double(), reference.double()
    finite = theirs.isfinite() & truth.isfinite()
    odd = ~theirs.isfinite()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    _must(bool(same[odd].all()), f"{what}: infinities or NaN are not where eager's are")
    _must(bool(mine[finite].isfinite().all()), f"{what}: not finite where eager is")
    mine, theirs, truth = mine[finite], theirs[finite], truth[finite]
    if not truth.numel():
        return []
    eps = max(eps, torch.finfo(ours.dtype).eps)
    found = []
    for name, measure, share in (("largest", torch.amax, 1.0), ("rms", _rms, 0.25)):
        of_eager = float(measure((theirs - truth).abs()))
        share = share if truth.numel() >= CALM else 1.0
        allowed = factor * of_eager + share * ulps * eps * float(measure(truth.abs()))
        got = float(measure((mine - truth).abs()))
        found.append(Error(what, name, ours.dtype, got, of_eager, allowed))
    return found


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def assert_as_accurate(
    ours: Tensor,
    eager: Tensor,
    reference: Tensor,
    *,
    factor: float = 2.0,
    ulps: float = 2.0,
    what: str = "output",
) -> None:
    """Hold `ours` to what `errors` allows.

    Raises:
        Wrong: an error is too large.
    """
    for error in errors(ours, eager, reference, factor=factor, ulps=ulps, what=what):
        _must(error.got <= error.allowed, str(error))


def judge(
    ours: Function,
    reference: Function,
    inputs: Mapping[str, Any],
    *,
    eager: Function | None = None,
    gradients: bool = True,
    factor: float = 2.0,
    gradient_factor: float = 3.0,
    ulps: float = 2.0,
    gradient_ulps: float = 4.0,
    repeat: bool = True,
) -> list[Error]:
    """The errors of `ours`, as the module's docstring says.

    Args:
        ours: takes `inputs` as keywords; gives a tensor or a tuple of tensors.
        reference: the same in plain PyTorch, right in any dtype.
        inputs: tensors and other arguments. Every floating tensor gets a gradient if `gradients`.
        eager: what stands for eager PyTorch in the inputs' dtypes; `reference` unless given.
        gradients: compare gradients too.
        factor: of eager's error that an output may have.
        gradient_factor: the same for a gradient.
        ulps: floor for outputs, in units in the last place.
        gradient_ulps: the same for gradients.
        repeat: a second run must be bit-equal.

    Raises:
        Wrong: for anything but an error's size.
    """
    out, got, douts = run(ours, inputs, gradients=gradients, guard=True)
    with torch.no_grad():
        shapes = run(eager or reference, inputs, gradients=False)[0]
    _must([(o.shape, o.dtype) for o in out] == [(o.shape, o.dtype) for o in shapes], "shape or dtype")
    eager_out, eager_got, _ = run(eager or reference, inputs, douts=douts, gradients=gradients)
    exact_out, exact_got, _ = run(reference, inputs, douts=douts, gradients=gradients, dtype=torch.float64)
    _must(got.keys() == eager_got.keys(), "gradients are not of the same inputs")
    found = []
    for i, (mine, theirs, truth) in enumerate(zip(out, eager_out, exact_out, strict=True)):
        found += errors(mine, theirs, truth, factor=factor, ulps=ulps, what=f"output {i}")
    for name, mine in got.items():
        found += errors(
            mine, eager_got[name], exact_got[name],
            factor=gradient_factor, ulps=gradient_ulps, what=f"gradient of {name}",
        )  # fmt: skip
    if repeat:
        again, got_again, _ = run(ours, inputs, douts=douts, gradients=gradients)
        for mine, second in zip(out, again, strict=True):
            assert_bit_equal(mine, second)
        for name, mine in got.items():
            assert_bit_equal(mine, got_again[name])
    return found


def check(ours: Function, reference: Function, inputs: Mapping[str, Any], **options: Any) -> None:
    """Judge `ours` by `judge`, with its options.

    Raises:
        Wrong: an error is too large, or anything else is not as it must be.
    """
    for error in judge(ours, reference, inputs, **options):
        _must(error.got <= error.allowed, str(error))


def run(
    function: Function,
    inputs: Mapping[str, Any],
    *,
    douts: Sequence[Tensor | None] | None = None,
    gradients: bool = True,
    dtype: torch.dtype | None = None,
    guard: bool = False,
) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor | None]]:
    """Outputs, gradients by input name, and the output gradients that were used.

    Args:
        function: called with `inputs` as keywords.
        inputs: its arguments; leaves of the graph are made of the floating tensors.
        douts: output gradients; random ones of the outputs' dtypes unless given.
        gradients: run the backward.
        dtype: cast floating tensors, and `douts`, to it first.
        guard: see that nothing was written to inputs or output gradients.
    """
    leaves = {name: _leaf(value, dtype, gradients) for name, value in inputs.items()}
    before = {name: _snapshot(leaf) for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    result = function(**leaves)
    outputs = [result] if isinstance(result, Tensor) else [out for out in result if out is not None]
    found: dict[str, Tensor] = {}
    used: list[Tensor | None] = []
    if gradients:
        given = douts if douts is not None else [_random_like(out) for out in outputs]
        used = list(given)
        pairs = [
            (out, d.to(out.dtype))
            for out, d in zip(outputs, given, strict=True)
            if d is not None and out.requires_grad
        ]
        held = [_snapshot(d) for _, d in pairs]
        wanted = {n: t for n, t in leaves.items() if isinstance(t, Tensor) and t.requires_grad}
        grads = torch.autograd.grad(
            [out for out, _ in pairs], list(wanted.values()), [d for _, d in pairs], allow_unused=True
        )
        found = {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}
        if guard:
            for (_, d), kept in zip(pairs, held, strict=True):
                _assert_untouched(d, kept, "an output gradient")
    if guard:
        for name, kept in before.items():
            _assert_untouched(leaves[name], kept, f"input {name}")
    return [out.detach() for out in outputs], found, used


def assert_bit_equal(a: Tensor, b: Tensor) -> None:
    """Same shape, dtype and values; NaN equals NaN.

    Raises:
        Wrong: it is not so.
    """
    _must(a.shape == b.shape, f"two runs differ: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    _must(a.dtype == b.dtype, f"two runs differ: {a.dtype} and {b.dtype}")
    _must(bool(((a == b) | ((a != a) & (b != b))).all()), "two runs differ")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that `torch.empty` hands out holds NaN (the largest value, for integers) within."""
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        memory.fill_uninitialized_memory = fill


def _leaf(value: Any, dtype: torch.dtype | None, gradients: bool) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    leaf = value.detach()
    if dtype is not None:
        leaf = leaf.to(dtype)
    # A view of the same memory keeps odd strides; a leaf of its own keeps the gradient apart.
    return leaf.requires_grad_(gradients)


def _random_like(out: Tensor) -> Tensor | None:
    return torch.randn_like(out) if out.is_floating_point() and out.requires_grad else None


def _snapshot(t: Tensor) -> tuple[int, Tensor]:
    return t._version, t.detach().clone()


def _assert_untouched(t: Tensor, kept: tuple[int, Tensor], what: str) -> None:
    version, values = kept
    _must(t._version == version, f"{what} was written to")
    assert_bit_equal(t.detach(), values)
