"""Whether a candidate does what the original does, on the loop's own tensors and on harder ones.

The judge is that of the bundled kernels (`advisor.kernels.verify.judge`): every output and gradient may be
off from the same computation in float64 by at most twice (gradients: three times) what the original itself is
off, and a floor of a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from advisor.kernels.verify.judge import Error, Wrong, errors
from advisor.swap import adversaries
from advisor.swap.chance import alike
from advisor.swap.guard import kept_state, seed, unwarned
from advisor.swap.play import Played, play
from advisor.swap.site import Candidate, Example, Site, Trial
from advisor.swap.tensors import devices_of, same_values

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
OUTPUT_ULPS, GRADIENT_ULPS = 2.0, 4.0
#: On hard values the floor is this many times as high: eager may hit zeros and ones exactly.
HARD_FLOOR = 2.0
_SEED = 20011

OutOfMemory = (torch.OutOfMemoryError, MemoryError)


def verify(
    site: Site,
    candidate: Candidate,
    example: Example | None = None,
    *,
    deterministic: bool = False,
    adversarial: bool = True,
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

    Returns:
        A trial without times; `refused` says what is wrong, in one line.
    """
    trial = Trial(candidate.name)
    examples = site.examples if example is None else [example]
    if deterministic and not candidate.deterministic:
        trial.refused = "two runs may differ, and the loop is to be deterministic"
        return trial
    for one in examples:
        reasons = list(candidate.unsupported(one))
        if reasons:
            trial.refused = "; ".join(reasons)
            return trial
    devices = devices_of([(e.args, dict(e.kwargs)) for e in examples])
    with kept_state(devices), unwarned():
        try:
            for one in examples:
                _judged(site, candidate, one, devices, trial)
            # Values alone are made anew, so that one of the calls shows what there is to see.
            hardest = next((e for e in examples if e.grad), examples[0])
            if adversarial and not hardest.rng:
                _on_hard_values(site, candidate, hardest, devices)
        except Wrong as wrong:
            trial.refused = str(wrong)
        except OutOfMemory:
            trial.refused = "ran out of memory while it was tried"
        except Exception as error:  # noqa: BLE001
            trial.refused = said(error)
    _let_go(devices)
    return trial


def said(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).splitlines()
    if "out of memory" in str(error).lower():
        return "ran out of memory while it was tried"
    return f"raises {type(error).__name__}" + (f": {lines[0]}" if lines else "")


def _judged(
    site: Site, candidate: Candidate, example: Example, devices: set[torch.device], trial: Trial
) -> None:
    if example.rng:
        seed(devices, _SEED)
        alike(site.original, candidate.call, example, devices)
        return
    try:
        found = compare(site, candidate, example, devices, repeat=candidate.deterministic)
    except OutOfMemory:
        # float64 takes several times the loop's memory: then fewer rows must do, once whole ones have run.
        play(candidate.call, example)
        few = _narrowed(site, example)
        if few is example:
            raise
        found = compare(site, candidate, few, devices, repeat=candidate.deterministic)
    if not found:
        return
    worst = max(found, key=lambda error: error.share)
    if trial.error is None or worst.got > trial.error:
        trial.error, trial.eager_error = worst.got, worst.eager
    _hold(found)


def _on_hard_values(site: Site, candidate: Candidate, example: Example, devices: set[torch.device]) -> None:
    seed(devices, _SEED)
    example = _narrowed(site, example)
    for name, hard in adversaries.hard(example, saturates=site.kind == "attention"):
        try:
            _hold(compare(site, candidate, hard, devices, repeat=False, ill_conditioned=True))
        except Wrong as wrong:
            raise Wrong(f"with {name}: {wrong}") from None
    spoilt = adversaries.not_a_number(example)
    theirs, ours = _original(site, spoilt), play(candidate.call, spoilt)
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
        # Not "got > allowed": NaN must not pass.
        if not error.got <= error.allowed:
            raise Wrong(f"{error}, {error.eager:.3e} eager's own")


def compare(
    site: Site,
    candidate: Candidate,
    example: Example,
    devices: set[torch.device],
    *,
    repeat: bool,
    ill_conditioned: bool = False,
) -> list[Error]:
    """The errors of every output and gradient on one call.

    Args:
        site, candidate, example: what is called with what.
        devices: whose random numbers are seeded.
        repeat: a second run must be equal to the bit.
        ill_conditioned: allow a higher floor, and what changes if the inputs are off by float32's precision:
            values may be such that two right ways to compute differ.

    Raises:
        Wrong: anything but an error's size is not as it must be.
    """
    seed(devices, _SEED)
    theirs = _original(site, example)
    if theirs.written:
        raise Wrong(f"the original writes to its {theirs.written[0]}")
    given = theirs.output_gradients
    ours = play(candidate.call, example, output_gradients=given)
    # A pattern's result is laid out where it is put in, and only where what follows looks at that.
    _same_kind(ours, theirs, layout=site.mechanism != "pattern")
    truth = _exact(site, example, given)
    found = _errors(ours, theirs, truth, HARD_FLOOR if ill_conditioned else 1.0)
    if repeat:
        again = play(candidate.call, example, output_gradients=given)
        for name, mine in ours.results.items():
            other = again.results.get(name)
            if other is None or not same_values(mine, other):
                raise Wrong(f"{name}: two runs differ")
    if ill_conditioned:
        shifted = _exact(site, adversaries.perturbed(example), given)
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


def _errors(ours: Played, theirs: Played, truth: Played, floor: float) -> list[Error]:
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
        )
    return found


def _where_eager_holds(mine: Tensor, eager: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where only the original overflows, there is nothing to hold a finite result against."""
    if mine.shape != eager.shape:
        return mine, eager, exact
    apart = ~eager.isfinite() & mine.isfinite() & exact.isfinite()
    if not bool(apart.any()):
        return mine, eager, exact
    return tuple(t.masked_fill(apart, 0.0) for t in (mine, eager, exact))  # type: ignore[return-value]


def _eased(error: Error, truth: Played, shifted: Played) -> Error:
    a, b = truth.results[error.what].double(), shifted.results[error.what].double()
    gap = (a - b).abs()
    gap = gap[gap.isfinite()]
    if not gap.numel():
        return error
    off = float(gap.amax() if error.measure == "largest" else gap.square().mean().sqrt())
    factor = GRADIENT_FACTOR if error.what.startswith("gradient") else OUTPUT_FACTOR
    return Error(error.what, error.measure, error.dtype, error.got, error.eager, error.allowed + factor * off)


def _let_go(devices: set[torch.device]) -> None:
    # What the float64 run took would be missing from the loop's largest allocation.
    if any(d.type == "cuda" for d in devices):
        torch.cuda.empty_cache()
