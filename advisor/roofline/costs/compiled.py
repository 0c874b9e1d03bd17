"""Kernels that Inductor generates: their arguments are the inputs and the outputs, the latter last.

What a kernel computes is told by its name alone (``triton_poi_fused_gelu_view_3``): each named operator
counts once an element of the largest argument, as its eager kernel would; one whose gradient is named too is
part of it. A looping kernel's (``triton_red_``) layer norm takes Welford's update, whose divisions make it
110 FLOPs an element on an H200.

Which arguments are written is not recorded: the last tensor certainly is, and where a norm's or softmax's
gradient ends in a smaller one (partial sums), so is the last of full size. One that is updated in place is
counted as read.
"""

from __future__ import annotations

import functools
import re

from advisor.roofline.costs.args import Unknown, checked, footprint, itemsize, vector_pipe
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.pointwise import FLOPS
from advisor.roofline.costs.registry import cost

#: FLOPs an element of operators that are no plain elementwise ones; what moves or shapes data counts nothing.
_OTHERS = {
    "native_layer_norm_backward": 10, "native_layer_norm": 6, "native_group_norm": 6,
    "native_batch_norm": 6, "_native_batch_norm_legit_functional": 6, "native_batch_norm_backward": 8,
    "_fused_rms_norm": 4, "_softmax_backward_data": 4, "_log_softmax_backward_data": 4, "_log_softmax": 5,
    "_softmax": 5, "prepare_softmax_online": 3, "logsumexp": 3, "native_dropout_backward": 2,
    "native_dropout": 3, "var_mean": 4, "sum": 1, "mean": 1, "cumsum": 1, "embedding_dense_backward": 1,
    "bernoulli": 1, "rand": 1, "embedding": 0, "nll_loss_forward": 0, "nll_loss_backward": 0, "amax": 0,
    "amin": 0, "argmax": 0, "any": 0, "all": 0,
}  # fmt: skip
_TABLE = {**FLOPS, **_OTHERS}
_WELFORD = 110
_NORM_GRADIENT = re.compile(r"norm_backward|softmax_backward")
_LOOK_UP = re.compile(r"embedding|index|gather|scatter")


@functools.cache
def _operator_names() -> re.Pattern[str]:
    """Any operator of the table, the longest first; compiled on first use."""
    return re.compile("|".join(sorted((re.escape(name) for name in _TABLE), key=len, reverse=True)))


def flops_per_element(name: str) -> int:
    """FLOPs an element that the operators in a fused kernel's name amount to."""
    fused = re.sub(r"^triton_\w+?_fused_?|_\d+$", "", name)
    named, position = [], 0
    while position < len(fused):
        found = _operator_names().match(fused, position)
        ends_word = found is not None and (found.end() == len(fused) or fused[found.end()] == "_")
        if found and ends_word:
            named.append(found[0])
            position = found.end() + 1
        else:
            following = fused.find("_", position + 1)
            position = len(fused) if following < 0 else following + 1
    table = {**_TABLE, "native_layer_norm": _WELFORD} if name.startswith("triton_red_") else _TABLE
    return sum(table[operator] for operator in named if f"{operator}_backward" not in named)


@cost("triton_poi_*", "triton_red_*", "triton_per_*", "triton_mix_*", "triton_spl_*", "triton_for_*")
def fused(call: OpCall) -> Cost:
    """Each argument's distinct elements once; of a table that is looked up, the rows picked."""
    arguments = [checked(arg) for arg in call.inputs if isinstance(arg, Tensor) and arg.shape]
    if not arguments:
        raise Unknown("arguments not recorded")
    largest = max(arguments, key=lambda arg: arg.numel)
    written = [arguments.pop()]
    if _NORM_GRADIENT.search(call.name) and sum(arg.shape == largest.shape for arg in arguments) > 2:
        last = max(at for at, arg in enumerate(arguments) if arg.shape == largest.shape)
        written.append(arguments.pop(last))
    looked_up = _LOOK_UP.search(call.name) is not None
    picks = (
        max((arg.numel for arg in [*arguments, *written] if arg.dtype in ("int64", "int32")), default=0)
        if looked_up
        else 0
    )
    flops = float(flops_per_element(call.name) * min(largest.numel, _rows_picked(largest, picks)))
    return Cost(
        flops,
        sum(_read(arg, picks) for arg in arguments),
        sum(min(_read(arg, picks), arg.numel * itemsize(arg.dtype)) for arg in written),
        "vector_fp64" if largest.dtype == "fp64" else vector_pipe("fp32", flops),
    )


def _rows_picked(arg: Tensor, picks: int) -> float:
    """Elements of as many rows as there are indices; all of them where nothing is looked up."""
    return picks * arg.shape[-1] if picks and len(arg.shape) == 2 else arg.numel


def _read(arg: Tensor, picks: int) -> float:
    return min(footprint(arg), _rows_picked(arg, picks) * itemsize(arg.dtype))


@cost("triton_tem_*")
def template(call: OpCall) -> Cost:
    """A matrix product: two matrices and a result whose sizes agree; epilogues are not counted."""
    if "flex_attention" in call.name:
        raise Unknown("its mask is code")
    arguments = [checked(arg) for arg in call.inputs if isinstance(arg, Tensor) and len(arg.shape) >= 2]
    if len(arguments) < 3:
        raise Unknown("arguments not recorded")
    a, b, out = arguments[0], arguments[1], arguments[-1]
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = a.numel // (m * k)
    if b.shape[-2] != k or b.numel != batch * k * n or out.numel != batch * m * n:
        raise Unknown("the template's sizes are not those of a product")
    read = sum(footprint(arg) for arg in arguments[:-1])
    pipe = {"fp16": "tensor_fp16", "bf16": "tensor_bf16", "fp8": "tensor_fp8", "int8": "tensor_int8"}.get(
        a.dtype
    )
    if pipe is None:
        pipe = "tensor_tf32" if call.settings.get("allow_tf32_matmul") is True else "vector_fp32"
    return Cost(2.0 * batch * m * n * k, read, out.numel * itemsize(out.dtype), pipe)
