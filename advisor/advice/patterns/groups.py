"""What a pattern is: calls that one kernel could do, and which operators are of which kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from advisor.advice.calls import Product, Unit
from advisor.roofline.costs import DTYPE_BYTES

#: Operators that change the dtype.
CASTS = frozenset({"to", "_to_copy", "type_as", "float", "copy"})
#: Operators, by name without ``aten::``, of each kind.
SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
NORMS = frozenset({"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm"})
ACTIVATIONS = frozenset({"silu", "gelu", "sigmoid", "relu", "tanh", "mish", "elu", "leaky_relu", "hardswish"})
#: What rearranges a tensor, by a view or a copy.
REARRANGING = frozenset({"reshape", "contiguous", "clone", "view", "transpose", "permute", "_unsafe_view"})
#: Pointwise operators that may read a second tensor of the same size.
BINARY = frozenset({
    "add", "sub", "mul", "div", "where", "addcmul", "addcdiv", "lerp", "maximum", "minimum",
})  # fmt: skip
ARITHMETIC = frozenset({
    "add", "sub", "rsub", "mul", "div", "pow", "square", "neg", "abs", "exp", "log", "sqrt", "rsqrt",
    "reciprocal", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "where", "masked_fill", "addcmul",
    "addcdiv", "lerp", "sin", "cos", "erf", "softplus", "log1p", "expm1",
})  # fmt: skip
POINTWISE = ARITHMETIC | ACTIVATIONS | CASTS | {"dropout", "native_dropout", "glu", "prelu"}
REDUCING = frozenset({"mean", "var", "var_mean", "sum", "std", "linalg_vector_norm", "norm", "amax"})


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Calls of one step that one kernel could do, with their gradients.

    Attributes:
        kind: a key of `advisor.advice.patterns.find.FINDERS`.
        what: how a reader would name it: ``"add → gelu → layer_norm"``.
        units: in program order.
        elements: of the tensor that it works on.
        width: elements of a row, where it works on rows; 0 elsewhere.
        bytes_in, bytes_out: bytes an element of what goes in and comes out; None where not recorded.
        extra_inputs: tensors of that size which are read besides the first.
    """

    kind: str
    what: str
    units: Sequence[Unit]
    elements: int
    width: int = 0
    bytes_in: float | None = None
    bytes_out: float | None = None
    extra_inputs: int = 0

    @property
    def forward(self) -> list[int]:
        """Rows of the forward."""
        return [row for unit in self.units for row in unit.forward]

    @property
    def backward(self) -> list[int]:
        """Rows of the gradients."""
        return [row for unit in self.units for row in unit.backward]

    @property
    def rows(self) -> list[int]:
        """All rows."""
        return self.forward + self.backward

    @property
    def forward_bytes(self) -> float:
        """What one kernel would have to move: inputs once, the result once."""
        read, written = self._widths
        return self.elements * (read * (1 + self.extra_inputs) + written)

    @property
    def _widths(self) -> tuple[float, float]:
        """Bytes an element of input and result; 16 bits where not recorded."""
        return (
            2.0 if self.bytes_in is None else self.bytes_in,
            2.0 if self.bytes_out is None else self.bytes_out,
        )

    @property
    def backward_bytes(self) -> float:
        """For the gradients: the result's gradient and the inputs once, the inputs' gradients once."""
        read, written = self._widths
        return self.elements * (written + 2 * read * (1 + self.extra_inputs))


@dataclass(frozen=True, slots=True, eq=False)
class Attention(Group):
    """Attention written out as two products around a softmax.

    Attributes:
        scores: the product of queries and keys.
        values: the product of weights and values.
        causal: whether a triangular mask is seen.
        masked: whether any mask is.
        dropout: whether weights are dropped.
        dtype: of the products.
        split: what split one projection into queries, keys and values, or None. Its gradient concatenates
            theirs, which is slow where they are transposed.
    """

    scores: Product = field(kw_only=True)
    values: Product = field(kw_only=True)
    causal: bool = field(kw_only=True)
    masked: bool = field(kw_only=True)
    dropout: bool = field(kw_only=True)
    dtype: str = field(kw_only=True)
    split: Unit | None = field(kw_only=True, default=None)


def ends_in_norm(group: Group) -> bool:
    """Whether a chain needs whole rows: it ends in a norm or a softmax."""
    return group.units[-1].name in NORMS | SOFTMAX


def bytes_of(dtype: str) -> float | None:
    """Bytes an element takes; None for a dtype that is not known."""
    return DTYPE_BYTES.get(dtype)


def score_entries(group: Attention) -> float:
    """Entries of the scores that are needed: half of them below a triangular mask."""
    entries = float(group.scores.results)
    return entries / 2 if group.causal and group.scores.m > 1 else entries
