"""Patterns in a LightningModule's `training_step`, as sites beside modules and optimizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from advisor.swap.find import Skipped
from advisor.swap.journal import Change
from advisor.swap.rewrite.backend import MEMORY_BYTES
from advisor.swap.rewrite.record import Recorder
from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.site import Candidate, Outcome, Site

#: The name of the change, for the journal.
REWRITTEN = "training_step: rewritten"

#: What the step is known by, where nothing is replaced in it, and what serves in its place.
WHOLE, GRAPHS = "training_step", "CUDA graphs"

_MODULE = re.compile(r"\((.*)\)$")


class PatternFinder:
    """Sites in the graph of the step, found through Dynamo.

    Args:
        module: the LightningModule.
        kinds: of `advisor.swap.site.KINDS`.
        inner: the compiler that the user compiles the step with; None where it runs eagerly.
        memory_bytes: that copies of the step's tensors may take.
        recorder: makes what records the rewritten step to be replayed; None leaves it unreplayed.
    """

    mechanism = "pattern"

    def __init__(
        self,
        module: Any,
        kinds: Collection[str],
        inner: str | Callable[..., Any] | None = None,
        memory_bytes: int = MEMORY_BYTES,
        recorder: Callable[[], Recorder] | None = None,
    ) -> None:
        self._rewrite = StepRewrite(
            module,
            inner=inner,
            memory_bytes=memory_bytes,
            recorder=recorder,
            tell=lambda why: None,  # whoever looks at `failure` does
        )
        self._kinds = kinds
        self._what = type(module).__name__
        self._obstacle = ""
        self._whole: Site | None = None
        #: What looks like a pattern and was left alone; the whole step, where it could not be read.
        self.skipped: list[Skipped] = []

    @property
    def failure(self) -> str:
        """Why the step was given up, in one line; empty while it was not."""
        return self._rewrite.failure

    @property
    def at_fault(self) -> dict[str, str]:
        """What was replaced and made a live step wrong, by the sites' keys, and why."""
        return self._rewrite.rewriter.at_fault

    @property
    def held_bytes(self) -> int:
        """Of the device's memory, what the recorded step holds."""
        return sum(replayer.held_bytes for replayer in self._rewrite.rewriter.replayers())

    @property
    def replayed(self) -> str:
        """Whether the rewritten step is replayed, or why not, for a reader; empty where it was not to be."""
        replayers = self._rewrite.rewriter.replayers()
        if any(replayer.proven and not replayer.refused for replayer in replayers):
            held = f" ({self.held_bytes / 1e9:.1f} GB of device memory)" if self.held_bytes else ""
            what = "it" if self._rewrite.rewriter.whole else "what is swapped"
            measured = next((f"; {r.measured}" for r in replayers if r.measured and not r.refused), "")
            return f"training_step: {what} is replayed as a CUDA graph{held}{measured}"
        why = next((replayer.refused for replayer in replayers if replayer.refused), "")
        return f"training_step: it is not replayed as a CUDA graph: {why}" if why else ""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Within it the loop makes one step, which is traced and runs as it is."""
        self._obstacle = self._rewrite.install()
        try:
            with self._rewrite.collecting():
                yield
        finally:
            self._rewrite.restore()

    def sites(self) -> list[Site]:
        """What was seen and is to be decided."""
        self.skipped = [Skipped(r.where, r.pattern, r.why) for r in self._rewrite.refusals]
        whole = self._obstacle or self._rewrite.failure
        if whole:
            self.skipped.append(Skipped("training_step", self._what, whole))
            return []
        while True:
            found = self._rewrite.sites()
            others = [site for site in found if site.kind not in self._kinds]
            if not others:
                return found
            self._rewrite.decide([Outcome(site, None, "not asked for") for site in others])

    def after(self, outcomes: Sequence[Outcome]) -> list[Site]:
        """Take over decisions; gives the sites within larger ones that were refused."""
        mine = [outcome for outcome in outcomes if outcome.site.mechanism == self.mechanism]
        if not mine:
            return []
        self._rewrite.decide(mine)
        return self.sites()

    @property
    def may_replay(self) -> bool:
        """Whether the step might be replayed, also where nothing is replaced in it."""
        return "replay" in self._kinds and not self._obstacle and not self.failure and self._recordable

    @property
    def _recordable(self) -> bool:
        return self._rewrite.rewriter.recordable

    def whole(self) -> Outcome | None:
        """The step as a site of its own, where nothing is replaced in it and it might be replayed."""
        rewriter = self._rewrite.rewriter
        if not self.may_replay or rewriter.active():
            return None
        rewriter.replay_whole(True)
        graphs = Candidate(GRAPHS, _as_it_is, "torch")
        what = "the step, launched kernel by kernel"
        self._whole = Site("replay", [WHOLE], self.mechanism, what, _as_it_is, [], [graphs])
        return Outcome(self._whole, graphs, "launched as two graphs; whole steps tell what that gains")

    @property
    def unreplayed(self) -> str:
        """Why the step, in which nothing is replaced, is not replayed; empty where it is, or may be."""
        replayers = self._rewrite.rewriter.replayers() if self._rewrite.rewriter.whole else []
        whys = [replayer.refused for replayer in replayers]
        return whys[0] if whys and all(whys) else ""

    def without(self, outcomes: Sequence[Outcome]) -> int:
        """Let the originals serve at these sites again; gives how many places are still replaced."""
        if any(outcome.site is self._whole for outcome in outcomes):
            self._rewrite.rewriter.replay_whole(False)
            self._whole = None
        return self._rewrite.decide([Outcome(o.site, None, "left out") for o in outcomes])

    def forget_recordings(self) -> None:
        """Free what a recorded step holds, where it is not in force any more; between two steps."""
        for replayer in self._rewrite.rewriter.replayers():
            replayer.close()

    def check(self, on: bool) -> None:
        """Hold the rewritten step against the original where that is due, or put it off."""
        self._rewrite.rewriter.may_check = on

    def key(self, site: Site) -> str:
        """What a site is known by on every rank."""
        return WHOLE if site is self._whole else self._rewrite.rewriter.key(site)

    def changes(self, outcomes: list[Outcome]) -> list[Change]:
        """One for all: the step runs through its rewritten graph."""
        rewriter = self._rewrite.rewriter
        if not any(outcome.chosen for outcome in outcomes) or not (rewriter.active() or rewriter.whole):
            return []

        def do() -> None:
            reason = self._rewrite.install()
            if reason:
                raise RuntimeError(f"training_step cannot be rewritten: {reason}")

        return [Change(REWRITTEN, do, self._rewrite.restore)]

    def release(self) -> None:
        """Let go of copies of the loop's tensors."""
        self._rewrite.rewriter.forget_examples()

    def close(self) -> None:
        """The step is the original's for good: graphs and what Dynamo made of them are let go of."""
        self._rewrite.close()


def _as_it_is(*_: Any) -> None:
    """Stands for the step's graph, which no site hands out."""


def uncovered(site: Site, patterns: Sequence[Site]) -> Site | None:
    """A module site without the places whose work is a site of the step's graph too; None if none is left.

    So it is with a sequence of layers of which a pattern of its kind takes what the sequence would replace:
    what is left once the pattern has been refused is in the graph, too.
    """
    covered = {match[1] for p in patterns for place in p.where if (match := _MODULE.search(place))}
    reached = {path for p in patterns if p.kind == site.kind for path in p.within}
    taken = reached.intersection(site.covers)

    def left_alone(path: str) -> bool:
        return path not in covered and not any(inner.startswith(f"{path}.") for inner in taken)

    left = [i for i, path in enumerate(site.where) if left_alone(path)]
    if len(left) == len(site.where):
        return site
    if not left:
        return None
    site.calls_per_step = max(1, round(site.calls_per_step * len(left) / len(site.where)))
    site.where, site.places = [site.where[i] for i in left], [site.places[i] for i in left]
    site.covers = [path for path in site.covers if any(path.startswith(f"{place}.") for place in site.where)]
    return site
