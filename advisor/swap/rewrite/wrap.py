"""A method of a live module put under the rewriter, and taken out again.

The object gets a subclass of its class whose one method runs through `torch.compile` with the rewriter as
backend; setting the class back undoes it. The object stays the same one, with its parameters, hooks and
optimizer. What is pickled or copied meanwhile has the original class.
"""

from __future__ import annotations

import contextlib
import copyreg
import logging
import os
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from advisor.swap.modules import set_class
from advisor.swap.site import Outcome, Site
from advisor.swap.warn import warn

from .backend import MAX_RECOMPILES, MEMORY_BYTES, Rewriter
from .facts import Refusal
from .record import Recorder

log = logging.getLogger(__name__)


class _Plain:
    """Keeps a live subclass out of sight: no subclass hook runs, copies have the original class."""

    # No __slots__: only a base laid out as a module is (dictionary, weak references) lets a class be set.
    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _of_base(super().__reduce_ex__(protocol), type(self))


def _of_base(reduced: Any, swapped: type) -> Any:
    """What ``__reduce_ex__`` gave, with the original class in place of the subclass."""
    if not isinstance(reduced, tuple):
        return reduced
    base = swapped._advisor_base  # type: ignore[attr-defined]

    def plain(value: Any) -> Any:
        if value is swapped:
            return base
        return tuple(map(plain, value)) if type(value) is tuple else value

    make, args = plain(reduced[0]), plain(reduced[1])
    if make is copyreg.__newobj__ and args == (base,):  # type: ignore[attr-defined]
        # Pickle takes that only for an object's own class.
        make, args = copyreg._reconstructor, (base, object, None)  # type: ignore[attr-defined]
    return (make, args, *reduced[2:])


class StepRewrite:
    """One module's step under the rewriter.

    Use: `install`, then some steps with `collecting`, then `sites`; decide about them; `decide`; and so on
    while `sites` gives any. `toggle` switches between the rewritten and the original step, `restore` ends
    it.

    Args:
        module: whose step it is.
        method: its name: ``training_step`` of a LightningModule, ``forward`` of another module.
        inner: the backend that rewritten graphs are handed on to, ``"inductor"`` where the user compiles.
        dynamic: as of `torch.compile`: None lets sizes and numbers become symbols once they change.
        memory_bytes, max_recompiles, recorder: see `Rewriter`.
        tell: told why the step is given up; by default a warning.
    """

    def __init__(
        self,
        module: nn.Module,
        method: str = "training_step",
        *,
        inner: str | Callable[..., Any] | None = None,
        dynamic: bool | None = None,
        memory_bytes: int = MEMORY_BYTES,
        max_recompiles: int = MAX_RECOMPILES,
        recorder: Callable[[], Recorder] | None = None,
        tell: Callable[[str], None] = lambda why: warn(f"the step is left as it is: {why}"),
    ) -> None:
        self._tell = tell
        self.module, self.method, self.dynamic = module, method, dynamic
        self._settings: dict[str, Any] = {
            "inner": inner, "memory_bytes": memory_bytes, "max_recompiles": max_recompiles,
            "recorder": recorder,
        }  # fmt: skip
        self.rewriter = Rewriter(**self._settings)
        self._base: type[nn.Module] | None = None
        self._swapped: type[nn.Module] | None = None
        self._instance_method: Any = None
        self._original: Callable[..., Any] | None = None
        self._compiled: Callable[..., Any] | None = None
        self._hooks: list[tuple[int, ...]] = []

    @property
    def failure(self) -> str:
        """Why the step was given up, in one line; empty while it was not."""
        return self.rewriter.failure

    @property
    def refusals(self) -> list[Refusal]:
        """What looks like a pattern and was left alone, and why."""
        return list(self.rewriter.refusals)

    @property
    def installed(self) -> bool:
        """Whether the module's step runs through the rewriter."""
        return self._swapped is not None and type(self.module) is self._swapped

    def obstacle(self) -> str:
        """Why the step cannot be put under the rewriter, in one line; empty if it can."""
        own = self.module.__dict__.get(self.method)
        if own is not None and not (self._settings["inner"] and self._is_compiled_whole()):
            return f"{self.method} is set on the object itself, which hides its class's"
        function = getattr(type(self.module), self.method, None)
        if hasattr(type(self.module), "_advisor_base"):
            return f"{type(self.module).__name__}.{self.method} is rewritten already"
        if not isinstance(function, types.FunctionType):
            return f"{type(self.module).__name__}.{self.method} is no plain method"
        if getattr(function, "_torchdynamo_disable", False):
            return f"{type(self.module).__name__}.{self.method} is marked as not to be traced"
        twice = differentiates_twice(self.module)
        if twice:
            return f"{twice} takes gradients of gradients, which the bundled kernels do not have"
        if self._settings["inner"] is None:
            compiled = compiled_part(self.module)
            if compiled:
                return f"{compiled} is compiled already, which running the step in parts would undo"
        return ""

    def _is_compiled_whole(self) -> bool:
        return self.module.__dict__.get("_compiler_ctx") is not None

    def install(self) -> str:
        """Put the step under the rewriter.

        Returns:
            Why it could not be, in one line; empty if it is.
        """
        if self.installed:
            return ""
        reason = self.obstacle()
        if reason:
            return reason
        try:
            self._make()
            assert self._swapped is not None
            self._instance_method = self.module.__dict__.pop(self.method, None)
            set_class(self.module, self._swapped)
        except TypeError as error:
            self._put_back_instance_method()
            return f"{type(self.module).__name__} takes no subclass: {error}"
        return ""

    def _make(self) -> None:
        base = type(self.module)
        if self._base is base:
            return
        self._base, self._original = base, getattr(base, self.method)
        self._compiled = None
        original, rewrite = self._original, self

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            return rewrite._run(self, args, kwargs)

        step.__name__, step.__qualname__ = self.method, original.__qualname__
        step.__doc__, step.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]

        def fill(namespace: dict[str, Any]) -> None:
            namespace.update(
                {
                    self.method: step,
                    "__module__": base.__module__,
                    "__qualname__": base.__qualname__,
                    "__doc__": base.__doc__,
                    "_advisor_base": base,
                }
            )
            if hasattr(base, "__deepcopy__"):
                namespace["__deepcopy__"] = _deepcopy

        self._swapped = types.new_class(base.__name__, (_Plain, base), {}, fill)  # type: ignore[assignment]

    def restore(self) -> None:
        """Give the module its class back; nothing of ours is left on it."""
        if self.installed:
            assert self._base is not None
            set_class(self.module, self._base)
            self._put_back_instance_method()

    def close(self) -> None:
        """Restore, and let go of graphs and examples."""
        self.restore()
        self.rewriter.forget_code()
        failure = self.rewriter.failure
        self.rewriter = Rewriter(**self._settings)
        self.rewriter.failure = failure
        self._compiled = None

    def toggle(self, on: bool) -> None:
        """Run the rewritten step, or the original one with nothing of ours in the way."""
        if on:
            self.install()
        else:
            self.restore()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """While it lasts, steps run as they are and keep copies of what sites are given."""
        self.rewriter.collecting = True
        try:
            yield
        finally:
            self.rewriter.collecting = False

    def sites(self) -> list[Site]:
        """What was collected and is to be decided; see `Rewriter.sites`."""
        return self.rewriter.sites()

    def decide(self, outcomes: Iterable[Outcome]) -> int:
        """Take over decisions; returns how many places are replaced now.

        With none, there is nothing to gain from running the step through here: `restore` it.
        """
        count = self.rewriter.decide(outcomes)
        if self._settings["inner"] is not None:
            # The inner backend has to see the graph anew.
            self._compiled = None
        return count

    def explain(self) -> str:
        """A table of what was found and what was left alone."""
        from .explain import table

        return table(self.rewriter)

    def _put_back_instance_method(self) -> None:
        if self._instance_method is not None:
            self.module.__dict__[self.method] = self._instance_method
            self._instance_method = None

    def _run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        original = self._original
        assert original is not None
        if self.failure or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        if self._compiled is not None and _hooks_of_all_modules() != self._hooks:
            # Dynamo does not see that they have changed.
            return original(module, *args, **kwargs)
        if self.rewriter.collecting:
            self.rewriter.steps += 1
        calls = self.rewriter.calls
        try:
            result = self._guarded(module, args, kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            if self.rewriter.calls != calls:
                # Part of the step has run: running it again would run that part twice.
                raise
            self._give_up(
                f"Dynamo cannot trace the step: {type(error).__name__}: {str(error).splitlines()[0]}"
            )
            return original(module, *args, **kwargs)
        if not self.rewriter.graphs and self.rewriter.calls == calls:
            self._give_up(self.failure or "Dynamo finds nothing in the step that it can trace")
        elif self.failure:
            self._give_up(self.failure)
        return result

    def _guarded(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._compiled is None:
            if self._settings["inner"] is not None:
                self._forget_code()
            self._hooks = _hooks_of_all_modules()
            self._compiled = torch.compile(self._original, backend=self.rewriter, dynamic=self.dynamic)
        with _own_settings(eager=self._settings["inner"] is None):
            return self._compiled(module, *args, **kwargs)

    def _forget_code(self) -> None:
        code = getattr(self._original, "__code__", None)
        if code is not None and self.rewriter.graphs:
            torch._dynamo.eval_frame.reset_code(code)
            self.rewriter.graphs.clear()

    def _give_up(self, reason: str) -> None:
        self.rewriter.failure = reason
        self._tell(reason)
        self.restore()


def _hooks_of_all_modules() -> list[tuple[int, ...]]:
    """Those that are called with every module, by their handles' numbers."""
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    found = [getattr(nn.modules.module, f"_global_{kind}_hooks", {}) for kind in kinds]
    return [tuple(hooks) for hooks in found]


def _deepcopy(self: Any, memo: Any) -> Any:
    base = type(self)._advisor_base
    copy = base.__deepcopy__(self, memo)
    if type(copy) is type(self):
        set_class(copy, base)
    return copy


@contextlib.contextmanager
def _own_settings(eager: bool) -> Iterator[None]:
    """Dynamo's settings for our calls alone: what it cannot trace runs as it is, frame by frame."""
    wanted = {
        "suppress_errors": True,
        "fail_on_recompile_limit_hit": False,
        "error_on_recompile": False,
        # What is hooked into a module later is called, too.
        "skip_nnmodule_hook_guards": False,
        # A step that counts itself in an attribute would be traced anew each time.
        "allow_unspec_int_on_nn_module": True,
    }
    if eager:
        # Autograd's own backward overlaps with DDP's buckets as ever: the graph need not be cut at them.
        wanted["optimize_ddp"] = False
    known = {k: v for k, v in wanted.items() if hasattr(torch._dynamo.config, k)}
    # What Dynamo advises to those who compile is of no use to a loop that does not.
    logs = [] if not eager or os.environ.get("TORCH_LOGS") else logging.getLogger("torch._dynamo").handlers
    with torch._dynamo.config.patch(known), contextlib.ExitStack() as stack:
        for handler in logs:
            handler.addFilter(_serious)
            stack.callback(handler.removeFilter, _serious)
        yield


def _serious(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def compiled_part(module: nn.Module) -> str:
    """The name of a submodule that the user compiles; empty if there is none."""
    if module.__dict__.get("_compiler_ctx") is not None:
        return type(module).__name__
    for name, part in module.named_modules():
        if (
            isinstance(part, torch._dynamo.OptimizedModule)
            or getattr(part, "_compiled_call_impl", None) is not None
        ):
            return name or type(part).__name__
    return ""


def differentiates_twice(module: nn.Module) -> str:
    """The method of the module's or its parts' classes that asks for ``create_graph``; empty if none does."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    for kind in kinds:
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "lightning", "pytorch_lightning"):
            continue
        for name, value in vars(kind).items():
            code = getattr(value, "__code__", None)
            if code is not None and _names_create_graph(code):
                return f"{kind.__name__}.{name}"
    return ""


def _names_create_graph(code: types.CodeType) -> bool:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and _names_create_graph(constant):
            return True
        # The names of keyword arguments are one constant of a call.
        if isinstance(constant, tuple) and "create_graph" in constant:
            return True
    return False
