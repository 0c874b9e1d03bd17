"""Loops of a few operators, forward and backward, laid out in time as a device-bound step would be.

    loop = train(op("aten::mm", ([64, 64], [64, 64]), kernels=[("gemm", 100)]))

Durations are in µs. The host takes a little for each operator; kernels run one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from advisor.advice.advise import advise
from advisor.advice.finding import Advised
from advisor.advice.loop import Loop
from advisor.advice.replay import Replay
from advisor.advice.rule import find_rule
from advisor.roofline.analysis import Analysis, analyse_timeline
from tests.trace.builder import BACKWARD, MAIN, Builder

BF16, FP16, FP32, BOOL, INT64 = "c10::BFloat16", "c10::Half", "float", "bool", "long int"
H200 = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_109_880_320, "numSms": 132}
#: Families of rules that look at the device's work.
MODEL = ("attention", "fusion", "kernel", "layout", "loss", "precision", "shape")
#: Host time of an operator that launches, and of the launch itself.
_OP_US, _LAUNCH_US = 6.0, 3.0


@dataclass
class Op:
    """An operator of the model: arguments, kernels, operators inside, and its gradient's."""

    name: str
    dims: list[Any]
    kernels: list[tuple[str, float]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    strides: list[Any] | None = None
    concrete: list[str] | None = None
    inside: list[Op] = field(default_factory=list)
    gradient: list[Op] = field(default_factory=list)


def op(
    name: str,
    dims: Sequence[Any] = (),
    *,
    dtype: str = BF16,
    kernels: Sequence[tuple[str, float]] = (),
    dtypes: Sequence[str] | None = None,
    inside: Sequence[Op] = (),
    gradient: Sequence[Op] = (),
    strides: list[Any] | None = None,
    concrete: list[str] | None = None,
) -> Op:
    """An operator; `dtype` is that of all its tensors unless `dtypes` names each argument's."""
    types = list(dtypes) if dtypes else [dtype if shape else "Scalar" for shape in dims]
    return Op(name, list(dims), list(kernels), types, strides, concrete, list(inside), list(gradient))


class _Clock:
    def __init__(self) -> None:
        self.host = 1_000.0
        self.device = 1_000.0


def _emit(build: Builder, clock: _Clock, one: Op, sequence: int | None, forward_thread: int = 0) -> None:
    start = clock.host
    at = len(build.events)
    clock.host += _OP_US
    for inner in one.inside:
        _emit(build, clock, inner, sequence, forward_thread)
    for kernel, taken in one.kernels:
        begin = max(clock.device, clock.host + _LAUNCH_US)
        cat = "gpu_memset" if kernel.startswith("Memset") else "kernel"
        build.launch(kernel, clock.host, at=begin, dur=taken, cat=cat, grid=[1024, 1, 1])
        clock.device = begin + taken
        clock.host += _LAUNCH_US
    build.op(
        one.name,
        start,
        clock.host - start,
        dims=one.dims,
        dtypes=one.dtypes,
        strides=one.strides,
        concrete=one.concrete,
        sequence=sequence,
        forward_thread=forward_thread,
    )
    # Longer ones first: the operator goes before what is inside it.
    build.events.insert(at, build.events.pop())
    clock.host += 1


def build(
    *model: Op,
    optimizer: Sequence[Op] = (),
    steps: int = 4,
    device: dict[str, Any] | None = None,
    **context: Any,
) -> Builder:
    """A trace of such a loop."""
    trace, clock = Builder(device=None), _Clock()
    trace.meta["deviceProperties"] = [device or H200]
    if context:
        trace.context(**context)
    for step in range(steps):
        begin, first = clock.host, 1 + 1000 * step
        trace.on(MAIN)
        for number, one in enumerate(model):
            _emit(trace, clock, one, first + number)
        trace.on(BACKWARD)
        for number, one in reversed(list(enumerate(model))):
            if one.gradient:
                node = one.name.removeprefix("aten::").title().replace("_", "") + "Backward0"
                inner = Op(node, [], inside=one.gradient)
                outer = Op(f"autograd::engine::evaluate_function: {node}", [], inside=[inner])
                _emit(trace, clock, outer, first + number, forward_thread=1)
        trace.on(MAIN)
        if optimizer:
            started = clock.host
            for one in optimizer:
                _emit(trace, clock, one, None)
            trace.range("Optimizer.step#AdamW.step", started - 0.5, clock.host - started)
        # The host waits for the device at the end, so that the step is as long as its kernels.
        wait = max(1.0, clock.device - clock.host) + 2
        trace.call(clock.host, correlation=1_000_000 + step, name="cudaDeviceSynchronize", dur=wait)
        clock.host += wait + 5
        trace.step(step, begin - 0.5, clock.host - begin)
        clock.host += 1
    return trace


def analysis(*model: Op, **options: Any) -> Analysis:
    """The same, worked out."""
    return analyse_timeline(build(*model, **options).join())


def loop(*model: Op, **options: Any) -> Loop:
    """The same, as rules see it."""
    worked_out = analysis(*model, **options)
    return Loop(worked_out, Replay(worked_out))


def ask(rule: str, *model: Op, **options: Any) -> Advised:
    """What one rule says of such a loop; it must not break on it."""
    said = advise(analysis(*model, **options), [find_rule(rule)])
    assert said.failed == []
    return said


def likely_ms(said: Advised) -> float:
    """Likely saving of the one finding."""
    (advice,) = said.advice
    assert advice.saving is not None
    return advice.saving.likely_ns / 1e6
