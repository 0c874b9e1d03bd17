"""The Dynamo backend: it reads the step's graphs, finds sites in them, and runs them with what was decided.

A graph is traced once. Whether it then runs as it is, collects examples, or runs with replacements is
looked up at each call, so that deciding costs no second tracing. The graph runs as PyTorch calls, one by
one, and its backward is autograd's; or it is handed on to another backend (``"inductor"``), which then sees
the replacements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from advisor.kernels._device import UnsupportedError
from advisor.swap.play import reasons
from advisor.swap.site import Candidate, Example, Outcome, Site
from advisor.swap.tensors import size_bytes

from . import casts, checkpointing
from .alike import Checked
from .blame import blamed
from .collect import Collector, fitting
from .constants import Proof
from .edit import copy_of, original_of, replaced
from .facts import Facts, Refusal, transformed
from .held import hold
from .match import Found, find
from .ops import forget
from .record import Recorder
from .replay import Replayer, collective, drawn, drawn_on_cpu
from .sites import Key, key_of, site_of

log = logging.getLogger(__name__)

#: Graphs with fewer operations are what ``self.log`` and the like leave; nothing is looked for in them.
_SMALL = 3
#: Traces of one piece of code; below Dynamo's own limit of 8, past which it says nothing to us.
MAX_RECOMPILES = 7
#: What examples may take of memory altogether.
MEMORY_BYTES = 4 << 30


@dataclass(eq=False)
class _Level:
    """The sites of one graph: the step's, or a checkpointed part's (`name`, within the step's)."""

    gm: GraphModule
    found: list[Found]
    keys: list[Key]
    proofs: dict[Found, list[Proof]]
    originals: Mapping[str, Callable[..., Any]]
    name: str = ""


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

        A match within a larger one waits until the larger one has been refused.
        """
        waiting = {key.exact: (key, found) for graph in self.graphs for key, found in graph.pending()}
        out = []
        for name, (key, found) in waiting.items():
            known = self._gathered.get(name)
            if known is None or known.example is None:
                continue
            calls = round(known.calls / max(self.steps, 1))
            site = site_of(found, known.original, known.example, known.places, calls)
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
        """Whether some of the graphs at hand might be recorded."""
        return self.recorder is not None and any(graph.recordable for graph in self.graphs)

    def replay_whole(self, on: bool) -> None:
        """Replay the step though nothing is replaced in it, if that is faster than launching; or do not."""
        self.whole = on
        self.version += 1

    def replayers(self) -> list[Replayer]:
        """Of the graphs at hand, those that are replayed, or were to be."""
        return [graph.replayer for graph in self.graphs if graph.replayer is not None]

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

    def note_call(self, level: _Level, found: Found, key: Key) -> bool:
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


class Traced:
    """One graph of the step, in place of which Dynamo calls it.

    Args:
        rewriter: whose decisions hold.
        gm: the graph.
        inputs: of the call that it was traced for.
    """

    def __init__(self, rewriter: Rewriter, gm: GraphModule, inputs: Sequence[Any]) -> None:
        self._rewriter = rewriter
        self._gm = gm
        #: Whether the graph changes what it is given, so that it cannot be run twice.
        self._writes = False
        if rewriter.inner is None:
            casts.write_out(gm)
        self.levels = self._read(inputs)
        self._plain = checkpointing.run_eagerly(hold(copy_of(gm)[0]))
        self._version = -1
        self._rewritten: Callable[..., Any] | None = None
        #: What replays it once that is recorded; None where nothing is replaced or nothing recorded.
        self.replayer: Replayer | None = None
        self._proofs: list[Proof] = []
        #: Of the call that is under way.
        self._args: tuple[Any, ...] = ()
        self._compiled = self._hand_on(inputs) if rewriter.inner is not None else None

    def __call__(self, *args: Any) -> Any:
        """Run the graph: collecting, rewritten, or as it is."""
        rewriter = self._rewriter
        rewriter.calls += 1
        if rewriter.collecting:
            return self._collect(args)
        if self._compiled is not None:
            stands = all(p.stands(args) for p in self._proofs)
            return self._compiled(*args) if stands else self._plain(*args)
        if self._version != rewriter.version:
            try:
                self._rewrite()
            except Exception as error:
                log.debug("a graph of the step could not be rewritten", exc_info=True)
                self._rewritten = self.replayer = None
                rewriter.failure = f"it could not be rewritten: {type(error).__name__}: {error}"
        if self._rewritten is None or not all(p.stands(args) for p in self._proofs):
            return self._plain(*args)
        self._args = args
        try:
            return self._rewritten(*args)
        except UnsupportedError as error:
            # A kernel looks at its arguments before it does anything.
            if self._writes:
                raise
            rewriter.failure = f"a kernel does not take what the step gives it: {error}"
            return self._plain(*args)
        finally:
            self._args = ()

    def pending(self) -> list[tuple[Key, Found]]:
        """Matches that nothing has been decided about and that no larger one covers."""
        out = []
        for level in self.levels:
            taken: list[Found] = []
            for found, key in zip(level.found, level.keys, strict=True):
                if any(found.overlaps(other) for other in taken):
                    continue
                if not self._rewriter.decided(key):
                    out.append((key, found))
                    taken.append(found)
                elif self._rewriter.decision(found, key) is not None:
                    taken.append(found)
        return out

    def chosen(self) -> list[tuple[_Level, Found, Candidate]]:
        """Matches to be replaced, none of which overlap."""
        out: list[tuple[_Level, Found, Candidate]] = []
        for level in self.levels:
            taken: list[Found] = []
            for found, key in zip(level.found, level.keys, strict=True):
                candidate = self._rewriter.decision(found, key)
                if candidate is not None and not any(found.overlaps(other) for other in taken):
                    taken.append(found)
                    out.append((level, found, candidate))
        return out

    def _read(self, inputs: Sequence[Any]) -> list[_Level]:
        levels = []
        indices = {n: i for i, n in enumerate(n for n in self._gm.graph.nodes if n.op == "placeholder")}
        try:
            levels.append(self._level(self._gm, inputs, indices, inputs))
            for node, fetch, body in checkpointing.bodies(self._gm):
                outer = [a for a in node.args[1:] if isinstance(a, Node)]
                inner = [n for n in body.graph.nodes if n.op == "placeholder"]
                if len(inner) != len(outer):
                    continue
                where_from = {}
                for mine, theirs in zip(inner, outer, strict=True):
                    if theirs in indices:
                        where_from[mine] = indices[theirs]
                        mine._dynamo_source = getattr(theirs, "_dynamo_source", None)  # type: ignore[attr-defined]
                given = [inputs[where_from[n]] if n in where_from else None for n in inner]
                levels.append(self._level(body, given, where_from, inputs, str(fetch.target)))
        except Exception as error:
            log.debug("a graph of the step could not be read", exc_info=True)
            self._rewriter.failure = f"a graph of the step could not be read: {type(error).__name__}: {error}"
            return []
        return levels

    def _level(
        self,
        gm: GraphModule,
        given: Sequence[Any],
        indices: Mapping[Node, int],
        inputs: Sequence[Any],
        name: str = "",
    ) -> _Level:
        facts = Facts(gm, given)
        self._writes = self._writes or any(facts.written(n) for n in gm.graph.nodes if n.op == "placeholder")
        within = transformed(gm.graph.nodes)
        found = [f for f in find(facts) if not f.interior & within]
        keys = [key_of(f, facts) for f in found]
        proofs = {
            f: [Proof.about(indices[n], inputs[indices[n]]) for n in f.match.proofs if n in indices]
            for f in found
        }
        sound = [i for i, f in enumerate(found) if len(proofs[f]) == len(f.match.proofs)]
        originals = {keys[i].exact: original_of(found[i], facts.order) for i in sound}
        self._rewriter.refusals += [r for r in facts.refusals if r not in self._rewriter.refusals]
        forget(gm.graph.nodes)
        return _Level(gm, [found[i] for i in sound], [keys[i] for i in sound], proofs, originals, name)

    def _collect(self, args: tuple[Any, ...]) -> Any:
        rewriter = self._rewriter
        waiting = {found for _, found in self.pending()}
        wanted: dict[str, Found] = {}
        name_of: dict[Found, str] = {}
        for level in self.levels:
            for found, key in zip(level.found, level.keys, strict=True):
                if not rewriter.decided(key) and rewriter.note_call(level, found, key):
                    # The last of equal ones: what comes first in a step may want no gradient.
                    wanted[key.exact] = found
                    name_of[found] = level.name
        keys = {f: key for level in self.levels for f, key in zip(level.found, level.keys, strict=True)}
        parts: dict[str, list[Found]] = {level.name: [] for level in self.levels}
        for found in rewriter.fitting(sorted(wanted.values(), key=lambda f: f not in waiting)):
            parts[name_of[found]].append(found)
        here = parts.pop("", [])
        return Collector(self._gm, here, lambda f, example: rewriter.keep(keys[f], example), parts).run(*args)

    def _rewrite(self) -> None:
        self._version = self._rewriter.version
        if self.replayer is not None:
            self.replayer.close()
        self._rewritten, self.replayer, self._proofs = None, None, []
        chosen = self.chosen()
        if chosen:
            self._rewritten = self._made(chosen)
            self._proofs = [p for level, f, _ in chosen for p in level.proofs[f]]
        # What draws random numbers draws others where something is replaced; checkpoints run more than once.
        comparable = self._rewritten is not None and not any(
            drawn(n) or checkpointing.is_higher_order(n) or collective(n) for n in self._gm.graph.nodes
        )
        original = self._plain if comparable else None
        recorder = self._rewriter.recorder
        wanted = self._rewriter.active() or self._rewriter.whole
        if recorder is None or not wanted or not self.recordable:
            if self._rewritten is not None and original is not None and not self._writes:
                self._rewritten = Checked(
                    self._rewritten, original, self._found_at_fault, lambda: self._rewriter.may_check
                )
            return
        # A part of the step in which nothing is replaced waits for the host like the others.
        self.replayer = Replayer(
            self._rewritten or self._plain,
            recorder(),
            original,
            self._found_at_fault,
            lambda: self._rewriter.may_check,
            host_bound=not self._rewriter.active(),
        )
        if any(collective(n) for n in self._gm.graph.nodes):
            self.replayer.refused = "ranks talk within it"
        if self._rewriter.reads_gradients:
            self.replayer.refused = "it reads gradients of the step before"
        self._rewritten = self.replayer

    def _found_at_fault(self, why: str) -> None:
        parts: dict[str, list[tuple[_Level, Found, Candidate]]] = {}
        for part in self.chosen():
            level, found, _ = part
            parts.setdefault(level.keys[level.found.index(found)].exact, []).append(part)

        def made(names: Sequence[str]) -> Callable[..., Any]:
            return self._made([part for name in names for part in parts[name]])

        found_out: dict[str, str] = {}
        # What serves for another size than it was decided upon for is no choice of its own.
        writes = self._writes or (self.replayer is not None and self.replayer.writes)
        if not writes and all(self._rewriter.is_choice(name) for name in parts):
            with suppress(Exception):
                found_out = blamed(list(parts), made, self._plain, self._args)
        self._rewriter.at_fault.update(found_out)
        if not found_out:
            self._rewriter.failure = f"a check found what it computes to be something else, {why}"

    @property
    def recordable(self) -> bool:
        """Whether it might be recorded: what it does on the host would not be."""
        return not self._works_on_the_host()

    def _works_on_the_host(self) -> bool:
        """Whether it does on the host what a recording does not hold: checkpoints, numbers drawn there."""
        return any(checkpointing.is_higher_order(n) or drawn_on_cpu(n) for n in self._gm.graph.nodes)

    def _edited(self, chosen: Sequence[tuple[_Level, Found, Candidate]]) -> GraphModule:
        made = replaced(self._gm, [(f, c.call) for level, f, c in chosen if not level.name])
        for level in self.levels:
            mine = [(f, c.call) for other, f, c in chosen if other is level]
            if level.name and mine:
                setattr(made, level.name, replaced(level.gm, mine))
        forget(made.graph.nodes)
        return made

    def _made(self, chosen: Sequence[tuple[_Level, Found, Candidate]]) -> Callable[..., Any]:
        return checkpointing.run_eagerly(hold(self._edited(chosen)))

    def _hand_on(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What the inner backend makes of the graph with all replacements decided so far."""
        from torch._dynamo import lookup_backend

        inner = self._rewriter.inner
        compile_it: Any = lookup_backend(inner) if isinstance(inner, str) else inner
        chosen = self.chosen()
        self._proofs = [p for level, f, _ in chosen for p in level.proofs[f]]
        return compile_it(self._edited(chosen) if chosen else self._gm, list(inputs))


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


def _proofs(found: Found, indices: Mapping[Node, int], inputs: Sequence[Any]) -> list[Proof]:
    at = [indices[n] for n in found.match.proofs if n in indices]
    return [Proof.about(i, inputs[i]) for i in at]


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
