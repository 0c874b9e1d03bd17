"""Whether two ways to compute a step give the same outputs and gradients, on the loop's own values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from advisor.swap.guard import kept_state
from advisor.swap.play import differentiated
from advisor.swap.tensors import copied, plain

from .record import Unrecordable

log = logging.getLogger(__name__)

#: By how much results may differ from those of the graph as it is, relative, for kernels that sum in any
#: order; and, of gradients, relative to all of them together.
_TOLERANCE, _OF_ALL = 2e-2, 1e-4
#: And those of the graph with what was replaced in it, as far apart as 16-bit arithmetic may take them.
_REWRITTEN, _REWRITTEN_OF_ALL = 0.2, 5e-3
#: The same where nothing has 16 bits; products in TF32 have fewer than float32's.
_WIDE, _WIDE_OF_ALL = 2e-2, 5e-4

Call = Callable[..., Any]


def results_of(call: Call, args: Sequence[Any]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """What a call gives, and the gradients of what is differentiated, on leaves of its own."""
    devices = {a.device for a in args if isinstance(a, Tensor)}
    own = [static(a, True) for a in args]
    with kept_state(devices), torch.enable_grad():
        outputs = outputs_of(call(*own))
        given = [torch.ones_like(o) for o in ends(outputs)]
        wants = [a for a in own if isinstance(a, Tensor) and a.requires_grad]
        return outputs, differentiated(ends(outputs), wants, given)


def static(value: Any, keep: bool) -> Any:
    """What the recorded call is given: memory that stays, and a leaf of its own."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad) if keep else copied(value)


def outputs_of(result: Any) -> list[Tensor | None]:
    """What a call gave, as a list.

    Raises:
        Unrecordable: it is no tuple of tensors, or nothing of it is differentiated.
    """
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    if any(o is not None and not (isinstance(o, Tensor) and plain(o)) for o in outputs):
        raise Unrecordable("it gives something else than tensors")
    if not any(o is not None and o.requires_grad for o in outputs):
        raise Unrecordable("nothing of it is differentiated")
    return outputs


def ends(outputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Those that a backward begins with."""
    return [o for o in outputs if o is not None and o.requires_grad]


class Differs(Unrecordable):
    """Results are not what they must be; `rewritten` says of what."""

    rewritten = False


def hold_against(
    original: Call, args: Sequence[Any], outputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> None:
    """That a rewritten call gave what the original gives; passed over where memory does not reach for that.

    Raises:
        Differs: it did not.
    """
    with suppress(torch.OutOfMemoryError):
        hold_to(results_of(original, args), outputs, gradients)


def hold_to(
    expected: tuple[Sequence[Tensor | None], Sequence[Tensor | None]],
    outputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    how: str = "with what was replaced in it",
) -> None:
    """The same where the original's outputs and gradients are known.

    Raises:
        Differs: they are others; `how` says of what.
    """
    limits = (_REWRITTEN, _REWRITTEN_OF_ALL) if _narrow(expected) else (_WIDE, _WIDE_OF_ALL)
    try:
        for what, mine, others in (("output", outputs, expected[0]), ("gradient", gradients, expected[1])):
            alike(what, mine, others, *limits, how)
    except Differs as error:
        error.rewritten = True
        raise


def _narrow(results: tuple[Sequence[Tensor | None], Sequence[Tensor | None]]) -> bool:
    """Whether numbers of 16 bits are among what is computed."""
    found = [t for some in results for t in some if t is not None]
    kinds = {t.device.type for t in found}
    return any(map(torch.is_autocast_enabled, kinds)) or any(
        t.is_floating_point() and t.element_size() == 2 for t in found
    )


class Checked:
    """A rewritten call that is held against the original again and again, ever more rarely.

    Args:
        call: the rewritten one.
        original: does the same, and draws no random numbers.
        at_fault: told why `call` does something else; from then on the original serves.
        may_check: whether a check that is due may be made now; else it is put off.
    """

    def __init__(
        self,
        call: Call,
        original: Call,
        at_fault: Callable[[str], None],
        may_check: Callable[[], bool] = lambda: True,
    ) -> None:
        self._call, self._original, self._at_fault = call, original, at_fault
        self._may_check, self._due = may_check, False
        self._calls = 0

    def __call__(self, *args: Any) -> Any:
        """The call's result."""
        if torch.is_grad_enabled() and self._call is not self._original:
            self._calls += 1
            # 1, 4, 16 and so on.
            self._due |= self._calls & (self._calls - 1) == 0 and bool(self._calls.bit_length() % 2)
            if self._due and self._may_check():
                self._due = False
                try:
                    hold_against(self._original, args, *results_of(self._call, args))
                except Differs as error:
                    self._at_fault(str(error))
                    self._call = self._original
                except Exception:
                    log.debug("a rewritten step is not checked", exc_info=True)
        return self._call(*args)


def _difference(mine: Tensor, expected: Tensor) -> Tensor:
    """Nought where both are infinite alike, as masked scores are, or no number, as a loop's own may be."""
    same = (mine == expected) | (mine.isnan() & expected.isnan())
    return (mine - expected).masked_fill(same, 0.0)


def alike(
    what: str,
    mine: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    relative: float = _TOLERANCE,
    of_all: float = _OF_ALL,
    how: str = "replayed",
) -> None:
    """That two lists of results are the same, each tensor within its own size and that of all together.

    Raises:
        Differs: they are not.
    """
    pairs = list(zip(mine, expected, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        raise Differs(f"{how}, it has {what}s where it has none, or the other way round")
    floats = [(a, b) for a, b in pairs if a is not None and b is not None and b.is_floating_point()]
    if not floats:
        return
    with torch.no_grad():
        sizes = torch.stack([torch.nan_to_num(b.float(), 0.0, 0.0, 0.0).norm() for _, b in floats])
        off = torch.stack([_difference(a.float(), b.float()).norm() for a, b in floats])
        allowed = relative * sizes + of_all * sizes.square().sum().sqrt()
        # Not "off > allowed": NaN must not pass.
        if not bool((off <= allowed).all()):
            worst = float((off / sizes.clamp_min(1e-30)).max())
            raise Differs(f"{how}, its {what}s are not the same (off by {worst:.1e})")
