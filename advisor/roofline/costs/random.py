"""Random numbers: counter-based generators do integer work; FLOPs are those of shaping the distribution."""

from __future__ import annotations

from advisor.roofline.costs.args import footprint, integer, itemsize, tensor, vector_pipe
from advisor.roofline.costs.conventions import ADD, FMA, LOG, MUL, SQRT, TRIG
from advisor.roofline.costs.model import Cost, OpCall
from advisor.roofline.costs.registry import cost

_IN_PLACE = {
    "uniform_": FMA, "normal_": (LOG + SQRT + 2 * TRIG) // 2 + FMA, "bernoulli_": FMA, "random_": 0,
    "exponential_": LOG + MUL, "cauchy_": TRIG + FMA, "log_normal_": LOG + TRIG, "geometric_": 2 * LOG,
}  # fmt: skip


@cost(*(f"aten::{name}" for name in _IN_PLACE))
def fill_random(call: OpCall) -> Cost:
    """Writes its first argument."""
    target = tensor(call, 0)
    flops = float(_IN_PLACE[call.name.removeprefix("aten::")] * target.numel)
    return Cost(flops, 0.0, target.numel * itemsize(target.dtype), vector_pipe(target.dtype, flops))


@cost("aten::bernoulli", "aten::poisson", "aten::rand_like", "aten::randn_like")
def random_like(call: OpCall) -> Cost:
    """Writes a tensor like its first argument; the first two read it for the probabilities."""
    x = tensor(call, 0)
    read = 0.0 if call.name.endswith("_like") else footprint(x)
    return Cost(float(FMA * x.numel), read, x.numel * itemsize(x.dtype), vector_pipe(x.dtype))


@cost("aten::multinomial")
def multinomial(call: OpCall) -> Cost:
    """Reads the probabilities, writes the drawn positions."""
    x, draws = tensor(call, 0), integer(call, 1)
    rows = x.numel // x.shape[-1]
    return Cost(float(2 * ADD * x.numel), footprint(x), rows * draws * 8.0, vector_pipe(x.dtype))


@cost("aten::randperm")
def permutation(call: OpCall) -> Cost:
    """Random keys are sorted with their positions: `n` of 8 bytes written."""
    return Cost(0.0, 0.0, 8.0 * max(1, integer(call, 0)), "none")
