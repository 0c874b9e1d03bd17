"""Sites among a model's modules: which there are, what they are called with, what is offered for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from advisor.swap.examples import Record, Watch
from advisor.swap.guard import kept_state, unwarned
from advisor.swap.journal import Change
from advisor.swap.kinds.registry import ModuleKind, module_kinds
from advisor.swap.modules import MARK, class_change, swapped_class, verified_keys
from advisor.swap.site import Outcome, Site
from advisor.swap.tensors import devices_of, size_bytes, stand_in
from advisor.swap.verify import said


@dataclass(frozen=True)
class Skipped:
    """A place that might have been a site.

    Attributes:
        where: module path, or place in the code.
        what: stands there.
        reason: why it is left alone, in one line.
    """

    where: str
    what: str
    reason: str


class Finder(Protocol):
    """Finds sites of one mechanism, and changes them."""

    mechanism: str
    skipped: list[Skipped]

    def watch(self) -> AbstractContextManager[object]:
        """Within it the loop makes one step."""
        ...

    def sites(self) -> list[Site]:
        """What was seen."""
        ...

    def changes(self, outcomes: list[Outcome]) -> list[Change]:
        """Of all the outcomes of this mechanism together: what to do for those that chose a candidate."""
        ...


class ModuleFinder:
    """Sites that are modules.

    Args:
        model: all its modules are looked at.
        kinds: of `KINDS`.
    """

    mechanism = "module"

    def __init__(self, model: nn.Module, kinds: Collection[str]) -> None:
        self.skipped: list[Skipped] = []
        self._watched: list[tuple[str, nn.Module, list[ModuleKind]]] = []
        for path, module, reason in walk(model):
            try:
                found = [k for k in module_kinds(kinds) if k.watches(module)]
            except Exception as error:  # noqa: BLE001  a class of its own make, such as TorchScript's
                self.skipped.append(
                    Skipped(path, type(module).__name__, reason or f"a look at it {said(error)}")
                )
                continue
            if found and reason:
                self.skipped.append(Skipped(path, type(module).__name__, reason))
            elif found:
                self._watched.append((path, module, found))
        self._watch: Watch | None = None

    def watch(self) -> AbstractContextManager[object]:
        """Note the calls of the modules that might be sites."""
        if not self._watched:
            return nullcontext()
        self._watch = Watch([module for _, module, _ in self._watched], configuration)
        return self._watch

    def sites(self) -> list[Site]:
        """One for each class, settings and calls; those with the most to read and write first."""
        groups: dict[Any, Site] = {}
        covered: dict[Any, list[str]] = {}
        for path, module, kinds in self._watched:
            record = self._watch.records[module] if self._watch else Record()
            reason = record.reasons[0] if record.reasons else "" if record.examples else "was not called"
            key = (configuration(module), frozenset(record.examples))
            if not reason and key in groups:
                site = groups[key]
                site.where.append(path)
                site.places.append(module)
                site.calls_per_step += record.calls
                site.covers += [_inner(path, name) for name in covered[key]]
                continue
            # A probe draws random numbers, and may deserve a warning.
            with kept_state(devices_of(module)), unwarned():
                site_or_reason = reason or _site(path, module, kinds, record)
            if isinstance(site_or_reason, Site):
                # As its kind named them: within the module.
                groups[key], covered[key] = site_or_reason, site_or_reason.covers
                site_or_reason.covers = [_inner(path, name) for name in covered[key]]
            elif site_or_reason:
                self.skipped.append(Skipped(path, type(module).__name__, site_or_reason))
        self._watch = None  # it holds on to copies of the loop's tensors
        return sorted(groups.values(), key=lambda s: -size_bytes(s.examples[0].args[1:]) * s.calls_per_step)

    def changes(self, outcomes: list[Outcome]) -> list[Change]:
        """One a module."""
        made = []
        for outcome in outcomes:
            if outcome.chosen is None:
                continue
            keys = verified_keys(outcome.site.examples)
            classes: dict[type, type[nn.Module]] = {}
            for path, module in zip(outcome.site.where, outcome.site.places, strict=True):
                base = type(module)
                if hasattr(base, MARK):  # by someone else since it was looked at
                    continue
                if base not in classes:
                    classes[base] = swapped_class(base, outcome.chosen, keys)
                made.append(class_change(path, module, classes[base]))
        return made


def _site(path: str, module: nn.Module, kinds: list[ModuleKind], record: Record) -> Site | str:
    """The first kind that has an offer makes the site; else the last one's reason."""
    base = type(module)
    twin = record.fleeting or stand_in(module)
    calls = list(record.examples.values())
    # A call that autograd records tells more than one that it does not.
    calls.sort(key=lambda e: not e.grad)
    examples = [replace(e, args=(twin, *e.args)) for e in calls]
    reason = ""
    for kind in kinds:
        try:
            offer = kind.offer(twin, calls[0])
        except Exception as error:  # noqa: BLE001
            offer = f"could not be recognised: {said(error)}"
        if isinstance(offer, str):
            reason = offer
            continue
        return Site(
            kind.kind,
            [path],
            "module",
            offer.what or base.__name__,
            _unbound(base),
            examples,
            offer.candidates,
            calls_per_step=record.calls,
            reference=offer.reference,
            places=[module],
            covers=list(offer.covers),
        )
    return reason


def _inner(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unbound(base: type[nn.Module]) -> Callable[..., Any]:
    def original(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return base.forward(module, *args, **kwargs)

    return original


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every module once with its path, outermost first, and why it is left alone (empty if it is not)."""
    inherited: dict[str, str] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        reason = (inherited.get(parent, "") if path else "") or _closed(module)
        if reason:
            inherited[path] = reason
        yield path, module, reason or _unchangeable(module)


def _closed(module: nn.Module) -> str:
    """Why neither a module nor any within it may be changed."""
    if isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return "is scripted"
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        return "is compiled"
    if isinstance(module, torch.fx.GraphModule):
        return "is a traced graph"
    return ""


def _unchangeable(module: nn.Module) -> str:
    if hasattr(type(module), MARK):
        return "is swapped already"
    if "forward" in vars(module):
        return "its forward is patched on the instance"
    if nn.utils.parametrize.is_parametrized(module):
        return "is parametrized"
    if any(nn.utils.parametrize.is_parametrized(child) for child in module.children()):
        return "a module within it is parametrized"
    if any(map(nn.parameter.is_lazy, module.parameters())):
        return "has parameters that its first call makes"
    computed = [k for k, v in vars(module).items() if isinstance(v, torch.Tensor) and v.requires_grad]
    if computed:
        return f"its {computed[0]} is computed from other parameters"
    for name, p in module.named_parameters(recurse=False):
        if not p.is_floating_point():
            return f"is quantized: its {name} is {str(p.dtype).removeprefix('torch.')}"
    return ""


def configuration(module: nn.Module) -> Any:
    """A key of all that decides what a module does but the values of its parameters."""
    settings = tuple(
        (name, _setting(value))
        for name, value in sorted(vars(module).items(), key=lambda item: item[0])
        if name not in ("_parameters", "_buffers", "_modules") and "hooks" not in name
    )
    tensors = tuple(
        (name, None if t is None else (t.dtype, t.device, tuple(t.shape), t.requires_grad))
        for name, t in [*module._parameters.items(), *module._buffers.items()]
    )
    children = tuple((name, None if m is None else configuration(m)) for name, m in module._modules.items())
    return type(module), settings, tensors, children


def _setting(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device, type, FunctionType)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_setting(v) for v in value)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(str, value)))
    if isinstance(value, dict) and not value:
        return ()
    # Two of one class may be set differently, so only one and the same counts as equal.
    return type(value), id(value)
