"""One graph of the step, which Dynamo calls: collecting, rewritten, replayed, or as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from advisor.kernels._device import UnsupportedError
from advisor.swap.site import Candidate

from . import casts, checkpointing
from .alike import Checked
from .blame import blamed
from .collect import Collector
from .constants import Proof
from .edit import copy_of, original_of, replaced
from .facts import Facts, transformed
from .held import hold
from .match import Found, find
from .ops import forget
from .replay import Replayer, collective, drawn, drawn_on_cpu
from .sites import Key, key_of

if TYPE_CHECKING:
    from .backend import Rewriter

log = logging.getLogger(__name__)

#: Why a step is given up that takes gradients of gradients.
TWICE = "it takes gradients of gradients, which the bundled kernels do not have"
#: Recordings of one graph that made room for another's, at most, for it to be recorded once more.
_RETIRED = 2
#: Where a module has its tensors, in the names that Dynamo gives to sources.
_OF_MODULES = ("_parameters", "_buffers")


@dataclass(eq=False)
class Level:
    """The sites of one graph: the step's, or a checkpointed part's (`name`, within the step's)."""

    gm: GraphModule
    found: list[Found]
    keys: list[Key]
    proofs: dict[Found, list[Proof]]
    originals: Mapping[str, Callable[..., Any]]
    name: str = ""


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
        self._may_stay = [_may_stay(n) for n in gm.graph.nodes if n.op == "placeholder"]
        #: The rewriter's count of calls when this graph was called last, and the time before.
        self.called = self._before = rewriter.calls
        #: How often its recording made room for another graph's.
        self._retired = 0
        self._compiled = self._hand_on(inputs) if rewriter.inner is not None else None

    def __call__(self, *args: Any) -> Any:
        """Run the graph: collecting, rewritten, or as it is."""
        rewriter = self._rewriter
        rewriter.calls += 1
        idle = rewriter.calls - self.called > 2 * len(rewriter.graphs)
        self._before, self.called = self.called, rewriter.calls
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
        if idle and self.replayer is not None:  # as with the last batch of an epoch, if that alone is smaller
            self.replayer.start_anew()
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

    def chosen(self) -> list[tuple[Level, Found, Candidate]]:
        """Matches to be replaced, none of which overlap."""
        out: list[tuple[Level, Found, Candidate]] = []
        for level in self.levels:
            taken: list[Found] = []
            for found, key in zip(level.found, level.keys, strict=True):
                candidate = self._rewriter.decision(found, key)
                if candidate is not None and not any(found.overlaps(other) for other in taken):
                    taken.append(found)
                    out.append((level, found, candidate))
        return out

    def _read(self, inputs: Sequence[Any]) -> list[Level]:
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
    ) -> Level:
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
        return Level(gm, [found[i] for i in sound], [keys[i] for i in sound], proofs, originals, name)

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
        result = Collector(self._gm, here, lambda f, example: rewriter.keep(keys[f], example), parts).run(
            *args
        )
        for output in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(output, Tensor) and output.requires_grad and rewriter.inner is None:
                output.register_hook(self._note_gradients_of_gradients)
        return result

    def _note_gradients_of_gradients(self, _: Tensor) -> None:
        # Within a backward whose own graph is kept.
        if torch.is_grad_enabled():
            self._rewriter.failure = TWICE

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
            plain=self._plain,
            may_stay=self._may_stay,
            varies=self._record_anew,
            twice=self._give_up_kernels if chosen else lambda: None,
            make_room=lambda: self._rewriter.retire_older(self._before),
        )
        if self._retired > _RETIRED:
            self.replayer.refused = "several graphs of the step, or tensors in it, take turns"
        if any(collective(n) for n in self._gm.graph.nodes):
            self.replayer.refused = "ranks talk within it"
        if self._rewriter.reads_gradients:
            self.replayer.refused = "it reads gradients of the step before"
        self._rewritten = self.replayer

    def _record_anew(self, varying: Sequence[int]) -> None:
        for i in varying:
            self._may_stay[i] = False
        self.retire()

    def _give_up_kernels(self) -> None:
        self._rewriter.failure = TWICE

    def retire(self) -> None:
        """Let go of its recording; should it be called again, it may be recorded anew."""
        if self.replayer is not None and self.replayer.recorded:
            self.replayer.close()
            self._retired += 1
            self._version = -1

    def _found_at_fault(self, why: str) -> None:
        parts: dict[str, list[tuple[Level, Found, Candidate]]] = {}
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
    def size(self) -> int:
        """Of the graph, in nodes."""
        return len(self._gm.graph.nodes)

    @property
    def recordable(self) -> bool:
        """Whether it might be recorded: what it does on the host would not be."""
        return not self._works_on_the_host()

    def _works_on_the_host(self) -> bool:
        """Whether it does on the host what a recording does not hold: checkpoints, numbers drawn there."""
        return any(checkpointing.is_higher_order(n) or drawn_on_cpu(n) for n in self._gm.graph.nodes)

    def _edited(self, chosen: Sequence[tuple[Level, Found, Candidate]]) -> GraphModule:
        made = replaced(self._gm, [(f, c.call) for level, f, c in chosen if not level.name])
        for level in self.levels:
            mine = [(f, c.call) for other, f, c in chosen if other is level]
            if level.name and mine:
                setattr(made, level.name, replaced(level.gm, mine))
        forget(made.graph.nodes)
        return made

    def _made(self, chosen: Sequence[tuple[Level, Found, Candidate]]) -> Callable[..., Any]:
        return checkpointing.run_eagerly(hold(self._edited(chosen)))

    def _hand_on(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What the inner backend makes of the graph with all replacements decided so far."""
        from torch._dynamo import lookup_backend

        inner = self._rewriter.inner
        compile_it: Any = lookup_backend(inner) if isinstance(inner, str) else inner
        chosen = self.chosen()
        self._proofs = [p for level, f, _ in chosen for p in level.proofs[f]]
        return compile_it(self._edited(chosen) if chosen else self._gm, list(inputs))


def _may_stay(node: Node) -> bool:
    """Whether what a placeholder is given may be one object for good: not what the step itself is given."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", None)
    text = str(name() if callable(name) else name)
    of_a_module = text.startswith("L['self']") or any(f"{kind}[" in text for kind in _OF_MODULES)
    return of_a_module or not text.startswith("L[")
