"""Foreach and fused optimizers, gradient clipping and scaling: many tensors, many kernels, one operator.

``multi_tensor_apply`` cuts each tensor into chunks of 65,536 elements, a thread block each, and launches up
to 320 blocks at a time in list order (aten/src/ATen/native/cuda/MultiTensorApply.cuh). So the block counts
tell how many elements each launch covers, and whether a list of sizes is the one that was really launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import Unknown, itemsize, tensors, vector_pipe
from advisor.roofline.costs.conventions import ADD, DIV, EXP, FMA, LOG, MUL, POW, RSQRT, SIGMOID, SQRT, TANH
from advisor.roofline.costs.model import Cost, Launch, OpCall, Tensor
from advisor.roofline.costs.registry import Result, cost

_CHUNK = 65_536

#: FLOPs an element, tensors read and tensors written an element. ``addcmul_``: in ``torch.optim`` both
#: factors are the gradient list (Adam, Adagrad, RMSprop, Adadelta), so it is read once.
_FOREACH = {
    "add": (FMA, 2, 1), "sub": (FMA, 2, 1), "mul": (MUL, 2, 1), "div": (DIV, 2, 1), "pow": (POW, 1, 1),
    "maximum": (0, 2, 1), "minimum": (0, 2, 1), "clamp_max": (0, 1, 1), "clamp_min": (0, 1, 1),
    "lerp": (FMA + ADD, 2, 1), "addcmul": (FMA + MUL, 2, 1), "addcdiv": (DIV + FMA, 3, 1),
    "sqrt": (SQRT, 1, 1), "rsqrt": (RSQRT, 1, 1), "reciprocal": (DIV, 1, 1), "neg": (0, 1, 1),
    "abs": (0, 1, 1), "sign": (0, 1, 1), "exp": (EXP, 1, 1), "log": (LOG, 1, 1), "tanh": (TANH, 1, 1),
    "sigmoid": (SIGMOID, 1, 1), "round": (0, 1, 1), "floor": (0, 1, 1), "ceil": (0, 1, 1),
    "trunc": (0, 1, 1), "zero": (0, 0, 1), "norm": (FMA, 1, 0), "max": (0, 1, 0),
}  # fmt: skip
_NEEDS_SECOND_LIST = frozenset({"add", "sub", "mul", "div", "maximum", "minimum"})


def _chunks(sizes: Sequence[int]) -> Iterator[int]:
    """Elements of each thread block's chunk, in launch order."""
    for size in sizes:
        full, rest = divmod(size, _CHUNK)
        yield from (_CHUNK for _ in range(full))
        if rest:
            yield rest


def _block_count(sizes: Sequence[int]) -> int:
    return sum(-(-size // _CHUNK) for size in sizes)


def _thinned(tensors: Sequence[Tensor], divisor: int) -> list[Tensor]:
    """Every `divisor`-th of each shape and dtype: one step's share of a trace's repeated gradients."""
    seen: Counter[tuple[tuple[int, ...], str]] = Counter()
    kept = []
    for item in tensors:
        key = (item.shape, item.dtype)
        if seen[key] % divisor == 0:
            kept.append(item)
        seen[key] += 1
    return kept


def _launched_parameters(call: OpCall, blocks: int) -> list[Tensor]:
    """The parameters, or the group of them, whose chunks are as many as the blocks that were launched.

    Groups tried: all, matrices only, vectors only (the usual weight-decay groups); each as one step's share
    of a trace's gradients. None of them fits: the list is not known.
    """
    known = [item for item in call.parameter_shapes if item.numel > 0]
    groups = (
        known,
        [item for item in known if len(item.shape) >= 2],
        [item for item in known if len(item.shape) < 2],
    )
    for group in groups:
        counts = Counter((item.shape, item.dtype) for item in group)
        for divisor in range(1, min(counts.values(), default=0) + 1):
            if any(count % divisor for count in counts.values()):
                continue
            candidate = _thinned(group, divisor)
            if _block_count([item.numel for item in candidate]) == blocks:
                return candidate
    raise Unknown("parameter sizes not recorded")


def _lists(call: OpCall) -> list[tuple[Tensor, ...]]:
    return [arg for arg in call.inputs if isinstance(arg, tuple) and arg]


def _sizes(call: OpCall, blocks: int | None) -> tuple[list[int], str]:
    """Elements of each tensor of the first list, and a dtype if the parameters tell one."""
    first = call.inputs[0] if call.inputs else None
    if isinstance(first, tuple) and first:
        return [item.numel for item in first if item.numel > 0], "unknown"
    if blocks is None:
        raise Unknown("list not recorded")
    parameters = _launched_parameters(call, blocks)
    return [item.numel for item in parameters], parameters[0].dtype


def _is_apply(launch: Launch) -> bool:
    return "multi_tensor_apply" in launch.name


def lists_cost(call: OpCall, flops: float, reads: float, writes: float) -> Result:
    """The cost of an operator over lists of equally shaped tensors.

    Args:
        call: the first list's sizes count; an empty one is looked up among the parameters.
        flops: floating-point operations an element.
        reads: tensors read for each element.
        writes: tensors written for each element.
    """
    applied = [launch for launch in call.launches if _is_apply(launch)]
    blocks = [launch.grid_blocks or 0 for launch in applied]
    complete = bool(applied) and all(blocks)
    sizes, dtype = _sizes(call, sum(blocks) if complete else None)
    if not sizes or sum(sizes) * 16 > 1e15:
        raise Unknown("impossible sizes")
    named = [roles.element_dtype(launch.name) for launch in applied]
    dtype = next((name for name in named if name != "unknown"), dtype)

    def of(elements: int) -> Cost:
        moved = elements * itemsize(dtype)
        return Cost(flops * elements, reads * moved, writes * moved, vector_pipe(dtype, flops))

    if not call.launches:
        return of(sum(sizes))
    if not applied:
        return _one_by_one(call, sizes, of)
    if not complete or _block_count(sizes) != sum(blocks):
        share = sum(sizes) // len(applied)
        elements = [share if not complete else sum(sizes) * count // sum(blocks) for count in blocks]
    else:
        chunks = _chunks(sizes)
        elements = [sum(next(chunks) for _ in range(count)) for count in blocks]
    remaining = iter(elements)
    small = Cost(0.0, 4.0 * len(sizes), 4.0 * len(sizes), "none")
    return tuple(of(next(remaining)) if _is_apply(launch) else small for launch in call.launches)


def _one_by_one(call: OpCall, sizes: list[int], of) -> Result:  # type: ignore[no-untyped-def]
    """The slow path: a kernel for each tensor."""
    if len(sizes) != len(call.launches):
        raise Unknown("launches do not match the list")
    return tuple(of(size) for size in sizes)


@cost(*(f"aten::_foreach_{name}{suffix}" for name in _FOREACH for suffix in ("", "_")))
def foreach(call: OpCall) -> Result:
    """One elementwise operator over lists; a second list is read only where there is one."""
    name = call.name.removeprefix("aten::_foreach_").rstrip("_")
    flops, reads, writes = _FOREACH[name]
    if name in _NEEDS_SECOND_LIST and not isinstance(call.inputs[1] if len(call.inputs) > 1 else None, tuple):
        flops, reads = (ADD if name in ("add", "sub") else flops), 1
    return lists_cost(call, float(flops), reads, writes)


#: FLOPs an element, tensors read, tensors written: parameter, gradient and states.
_FUSED = {
    "aten::_fused_adam_": (40, 4, 3), "aten::_fused_adamw_": (41, 4, 3), "aten::_fused_sgd_": (6, 3, 2),
    "aten::_fused_adagrad_": (25, 3, 2),
}  # fmt: skip


@cost(*_FUSED)
def fused(call: OpCall) -> Result:
    """Fused optimizers: Adam reads parameter, gradient and two moments, and writes all but the gradient.

    FLOPs: an H200's AdamW kernel executes 17 FFMA, 2 FADD and 4 FMUL an element (41). ``amsgrad`` adds a
    state; SGD without momentum has none.
    """
    flops, reads, writes = _FUSED[call.name]
    lists = _lists(call)
    if call.name.startswith("aten::_fused_adam") and len(lists) >= 5 and len(lists[4]) == len(lists[0]):
        has_maximum = any(item.shape for item in lists[4]) and lists[4][0].shape == lists[0][0].shape
        reads, writes = (reads + 1, writes + 1) if has_maximum else (reads, writes)
    if call.name == "aten::_fused_sgd_" and lists and len(lists) < 3:
        reads, writes = 2, 1
    return lists_cost(call, float(flops), reads, writes)


@cost("aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_non_finite_check_and_unscale_")
def unscale(call: OpCall) -> Result:
    """Reads each gradient, writes it multiplied by the inverse scale."""
    return lists_cost(call, float(MUL), 1, 1)


@cost("aten::_amp_update_scale_")
def update_scale(call: OpCall) -> Cost:
    """A few scalars."""
    return Cost(1.0, 12.0, 8.0)


#: FLOPs an element, tensors read, tensors written, of Apex' functors: Adam and LAMB's first stage work on
#: gradient, parameter and two moments, the others on what their names say.
_BARE = {
    "AdamFunctor": (40, 4, 3), "AdamCapturableFunctor": (40, 4, 3), "AdagradFunctor": (25, 3, 2),
    "LAMBStage1Functor": (45, 4, 3), "LAMBStage2Functor": (FMA, 2, 1), "NovoGradFunctor": (25, 3, 2),
    "L2NormFunctor": (FMA, 1, 0), "ScaleFunctor": (MUL, 1, 1), "AxpbyFunctor": (FMA + MUL, 2, 1),
}  # fmt: skip


@cost(*(f"multi_tensor_apply::{name}" for name in _BARE))
def bare(call: OpCall) -> Result:
    """Apex' optimizers: no operator is recorded around them, so the sizes are those of the parameters.

    (NVIDIA/apex, ``csrc/multi_tensor_*.cu``; chunks of ``2048 * 32`` elements as in ATen.) Which parameters a
    launch works on is not recorded: each gets its share by thread blocks.
    """
    flops, reads, writes = _BARE[call.name.removeprefix("multi_tensor_apply::")]
    blocks = [launch.grid_blocks or 0 for launch in call.launches]
    if not blocks or not all(blocks):
        raise Unknown("launches not recorded")
    parameters = _launched_parameters(call, sum(blocks))
    named = roles.element_dtype(call.launches[0].name)
    width = itemsize(named if named != "unknown" else parameters[0].dtype)
    elements = sum(item.numel for item in parameters)
    shares = (elements * count / sum(blocks) for count in blocks)
    return tuple(
        Cost(flops * share, reads * share * width, writes * share * width, vector_pipe("fp32", flops))
        for share in shares
    )


@cost("bitsandbytes::optimizer_update_8bit_blockwise", "bitsandbytes::optimizer_update_32bit")
def bitsandbytes_update(call: OpCall) -> Cost:
    """Name, gradient, parameter and one or two states of one size; all but the gradient written."""
    moved = [arg for arg in tensors(call, 1, 2, 3, 4) if arg.shape]
    if len(moved) < 3 or any(arg.numel != moved[0].numel for arg in moved):
        raise Unknown("gradient, parameter and states contradict each other")
    sizes = [arg.numel * itemsize(arg.dtype) for arg in moved]
    return Cost(40.0 * moved[0].numel, sum(sizes), sum(sizes[1:]), "vector_fp32")
