"""Runs that swap leaves alone, and what a checkpoint must not remember of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

#: Strategies that keep parameters where no module has them between steps.
_PARTITIONED = ("DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")
#: Of an optimizer's groups: how its step is carried out, which is no part of what it computes.
_WAYS = ("fused", "foreach", "capturable")


def why_not(trainer: Any, module: Any) -> str:
    """Why nothing can be swapped in this run; empty if something might."""
    if getattr(module, "_compiler_ctx", None) is not None:
        return "the LightningModule is compiled as a whole, and its compiled graph stays as it is"
    name = type(trainer.strategy).__name__
    if name in _PARTITIONED:
        return f"{name} keeps parameters where swap cannot reach them"
    return ""


def ways_of(optimizers: Iterable[Any]) -> list[list[dict[str, Any]]]:
    """How each group of each optimizer steps, to tell later what swap has changed."""
    return [
        [{name: group[name] for name in _WAYS if name in group} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def unswapped_optimizers(states: list[Any], before: list[list[dict[str, Any]]]) -> list[Any]:
    """A checkpoint's optimizer states as an unswapped run has them: no value of theirs differs.

    Args:
        states: of `torch.optim.Optimizer.state_dict`, as a checkpoint holds them; they stay as they are.
        before: `ways_of` the optimizers before swap changed any.
    """
    return [
        _unswapped(state, ways) if isinstance(state, dict) and "param_groups" in state else state
        for state, ways in zip(states, before, strict=True)
    ]


def _unswapped(state: dict[str, Any], ways: list[dict[str, Any]]) -> dict[str, Any]:
    groups = state["param_groups"]
    if len(groups) != len(ways):
        return state
    changed = [i for i, (g, w) in enumerate(zip(groups, ways, strict=True)) if {**g, **w} != g]
    if not changed:
        return state
    steps = set(_host_steps(groups, ways, changed))
    return {
        **state,
        "param_groups": [{**group, **way} for group, way in zip(groups, ways, strict=True)],
        "state": {
            key: {**values, "step": values["step"].cpu()} if key in steps and _on_device(values) else values
            for key, values in state["state"].items()
        },
    }


def _host_steps(groups: list[Any], ways: list[dict[str, Any]], changed: list[int]) -> Iterator[Any]:
    """Parameters whose count of steps stays on the host where the optimizer steps as before."""
    for i in changed:
        if not ways[i].get("fused") and not ways[i].get("capturable"):
            yield from groups[i]["params"]


def _on_device(values: Any) -> bool:
    step = values.get("step") if isinstance(values, dict) else None
    return isinstance(step, torch.Tensor) and step.device.type != "cpu"
