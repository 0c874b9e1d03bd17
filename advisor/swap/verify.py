"""Whether a candidate does what the original does, on the loop's own tensors and on harder ones.

The judge is that of the bundled kernels (`advisor.kernels.verify.judge`): every output and gradient may be
off from the same computation in float64 by at most twice (gradients: three times) what the original itself is
off, and a floor of a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from advisor.kernels.verify.judge import CALM, Error, Wrong, errors
from advisor.swap import adversaries
from advisor.swap.chance import alike
from advisor.swap.guard import kept_state, seed, unwarned
from advisor.swap.play import Played, play, reasons
from advisor.swap.products import Products
from advisor.swap.site import Candidate, Example, Site, Trial
from advisor.swap.tensors import devices_of, same_values

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
OUTPUT_ULPS, GRADIENT_ULPS = 2.0, 4.0
#: On hard values the floor is this many times as high: eager may hit zeros and ones exactly.
HARD_FLOOR = 2.0
_SEED = 20011

OutOfMemory = (torch.OutOfMemoryError, MemoryError)

_T = TypeVar("_T")


def verify(
    site: Site,
    candidate: Candidate,
    example: Example | None = None,
    *,
    deterministic: bool = False,
    adversarial: bool = True,
    known: Known | None = None,
) -> Trial:
    """Hold a candidate against the original, forward and backward.

    The loop's tensors, its gradients, its random numbers and its settings are after it as before it, even if
    it is interrupted.

    Args:
        site: what is to be replaced.
        candidate: by what.
        example: the call to hold them against; all of the site's unless given.
        deterministic: refuse what differs between two runs, or does not say that it never does.
        adversarial: also on values made to be hard.
        known: of the site, where several candidates are held against it.

    Returns:
        A trial without times; `refused` says what is wrong, in one line.
    """
    trial = Trial(candidate.name)
    examples = site.examples if example is None else [example]
    if deterministic and not candidate.deterministic:
        trial.refused = "two runs may differ, and the loop is to be deterministic"
        return trial
    for one in examples:
        trial.refused = "; ".join(reasons(candidate, one))
        if trial.refused:
            return trial
    devices = devices_of([(e.args, dict(e.kwargs)) for e in examples])
    alone = known is None
    known = known or Known(site)
    with kept_state(devices), unwarned():
        try:
            for one in examples:
                _judged(known, candidate, one, devices, trial)
            # Values alone are made anew, so that one of the calls shows what there is to see.
            hardest = next((e for e in examples if e.grad), examples[0])
            if adversarial and not hardest.rng:
                _on_hard_values(known, candidate, hardest, devices)
        except Wrong as wrong:
            trial.refused = str(wrong)
        except OutOfMemory:
            trial.refused = "ran out of memory while it was tried"
        except Exception as error:  # noqa: BLE001
            trial.refused = said(error)
    if alone:
        known.let_go()
    return trial


def said(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).splitlines()
    if "out of memory" in str(error).lower():
        return "ran out of memory while it was tried"
    return f"raises {type(error).__name__}" + (f": {lines[0]}" if lines else "")


class Known:
    """What a site's original gives, here and in float64, worked out once for all candidates.

    Args:
        site: whose.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self._found: dict[Any, Any] = {}

    def original(self, example: Example) -> Played:
        """What the original gives, and the gradients that its backward begins with."""
        return self._once("original", example, lambda: _original(self.site, example))

    def exact(self, example: Example) -> Played:
        """The same in float64."""
        given = self.original(example).output_gradients
        return self._once("exact", example, lambda: _exact(self.site, example, given))

    def shifted(self, example: Example) -> Played:
        """The same with inputs that are off by float32's precision."""
        given = self.original(example).output_gradients
        return self._once(
            "shifted", example, lambda: _exact(self.site, adversaries.perturbed(example), given)
        )

    def usual_errors(self, example: Example) -> dict[tuple[str, str], float]:
        """The original's largest errors on calls like this one, by result and measure.

        A single number may happen to be right, where the original is as far off as any with other roundings.
        """
        return self._once("usual errors", example, lambda: _usual_errors(self, example))

    def product_dtype(self, example: Example) -> torch.dtype | None:
        """The coarsest dtype that the original multiplies matrices in; None where it multiplies none.

        Gradients come out of such products in that dtype, whatever they are cast to afterwards.
        """

        def watched() -> torch.dtype | None:
            with Products() as products:
                play(self.site.original, example)
            return products.dtype

        return self._once("products", example, watched)

    def few(self, example: Example) -> Example:
        """The call with fewer rows, if the original takes them."""
        return self._once("few", example, lambda: _narrowed(self.site, example))

    def hard(self, example: Example) -> list[tuple[str, Example]]:
        """The call with other values."""
        return self._once(
            "hard",
            example,
            lambda: list(
                adversaries.hard(example, saturates=self.site.kind == "attention", steady=self.site.steady)
            ),
        )

    def spoilt(self, example: Example) -> Example:
        """The call with a NaN in each input."""
        return self._once("spoilt", example, lambda: adversaries.not_a_number(example))

    def used(self, example: Example) -> None:
        """Forget what it gives, unless another candidate is to be held against it."""
        if len(self.site.candidates) < 2:
            for what in ("original", "exact", "shifted"):
                self._found.pop((what, id(example)), None)

    def let_go(self) -> None:
        """Forget it all: what the float64 run took would be missing from the loop's largest allocation."""
        self._found.clear()
        if any(d.type == "cuda" for d in devices_of([(e.args, dict(e.kwargs)) for e in self.site.examples])):
            torch.cuda.empty_cache()

    def _once(self, what: str, example: Example, make: Callable[[], _T]) -> _T:
        # The example is held on to, so that no other gets its id.
        key = (what, id(example))
        if key not in self._found:
            self._found[key] = (example, make())
        return self._found[key][1]  # type: ignore[no-any-return]


def _judged(
    known: Known, candidate: Candidate, example: Example, devices: set[torch.device], trial: Trial
) -> None:
    if example.rng:
        seed(devices, _SEED)
        # Whole once, to see that it runs; the law that its numbers follow shows in a few rows.
        play(candidate.call, example)
        alike(known.site.original, candidate.call, known.few(example), devices)
        return
    try:
        found = compare(known, candidate, example, devices, repeat=candidate.deterministic)
    except OutOfMemory:
        # float64 takes several times the loop's memory: then fewer rows must do, once whole ones have run.
        play(candidate.call, example)
        few = known.few(example)
        if few is example:
            raise
        found = compare(known, candidate, few, devices, repeat=candidate.deterministic)
    if not found:
        return
    worst = max(found, key=lambda error: error.share)
    if trial.error is None or worst.got > trial.error:
        trial.error, trial.eager_error = worst.got, worst.eager
    _hold(found)


def _on_hard_values(known: Known, candidate: Candidate, example: Example, devices: set[torch.device]) -> None:
    seed(devices, _SEED)
    example = known.few(example)
    for name, hard in known.hard(example):
        try:
            _hold(compare(known, candidate, hard, devices, repeat=False, ill_conditioned=True))
        except Wrong as wrong:
            raise Wrong(f"with {name}: {wrong}") from None
        known.used(hard)
    spoilt = known.spoilt(example)
    theirs, ours = known.original(spoilt), play(candidate.call, spoilt)
    for i, (mine, eager) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
        if bool(mine.isfinite().all()) != bool(eager.isfinite().all()):
            raise Wrong(f"output {i}: a NaN in the input shows in one result and not in the other")


def _narrowed(site: Site, example: Example) -> Example:
    """The call with fewer rows, if the original takes them."""
    few = adversaries.narrowed(example)
    try:
        play(site.original, few)
    except Exception:  # noqa: BLE001
        return example
    return few


def _hold(found: Sequence[Error]) -> None:
    for error in found:
        if _too_large(error):
            raise Wrong(f"{error}, {error.eager:.3e} eager's own")


def compare(
    known: Known,
    candidate: Candidate,
    example: Example,
    devices: set[torch.device],
    *,
    repeat: bool,
    ill_conditioned: bool = False,
) -> list[Error]:
    """The errors of every output and gradient on one call.

    Args:
        known: of the site.
        candidate, example: what is called with what.
        devices: whose random numbers are seeded.
        repeat: a second run must be equal to the bit.
        ill_conditioned: allow a higher floor, and what changes if the inputs are off by float32's precision:
            values may be such that two right ways to compute differ.

    Raises:
        Wrong: anything but an error's size is not as it must be.
    """
    seed(devices, _SEED)
    theirs = known.original(example)
    if theirs.written:
        raise Wrong(f"the original writes to its {theirs.written[0]}")
    given = theirs.output_gradients
    ours = play(candidate.call, example, output_gradients=given)
    # A pattern's result is laid out where it is put in, and only where what follows looks at that.
    _same_kind(ours, theirs, layout=known.site.mechanism != "pattern")
    truth = known.exact(example)
    floor = HARD_FLOOR if ill_conditioned else 1.0
    found = _errors(ours, theirs, truth, floor)
    if any(_too_large(error) and error.what.startswith("gradient") for error in found):
        found = _errors(ours, theirs, truth, floor, known.product_dtype(example))
    if repeat:
        again = play(candidate.call, example, output_gradients=given)
        for name, mine in ours.results.items():
            other = again.results.get(name)
            if other is None or not same_values(mine, other):
                raise Wrong(f"{name}: two runs differ")
    if any(_too_large(error) and truth.results[error.what].numel() < CALM for error in found):
        found = [
            _as_usual(error, known.usual_errors(example)) if _too_large(error) else error for error in found
        ]
    if ill_conditioned and any(_too_large(error) for error in found):
        shifted = known.shifted(example)
        found = [_eased(error, truth, shifted) for error in found]
    return found


def _exact(site: Site, example: Example, given: Sequence[Tensor | None]) -> Played:
    call = site.reference or site.original
    try:
        return play(call, example, output_gradients=given, wide=torch.float64)
    except OutOfMemory:
        raise
    except Exception as error:
        raise Wrong(f"the original in float64, to compare with, {said(error)}") from error


def _original(site: Site, example: Example) -> Played:
    try:
        return play(site.original, example)
    except OutOfMemory:
        raise
    except Exception as error:
        raise Wrong(f"the original {said(error)}") from error


def _same_kind(ours: Played, theirs: Played, *, layout: bool) -> None:
    if ours.written:
        raise Wrong(f"writes to its {ours.written[0]}")
    if len(ours.outputs) != len(theirs.outputs) or ours.rest != theirs.rest:
        raise Wrong("what it returns is built otherwise than what the original returns")
    for i, (mine, eager) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
        if mine.shape != eager.shape:
            raise Wrong(f"output {i}: shape {tuple(mine.shape)}, the original's {tuple(eager.shape)}")
        if mine.device != eager.device:
            raise Wrong(f"output {i} lies on {mine.device}, the original's on {eager.device}")
        if layout and eager.is_contiguous() and not mine.is_contiguous():
            raise Wrong(f"output {i} is not contiguous, the original's is")
    if ours.differentiable != theirs.differentiable:
        raise Wrong("its outputs do not have gradients where the original's have")
    missing = theirs.gradients.keys() ^ ours.gradients.keys()
    if missing:
        raise Wrong(f"gradient of {min(missing)}: one has it, the other has not")


def _errors(
    ours: Played, theirs: Played, truth: Played, floor: float, products: torch.dtype | None = None
) -> list[Error]:
    found = []
    mine, eager, exact = ours.results, theirs.results, truth.results
    for name, result in mine.items():
        if name not in exact:
            raise Wrong(f"{name}: float64 gives none to compare with")
        if not result.is_floating_point():
            if not torch.equal(result, eager[name]):
                raise Wrong(f"{name}: not equal to the original's")
            continue
        gradient = name.startswith("gradient")
        factor, ulps = (GRADIENT_FACTOR, GRADIENT_ULPS) if gradient else (OUTPUT_FACTOR, OUTPUT_ULPS)
        found += errors(
            *_where_eager_holds(result, eager[name], exact[name]),
            factor=factor,
            ulps=floor * ulps,
            what=name,
            eps=_eps_of(eager[name], products) if gradient else 0.0,
        )
    return found


def _eps_of(eager: Tensor, products: torch.dtype | None) -> float:
    """Of the dtype of products, where what eager gives is a number of that dtype, cast to its own."""
    if products is None or not torch.equal(eager.to(products).to(eager.dtype), eager):
        return 0.0
    return torch.finfo(products).eps


def _where_eager_holds(mine: Tensor, eager: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where only the original overflows, there is nothing to hold a finite result against."""
    if mine.shape != eager.shape:
        return mine, eager, exact
    apart = ~eager.isfinite() & mine.isfinite() & exact.isfinite()
    if not bool(apart.any()):
        return mine, eager, exact
    return tuple(t.masked_fill(apart, 0.0) for t in (mine, eager, exact))  # type: ignore[return-value]


def _too_large(error: Error) -> bool:
    # Not "got > allowed": NaN must not pass.
    return not error.got <= error.allowed


def _usual_errors(known: Known, example: Example) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    given = known.original(example).output_gradients
    for one in adversaries.similar(example):
        theirs = play(known.site.original, one, output_gradients=given)
        truth = _exact(known.site, one, given).results
        for name, result in theirs.results.items():
            if name not in truth or not result.is_floating_point() or result.numel() >= CALM:
                continue
            for error in errors(result, result, truth[name], factor=1.0, ulps=0.0, what=name):
                key = (error.what, error.measure)
                found[key] = max(found.get(key, 0.0), error.eager)
    return found


def _as_usual(error: Error, usual: dict[tuple[str, str], float]) -> Error:
    """The same, held to what the original is usually off."""
    more = usual.get((error.what, error.measure), 0.0) - error.eager
    if not more > 0.0:
        return error
    allowed = error.allowed + _factor(error) * more
    return Error(error.what, error.measure, error.dtype, error.got, error.eager + more, allowed)


def _factor(error: Error) -> float:
    return GRADIENT_FACTOR if error.what.startswith("gradient") else OUTPUT_FACTOR


def _eased(error: Error, truth: Played, shifted: Played) -> Error:
    a, b = truth.results[error.what].double(), shifted.results[error.what].double()
    gap = (a - b).abs()
    gap = gap[gap.isfinite()]
    if not gap.numel():
        return error
    off = float(gap.amax() if error.measure == "largest" else gap.square().mean().sqrt())
    allowed = error.allowed + _factor(error) * off
    return Error(error.what, error.measure, error.dtype, error.got, error.eager, allowed)
