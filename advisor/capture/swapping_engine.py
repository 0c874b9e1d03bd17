"""`advisor.swap` in the hands of a Trainer: a step watched from hook to hook, faults that are noticed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from advisor.swap.decide import Terms
from advisor.swap.find import Finder, Skipped
from advisor.swap.journal import Journal
from advisor.swap.session import Swapper
from advisor.swap.site import Outcome, Site

#: Lets swap try on a CPU too, where the bundled kernels do not run; for tests.
ALLOW_CPU = "ADVISOR_SWAP_ALLOW_CPU"


class _Swapper(Swapper):
    """Lets faults through, since whoever holds the `Engine` must know of them; it gives the warning, too."""

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.restore()
            raise


class Engine:
    """Finds, proves and applies, for `advisor.capture.swapping.Swapping`. Any method may raise anything.

    Args:
        module: the LightningModule.
        optimizers: the Trainer's.
        kinds: asked for.
        allow_memory: take candidates that need more memory; whole steps are held to the limit.
        finders: make finders of sites beyond modules and optimizers.
    """

    def __init__(
        self,
        module: Any,
        optimizers: Sequence[Any],
        kinds: Sequence[str],
        *,
        allow_memory: bool = False,
        finders: Callable[[], Sequence[Finder]] = tuple,
    ) -> None:
        self._model, self._optimizers, self._kinds = module, optimizers, kinds
        self._allow_memory = allow_memory
        self._finders = finders
        self._watching = contextlib.ExitStack()
        self._swapper: Swapper | None = None
        self._journal = Journal()
        self._progress: Callable[[int, int, str], None] = lambda _done, _count, _what: None
        #: What was left alone and why, places of one reason together.
        self.remarks: list[str] = []

    def unable(self) -> str:
        """Why nothing can be swapped here; empty if something might."""
        return self._made().unable

    def watch(self) -> None:
        """Note the calls of the step that comes."""
        self._swapper = self._made()
        self._watching.enter_context(self._swapper.watch())

    def sites(self) -> list[Site]:
        """The step has ended: forget the marks; what could be replaced, hot first."""
        self._watching.close()
        return self._in_use.sites()

    def decide(self, progress: Callable[[int, int, str], None]) -> list[Outcome]:
        """An outcome for each site; nothing is changed."""
        self._progress = progress
        return self._in_use.decide()

    def choices(self) -> tuple[tuple[str, str | None], ...]:
        """The first place of each site and the name of its candidate, for `follow`."""
        outcomes, names = self._in_use.outcomes, self._in_use.choices()
        return tuple((o.site.where[0], name) for o, name in zip(outcomes, names, strict=True))

    def follow(self, choices: Sequence[tuple[str, str | None]]) -> None:
        """Take over what another rank has decided."""
        self._in_use.follow([name for _, name in choices], [place for place, _ in choices])

    def apply(self) -> None:
        """Make the changes that were decided."""
        self._journal = self._in_use.journal
        self._in_use.apply()
        if not len(self._journal):
            raise RuntimeError("what was chosen changes nothing")

    def release(self) -> None:
        """Let go of copies of the loop's tensors; what is applied stays."""
        if self._swapper is not None:
            self.remarks = _grouped(self._swapper.skipped)
        self._swapper = None

    def toggle(self, on: bool) -> None:
        """Put what was applied in force, or out of it."""
        self._journal.toggle(on)

    def restore(self) -> None:
        """Take everything back; twice does nothing."""
        self._watching.close()
        self._journal.restore()
        if self._journal.faults:
            faults, self._journal.faults = "; ".join(self._journal.faults), []
            raise RuntimeError(faults)

    @property
    def _in_use(self) -> Swapper:
        if self._swapper is None:
            raise RuntimeError("no step was watched")
        return self._swapper

    def _made(self) -> Swapper:
        return _Swapper(
            self._model,
            self._optimizers,
            self._kinds,
            terms=Terms(
                deterministic=torch.are_deterministic_algorithms_enabled(), allow_memory=self._allow_memory
            ),
            allow_cpu=os.environ.get(ALLOW_CPU) == "1",
            progress=lambda done, count, what: self._progress(done, count, what),
            finders=self._finders(),
        )


def _grouped(skipped: Sequence[Skipped]) -> list[str]:
    places: dict[tuple[str, str], list[str]] = {}
    for skip in skipped:
        places.setdefault((skip.what, skip.reason), []).append(skip.where)
    return [f"{what} at {_named(where)}: {reason}" for (what, reason), where in places.items()]


def _named(where: Sequence[str]) -> str:
    rest = len(where) - 2
    return ", ".join(where[:2]) + (f" and {rest} more" if rest > 0 else "")
