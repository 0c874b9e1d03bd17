"""One name for each operation, whatever it was spelled as in the graph that Dynamo hands over.

Dynamo keeps the user's spelling: ``x @ y``, ``torch.matmul(x, y)`` and ``x.bmm(y)`` are three different
nodes. `read` gives them one name and names their arguments, so that patterns are written once. Operations
that it does not know have no name, and no pattern looks through them.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

_REQUIRED = object()


@dataclass(frozen=True)
class Call:
    """A node, read: the operation's name here and its arguments by name.

    Attributes:
        op: of `_TABLE`.
        args: defaults filled in.
        in_place: writes into its first argument.
    """

    op: str
    args: dict[str, Any]
    in_place: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    @property
    def input(self) -> Any:
        """The first argument."""
        return next(iter(self.args.values()))


#: Name; parameters, as ``name`` or ``name=default``, ``*name`` for what methods take spread; other
#: functions and methods of that meaning. The function ``torch.<name>`` and the methods ``<name>`` and
#: ``<name>_`` are always so.
_TABLE: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("add", "input other alpha=1", (operator.add, "__add__", "__radd__")),
    ("sub", "input other alpha=1", (operator.sub, "__sub__", torch.subtract, "subtract")),
    ("rsub", "other input alpha=1", ("__rsub__", torch.rsub)),
    ("mul", "input other", (operator.mul, "__mul__", "__rmul__", torch.multiply, "multiply")),
    ("div", "input other rounding_mode=None", (operator.truediv, "__truediv__", torch.divide, "divide",
                                               torch.true_divide, "true_divide")),
    ("pow", "input exponent", (operator.pow, "__pow__")),
    ("neg", "input", (operator.neg, "__neg__", torch.negative, "negative")),
    ("sqrt", "input", ()),
    ("rsqrt", "input", ()),
    ("square", "input", ()),
    ("reciprocal", "input", ()),
    ("tanh", "input", (F.tanh,)),
    ("erf", "input", (torch.special.erf,)),
    ("sigmoid", "input", (F.sigmoid,)),
    ("relu", "input inplace=False", (F.relu,)),
    ("silu", "input inplace=False", (F.silu,)),
    ("gelu", "input approximate='none'", (F.gelu,)),
    ("softmax", "input dim=None _stacklevel=3 dtype=None", (F.softmax,)),
    ("log_softmax", "input dim=None _stacklevel=3 dtype=None", (F.log_softmax,)),
    ("dropout", "input p=0.5 training=True inplace=False", (F.dropout,)),
    ("matmul", "input other", (operator.matmul, "__matmul__", torch.bmm, "bmm", torch.mm, "mm")),
    ("baddbmm", "bias input other beta=1 alpha=1", ()),
    ("einsum", "equation *operands", ()),
    ("linear", "input weight bias=None", (F.linear,)),
    ("transpose", "input dim0 dim1", (torch.swapaxes, "swapaxes", torch.swapdims, "swapdims")),
    ("t", "input", ()),
    ("mT", "input", ()),
    ("permute", "input *dims", ()),
    ("reshape", "input *shape", ("view",)),
    ("flatten", "input start_dim=0 end_dim=-1", ()),
    ("unflatten", "input dim sizes", ()),
    ("unsqueeze", "input dim", ()),
    ("squeeze", "input dim=None", ()),
    ("expand", "input *sizes", ()),
    ("repeat", "input *sizes", ()),
    ("repeat_interleave", "input repeats dim=None output_size=None", ()),
    ("contiguous", "input memory_format=None", ()),
    ("clone", "input memory_format=None", ()),
    ("masked_fill", "input mask value", ()),
    ("where", "condition input other", ()),
    ("mean", "input dim=None keepdim=False dtype=None", ()),
    ("sum", "input dim=None keepdim=False dtype=None", ()),
    ("var", "input dim=None unbiased=None keepdim=False correction=None", ()),
    ("layer_norm", "input normalized_shape weight=None bias=None eps=1e-05", (F.layer_norm,)),
    ("rms_norm", "input normalized_shape weight=None eps=None", (F.rms_norm,)),
    ("group_norm", "input num_groups weight=None bias=None eps=1e-05", (F.group_norm,)),
    ("conv1d", "input weight bias=None stride=1 padding=0 dilation=1 groups=1", (F.conv1d,)),
    ("conv2d", "input weight bias=None stride=1 padding=0 dilation=1 groups=1", (F.conv2d,)),
    ("conv3d", "input weight bias=None stride=1 padding=0 dilation=1 groups=1", (F.conv3d,)),
    ("cross_entropy", "input target weight=None size_average=None ignore_index=-100 reduce=None "
                      "reduction='mean' label_smoothing=0.0", (F.cross_entropy,)),
    ("nll_loss", "input target weight=None size_average=None ignore_index=-100 reduce=None reduction='mean'",
     (F.nll_loss,)),
    ("sdpa", "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False",
     (F.scaled_dot_product_attention,)),
    ("cat", "tensors dim=0", (torch.concat, torch.concatenate)),
    ("stack", "tensors dim=0", ()),
    ("chunk", "input chunks dim=0", ()),
    ("split", "input sizes dim=0", ("split_with_sizes",)),
    ("getitem", "input index", (operator.getitem, "__getitem__")),
    ("view_as_complex", "input", ()),
    ("view_as_real", "input", ()),
    ("detach", "input", ()),
    ("ones", "*size", ()),
    ("zeros", "*size", ()),
    ("full", "size fill_value", ()),
    ("arange", "start end=None step=1", ()),
    ("tensor", "data", (torch.as_tensor,)),
    ("ones_like", "input", ()),
    ("zeros_like", "input", ()),
    ("full_like", "input fill_value", ()),
    ("new_ones", "input *size", ()),
    ("new_zeros", "input *size", ()),
    ("new_full", "input size fill_value", ()),
    ("tril", "input diagonal=0", ()),
    ("triu", "input diagonal=0", ()),
    ("eq", "input other", (operator.eq, "__eq__")),
    ("ne", "input other", (operator.ne, "__ne__", torch.not_equal)),
    ("lt", "input other", (operator.lt, "__lt__", torch.less)),
    ("le", "input other", (operator.le, "__le__", torch.less_equal)),
    ("gt", "input other", (operator.gt, "__gt__", torch.greater)),
    ("ge", "input other", (operator.ge, "__ge__", torch.greater_equal)),
    ("not", "input", (operator.invert, "__invert__", torch.logical_not, "logical_not",
                      torch.bitwise_not, "bitwise_not")),
    ("and", "input other", (operator.and_, "__and__", torch.logical_and, "logical_and", torch.bitwise_and)),
    ("or", "input other", (operator.or_, "__or__", torch.logical_or, "logical_or", torch.bitwise_or)),
)  # fmt: skip

#: Methods that change the dtype alone; what to, the node's value says.
_CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "long", "int", "bool")
#: ``x += y`` and its kin.
_AUGMENTED = {
    operator.iadd: "add", operator.isub: "sub", operator.imul: "mul", operator.itruediv: "div",
    operator.ipow: "pow",
}  # fmt: skip
_OTHER_NAMES = {
    "dim": ("axis", "dims"), "keepdim": ("keepdims",), "input": ("x", "self"), "training": ("train",),
    "sizes": ("split_size_or_sections", "split_size", "size"), "dims": ("dim",), "shape": ("size",),
    "start": ("end",),
}  # fmt: skip


def _parameters(text: str) -> list[tuple[str, Any]]:
    found = []
    for word in text.split():
        name, _, default = word.partition("=")
        found.append((name, ast.literal_eval(default) if default else _REQUIRED))
    return found


def _names() -> tuple[dict[Any, str], dict[str, str], dict[str, list[tuple[str, Any]]]]:
    functions: dict[Any, str] = {}
    methods: dict[str, str] = {}
    parameters: dict[str, list[tuple[str, Any]]] = {}
    for name, words, spellings in _TABLE:
        parameters[name] = _parameters(words)
        functions.setdefault(getattr(torch, name, None), name)
        methods[name] = name
        for spelling in spellings:
            (methods if isinstance(spelling, str) else functions)[spelling] = name
    functions.pop(None, None)
    return functions, methods, parameters


_FUNCTIONS, _METHODS, _PARAMETERS = _names()


def read(node: Any) -> Call | None:
    """The node under its one name, or None for what is no operation known here."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    cached = node.meta.get("_advisor_call", _REQUIRED)
    if cached is _REQUIRED:
        cached = node.meta["_advisor_call"] = _read(node)
    return cached


def _read(node: Node) -> Call | None:
    name, in_place = _name(node)
    if name is None or "out" in node.kwargs:
        return None
    if name == "cast":
        return Call("cast", {"input": node.args[0] if node.args else node.kwargs.get("input")})
    bound = _bind(name, node.args, dict(node.kwargs))
    if bound is None:
        return None
    if name == "rsub":
        return Call("sub", {"input": bound["input"], "other": bound["other"], "alpha": bound["alpha"]})
    if name == "arange" and bound["end"] is None:
        bound = {"start": 0, "end": bound["start"], "step": 1}
    return Call(name, bound, in_place or bound.get("inplace") is True)


def _name(node: Node) -> tuple[str | None, bool]:
    target = node.target
    if isinstance(target, str):
        if target in _CASTS:
            return "cast", False
        if target in _METHODS:
            return _METHODS[target], False
        bare = target[:-1]
        if target.endswith("_") and not target.endswith("__") and bare in _METHODS:
            return _METHODS[bare], True
        return None, False
    try:
        if target in _AUGMENTED:
            return _AUGMENTED[target], True
        if target is getattr and len(node.args) == 2 and node.args[1] in ("mT", "T"):
            return "t" if node.args[1] == "T" else "mT", False
        return _FUNCTIONS.get(target), False
    except TypeError:
        return None, False


def _bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    bound: dict[str, Any] = {}
    rest = list(args)
    if name in ("t", "mT"):
        rest = rest[:1]
    if name == "split" and "split_size_or_sections" in kwargs:
        kwargs["sizes"] = kwargs.pop("split_size_or_sections")
    for parameter, default in _PARAMETERS[name]:
        if parameter.startswith("*"):
            parameter = parameter[1:]
            if not rest:
                spread = next(
                    (kwargs.pop(n) for n in (parameter, *_OTHER_NAMES.get(parameter, ())) if n in kwargs), ()
                )
            else:
                spread = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
            bound[parameter] = tuple(spread) if isinstance(spread, (tuple, list)) else (spread,)
            rest = []
            continue
        if rest:
            bound[parameter] = rest.pop(0)
            continue
        known = next((n for n in (parameter, *_OTHER_NAMES.get(parameter, ())) if n in kwargs), None)
        if known is not None:
            bound[parameter] = kwargs.pop(known)
        elif default is _REQUIRED:
            return None
        else:
            bound[parameter] = default
    # More arguments than are known of (a bool for `correction`, say) would be lost.
    if rest:
        return None
    bound.update({k: v for k, v in kwargs.items() if k in ("dtype", "device")})
    unknown = set(kwargs) - {
        "dtype",
        "device",
        "requires_grad",
        "layout",
        "pin_memory",
        "copy",
        "memory_format",
    }
    return None if unknown else bound


def is_op(node: Any, *names: str) -> bool:
    """Whether the node is one of these operations."""
    call = read(node)
    return call is not None and call.op in names


def function_name(target: Callable[..., Any] | str) -> str:
    """A target as a reader would write it."""
    if isinstance(target, str):
        return target
    return getattr(target, "__name__", None) or str(target)


def forget(nodes: Iterable[Node]) -> None:
    """Drop what `read` keeps on nodes."""
    for node in nodes:
        node.meta.pop("_advisor_call", None)
