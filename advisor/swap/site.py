"""What can be replaced, with what, and how it came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

#: What swap may be asked for; ``"auto"`` means all of them.
KINDS = ("norm", "activation", "gate", "attention", "rope", "softmax", "loss", "optimizer", "replay")


@dataclass(frozen=True, eq=False)
class Example:
    """One call of a site, as the loop made it. Tensors are detached copies.

    Attributes:
        args, kwargs: of the call; tensors keep dtype, strides and `requires_grad`. A module among them is a
            stand-in (`tensors.stand_in`), whose parameters are inputs like any other.
        autocast: dtype of autocast in force on the device, or None.
        rng: whether the call draws random numbers (dropout).
        grad: whether autograd recorded the call.
        gradient_strides: of the gradients that the loop's backward had for its outputs, by the output's
            index; filled in as that runs, and what is tried later begins with such. A kernel may go wrong
            with some layouts only, and PyTorch's cuDNN attention with all but the first that it met.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    rng: bool = False
    grad: bool = True
    gradient_strides: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to do what a site does.

    Attributes:
        name: as it is told: ``advisor.kernels.rms_norm``, ``torch SDPA (cuDNN)``.
        call: takes what the original takes and returns what it returns.
        source: ``"bundled"`` or ``"torch"``.
        permanent: the lines of code that make the change without us.
        unsupported: reasons why it cannot serve an example; empty where it can.
        deterministic: whether repeated runs agree to the bit, forward and backward.
    """

    name: str
    call: Callable[..., Any]
    source: str
    permanent: str = ""
    unsupported: Callable[[Example], Sequence[str]] = lambda _example: ()
    deterministic: bool = True


@dataclass(eq=False)
class Site:
    """Places in the loop that do the same work on the same shapes.

    Attributes:
        kind: of `KINDS`.
        where: module paths, or ``file.py:12`` of the code, one for each place.
        mechanism: ``"module"`` (the class of a module is changed), ``"pattern"`` (the graph of the step is
            rewritten) or ``"optimizer"``.
        what: what stands there, for a reader: ``LlamaRMSNorm``, ``softmax(q @ k.T * scale + mask) @ v``.
        original: what the loop calls now. Of a module it is the class's `forward`, so that the first argument
            of it, of the candidates and of the examples is the module.
        examples: calls that it made; at least one.
        candidates: ways to replace it, any order.
        calls_per_step: of all its places together.
        reference: does the same in float64, where the original's code would not do so in float64.
        places: what is changed when a candidate is chosen (modules, the optimizer), as `where` has it.
        covers: paths of modules within, which no candidate calls.
        within: of a pattern, paths of the modules whose work it is part of.
        steady: which arguments have one value in every batch, such as a mask that is made of sizes alone.
        prove: does what `verify` does, where a candidate is not called as the original is.
        ready: makes the calls that `measure` times, by the candidates' names and ``"original"``, likewise.
    """

    kind: str
    where: list[str]
    mechanism: str
    what: str
    original: Callable[..., Any]
    examples: list[Example]
    candidates: list[Candidate]
    calls_per_step: int = 1
    reference: Callable[..., Any] | None = None
    places: list[Any] = field(default_factory=list)
    covers: list[str] = field(default_factory=list)
    within: list[str] = field(default_factory=list)
    steady: tuple[int, ...] = ()
    prove: Callable[[Candidate], Trial] | None = None
    ready: Callable[[Sequence[Candidate]], dict[str, Callable[[], object]]] | None = None


@dataclass(eq=False)
class Trial:
    """How one candidate did at one site.

    Attributes:
        candidate: its name.
        refused: why it is out, in one line; empty if it may serve.
        error, eager_error: largest error of outputs and gradients against the higher-precision reference,
            and the original's own; None where not computed.
        time_ns, original_ns: forward and backward, medians; None where not timed.
        memory_bytes, original_memory_bytes: peak beyond the inputs on a GPU, what the backward holds on to on
            a CPU; None where not known.
    """

    candidate: str
    refused: str = ""
    error: float | None = None
    eager_error: float | None = None
    time_ns: float | None = None
    original_ns: float | None = None
    memory_bytes: int | None = None
    original_memory_bytes: int | None = None


@dataclass(eq=False)
class Outcome:
    """What was decided for one site.

    Attributes:
        site: which.
        chosen: the candidate in force, or None.
        reason: why, in one line: "1.8 times as fast", or why nothing was chosen.
        trials: every candidate's.
    """

    site: Site
    chosen: Candidate | None
    reason: str
    trials: list[Trial] = field(default_factory=list)

    @property
    def trial(self) -> Trial | None:
        """That of the candidate in force."""
        name = self.chosen.name if self.chosen else None
        return next((trial for trial in self.trials if trial.candidate == name), None)

    @property
    def saved_ns(self) -> float:
        """Of a step, by the candidate in force; 0 where that is not known."""
        trial = self.trial
        if trial is None or trial.time_ns is None or trial.original_ns is None:
            return 0.0
        return (trial.original_ns - trial.time_ns) * self.site.calls_per_step
