"""Linear layers as autograd functions that call their library without an operator around each kernel.

Transformer Engine's ``_Linear``, ``_LayerNormLinear`` and ``_LayerNormMLP`` (``pytorch/module/*.py``) and
Apex' ``FusedDenseFunc`` (``apex/fused_dense``). The profiler records an autograd function's tensors, but few
of its settings; a backward call records gradients alone, and takes the sizes of its forward call. Matrix
kernels are told apart by their number and order; what a kernel beside them does, by its name, and where more
than one tensor could be meant it has no cost. Transformer Engine's fused attention is not here: its layout
and its mask are texts, which are not recorded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import Unknown, checked, itemsize, tensor
from advisor.roofline.costs.conventions import GELU
from advisor.roofline.costs.matmul import product
from advisor.roofline.costs.model import Arg, Cost, Launch, OpCall, Tensor
from advisor.roofline.costs.registry import Result, cost, total

#: The family of operators that these count under.
FAMILY = "matmul"

_NORM = re.compile(r"(ln|rmsnorm|layer_?norm)_?(fwd|forward|bwd|backward)", re.I)
_ACTIVATION = re.compile(r"gelu|swiglu|geglu|relu|gated|act_kernel", re.I)
_CAST = re.compile(r"cast|quantize", re.I)


@dataclass(frozen=True)
class _Product:
    """``m x k`` by ``k x n``."""

    m: int
    k: int
    n: int

    def gradients(self) -> tuple[_Product, _Product]:
        """That of the input, then that of the weight."""
        return _Product(self.m, self.n, self.k), _Product(self.n, self.m, self.k)


def _tensors(arguments: Sequence[Arg]) -> list[Tensor]:
    """The tensors among recorded arguments, in order; what is left out is no tensor."""
    return [checked(arg) for arg in arguments if isinstance(arg, Tensor) and arg.shape]


def _linear(x: Tensor, weight: Tensor) -> _Product:
    if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1]:
        raise Unknown("weight and input contradict each other")
    return _Product(x.numel // x.shape[-1], x.shape[-1], weight.shape[0])


def _layers(name: str, arguments: Sequence[Arg]) -> tuple[Tensor, list[_Product]]:
    """Input and products of a forward call, by the shapes of its tensors: some versions have more of them."""
    found = _tensors(arguments)
    if not found:
        raise Unknown("tensors not recorded")
    if name in ("_Linear", "FusedDenseFunc"):
        matrices = [arg for arg in found if len(arg.shape) >= 2]
        if name == "_Linear":
            # The weight comes first, maybe with copies of it.
            weight = matrices[0]
            x = next((arg for arg in matrices[1:] if arg.shape != weight.shape), matrices[-1])
        else:
            x, weight = matrices[:2]
        if len(matrices) < 2:
            raise Unknown("weight or input not recorded")
        return x, [_linear(x, weight)]
    x = found[0]
    weights = [arg for arg in found[1:] if len(arg.shape) == 2]
    first = next((arg for arg in weights if arg.shape[1] == x.shape[-1]), None)
    if first is None:
        raise Unknown("weight not recorded")
    layers = [_linear(x, first)]
    if name == "_LayerNormMLP":
        rows, inner = layers[0].m, first.shape[0]
        second = next(
            (arg for arg in weights if arg is not first and arg.shape[1] in (inner, inner // 2)), None
        )
        if second is None:
            raise Unknown("second weight not recorded")
        layers.append(_Product(rows, second.shape[1], second.shape[0]))
    return x, layers


def _costs(call: OpCall, x: Tensor, products: list[_Product], beside: dict[str, Cost]) -> Result:
    """The products in order to the matrix kernels, if there are as many; others by what they are."""
    matrix = [launch for launch in call.launches if roles.is_matrix(launch.name)]
    if call.launches and len(matrix) != len(products):
        raise Unknown("not a kernel for each product")
    if not call.launches:
        return total([_of_kernel(call, None, x.dtype, sizes) for sizes in products])
    each = [_of_kernel(call, launch, x.dtype, sizes) for launch, sizes in zip(matrix, products, strict=True)]
    shares = iter(each)
    return tuple(
        next(shares) if roles.is_matrix(launch.name) else beside.get(_kind(launch.name))
        for launch in call.launches
    )


def _of_kernel(call: OpCall, launch: Launch | None, dtype: str, sizes: _Product) -> Cost | None:
    is_fp8 = launch is not None and roles.matrix_pipe(launch.name, dtype, call.settings) == "tensor_fp8"
    operand = "fp8" if is_fp8 else dtype
    one = OpCall("", launches=(launch,) if launch else (), settings=call.settings)
    found = product(
        one, Tensor((sizes.m, sizes.k), operand), Tensor((sizes.k, sizes.n), operand),
        sizes.m, sizes.n, sizes.k, out_dtype=dtype,
    )  # fmt: skip
    return found[0] if isinstance(found, tuple) else found


def _kind(kernel: str) -> str:
    if _NORM.search(kernel):
        return "norm"
    if _CAST.search(kernel):
        return "cast"
    return "activation" if _ACTIVATION.search(kernel) else ""


def _cast(launches: Sequence[Launch], of: Tensor) -> dict[str, Cost]:
    """The one cast to fp8 that can only be of this tensor; with its transpose it is written twice."""
    casts = [launch for launch in launches if _kind(launch.name) == "cast"]
    if len(casts) != 1:
        return {}
    copies = 2 if "transpose" in casts[0].name.lower() else 1
    return {
        "cast": Cost(float(of.numel), of.numel * itemsize(of.dtype), float(copies * of.numel), "vector_fp32")
    }


def _size(x: Tensor) -> float:
    return x.numel * itemsize(x.dtype)


@cost("_Linear", "FusedDenseFunc", "_LayerNormLinear", "_LayerNormMLP")
def forward(call: OpCall) -> Result:
    """``x w^T + b``, after a norm, and twice with an activation between for the MLP."""
    x, layers = _layers(call.name, call.inputs)
    inner = layers[0].m * layers[0].n * itemsize(x.dtype)
    beside = {"norm": Cost(float(6 * x.numel), _size(x), _size(x), "vector_fp32")}
    if len(layers) == 2:
        out = layers[1].m * layers[1].k
        beside["activation"] = Cost(float(GELU * out), inner, out * itemsize(x.dtype), "vector_fp32")
    return _costs(call, x, layers, beside)


@cost("_LinearBackward", partner="_Linear")
@cost("_LayerNormLinearBackward", partner="_LayerNormLinear")
@cost("_LayerNormMLPBackward", partner="_LayerNormMLP")
def backward(call: OpCall) -> Result:
    """From the last layer to the first, the input's gradient before the weight's; the norm's at the end."""
    grad = tensor(call, 0)
    x, layers = _layers(call.name.removesuffix("Backward"), call.partner)
    if grad.numel != layers[-1].m * layers[-1].n:
        raise Unknown("the gradient is not that of the result")
    products = [one for layer in reversed(layers) for one in layer.gradients()]
    beside = {"norm": Cost(float(13 * x.numel), 2 * _size(x), _size(x), "vector_fp32")}
    if len(layers) == 1:
        beside |= _cast(call.launches, grad)
    else:
        inner, out = layers[0].m * layers[0].n, layers[1].m * layers[1].k
        width = itemsize(x.dtype)
        moved = Cost(float(2 * GELU * out), (inner + out) * width, inner * width, "vector_fp32")
        beside["activation"] = moved
    return _costs(call, x, products, beside)


@cost("FusedDenseFuncBackward", partner="FusedDenseFunc")
def dense_backward(call: OpCall) -> Result:
    """Apex makes the weight's gradient first (``csrc/fused_dense_cuda.cu``)."""
    x, layers = _layers("FusedDenseFunc", call.partner)
    return _costs(call, x, list(reversed(layers[0].gradients())), {})
