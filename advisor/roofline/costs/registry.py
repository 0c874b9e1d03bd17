"""The registry of cost formulas: an operator's name to a pure function of the call."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from advisor.roofline.costs import roles
from advisor.roofline.costs.model import Cost, Launch, OpCall

#: One cost for the whole call, or one for each of its launches; None where the trace does not say enough.
Result: TypeAlias = "Cost | tuple[Cost | None, ...] | None"
Formula: TypeAlias = Callable[[OpCall], Result]
_F = TypeVar("_F", bound=Formula)

_PACKAGE = __name__.rpartition(".")[0]
_exact: dict[str, Formula] = {}
_prefixes: dict[str, Formula] = {}
_partners: dict[str, str] = {}

#: What a formula raises when a trace's shapes are missing or contradict each other.
_UNUSABLE = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
#: Beyond this a number is a broken record, not work.
_MAX = 1e30


def cost(*names: str, partner: str = "") -> Callable[[_F], _F]:
    """Register the decorated formula for operators of these names.

    Args:
        names: operator names as in a trace; one that ends in ``*`` stands for all that begin so.
        partner: how the name of the operator begins whose arguments are to be in `OpCall.partner`.

    Raises:
        ValueError: if a name already has a formula.
    """

    def register(formula: _F) -> _F:
        if not formula.__module__.startswith(f"{_PACKAGE}."):
            _load()
        for name in names:
            table, key = (_prefixes, name[:-1]) if name.endswith("*") else (_exact, name)
            if key in table:
                raise ValueError(f"{name} already has a cost formula: {table[key].__module__}")
            table[key] = formula
            if partner:
                _partners[name] = partner
        return formula

    return register


@functools.cache
def _load() -> None:
    """Import every module of this package, so that each registers its formulas."""
    package = importlib.import_module(_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


@functools.lru_cache(maxsize=4096)
def formula_of(op_name: str) -> Formula | None:
    """The formula for an operator, or None."""
    _load()
    if op_name in _exact:
        return _exact[op_name]
    matching = [prefix for prefix in _prefixes if op_name.startswith(prefix)]
    return _prefixes[max(matching, key=len)] if matching else None


@functools.lru_cache(maxsize=4096)
def partner_of(op_name: str) -> str:
    """How the name begins of the operator whose arguments an operator's formula asks for; empty for none."""
    _load()
    if op_name in _partners:
        return _partners[op_name]
    return next(
        (of for name, of in _partners.items() if name.endswith("*") and op_name.startswith(name[:-1])), ""
    )


def knows(op_name: str) -> bool:
    """Whether there is a formula for operators of this name (it may still not yield a cost)."""
    return formula_of(op_name) is not None


def launch_costs(call: OpCall) -> tuple[Cost | None, ...]:
    """The cost of each of the call's launches, None where it cannot be told.

    Copies and memsets are costed from the bytes that the trace states. Never raises.

    Returns:
        One entry for each of ``call.launches``.
    """
    transfers = [
        transfer_cost(launch) if roles.is_transfer(launch.name) else None for launch in call.launches
    ]
    kernels = tuple(launch for launch in call.launches if not roles.is_transfer(launch.name))
    costs = iter(_kernel_costs(dataclasses.replace(call, launches=kernels)) if kernels else ())
    if not kernels and transfers == [None]:
        return (_transfer_by_arguments(call),)
    return tuple(
        transfer if roles.is_transfer(launch.name) else next(costs)
        for launch, transfer in zip(call.launches, transfers, strict=True)
    )


def _transfer_by_arguments(call: OpCall) -> Cost | None:
    """A copy whose trace states no bytes moves what its operator writes."""
    whole = op_cost(call) if call.name == "aten::copy_" else None
    return whole and transfer_cost(dataclasses.replace(call.launches[0], bytes=int(whole.bytes_written)))


def op_cost(call: OpCall) -> Cost | None:
    """The cost of the whole operator, as if one ideal kernel did it; None where it cannot be told."""
    result = _apply(dataclasses.replace(call, launches=()))
    if isinstance(result, tuple):
        return total(result)
    return result if _is_sane(result) else None


def transfer_cost(launch: Launch) -> Cost | None:
    """The cost of a copy or a memset, on this device's memory."""
    if launch.bytes is None or launch.bytes < 0:
        return None
    name = launch.name.lower()
    read = 0 if "memset" in name or "htod" in name else launch.bytes
    written = 0 if "dtoh" in name else launch.bytes
    return Cost(0.0, float(read), float(written), "none")


def total(costs: Sequence[Cost | None]) -> Cost | None:
    """The sum of several costs, with the pipe of the greatest; None if any is unknown."""
    known = [item for item in costs if item is not None]
    if not known or len(known) < len(costs):
        return None
    return Cost(
        sum(item.flops for item in known),
        sum(item.bytes_read for item in known),
        sum(item.bytes_written for item in known),
        max(known, key=lambda item: item.flops).pipe,
        sum(item.bytes_reread for item in known),
        sum(item.flops_padding for item in known),
    )


def split(whole: Cost, launches: Sequence[Launch]) -> tuple[Cost, ...]:
    """Share a cost among kernels that work on it together, by the thread blocks of each.

    Where some of them are matrix kernels, the floating-point operations are theirs alone.
    """
    if len(launches) == 1:
        return (whole,)
    matrix = [roles.is_matrix(launch.name) for launch in launches]
    does_flops = matrix if any(matrix) else [True] * len(launches)
    blocks = [float(launch.grid_blocks or 0) for launch in launches]
    if not all(blocks):
        blocks = [1.0] * len(launches)
    blocks_of_flops = sum(count for count, does in zip(blocks, does_flops, strict=True) if does)
    shares = [count / sum(blocks) for count in blocks]
    return tuple(
        Cost(
            whole.flops * count / blocks_of_flops if does else 0.0,
            whole.bytes_read * share,
            whole.bytes_written * share,
            whole.pipe if does else "none",
            whole.bytes_reread * share,
            whole.flops_padding * count / blocks_of_flops if does else 0.0,
        )
        for count, share, does in zip(blocks, shares, does_flops, strict=True)
    )


def assign(call: OpCall, main: Cost, *parts: tuple[str, Cost | None], whole: Cost | None = None) -> Result:
    """Give each kernel whose name matches a part's pattern that part's cost; the others share `main`.

    Args:
        call: whose launches are costed; without launches the result is `whole`, or else `main`.
        main: cost of what no pattern matches, shared among those kernels by `split`.
        parts: a regular expression, searched in the kernel's name without regard to case, and the cost of
            each kernel that it matches first.
        whole: cost of the operator as one ideal kernel would have it.
    """
    if not call.launches:
        return whole or main
    matched = [
        next(
            (index for index, (pattern, _) in enumerate(parts) if re.search(pattern, launch.name, re.I)), None
        )
        for launch in call.launches
    ]
    rest = [launch for launch, index in zip(call.launches, matched, strict=True) if index is None]
    shares = iter(split(main, rest) if rest else ())
    return tuple(next(shares) if index is None else parts[index][1] for index in matched)


def family(op_name: str, kernel_name: str) -> str:
    """What kind of work a launch is: the operator's family, or else what the kernel's name says.

    Returns:
        ``matmul``, ``attention``, ``convolution``, ``norm`` and so on: the `FAMILY` of the module that holds
        the formula, or the module's name; ``memory`` for copies and memsets; ``other`` where nothing tells.
    """
    if roles.is_transfer(kernel_name):
        return "memory"
    by_kernel = roles.family(kernel_name)
    if by_kernel == "communication":
        return by_kernel
    formula = formula_of(op_name)
    if formula is None:
        return by_kernel
    return getattr(sys.modules[formula.__module__], "FAMILY", formula.__module__.rpartition(".")[2])


def _apply(call: OpCall) -> Cost | tuple[Cost | None, ...] | None:
    formula = formula_of(call.name)
    if formula is None:
        return None
    try:
        return formula(call)
    except _UNUSABLE:
        return None


def _kernel_costs(call: OpCall) -> tuple[Cost | None, ...]:
    result = _apply(call)
    if isinstance(result, Cost):
        result = split(result, call.launches)
    if result is None or len(result) != len(call.launches):
        return (None,) * len(call.launches)
    return tuple(item if _is_sane(item) else None for item in result)


def _is_sane(item: Cost | None) -> bool:
    if item is None:
        return False
    numbers = (item.flops, item.bytes_read, item.bytes_written, item.bytes_reread, item.flops_padding)
    try:
        return all(math.isfinite(number) and 0 <= number < _MAX for number in numbers) and (
            item.bytes_reread <= item.bytes_read and item.flops_padding <= item.flops
        )
    except (OverflowError, TypeError):
        return False
