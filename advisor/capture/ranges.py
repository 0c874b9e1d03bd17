"""Named ranges in the trace: which module and which phase of the step the work belongs to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from advisor.capture.shadow import call_before

try:  # a quarter of record_function's cost while profiling
    from torch._C._profiler import _RecordFunctionFast as FastRange
except ImportError:
    FastRange = record_function  # type: ignore[misc,assignment]

MODULE_PREFIX = "advisor::module::"
PHASE_PREFIX = "advisor::phase::"

#: Path components that wrappers add: compile, FSDP, activation checkpointing, DDP.
WRAPPERS = {
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_flat_param",
}

#: Modules that launch nothing themselves; their children have ranges of their own.
SILENT = (
    torch.nn.Identity,
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
    torch.nn.Flatten,
    torch.nn.Unflatten,
)


class Instrument(Protocol):
    """Something that marks the trace while a window is open, and leaves nothing behind."""

    def install(self) -> None:
        """Start marking."""

    def remove(self) -> None:
        """Stop marking; must be safe to call at any time and more than once."""


class OpenRanges(threading.local):
    """The ranges that are open on each thread, closed last in first out.

    They are opened and closed in the middle of the user's code, so nothing here raises.

    Args:
        failed: told of a range that could not be opened or closed.
    """

    def __init__(self, failed: Callable[[Exception], None] = lambda error: None) -> None:
        self.stack: list[tuple[str, Any]] = []
        self._failed = failed

    def open(self, name: str, kind: Any = None) -> None:
        """Open a range on this thread."""
        try:
            opened = (kind or FastRange)(name)
            opened.__enter__()
            self.stack.append((name, opened))
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def close(self, name: str) -> None:
        """Close a range and all that was opened inside it; nothing happens if it is not open here."""
        stack = self.stack
        if not stack or (stack[-1][0] != name and not any(entry[0] == name for entry in stack)):
            return
        try:
            while stack:
                top, opened = stack.pop()
                opened.__exit__(None, None, None)
                if top == name:
                    return
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def drain(self) -> None:
        """Close whatever is open on this thread."""
        while self.stack:
            with contextlib.suppress(Exception):
                self.stack.pop()[1].__exit__(None, None, None)


class Phases:
    """Ranges of the step's phases, on the calling thread. Inert until switched on."""

    def __init__(self, ranges: OpenRanges) -> None:
        self._ranges = ranges
        self.on = False

    def open(self, phase: str) -> None:
        """Enter a phase; one that is already open starts anew."""
        if self.on:
            self._ranges.close(PHASE_PREFIX + phase)
            self._ranges.open(PHASE_PREFIX + phase, record_function)

    def close(self, phase: str) -> None:
        """Leave a phase."""
        if self.on:
            self._ranges.close(PHASE_PREFIX + phase)


#: What a hook becomes in a copy or pickle of the model made while the window was open: it takes anything and
#: returns None, and a checkpoint with it loads where this package is not installed.
_inert = contextlib.nullcontext().__exit__


class _Hook:
    """A forward hook that holds no module and turns inert when copied or pickled."""

    __slots__ = ("name", "ranges")

    def __init__(self, name: str, ranges: OpenRanges) -> None:
        self.name = name
        self.ranges = ranges

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _inert


class _Enter(_Hook):
    __slots__ = ()

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.ranges.open(self.name)


class _Exit(_Hook):
    __slots__ = ()

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.ranges.close(self.name)


class ModuleRanges:
    """A range around the forward of every module that runs eagerly.

    Args:
        model: its submodules are marked; the root is not, since its path is empty.
        ranges: where open ranges are kept.
    """

    def __init__(self, model: torch.nn.Module, ranges: OpenRanges) -> None:
        self._model: torch.nn.Module | None = model
        self._ranges = ranges
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Add the hooks."""
        if self._model is None:
            return
        eager, _ = split_modules(self._model)
        for path, module in eager.items():
            if not path or isinstance(module, SILENT):
                continue
            name = MODULE_PREFIX + path
            # Prepended enter and always-called exit: the range closes when a forward raises.
            enter = module.register_forward_pre_hook(_Enter(name, self._ranges), prepend=True)
            self._undo.append(enter.remove)
            leave = module.register_forward_hook(_Exit(name, self._ranges), always_call=True)
            self._undo.append(leave.remove)
        # TorchScript compiles a module's hooks with it, and fails on those that are no functions.
        self._undo.append(call_before(torch.jit._recursive, "create_script_module", self.remove))

    def remove(self) -> None:
        """Take the hooks away and forget the model."""
        while self._undo:
            self._undo.pop()()
        self._model = None


def clean_path(path: str) -> str:
    """A module's path without the components that wrappers add."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calling the module runs compiled code: `torch.compile`, `Module.compile` or TorchScript."""
    if isinstance(module, torch.jit.ScriptModule) or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    if "_orig_mod" in module._modules:
        return True
    if getattr(module, "_compiler_ctx", None) is not None:  # a LightningModule given to torch.compile
        return True
    return getattr(module.forward, "_torchdynamo_orig_callable", None) is not None


def split_modules(model: torch.nn.Module) -> tuple[dict[str, torch.nn.Module], list[str]]:
    """The modules that run eagerly, and the paths of the compiled ones.

    Each module appears once, under the first path that leads to it; what lies inside a compiled module is in
    neither. Of a wrapper and what it wraps, which share a path, the inner one is kept.

    Returns:
        ``({path: module}, [path of each compiled module])``, in the order of `Module.named_modules`.
    """
    eager: dict[str, torch.nn.Module] = {}
    compiled: list[str] = []
    seen: set[int] = set()

    def visit(module: torch.nn.Module, path: str) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        clean = clean_path(path)
        if is_compiled(module):
            compiled.append(clean)
            seen.update(id(inner) for inner in module.modules())
            return
        eager[clean] = module
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    while isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        model = model.module
    visit(model, "")
    return eager, compiled
