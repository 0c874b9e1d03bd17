"""What is known of a step's graph besides its operations: values, order, writes, modes, constants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .constants import Constants, kept_by_module
from .ops import forget, function_name, is_op, read

#: Results that may share memory with their first argument.
VIEWS = frozenset(
    [
        "transpose",
        "t",
        "mT",
        "permute",
        "reshape",
        "flatten",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "expand",
        "contiguous",
        "detach",
        "getitem",
        "chunk",
        "split",
        "view_as_complex",
        "view_as_real",
        "cast",
    ]
)


#: What changes a value's dtype or place alone.
_COPIES = ("cast", "contiguous", "clone")


@dataclass(frozen=True)
class Refusal:
    """Why something that looks like a pattern was left alone.

    Attributes:
        pattern: which.
        where: ``file.py:12``.
        why: in one line.
    """

    pattern: str
    where: str
    why: str


class Facts:
    """A torch-level graph as Dynamo hands it over, read once.

    One thing is changed in the graph, and none in what it computes: what reads a tensor after a write in
    place reads the write's result, which is the same tensor.

    Args:
        gm: the graph; nodes carry fake tensors as ``example_value``.
        inputs: what stands for its placeholders, in order: real tensors where they are known.
    """

    def __init__(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        self.gm = gm
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self._read_results_of_writes()
        self.refusals: list[Refusal] = []
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        self.constants = Constants(dict(zip(placeholders, inputs, strict=False)))
        self._roots: dict[Node, Node] = {}
        self._writes: dict[Node, list[int]] = {}
        self.opaque: set[Node] = set()
        self._modes: dict[Node, tuple[Any, ...]] = {}
        self._read_modes()
        self._read_writes()
        written = {self._roots[self.nodes[i]] for i in self._opaque_writes()}
        self.constants.leave_out(n for n in self.nodes if self._roots[n] in written)

    def shape(self, node: Any) -> tuple[Any, ...] | None:
        """The node's shape, or None where it is no tensor; sizes that vary are symbols."""
        value = fake(node)
        return None if value is None else tuple(value.shape)

    def dtype(self, node: Any) -> torch.dtype | None:
        """The node's dtype, or None where it is no tensor."""
        value = fake(node)
        return None if value is None else value.dtype

    def number(self, value: Any) -> float | None:
        """A Python number, or the one element of a constant tensor; None for anything else."""
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, Node):
            constant = self.constants.of(value)
            if constant is not None and constant.numel() == 1 and not self.constants.sources(value):
                return float(constant)
        return None

    def refuse(self, pattern: str, node: Node, why: str) -> Any:
        """Note a near miss; gives None, so that a parser can hand it on."""
        refusal = Refusal(pattern, where(node), why)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def mode(self, node: Node) -> tuple[Any, ...]:
        """Which autocast and grad-mode blocks the node stands in; equal for nodes that run alike."""
        return self._modes[node]

    def autocast(self, node: Node) -> torch.dtype | None:
        """The dtype of autocast that is in force at the node, from inside the graph or around it."""
        value = fake(node)
        kind = value.device.type if value is not None else "cpu"
        for entry in reversed(self._modes[node]):
            if isinstance(entry, Node) and entry.args[0] == kind:
                _, dtype, enabled = (*entry.args, None, True)[:3]
                if not enabled:
                    return None
                return dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(kind)
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def written_after(self, node: Node, besides: frozenset[Node]) -> bool:
        """Whether something but `besides` writes into the node's memory once the node has its value."""
        at = self.order[node]
        return any(i > at and self.nodes[i] not in besides for i in self._writes.get(self._roots[node], ()))

    def written(self, node: Node) -> bool:
        """Whether anything in the graph writes into the node's memory."""
        return bool(self._writes.get(self._roots[node]))

    def _opaque_writes(self) -> Iterator[int]:
        """Where the nodes stand into whose memory something writes that is not as good as out of place."""
        for node in self.opaque:
            yield from (self.order[target] for target in _written(node))

    def _read_results_of_writes(self) -> None:
        for node in self.nodes:
            call = read(node)
            if call is None or not call.in_place or not isinstance(call.input, Node):
                continue
            for user in list(call.input.users):
                if self.order[user] > self.order[node]:
                    user.replace_input_with(call.input, node)
                    forget([user])

    def _read_modes(self) -> None:
        stack: list[Any] = []
        for node in self.nodes:
            self._modes[node] = tuple(stack)
            if node.op != "call_function":
                continue
            name = function_name(node.target)
            if name.startswith("_enter_") or name.endswith("_enter"):
                stack.append(node)
            elif (name.startswith("_exit_") or name.endswith("_exit")) and stack:
                stack.pop()
            elif name == "_set_grad_enabled":
                stack = [e for e in stack if not isinstance(e, str)] + [f"grad {node.args[0]}"]

    def _read_writes(self) -> None:
        for node in self.nodes:
            call = read(node)
            source = node.args[0] if node.args else None
            aliases = isinstance(source, Node) and (call is None or call.op in VIEWS)
            self._roots[node] = self._roots[source] if aliases and isinstance(source, Node) else node
            for target in _written(node):
                self._writes.setdefault(self._roots[target], []).append(self.order[node])
                if call is not None and call.in_place and self._as_if_functional(node, target):
                    self._roots[node] = node
                else:
                    self.opaque.add(node)

    def _as_if_functional(self, node: Node, target: Node) -> bool:
        """Whether a write in place differs in nothing from one that gives a new tensor.

        So it is where the graph made the memory itself and nothing reads its old value later.
        """
        root = self._roots[target]
        if root is not target or target.op in ("placeholder", "get_attr") or read(target) is None:
            return False
        if fake(node) is None or self.dtype(node) != self.dtype(target) or not _keeps_dtype(node):
            return False
        at = self.order[node]
        sharing = [n for n in self.nodes[:at] if self._roots.get(n) is root]
        return all(user is node or self.order[user] < at for n in sharing for user in n.users)


def _keeps_dtype(node: Node) -> bool:
    """Whether the operation out of place would give the same dtype as in place."""
    values = [fake(a) for a in node.args]
    dtypes = {v.dtype for v in values if v is not None and v.dtype != torch.bool and v.dim()}
    return len(dtypes) == 1


def _written(node: Node) -> Iterator[Node]:
    """The nodes into whose memory this one writes."""
    call = read(node)
    first = node.args[0] if node.args else None
    out = node.kwargs.get("out")
    if isinstance(out, Node):
        yield out
    if not isinstance(first, Node):
        return
    if call is not None:
        if call.in_place:
            yield first
    elif node.op == "call_method":
        name = str(node.target)
        if name.endswith("_") and not name.endswith("__"):
            yield first
    elif node.op == "call_function":
        name = function_name(node.target)
        schema = getattr(node.target, "_schema", None)
        if (
            name
            in ("setitem", "iadd", "isub", "imul", "itruediv", "ior", "iand", "ixor", "ifloordiv", "imod")
            or (name.endswith("_") and not name.endswith("__"))
            or node.kwargs.get("inplace") is True
        ):
            yield first
        elif schema is not None and getattr(schema, "is_mutable", False):
            yield from (a for a in node.all_input_nodes)


def fake(node: Any) -> Tensor | None:
    """The fake tensor that Dynamo found for a node."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def fake_value(node: Any) -> Any:
    """What Dynamo found for a node, tensor or not."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def where(node: Node) -> str:
    """``file.py:12`` of the code that the node stems from, with the module's path where it has one."""
    line = ""
    for text in (node.meta.get("stack_trace") or "").splitlines():
        text = text.strip()
        if text.startswith('File "'):
            path, _, rest = text[6:].partition('", line ')
            line = f"{path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
    module = module_path(node)
    if not line:
        return module or node.name
    return f"{line} ({module})" if module else line


def module_path(node: Node) -> str:
    """The path of the innermost module that the node ran in, ``blocks.0.attn``; empty at the top."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path = str(stack[-1][0])
    path = re.sub(r"^L\['\w+'\]|^self\b", "", path)
    # Under DDP, Lightning puts a method in place of the module's own, through which Dynamo then sees it.
    path = path.replace("forward.__self__.", "")
    path = re.sub(r"_modules\['([^']*)'\]|\['?([^'\]]*)'?\]", r".\1\2", path)
    return re.sub(r"\.+", ".", path).strip(".")


def hangs_on_data(node: Node) -> bool:
    """Whether a value may be another in the next batch: it hangs on more than modules keep."""
    todo, seen = [node], {node}
    while todo:
        here = todo.pop()
        if here.op == "placeholder" and not kept_by_module(here):
            return True
        fresh = [n for n in here.all_input_nodes if n not in seen]
        seen.update(fresh)
        todo += fresh
    return False


def transformed(nodes: Iterable[Node]) -> set[Node]:
    """Those that run within a transform of torch.func, whose tensors are not what they seem."""
    depth, found = 0, set()
    for node in nodes:
        name = function_name(node.target) if node.op == "call_function" else ""
        depth += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        if depth > 0:
            found.add(node)
    return found


def same_value(a: Any, b: Any) -> bool:
    """Whether two nodes surely hold the same numbers, up to casts and copies."""
    return _alike(through(a, *_COPIES), through(b, *_COPIES), 8)


def _alike(a: Any, b: Any, depth: int) -> bool:
    """The same node, or the same view of the same."""
    if a is b:
        return True
    if not isinstance(a, Node) or not isinstance(b, Node) or not depth:
        return type(a) is type(b) and not isinstance(a, Node) and a == b
    one, other = read(a), read(b)
    if one is None or other is None or one.op != other.op or one.op not in VIEWS or one.op == "cast":
        return False
    pairs = [(one.args[k], other.args.get(k)) for k in one.args]
    return all(_alike(x, y, depth - 1) for x, y in pairs)


def through(node: Any, *ops: str) -> Any:
    """The node that is left when these operations are peeled off from the outside."""
    while is_op(node, *ops):
        call = read(node)
        assert call is not None
        if call.op == "cast" and not _between_floats(call.input, node):
            return node
        node = call.input
    return node


def _between_floats(a: Any, b: Any) -> bool:
    """A cast by way of integers or bools changes the numbers, so that nobody may look through it."""
    x, y = fake(a), fake(b)
    return x is not None and y is not None and x.is_floating_point() and y.is_floating_point()


def sole_user(node: Node) -> Node | None:
    """The one node that uses this one, or None."""
    return next(iter(node.users)) if len(node.users) == 1 else None
