"""The Dynamo backend: it reads the step's graphs, finds sites in them, and runs them with what was decided.

A graph is traced once. Whether it then runs as it is, collects examples, or runs with replacements is
looked up at each call, so that deciding costs no second tracing. The graph runs as PyTorch calls, one by
one, and its backward is autograd's; or it is handed on to another backend (``"inductor"``), which then sees
the replacements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from advisor.swap.play import reasons
from advisor.swap.site import Candidate, Example, Outcome, Site
from advisor.swap.tensors import size_bytes

from . import checkpointing
from .collect import fitting
from .facts import Refusal, module_path
from .match import Found
from .record import Recorder
from .replay import Replayer
from .sites import Key, site_of
from .traced import Level, Traced

log = logging.getLogger(__name__)

#: Graphs with fewer operations are what ``self.log`` and the like leave; nothing is looked for in them.
_SMALL = 3
#: Traces of one piece of code; below Dynamo's own limit of 8, past which it says nothing to us.
MAX_RECOMPILES = 7
#: What examples may take of memory altogether.
MEMORY_BYTES = 4 << 30


@dataclass
class _Gathered:
    """What is known of the sites with one key."""

    found: Found
    original: Callable[..., Any]
    places: list[str] = field(default_factory=list)
    example: Example | None = None
    calls: int = 0


class Rewriter:
    """A backend for `torch.compile`, and what was decided about the sites in what it is given.

    Args:
        inner: the backend that graphs are handed on to; None runs them as they are.
        memory_bytes: that the copies of sites' inputs may take.
        max_recompiles: traces of one piece of code, because shapes or flags changed, after which `failure`
            is set.
        recorder: makes what records a rewritten graph to be replayed; None leaves it unreplayed.
    """

    def __init__(
        self,
        *,
        inner: str | Callable[..., Any] | None = None,
        memory_bytes: int = MEMORY_BYTES,
        max_recompiles: int = MAX_RECOMPILES,
        recorder: Callable[[], Recorder] | None = None,
    ) -> None:
        self.inner = inner
        self.recorder = recorder
        self.memory_bytes = memory_bytes
        self.max_recompiles = max_recompiles
        #: Why the step is better left alone, in one line; empty where it is not.
        self.failure = ""
        #: What was replaced and made a live step wrong, as `key` has it, and why; the original serves then.
        self.at_fault: dict[str, str] = {}
        self.refusals: list[Refusal] = []
        self.graphs: list[Traced] = []
        self.collecting = False
        #: Whether a step in which nothing is replaced is replayed as it is.
        self.whole = False
        #: Whether a step may be held against the original now, which takes longer.
        self.may_check = True
        #: Steps that ran while collecting.
        self.steps = 0
        #: Calls of graphs so far.
        self.calls = 0
        #: Whether the step reads gradients of the step before, which a replay would write over.
        self.reads_gradients = False
        self._gathered: dict[str, _Gathered] = {}
        self._sites: dict[Site, Key] = {}
        self._decided: dict[str, Candidate | None] = {}
        self._loose: dict[str, Candidate | None] = {}
        self._codes: set[CodeType] = set()
        self.version = 0

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Take a graph from Dynamo; gives what runs in its place."""
        self._note_code()
        if not self.reads_gradients and any(_is_gradient(n) for n in gm.graph.nodes):
            self.reads_gradients = True
            self.version += 1
        operations = sum(n.op in ("call_function", "call_method") for n in gm.graph.nodes)
        if operations < _SMALL and not any(checkpointing.bodies(gm)):
            return gm.forward
        if self._recompiles() >= self.max_recompiles:
            self.failure = (
                f"traced {self.max_recompiles} times over: the step's shapes, flags or lists keep changing"
            )
        compiled_only = checkpointing.needs_compiler(gm)
        if compiled_only and self.inner is None:
            self.failure = f"the step uses {compiled_only}, which is slow unless compiled"
        traced = Traced(self, gm, inputs)
        self.graphs.append(traced)
        return traced

    def sites(self) -> list[Site]:
        """The sites collected so far that nothing has been decided about, each with an example.

        A match within a larger one waits until the larger one has been refused, and is no place of the site
        where it has been taken.
        """
        waiting: dict[str, list[tuple[Key, Found]]] = {}
        for key, found in (pair for graph in self.graphs for pair in graph.pending()):
            waiting.setdefault(key.exact, []).append((key, found))
        out = []
        for name, pairs in waiting.items():
            known = self._gathered.get(name)
            if known is None or known.example is None:
                continue
            key, found = pairs[-1]
            left = {one.where for _, one in pairs}
            places = [place for place in known.places if place in left]
            calls = known.calls / max(self.steps, 1) * len(places) / len(known.places)
            site = site_of(found, known.original, known.example, places, round(calls))
            paths = {module_path(node) for _, one in pairs for node in one.data}
            site.within = sorted(paths - {""})
            self._sites[site] = key
            out.append(site)
        return out

    def decide(self, outcomes: Iterable[Outcome]) -> int:
        """Take over what was decided about sites of `sites`; others are passed over.

        Returns:
            How many places of the graphs at hand are now replaced.
        """
        return self.decide_by_key((self._sites[o.site], o.chosen) for o in outcomes if o.site in self._sites)

    def decide_by_key(self, decisions: Iterable[tuple[Key, Candidate | None]]) -> int:
        """The same by key; what other processes, or a former run, decided."""
        for key, candidate in decisions:
            self._decided[key.exact] = candidate
            if key.loose in self._loose and _name(self._loose[key.loose]) != _name(candidate):
                candidate = None
            self._loose[key.loose] = candidate
            self._gathered.pop(key.exact, None)
            self.at_fault.pop(key.exact, None)
        self.version += 1
        return self.active()

    def active(self) -> int:
        """How many places are replaced."""
        return sum(len(graph.chosen()) for graph in self.graphs)

    @property
    def recordable(self) -> bool:
        """Whether the larger part of the graphs at hand might be recorded."""
        sizes = [(graph.size if graph.recordable else 0, graph.size) for graph in self.graphs]
        return self.recorder is not None and 2 * sum(a for a, _ in sizes) > sum(b for _, b in sizes)

    def replay_whole(self, on: bool) -> None:
        """Replay the step though nothing is replaced in it, if that is faster than launching; or do not."""
        self.whole = on
        self.version += 1

    def replayers(self) -> list[Replayer]:
        """Of the graphs at hand, those that are replayed, or were to be; the largest graph's first."""
        largest_first = sorted(self.graphs, key=lambda graph: -graph.size)
        return [graph.replayer for graph in largest_first if graph.replayer is not None]

    def retire_older(self, call: int) -> None:
        """Let go of the recordings of graphs not called since: another has come in their place.

        Args:
            call: by the count of calls.
        """
        for graph in self.graphs:
            if graph.called < call:
                graph.retire()

    def key(self, site: Site) -> str:
        """What the site is known by in every process."""
        return self._sites[site].exact

    def decision(self, found: Found, key: Key) -> Candidate | None:
        """What stands in for a match; None for nothing."""
        if key.exact in self._decided:
            return _counterpart(found, self._decided[key.exact])
        if key.exact in self._gathered:
            # It has an example of its own, and waits for a decision of its own.
            return None
        return _serving(found, self._loose.get(key.loose), key.autocast)

    def decided(self, key: Key) -> bool:
        """Whether a match of this key has been decided upon, if at another size."""
        if key.exact in self._decided:
            return True
        return key.loose in self._loose and key.exact not in self._gathered

    def is_choice(self, exact: str) -> bool:
        """Whether a candidate was chosen for matches of this key, and not for others like them."""
        return self._decided.get(exact) is not None

    def keep(self, key: Key, example: Example) -> None:
        """Take in an example of a site."""
        known = self._gathered.get(key.exact)
        if known is not None and known.example is None:
            known.example = example

    def note_call(self, level: Level, found: Found, key: Key) -> bool:
        """Count a call of a site; whether an example of it is wanted still."""
        known = self._gathered.get(key.exact)
        if known is None:
            known = self._gathered[key.exact] = _Gathered(found, level.originals[key.exact])
        if found.where not in known.places:
            known.places.append(found.where)
        known.calls += 1
        return known.example is None

    def fitting(self, wanted: Sequence[Found]) -> list[Found]:
        """Those for whose examples there is memory; the others are noted as refused."""
        kept = [g.example.args for g in self._gathered.values() if g.example is not None]
        left = min(self.memory_bytes - size_bytes(kept), _spare_bytes())
        fit = fitting(wanted, left)
        for found in wanted:
            why = f"no room for an example in {left / 2**20:.0f} MiB"
            refusal = Refusal(found.match.pattern, found.where, why)
            if found not in fit and refusal not in self.refusals:
                self.refusals.append(refusal)
        return fit

    def forget_examples(self) -> None:
        """Let go of the copies; sites that were handed out keep theirs."""
        self._gathered.clear()
        self.steps = 0

    def forget_code(self) -> None:
        """Let Dynamo forget what it made of the step: it counts traces over all runs of a process."""
        for code in self._codes:
            torch._dynamo.eval_frame.reset_code(code)
        self._codes.clear()
        for replayer in self.replayers():
            replayer.close()
        self.graphs.clear()

    def _note_code(self) -> None:
        # A step that is traced in parts has code of Dynamo's own for each of them.
        with suppress(ImportError, AttributeError):
            from torch._dynamo.symbolic_convert import InstructionTranslator

            self._codes.add(InstructionTranslator.current_tx().f_code)

    def _recompiles(self) -> int:
        from torch._guards import CompileContext

        compile_id = CompileContext.current_compile_id()
        return getattr(compile_id, "frame_compile_id", 0) or 0


def _is_gradient(node: Node) -> bool:
    """Whether a graph is given what something had for its `grad`."""
    source = getattr(node, "_dynamo_source", None)
    return getattr(source, "member", "") == "grad" or type(source).__name__ == "GradSource"


def _spare_bytes() -> int:
    """Of the current GPU's memory, what copies may take without pressing the step that they are taken in."""
    if not torch.cuda.is_available():
        return 1 << 62
    free, _ = torch.cuda.mem_get_info()
    return (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) // 4


def _name(candidate: Candidate | None) -> str:
    return "" if candidate is None else candidate.name


def _counterpart(found: Found, candidate: Candidate | None) -> Candidate | None:
    """The match's own candidate of that name: settings such as shapes within it are its own."""
    return next(
        (c for c in found.match.candidates if candidate is not None and c.name == candidate.name), None
    )


def _serving(found: Found, candidate: Candidate | None, autocast: torch.dtype | None) -> Candidate | None:
    """The same for a match of another size than was decided upon, if the candidate takes that size."""
    mine = _counterpart(found, candidate)
    if mine is None:
        return None
    values = [n.meta.get("example_value") for n in found.match.inputs]
    try:
        return None if reasons(mine, Example(tuple(values), autocast=autocast)) else mine
    except Exception:  # noqa: BLE001
        return None
