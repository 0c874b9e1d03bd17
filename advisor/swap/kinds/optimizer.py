"""Optimizers of torch's own, told to do a step in one kernel: ``fused=True``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from advisor.kernels.verify.judge import Wrong, errors
from advisor.swap.find import Skipped
from advisor.swap.guard import kept_state, unwarned
from advisor.swap.journal import Change
from advisor.swap.measure import ORIGINAL
from advisor.swap.site import Candidate, Outcome, Site, Trial
from advisor.swap.tensors import plain
from advisor.swap.verify import OUTPUT_FACTOR, OutOfMemory, said

#: Whose `step` knows ``fused``; subclasses may do something else.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
#: Of parameters, gradients and state that are copied to try a step out.
CAP_BYTES = 2**30
_STEPS = 3
_ULPS = 4.0
#: Of an update's size, what the rounding of its bias corrections may take.
_MOST_OF_UPDATE = 1e-3


class OptimizerFinder:
    """Optimizers that could do their step in one kernel.

    Args:
        optimizers: the loop's own objects.
        model: whose layers tell which parameters get sparse gradients.
    """

    mechanism = "optimizer"

    def __init__(self, optimizers: Sequence[Optimizer], model: nn.Module | None = None) -> None:
        self._optimizers = optimizers
        modules = () if model is None else model.modules()
        self._sparse = {
            m.weight for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse
        }
        self.skipped: list[Skipped] = []

    def watch(self) -> AbstractContextManager[object]:
        """Nothing needs to be seen."""
        return nullcontext()

    def sites(self) -> list[Site]:
        """One an optimizer."""
        found = []
        for i, optimizer in enumerate(self._optimizers):
            where, what = f"optimizer {i}", type(optimizer).__name__
            reason = unfit(optimizer, self._sparse)
            if reason:
                self.skipped.append(Skipped(where, what, reason))
                continue
            candidate = Candidate(
                f"torch.optim.{what}(fused=True)",
                optimizer.step,
                "torch",
                permanent=f"torch.optim.{what}(..., fused=True)",
            )
            found.append(
                Site(
                    "optimizer",
                    [where],
                    "optimizer",
                    what,
                    optimizer.step,
                    [],
                    [candidate],
                    places=[optimizer],
                    prove=partial(_proven, optimizer),
                    ready=partial(_ready, optimizer),
                )
            )
        return found

    def changes(self, outcomes: list[Outcome]) -> list[Change]:
        """One an optimizer."""
        return [fused_change(o.site.where[0], o.site.places[0]) for o in outcomes if o.chosen]


def unfit(optimizer: Optimizer, sparse: Collection[Tensor] = ()) -> str:
    """Why an optimizer is left alone; empty if it need not be.

    Args:
        optimizer: which.
        sparse: parameters that get sparse gradients, whatever they have now.
    """
    if type(optimizer) not in _FUSED:
        return "is none of torch's optimizers that have a fused step"
    groups = optimizer.param_groups
    if any(group.get("fused") for group in groups):
        return "is fused already"
    if any(group.get("differentiable") for group in groups):
        return "is differentiable, which a fused step is not"
    for p in _parameters(optimizer):
        if not plain(p) or not p.is_floating_point():
            return f"has a parameter that is a {type(p).__name__} of {p.dtype}"
        if p in sparse or (p.grad is not None and not plain(p.grad)):
            return "has sparse gradients, which a fused step does not take"
        if p.device.type not in ("cuda", "cpu"):
            return f"has a parameter on {p.device.type}"
    if not _parameters(optimizer):
        return "has no parameters"
    return ""


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def fused_change(where: str, optimizer: Optimizer) -> Change:
    """Tell an optimizer to fuse: flags of its groups, and step counts where the fused step has them.

    `_step_supports_amp_scaling` stays as it is: gradient scalers and clipping go on as before.
    """
    flags: list[dict[str, Any]] = []
    homes: dict[Tensor, Any] = {}
    hooks: list[Any] = []

    def do() -> None:
        # Read each time: groups may have been added while it was toggled off.
        flags[:] = [
            {name: group.get(name) for name in ("fused", "foreach")} for group in optimizer.param_groups
        ]
        homes.update(_fuse(optimizer))
        hooks.append(optimizer.register_state_dict_post_hook(saved))

    def home(p: Tensor, step: Any) -> Any:
        """A step count as the optimizer would have it without us."""
        old = homes.get(p)
        if old is not None and not isinstance(old, Tensor):
            return type(old)(float(step))
        # State that came up while it was fused goes where an unfused step keeps it.
        capturable = any(g.get("capturable") for g in optimizer.param_groups)
        to = old.device if isinstance(old, Tensor) else p.device if capturable else torch.device("cpu")
        return step.to(to) if isinstance(step, Tensor) else step

    def saved(_optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint is one of the optimizer as it was."""
        for group, old in zip(state["param_groups"], flags, strict=False):
            group.update(old)
        for i, p in enumerate(_parameters(optimizer)):
            entry = state["state"].get(i, {})
            if "step" in entry:
                state["state"][i] = {**entry, "step": home(p, entry["step"])}
        return state

    def undo() -> None:
        while hooks:
            hooks.pop().remove()
        for group, old in zip(optimizer.param_groups, flags, strict=False):
            group.update(old)
        for p, step in _steps(optimizer):
            optimizer.state[p]["step"] = home(p, step)
        homes.clear()

    return Change(f"{where}: torch.optim.{type(optimizer).__name__}(fused=True)", do, undo)


def _fuse(optimizer: Optimizer) -> dict[Tensor, Any]:
    """Have the next step fused; gives the step counts that stood where a fused step has its own."""
    stood: dict[Tensor, Any] = {}
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    for p, step in _steps(optimizer):
        stood[p] = step
        value = step if isinstance(step, Tensor) else torch.tensor(float(step))
        optimizer.state[p]["step"] = value.to(device=p.device, dtype=torch.float32, copy=True)
    return stood


def _steps(optimizer: Optimizer) -> Iterator[tuple[Tensor, Any]]:
    for p in _parameters(optimizer):
        state = optimizer.state.get(p)
        if state and "step" in state:
            yield p, state["step"]


def twin(optimizer: Optimizer, dtype: torch.dtype | None = None, cap_bytes: int = CAP_BYTES) -> Optimizer:
    """An optimizer of the same class, settings and state over copies of the parameters, with gradients.

    Args:
        optimizer: it is only read. Gradients that it has not are drawn at random.
        dtype: of the copies.
        cap_bytes: parameters that would exceed this are left out, the last first.
    """
    generator = torch.Generator().manual_seed(0)
    left = cap_bytes
    groups = []
    states: list[tuple[Tensor, dict[str, Any]]] = []
    for group in optimizer.param_groups:
        params: list[Tensor] = []
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            left -= 4 * p.numel() * p.element_size()
            if left < 0 and params:
                break
            params.append(_copy(p, dtype).requires_grad_())
            gradient = p.grad
            if gradient is None:
                drawn = torch.randn(p.shape, generator=generator).mul_(1e-2)
                gradient = drawn.to(device=p.device, dtype=p.dtype)
            params[-1].grad = _copy(gradient, dtype)
            copied = {k: _copy(v, dtype) if isinstance(v, Tensor) else copy.copy(v) for k, v in state.items()}
            states.append((params[-1], copied))
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": params})
    kind: Any = type(optimizer)
    made: Optimizer = kind(groups, lr=groups[0]["lr"])
    for own, settings in zip(made.param_groups, groups, strict=True):
        own.update({k: v for k, v in settings.items() if k != "params"})
    for p, state in states:
        if state:
            made.state[p] = state
    return made


def _copy(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    wide = dtype if dtype is not None and t.is_floating_point() else t.dtype
    return t.detach().to(wide, copy=True)


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    # The unwrapped step: hooks and profiler ranges belong to the loop's optimizer.
    for _ in range(_STEPS):
        optimizer.step()
    return [p.detach() for p in _parameters(optimizer)]


def _proven(optimizer: Optimizer, candidate: Candidate) -> Trial:
    """Several steps on copies against float64; parameters to within rounding, and that of their updates."""
    trial = Trial(candidate.name)
    devices = {p.device for p in _parameters(optimizer)}
    with kept_state(devices), unwarned():
        try:
            _prove(optimizer, trial)
        except Wrong as wrong:
            trial.refused = str(wrong)
        except OutOfMemory:
            trial.refused = "ran out of memory"
        except Exception as error:  # noqa: BLE001
            trial.refused = said(error)
    return trial


def _fused_twin(optimizer: Optimizer) -> Optimizer:
    # Without the change's hook, which would hold it and all of its copies until garbage is collected.
    made = twin(optimizer)
    _fuse(made)
    return made


def _prove(optimizer: Optimizer, trial: Trial) -> None:
    reference = twin(optimizer, torch.float64)
    for group in reference.param_groups:
        group["foreach"] = False
    before = [p.detach().clone() for p in _parameters(reference)]
    truth, theirs, ours = _stepped(reference), _stepped(twin(optimizer)), _stepped(_fused_twin(optimizer))
    again = _stepped(_fused_twin(optimizer))
    share = _update_share(optimizer)
    for i, (mine, eager, exact, second) in enumerate(zip(ours, theirs, truth, again, strict=True)):
        if not torch.equal(mine, second) and not bool(mine.isnan().any()):
            raise Wrong(f"parameter {i}: two runs differ")
        for error in errors(mine, eager, exact, factor=OUTPUT_FACTOR, ulps=_ULPS, what=f"parameter {i}"):
            if not error.got <= error.allowed + share * _size(exact - before[i], error.measure):
                raise Wrong(f"{error}, {error.eager:.3e} eager's own")
            if trial.error is None or error.got > trial.error:
                trial.error, trial.eager_error = error.got, error.eager


def _update_share(optimizer: Optimizer) -> float:
    """What of an update may be lost because the fused step takes ``1 - beta2 ** step`` in float32.

    At the first step that is 1 - beta2, known to within a rounding of 1.
    """
    betas = [group["betas"][1] for group in optimizer.param_groups if "betas" in group]
    left = min((1.0 - float(beta) for beta in betas), default=1.0)
    return min(torch.finfo(torch.float32).eps / left, _MOST_OF_UPDATE) if left > 0.0 else _MOST_OF_UPDATE


def _size(t: Tensor, measure: str) -> float:
    return float(t.abs().amax() if measure == "largest" else t.square().mean().sqrt())


def _ready(optimizer: Optimizer, candidates: Sequence[Candidate]) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {ORIGINAL: twin(optimizer).step}
    return {**calls, **{c.name: _fused_twin(optimizer).step for c in candidates}}
