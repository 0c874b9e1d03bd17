"""The whole of it: watch a step of the loop, decide, change, and change back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from advisor.kernels._here import lacking
from advisor.swap.decide import Progress, Terms, decide, most_worthwhile_first
from advisor.swap.find import Finder, ModuleFinder, Skipped
from advisor.swap.journal import Journal
from advisor.swap.kinds.optimizer import OptimizerFinder
from advisor.swap.kinds.registry import chosen_kinds
from advisor.swap.site import Outcome, Site
from advisor.swap.table import table
from advisor.swap.warn import warn


class Swapper:
    """Finds, proves, times, applies and takes back swaps in a loop that others run.

    Nothing here raises into the loop: a fault is a warning, and whatever was changed is changed back.

        swapper = Swapper(model, [optimizer])
        with swapper.watch():
            one_training_step()
        swapper.decide()
        swapper.apply()
        ...
        swapper.restore()

    Args:
        model: whose modules are looked at.
        optimizers: that may be changed in place.
        kinds: ``"auto"``, one of `advisor.swap.site.KINDS`, or several.
        terms: on which a candidate is taken; deterministic where torch is set so, unless given.
        allow_cpu: look at models on the CPU too.
        progress: told before each site.
        finders: of sites beyond modules and optimizers.

    Raises:
        UsageError: an unknown kind.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        kinds: str | Collection[str] = "auto",
        *,
        terms: Terms | None = None,
        allow_cpu: bool = False,
        progress: Progress | None = None,
        finders: Sequence[Finder] = (),
    ) -> None:
        self.kinds = chosen_kinds(kinds)
        self.terms = terms or Terms(deterministic=torch.are_deterministic_algorithms_enabled())
        #: Why nothing can be swapped here, in one line; empty where something can.
        self.unable = "" if allow_cpu else _unable(model)
        self.outcomes: list[Outcome] = []
        self.journal = Journal()
        self._progress = progress
        self._finders: list[Finder] = []
        self._sites: list[Site] | None = None
        if not self.unable:
            with self._guarded("the model could not be searched"):
                self._finders = [ModuleFinder(model, self.kinds)]
                if "optimizer" in self.kinds:
                    self._finders.append(OptimizerFinder(optimizers, model))
                self._finders += finders

    @property
    def skipped(self) -> list[Skipped]:
        """Places that might have been sites, and why they are not."""
        return [skip for finder in self._finders for skip in finder.skipped]

    @property
    def applied(self) -> list[Outcome]:
        """Those in force (or toggled off for a while)."""
        return [o for o in self.outcomes if o.chosen is not None] if len(self.journal) else []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """The loop makes one step of its own within; what it raises goes through."""
        with ExitStack() as stack:
            with self._guarded("the step could not be watched"):
                for finder in self._finders:
                    stack.enter_context(finder.watch())
            yield

    def sites(self) -> list[Site]:
        """What was found in the step that was watched."""
        if self._sites is None:
            self._sites = []
            with self._guarded("sites could not be found"):
                found = [site for finder in self._finders for site in finder.sites()]
                self._sites = most_worthwhile_first(found)
        return self._sites

    def decide(self) -> list[Outcome]:
        """Prove and time the candidates of every site. The loop's state is left as it is."""
        with self._guarded("sites could not be tried"):
            self.outcomes = decide(self.sites(), self.terms, self._progress)
        return self.outcomes

    def choices(self) -> list[str | None]:
        """The name of each site's candidate, for another rank to `follow`."""
        return [o.chosen.name if o.chosen else None for o in self.outcomes]

    def follow(self, choices: Sequence[str | None], sites: Sequence[str] = ()) -> list[Outcome]:
        """Take over what another rank has decided for the same model.

        Args:
            choices: of that rank.
            sites: the first place of each of its sites, to find them by; the same order unless given.
        """
        with self._guarded("the choices of another rank could not be followed"):
            mine = self.sites()
            by_place = {site.where[0]: site for site in mine}
            ordered = [by_place[place] for place in sites] if sites else mine
            if len(ordered) != len(choices):
                raise ValueError(f"{len(choices)} choices for {len(ordered)} sites")
            self.outcomes = [followed(s, name) for s, name in zip(ordered, choices, strict=True)]
        return self.outcomes

    def apply(self) -> list[Outcome]:
        """Make the changes that were decided; all of them, or none after a fault."""
        with self._guarded("swaps could not be applied"), self.journal.nested(keep=True):
            for finder in self._finders:
                own = [o for o in self.outcomes if o.site.mechanism == finder.mechanism]
                for change in finder.changes(own):
                    self.journal.make(change)
        return self.applied

    def release(self) -> None:
        """Let go of copies of the loop's tensors; what is in force stays, nothing more can be applied."""
        for site in self._sites or ():
            site.examples.clear()

    def toggle(self, on: bool) -> None:
        """Take everything back for a while, or put it in force again."""
        with self._guarded("swaps could not be toggled"):
            self.journal.toggle(on)

    def restore(self) -> None:
        """Take everything back, the last first. Doing so again does nothing."""
        self.journal.restore()
        while self.journal.faults:
            warn(f"could not be taken back: {self.journal.faults.pop()}")

    def __enter__(self) -> Swapper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __str__(self) -> str:
        return self.unable or table(self.outcomes, self.skipped)

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Whatever ends it, all is taken back; an exception becomes a warning, an interruption goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.restore()
            warn(f"{what}: {type(error).__name__}: {error}")
        except BaseException:
            self.restore()
            raise


def find_swaps(
    model: nn.Module,
    run_step: Callable[[], object],
    kinds: str | Collection[str] = "auto",
    **options: Any,
) -> list[Outcome]:
    """What could be swapped in a loop, and how it came out; nothing is changed.

    Args:
        model: whose modules are looked at.
        run_step: makes one step of the loop, which is the loop's own: it counts as training.
        kinds: as for `Swapper`.
        options: the others of `Swapper`.
    """
    swapper = Swapper(model, kinds=kinds, **options)
    with swapper.watch():
        run_step()
    return swapper.decide()


def _unable(model: nn.Module) -> str:
    reason = lacking()
    if reason is None and not any(t.device.type == "cuda" for t in [*model.parameters(), *model.buffers()]):
        reason = "the model is not on a GPU"
    return "" if reason is None else f"nothing can be swapped here: {reason}"


def followed(site: Site, name: str | None) -> Outcome:
    """The outcome that another rank's choice, a candidate's name or None, is here.

    Raises:
        LookupError: this rank has no such candidate.
    """
    chosen = next((c for c in site.candidates if c.name == name), None)
    if name is not None and chosen is None:
        raise LookupError(f"{site.where[0]} has no candidate {name}")
    return Outcome(site, chosen, "as the first rank decided")
