"""Recurrent layers of cuDNN and MIOpen: the gates' matrix products dominate.

cuDNN multiplies the inputs of all steps at once, then the state step by step. Its backward goes back step by
step, then makes the input's gradient, and last the weights' (the first step's state, the other steps' states,
the inputs).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import Unknown, flag, footprint, integer, itemsize, tensor, text, vector_pipe
from advisor.roofline.costs.conventions import SIGMOID, TANH
from advisor.roofline.costs.model import Cost, Launch, OpCall
from advisor.roofline.costs.registry import Result, cost, split
from advisor.roofline.costs.tiles import product_padding

#: Gate matrices by cuDNN's mode: RNN with ReLU, with tanh, LSTM, GRU.
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


@dataclass(frozen=True)
class _Network:
    """Sizes of a call: of `inputs` the first layer's, of those above the states below in all directions."""

    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int
    directions: int
    gates: int
    width: float
    dtype: str

    @property
    def rows(self) -> int:
        return self.steps * self.batch

    @property
    def gate_rows(self) -> int:
        return self.gates * self.hidden

    def layer_inputs(self, layer: int) -> int:
        return self.hidden * self.directions if layer else self.inputs

    @property
    def weights(self) -> int:
        """Elements of all gate matrices: from the input (or the layer below) and from the state before."""
        return sum(
            self.directions * self.gate_rows * (self.layer_inputs(layer) + self.hidden)
            for layer in range(self.layers)
        )


def _network(call: OpCall, mode_at: int, has_projection: bool) -> _Network:
    x = tensor(call, 0)
    if text(call, mode_at) not in ("0", "1", "2", "3") or len(x.shape) != 3:
        raise Unknown("mode or packed sizes not recorded")
    after = mode_at + (3 if has_projection else 2)
    first_is_batch = flag(call, after + 1)
    steps, batch = (x.shape[1], x.shape[0]) if first_is_batch else (x.shape[0], x.shape[1])
    return _Network(
        steps,
        batch,
        x.shape[2],
        integer(call, mode_at + 1),
        integer(call, after),
        2 if flag(call, after + 4) else 1,
        _GATES[integer(call, mode_at)],
        itemsize(x.dtype),
        x.dtype,
    )


@cost("aten::_cudnn_rnn", "aten::miopen_rnn")
def forward(call: OpCall) -> Result:
    """Two FLOPs for each weight, at each step of each sequence; weights are read once, or once a step.

    Arguments: input, weights, stride, [buffer,] hx, cx, mode, hidden size, [projection,] layers, batch first,
    dropout, train, bidirectional, ...
    """
    has_projection = "cudnn" in call.name
    net = _network(call, 6 if has_projection else 5, has_projection)
    units = net.rows * net.hidden * net.directions * net.layers
    flops = 2.0 * net.rows * net.weights + units * (2 * SIGMOID + TANH)
    read = footprint(tensor(call, 0)) + net.weights * net.width
    written = net.rows * net.hidden * net.directions * net.width
    products = [
        product
        for layer in range(net.layers)
        for _ in range(net.directions)
        for product in (
            (net.rows, net.layer_inputs(layer), net.gate_rows),
            *[(net.batch, net.hidden, net.gate_rows)] * net.steps,
        )
    ]
    return _by_kernel(call, net, products, Cost(flops, read, written, _pipe(call, net, "")))


@cost("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward")
def backward(call: OpCall) -> Result:
    """Twice the products of the forward: gradients of inputs and states, and of the weights.

    Arguments: input, weights, stride, weight buffer, hx, cx, output, its gradient, those of hy and cy, mode,
    ...
    """
    has_projection = "cudnn" in call.name
    net = _network(call, 10, has_projection)
    flops = 4.0 * net.rows * net.weights
    size_x = footprint(tensor(call, 0))
    gates = net.rows * net.gate_rows * net.directions * net.layers * net.width
    whole = Cost(
        flops, 2 * size_x + gates + net.weights * net.width, size_x + net.weights * net.width,
        _pipe(call, net, ""),
    )  # fmt: skip
    later = (net.gate_rows, net.batch * (net.steps - 1), net.hidden)
    products = [
        product
        for layer in reversed(range(net.layers))
        for _ in range(net.directions)
        for product in (
            *[(net.batch, net.gate_rows, net.hidden)] * net.steps,
            (net.rows, net.gate_rows, net.layer_inputs(layer)),
            (net.gate_rows, net.batch, net.hidden),
            *([later] if net.steps > 1 else []),
            (net.gate_rows, net.rows, net.layer_inputs(layer)),
        )
    ]
    return _by_kernel(call, net, products, whole)


def _by_kernel(call: OpCall, net: _Network, products: list[tuple[int, int, int]], whole: Cost) -> Result:
    """Matrix kernels take the products in order if there are as many, else they share the whole."""
    if not call.launches:
        return whole
    matrix = [launch for launch in call.launches if roles.is_matrix(launch.name)]
    if len(matrix) == len(products):
        costs = iter(
            [_product(call, net, launch, *sizes) for launch, sizes in zip(matrix, products, strict=True)]
        )
    else:
        main = matrix or [launch for launch in call.launches if _is_persistent(launch)]
        if not main:
            raise Unknown("no matrix kernel among the launches")
        pipe = _pipe(call, net, main[0].name)
        costs = iter(split(Cost(whole.flops, whole.bytes_read, whole.bytes_written, pipe), main))
        matrix = main
    return tuple(next(costs) if launch in matrix else _beside(launch, net) for launch in call.launches)


def _is_persistent(launch: Launch) -> bool:
    return re.search(r"persist|rnn_", launch.name, re.I) is not None


def _pipe(call: OpCall, net: _Network, kernel: str) -> str:
    return roles.matrix_pipe(kernel, net.dtype, call.settings, "allow_tf32_cudnn")


def _product(call: OpCall, net: _Network, launch: Launch, m: int, k: int, n: int) -> Cost:
    padding = product_padding(launch.name, m, n, k)
    return Cost(
        2.0 * m * n * k + padding,
        (m * k + k * n) * net.width,
        m * n * net.width,
        _pipe(call, net, launch.name),
        flops_padding=padding,
    )


def _beside(launch: Launch, net: _Network) -> Cost:
    """Kernels for a step's gates, for the biases' gradients, for weights' layouts and for split sums."""
    gates = net.batch * net.gate_rows
    role = roles.role(launch.name)
    if role == "sum_partials":
        units = net.batch * net.hidden
        return Cost(float(units), 2 * 4.0 * units, units * net.width, "vector_fp32")
    if re.search(r"region_transform", launch.name) or role == "layout":
        moved = net.gate_rows * net.hidden * net.width
        return Cost(0.0, moved, moved, "none")
    if re.search(r"bp2", launch.name):
        return Cost(float(net.steps * gates), net.steps * gates * net.width, 0.0, vector_pipe(net.dtype))
    units = net.batch * net.hidden
    return Cost(
        float(units * (2 * SIGMOID + TANH)), 2 * gates * net.width, (gates + units) * net.width,
        vector_pipe(net.dtype),
    )  # fmt: skip


@cost("aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_gru_cell")
def cell(call: OpCall) -> Cost:
    """The elementwise part of a cell: reads both products and the state, writes the new state."""
    a, b, state = tensor(call, 0), tensor(call, 1), tensor(call, 2)
    gates = 4 if "lstm" in call.name else 3
    units = a.numel // gates
    written = units * itemsize(a.dtype) * (2 + gates if gates == 4 else 1 + 5)
    flops = float(units * (3 * SIGMOID + 2 * TANH if gates == 4 else 2 * SIGMOID + TANH))
    return Cost(flops, footprint(a) + footprint(b) + footprint(state), written, vector_pipe(a.dtype))
