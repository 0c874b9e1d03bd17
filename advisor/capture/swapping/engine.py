"""`advisor.swap` in the hands of a Trainer: a step watched from hook to hook, faults that are noticed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from advisor.capture.swapping.less import Part
from advisor.capture.swapping.patterns import REWRITTEN, WHOLE, PatternFinder, uncovered
from advisor.capture.swapping.steps import headroom_bytes, peak_bytes
from advisor.swap.background import Background
from advisor.swap.covers import settled
from advisor.swap.decide import COMPILING_SHARE, Terms, decide, most_worthwhile_first
from advisor.swap.examples import CAP_BYTES
from advisor.swap.find import Finder, Skipped
from advisor.swap.journal import Journal
from advisor.swap.rewrite.backend import MEMORY_BYTES
from advisor.swap.rewrite.record import CudaRecorder, Recorder
from advisor.swap.session import Swapper, followed
from advisor.swap.site import Outcome, Site
from advisor.swap.table import places

#: Lets swap try on a CPU too, where the bundled kernels do not run; for tests.
ALLOW_CPU = "ADVISOR_SWAP_ALLOW_CPU"
#: "0" keeps rewritten steps from being replayed.
REPLAY = "ADVISOR_SWAP_REPLAY"
#: Devices whose work can be recorded.
RECORDABLE = ("cuda",)


class GivenUp(Exception):
    """What was chosen cannot stay, which is no fault of the loop's or of swap's; the message says why."""


class _Swapper(Swapper):
    """Lets faults through, since whoever holds the `Engine` must know of them; it gives the warning, too."""

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def add(self, finder: Finder) -> None:
        """Look with this one too."""
        self._finders.append(finder)

    def without(self, mechanism: str) -> None:
        """Look at nothing of this mechanism."""
        self._finders = [finder for finder in self._finders if finder.mechanism != mechanism]


class Engine:
    """Finds, proves and applies, for `advisor.capture.swapping.Swapping`. Any method may raise anything.

    Args:
        module: the LightningModule.
        optimizers: the Trainer's.
        kinds: asked for.
        allow_memory: take candidates that need more memory; whole steps are held to the limit.
        modules: whether modules may be changed.
        patterns: whether the step's graph may be rewritten.
        inner: the compiler that the user compiles the step with; None where it runs eagerly.
        replay: whether the rewritten step may be recorded and replayed.
        adds_up: whether gradients of several batches are added up, asked at each.
    """

    def __init__(
        self,
        module: Any,
        optimizers: Sequence[Any],
        kinds: Sequence[str],
        *,
        allow_memory: bool = False,
        modules: bool = True,
        patterns: bool = True,
        inner: Callable[..., Any] | None = None,
        replay: bool = False,
        adds_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model, self._optimizers, self._kinds = module, optimizers, kinds
        self._allow_memory = allow_memory
        self._modules, self._with_patterns, self._inner = modules, patterns, inner
        recordable = patterns and inner is None and module.device.type in RECORDABLE
        self._replay = replay and recordable and os.environ.get(REPLAY) != "0"
        self._adds_up = adds_up
        #: The peak of what the loop had allocated when it was first watched; None if it is not known.
        self.loop_bytes: int | None = None
        self._watching = contextlib.ExitStack()
        self._swapper: _Swapper | None = None
        self._patterns: PatternFinder | None = None
        self._background: Background | None = None
        self._found: list[Site] = []
        self._outcomes: list[Outcome] = []
        self._applied: dict[str, Outcome] = {}
        self._graph_dropped = False
        self._journal = Journal()
        self._left: list[str] = []

    @property
    def remarks(self) -> list[str]:
        """What was left alone and why, places of one reason together, and how the step is run."""
        return [*self._left, *([self.replayed] if self.replayed else [])]

    @property
    def replayed(self) -> str:
        """Whether the step is replayed, or why not, in one line; empty where it was not to be."""
        return self._patterns.replayed if self._patterns is not None and not self._graph_dropped else ""

    @property
    def unread(self) -> str:
        """Why the step's graph, though it was traced, is not looked at; empty where it is."""
        return self._patterns.failure if self._patterns is not None else ""

    @property
    def held_bytes(self) -> int:
        """Device memory that a recorded step holds beside what is allocated."""
        return self._patterns.held_bytes if self._patterns is not None else 0

    def unable(self) -> str:
        """Why nothing can be swapped here; empty if something might."""
        return self._made().unable

    def lacks_memory(self) -> str:
        """Why the step's tensors cannot be copied beside it; empty if they can."""
        free = self._headroom_bytes()
        if free is None or free >= 2 * CAP_BYTES:
            return ""
        return f"too little device memory is free to copy what a step computes ({free / 1e9:.1f} GB)"

    @property
    def steps_to_watch(self) -> int:
        """One for modules, which are watched as they are called, and one that is traced."""
        return max(1, int(self._modules) + int(self._with_patterns))

    def watch(self) -> None:
        """Note the calls of the step that comes."""
        lacking = self.lacks_memory()
        if lacking:
            raise RuntimeError(lacking)
        if self._swapper is None:
            self.loop_bytes = peak_bytes(self._model.device.type)
            self._swapper = self._made()
            if self._modules or not self._with_patterns:
                self._watching.enter_context(self._swapper.watch())
                return
        free = self._headroom_bytes()
        memory_bytes = MEMORY_BYTES if free is None else min(MEMORY_BYTES, free // 2)
        self._patterns = PatternFinder(
            self._model, self._kinds, self._inner, memory_bytes, self._recorder() if self._replay else None
        )
        self._swapper.add(self._patterns)
        self._watching.enter_context(self._patterns.watch())

    def unwatch(self) -> None:
        """The step has ended."""
        self._watching.close()

    def sites(self) -> list[Site]:
        """What could be replaced, modules only where no pattern covers them; the most worthwhile first."""
        found = self._in_use.sites()
        patterns = [site for site in found if site.mechanism == PatternFinder.mechanism]
        self._found = list(patterns)
        for site in found:
            left = uncovered(site, patterns) if site.mechanism == "module" else site
            if left is not None and site not in patterns:
                self._found.append(left)
        self._found = most_worthwhile_first(self._found)
        return self._found

    @property
    def may_replay(self) -> bool:
        """Whether the step might be replayed though nothing is replaced in it."""
        return self._patterns is not None and self._patterns.may_replay

    def compile(self) -> int:
        """Begin to compile what candidates launch, beside the loop; gives the number of kernels."""
        self._background = Background(self._found)
        return self._background.begun

    @property
    def compiling(self) -> bool:
        """Whether kernels are still being compiled."""
        return self._background is not None and not self._background.done

    @property
    def cramped(self) -> bool:
        """Whether the loop has little room beside the copies of its tensors, which may get less yet."""
        free = self._headroom_bytes()
        return free is not None and free < CAP_BYTES

    def decide(self, progress: Callable[[int, int, str], None]) -> list[Outcome]:
        """An outcome for each site, those within larger ones that were refused included."""
        terms = self._in_use.terms
        end_s = time.monotonic() + (1 + COMPILING_SHARE) * terms.budget_s
        sites = self._found
        while sites:
            left_s = max(0.0, end_s - time.monotonic())
            found = decide(sites, replace(terms, budget_s=min(left_s, terms.budget_s)), progress)
            # What waited within a larger site may be in the way of what was chosen before.
            self._outcomes = settled([*self._outcomes, *found])
            found = self._outcomes[-len(found) :]
            more = most_worthwhile_first(self._patterns.after(found)) if self._patterns else []
            sites = more if time.monotonic() < end_s else []
        whole = self._patterns.whole() if self.may_replay and self._patterns is not None else None
        if whole is not None:
            self._outcomes.append(whole)
        return self._outcomes

    def choices(self) -> tuple[tuple[str, str | None], ...]:
        """What each site is known by on every rank, and the name of its candidate, for `follow`."""
        return tuple((self._key(o.site), o.chosen.name if o.chosen else None) for o in self._outcomes)

    def follow(self, choices: Sequence[tuple[str, str | None]]) -> None:
        """Take over what another rank has decided.

        Raises:
            LookupError: this rank has not the same sites or candidates.
        """
        names, sites = dict(choices), self._found
        while sites:
            found = [followed(site, names.pop(self._key(site), None)) for site in sites]
            self._outcomes += found
            sites = self._patterns.after(found) if self._patterns else []
        if names.pop(WHOLE, None) is not None:
            whole = self._patterns.whole() if self._patterns is not None else None
            if whole is None:
                raise LookupError("this rank cannot replay its step")
            self._outcomes.append(whole)
        missing = [key for key, name in names.items() if name is not None]
        if missing:
            raise LookupError(f"this rank has no site {missing[0]}")

    def apply(self) -> None:
        """Make the changes that were decided."""
        self._journal = self._in_use.journal
        self._in_use.outcomes = self._outcomes
        self._in_use.apply()
        if not len(self._journal):
            raise RuntimeError("what was chosen changes nothing")
        self._applied = {self._key(o.site): o for o in self._outcomes if o.chosen is not None}

    @property
    def parts(self) -> list[Part]:
        """What is in force, and what each of it gains by itself."""
        return [_part(key, outcome) for key, outcome in self._applied.items()]

    def drop(self, keys: Sequence[str]) -> None:
        """Take these parts back, so that the originals serve again; the others stay.

        Raises:
            KeyError: there is no such part.
        """
        gone = [self._applied.pop(key) for key in keys]
        patterns = [outcome for outcome in gone if outcome.site.mechanism == PatternFinder.mechanism]
        if patterns and self._patterns is not None and not self._patterns.without(patterns):
            self._drop_graph()
        for outcome in gone:
            if outcome not in patterns and outcome.chosen is not None:
                for place in outcome.site.where:
                    self._journal.drop(f"{place}: {outcome.chosen.name}")

    def release(self) -> None:
        """Let go of copies of the loop's tensors, and of what compiles for them; what is applied stays."""
        if self._background is not None:
            self._background.stop()
            self._background = None
        if self._swapper is not None:
            self._left = _grouped(self._swapper.skipped)
        if self._patterns is not None:
            self._patterns.release()
        for outcome in self._outcomes:
            outcome.site.examples.clear()
        self._swapper = None
        self._found, self._outcomes = [], []

    def time(self, on: bool) -> None:
        """Steps are timed from now on, or no longer: none of them is checked meanwhile."""
        if self._patterns is not None:
            self._patterns.check(not on)

    def toggle(self, on: bool) -> None:
        """Put what was applied in force, or out of it."""
        self._journal.toggle(on)
        if self.given_up:
            raise GivenUp(self.given_up)

    @property
    def given_up(self) -> str:
        """Why the step's graph, though it was rewritten, runs as it is; empty while it does not."""
        if self._patterns is None or REWRITTEN not in self._journal.changes:
            return ""
        return self._patterns.failure or next(iter(self._patterns.at_fault.values()), "")

    @property
    def at_fault(self) -> dict[Part, str]:
        """What of the step's graph was found to be wrong in a live step, while the rest is right, and why."""
        if self._patterns is None or self._patterns.failure:
            return {}
        found = self._patterns.at_fault
        return {part: found[part.key] for part in self.parts if part.key in found}

    @property
    def unreplayed(self) -> dict[Part, str]:
        """The step, where nothing is replaced in it and it cannot be replayed or gains nothing, and why."""
        why = self._patterns.unreplayed if self._patterns is not None else ""
        return {part: why for part in self.parts if why and part.key == WHOLE}

    def drop_patterns(self) -> bool:
        """Take back what was replaced in the step's graph; whether anything else is in force."""
        self._applied = {
            key: outcome
            for key, outcome in self._applied.items()
            if outcome.site.mechanism != PatternFinder.mechanism
        }
        self._drop_graph()
        return len(self._journal) > 0

    def _drop_graph(self) -> None:
        self._journal.drop(REWRITTEN)
        self._graph_dropped = True
        self.forget_recordings()

    def forget_recordings(self) -> None:
        """Free what a recorded step holds, which is not in force any more; between two steps."""
        if self._patterns is not None:
            self._patterns.forget_recordings()

    def restore(self) -> None:
        """Take everything back; twice does nothing."""
        self._watching.close()
        self._journal.restore()
        if self._journal.faults:
            faults, self._journal.faults = "; ".join(self._journal.faults), []
            raise RuntimeError(faults)

    def close(self) -> None:
        """Take everything back, and let go of the loop; nothing more can be asked."""
        try:
            self.restore()
        finally:
            self.release()
            if self._patterns is not None:
                self._patterns.close()
            self._patterns, self._model, self._optimizers = None, None, ()
            self._applied = {}

    def _recorder(self) -> Callable[[], Recorder]:
        device, loop_bytes = self._model.device, self.loop_bytes or 0
        return lambda: CudaRecorder(device, loop_bytes, may_grow=self._allow_memory, adds_up=self._adds_up)

    def _headroom_bytes(self) -> int | None:
        return headroom_bytes(self._model.device.type)

    @property
    def _in_use(self) -> _Swapper:
        if self._swapper is None:
            raise RuntimeError("no step was watched")
        return self._swapper

    def _key(self, site: Site) -> str:
        if self._patterns is not None and site.mechanism == self._patterns.mechanism:
            return self._patterns.key(site)
        return site.where[0]

    def _made(self) -> _Swapper:
        terms = Terms(
            deterministic=torch.are_deterministic_algorithms_enabled(),
            allow_memory=self._allow_memory,
            host_counts=not self._replay,
            run_peak_bytes=self.loop_bytes,
        )
        allow_cpu = os.environ.get(ALLOW_CPU) == "1"
        made = _Swapper(self._model, self._optimizers, self._kinds, terms=terms, allow_cpu=allow_cpu)
        if not self._modules:
            made.without("module")
        return made


def _part(key: str, outcome: Outcome) -> Part:
    site, trial = outcome.site, outcome.trial
    more_bytes = 0 if trial is None else (trial.memory_bytes or 0) - (trial.original_memory_bytes or 0)
    return Part(
        key,
        site.mechanism,
        site.what,
        tuple(site.where),
        outcome.saved_ns,
        more_bytes * site.calls_per_step,
    )


def _grouped(skipped: Sequence[Skipped]) -> list[str]:
    alike: dict[tuple[str, str], list[str]] = {}
    for skip in skipped:
        alike.setdefault((skip.what, skip.reason), []).append(skip.where)
    return [f"{what} at {places(where)}: {reason}" for (what, reason), where in alike.items()]
