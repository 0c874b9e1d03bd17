"""Recurrent layers of cuDNN and MIOpen: the gates' matrix products dominate."""

from __future__ import annotations

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import Unknown, flag, footprint, integer, itemsize, tensor, text, vector_pipe
from advisor.roofline.costs.conventions import SIGMOID, TANH
from advisor.roofline.costs.model import Cost, OpCall
from advisor.roofline.costs.registry import cost

#: Gate matrices by cuDNN's mode: RNN with ReLU, with tanh, LSTM, GRU.
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


def _weights(hidden: int, inputs: int, gates: int, layers: int, directions: int) -> int:
    """Elements of all gate matrices: from the input (or the layer below) and from the state before."""
    first = directions * gates * hidden * (inputs + hidden)
    above = (layers - 1) * directions * gates * hidden * (hidden * directions + hidden)
    return first + above


@cost("aten::_cudnn_rnn", "aten::miopen_rnn")
def forward(call: OpCall) -> Cost:
    """Two FLOPs for each weight, at each step of each sequence; weights are read once.

    Arguments: input, weights, stride, [buffer,] hx, cx, mode, hidden size, [projection,] layers, batch first,
    ...
    """
    x = tensor(call, 0)
    has_projection = "cudnn" in call.name
    mode_at = 6 if has_projection else 5
    if text(call, mode_at) not in ("0", "1", "2", "3") or len(x.shape) != 3:
        raise Unknown("mode or packed sizes not recorded")
    hidden, layers = integer(call, mode_at + 1), integer(call, mode_at + (3 if has_projection else 2))
    directions = 2 if flag(call, mode_at + (7 if has_projection else 6)) else 1
    gates = _GATES[integer(call, mode_at)]
    steps = x.shape[0] * x.shape[1]
    weights = _weights(hidden, x.shape[2], gates, layers, directions)
    width = itemsize(x.dtype)
    flops = 2.0 * steps * weights + steps * hidden * directions * layers * (2 * SIGMOID + TANH)
    pipe = roles.matrix_pipe(
        call.launches[0].name if call.launches else "", x.dtype, call.settings, "allow_tf32_cudnn"
    )
    return Cost(flops, footprint(x) + weights * width, steps * hidden * directions * width, pipe)


@cost("aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_gru_cell")
def cell(call: OpCall) -> Cost:
    """The elementwise part of a cell: reads both products and the state, writes the new state."""
    a, b, state = tensor(call, 0), tensor(call, 1), tensor(call, 2)
    gates = 4 if "lstm" in call.name else 3
    units = a.numel // gates
    written = units * itemsize(a.dtype) * (2 + gates if gates == 4 else 1 + 5)
    flops = float(units * (3 * SIGMOID + 2 * TANH if gates == 4 else 2 * SIGMOID + TANH))
    return Cost(flops, footprint(a) + footprint(b) + footprint(state), written, vector_pipe(a.dtype))
