"""What of a run swap leaves alone, by its strategy and by how the user compiles."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

#: Strategies that keep parameters where no module has them between steps.
_PARTITIONED = ("DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")
#: Strategies that gather parameters in hooks within the step, which a traced graph would not hold.
_GATHERING = ("FSDPStrategy", "ModelParallelStrategy")
_LIBRARIES = ("torch", "builtins", "lightning", "pytorch_lightning")
#: Of a LightningModule, what runs when the gradients of a step are complete, or those of the one before are.
_BETWEEN_STEPS = (
    "backward", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step",
    "configure_gradient_clipping", "lr_scheduler_step", "on_train_batch_start", "on_train_batch_end",
)  # fmt: skip


def why_not(trainer: Any) -> str:
    """Why nothing can be swapped in this run; empty if something might."""
    name = type(trainer.strategy).__name__
    if name in _PARTITIONED:
        return f"{name} keeps parameters where swap cannot reach them"
    return ""


def why_no_patterns(trainer: Any, module: Any) -> str:
    """Why the step's graph is not looked at; empty if it may be."""
    name = type(trainer.strategy).__name__
    if name in _GATHERING:
        return f"{name} gathers parameters within the step, so its graph is left alone"
    if not module.automatic_optimization:
        return "training_step steps the optimizer itself, so its graph is left alone"
    return ""


def why_no_replay(trainer: Any, module: Any) -> str:
    """Why the rewritten step is not to be recorded; empty if it may be."""
    if trainer.world_size == 1:
        return ""
    if not any(kind.__name__ == "DDPStrategy" for kind in type(trainer.strategy).__mro__):
        return f"{type(trainer.strategy).__name__} may have ranks talk within the step, so it is not replayed"
    if any(type(part).__name__ == "SyncBatchNorm" for part in module.modules()):
        return "SyncBatchNorm has ranks talk within the step, so it is not replayed"
    return ""


def adds_up(
    held: Callable[[], Any], looked_at: bool = False, optimized: frozenset[int] = frozenset()
) -> bool:
    """Whether gradients outlive a step: several batches' are added up, now or later, or a hook looks at them.

    Asked within a step.

    Args:
        held: gives the Trainer while there is one: a graph that was recorded of it may outlive it.
        looked_at: what `looks_at_gradients` has found.
        optimized: what `optimized_by` gave at first: gradients of what no optimizer has are not let go of.
    """
    trainer = held()
    if trainer is None:
        return False
    if looked_at:
        return True
    hooked = (*trainer.callbacks, trainer.lightning_module)
    hooks = [getattr(of, "on_before_zero_grad", None) for of in hooked]
    if any(map(_is_users, [*hooks, getattr(trainer.lightning_module, "optimizer_zero_grad", None)])):
        return True
    # A hook that makes a step of its own adds to what is there.
    if getattr(trainer.lightning_module, "_current_fx_name", None) not in (None, "training_step"):
        return True
    if optimized and not optimized <= optimized_by(trainer.optimizers):
        return True
    schedules = (getattr(c, "going_to_accumulate_grad_batches", None) for c in trainer.callbacks)
    return trainer.accumulate_grad_batches > 1 or any(will() for will in schedules if will is not None)


def optimized_by(optimizers: Sequence[Any]) -> frozenset[int]:
    """The parameters that optimizers have, by their ids."""
    return frozenset(id(p) for o in optimizers for group in o.param_groups for p in group["params"])


def looks_at_gradients(module: Any) -> bool:
    """Whether code of the module's or its parts' classes that a step may call names a `grad`."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    return any(
        _names_grad(method)
        for kind in kinds
        if kind.__module__.partition(".")[0] not in _LIBRARIES
        for name, method in vars(kind).items()
        if name not in _BETWEEN_STEPS
    )


def _names_grad(method: Any) -> bool:
    """In itself, or in a function of the user's that it names."""
    if isinstance(method, property):
        method = method.fget
    elif isinstance(method, (staticmethod, classmethod)):
        method = method.__func__
    function = inspect.unwrap(method) if isinstance(method, types.FunctionType) else None
    if not isinstance(function, types.FunctionType):
        return False
    called = [function.__globals__.get(name) for name in function.__code__.co_names]
    users = [f for f in called if isinstance(f, types.FunctionType) and _is_users(f)]
    return any(_code_names_grad(f.__code__) for f in (function, *users))


def _code_names_grad(code: types.CodeType) -> bool:
    within = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return "grad" in (*code.co_names, *code.co_consts) or any(map(_code_names_grad, within))


def _is_users(hook: Any) -> bool:
    """Whether a hook is no library's own; these run once the next step's forward is over."""
    return hook is not None and (hook.__module__ or "").partition(".")[0] not in _LIBRARIES


def compiler_of(module: Any) -> Callable[..., Any] | None:
    """What a LightningModule that was passed through `torch.compile` is compiled with; None if it was not."""
    context = getattr(module, "_compiler_ctx", None)
    if context is None:
        return None
    backend = context["dynamo_ctx"].callback
    # Dynamo wraps the backend several times over; the name of what is within has changed with torch 2.9.
    while inner := getattr(backend, "_torchdynamo_orig_backend", None) or getattr(
        backend, "_torchdynamo_orig_callable", None
    ):
        backend = inner
    return backend  # type: ignore[no-any-return]
