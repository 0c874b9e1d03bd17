"""Copies, casts, fills, concatenation, padding: each source element is read, each target element written."""

from __future__ import annotations

import math

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import (
    SECTOR_BYTES,
    Unknown,
    footprint,
    integer,
    integers,
    itemsize,
    named_dtype,
    optional,
    promote,
    size_bytes,
    tensor,
    text,
)
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import cost
from advisor.roofline.costs.traffic import outgrows_cache


def _move(read: float, written: float) -> Cost:
    return Cost(0.0, read, written, "none")


@cost("aten::copy_")
def copy_(call: OpCall) -> Cost:
    """Target first, source second; the source broadcasts, the target's dtype is written."""
    target, source = tensor(call, 0), tensor(call, 1)
    if source.numel > target.numel:
        raise Unknown("the source does not fit")
    return _move(footprint(source), target.numel * itemsize(target.dtype))


@cost("aten::_to_copy", "aten::to", "aten::type_as")
def cast(call: OpCall) -> Cost:
    """Reads the source, writes it in the dtype that the call names (the same if it names none)."""
    source = tensor(call, 0)
    return _move(footprint(source), source.numel * itemsize(named_dtype(call, 1) or source.dtype))


@cost(
    "aten::clone",
    "aten::contiguous",
    "aten::roll",
    "aten::flip",
    "aten::rot90",
    "aten::_reshape_copy",
    "aten::lift_fresh",
    "aten::alias_copy",
    "aten::view_copy",
    "aten::_reshape_alias_copy",
    "aten::channel_shuffle",
    "aten::pixel_shuffle",
    "aten::pixel_unshuffle",
    "aten::tril",
    "aten::triu",
    "aten::tril_",
    "aten::triu_",
    "aten::cudnn_grid_copy",
    "aten::resolve_conj",
    "aten::_conj_copy",
)
def rearrange(call: OpCall) -> Cost:
    """As many elements out as in."""
    source = tensor(call, 0)
    return _move(footprint(source), source.numel * itemsize(source.dtype))


@cost("aten::fill_", "aten::zero_", "aten::eye", "aten::fill_diagonal_")
def fill_(call: OpCall) -> Cost:
    """Writes its target; what is filled in is a number or a 0-d tensor."""
    target = tensor(call, 0)
    return _move(0.0, target.numel * itemsize(target.dtype))


@cost(
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::new_zeros",
    "aten::new_full",
    "aten::new_ones",
)
def fill_like(call: OpCall) -> Cost:
    """Writes a tensor like its first argument (``new_*``: of that dtype and the listed size)."""
    like = tensor(call, 0)
    shape = integers(call, 1) if "new_" in call.name else like.shape
    return _move(0.0, size_bytes(shape, like.dtype))


@cost("aten::arange", "aten::linspace", "aten::range", "aten::tril_indices", "aten::triu_indices")
def sequence(call: OpCall) -> Cost:
    """Writes ``ceil((end - start) / step)`` elements; the dtype is that of the ``out`` tensor."""
    if call.name not in ("aten::arange", "aten::linspace") or len(call.concrete) < 3:
        raise Unknown("length not recorded")
    out = call.inputs[-1]
    if not isinstance(out, Tensor):
        raise Unknown("dtype not recorded")
    if call.name == "aten::linspace":
        return _move(0.0, max(1, integer(call, 2)) * itemsize(tensor(call, len(call.inputs) - 1).dtype))
    start, end, step = (float(value) for value in call.concrete[:3])
    return _move(0.0, max(1, math.ceil((end - start) / step)) * itemsize(out.dtype))


@cost(
    "aten::cat",
    "aten::concat",
    "aten::stack",
    "aten::_cat",
    "aten::hstack",
    "aten::vstack",
    "aten::_foreach_copy_cat",
    "aten::concatenate",
)
def cat(call: OpCall) -> Cost:
    """Reads and writes every tensor of the list. Lists carry no dtype: the kernel's name tells the width.

    Tensors are copied one after another. Where the pieces of one are shorter than a sector, every sector of
    the result is written in part for each tensor, and what the cache has lost is fetched for it first.
    """
    listed = call.inputs[0]
    if not isinstance(listed, tuple) or not listed:
        raise Unknown("list not recorded")
    names = (roles.element_dtype(launch.name) for launch in call.launches)
    dtype = next((name for name in names if name != "unknown"), "unknown")
    items = [Tensor(arg.shape, dtype, arg.strides) for arg in listed if arg.numel]
    read = sum(footprint(arg) for arg in items)
    written = sum(arg.numel for arg in items) * itemsize(dtype)
    again = 0.0
    if len(items) > 1 and outgrows_cache(call, written):
        again = sum(written for arg in items if _piece(call, arg) < SECTOR_BYTES)
    return Cost(0.0, read + again, written, "none", again)


def _piece(call: OpCall, arg: Tensor) -> float:
    """Bytes of a joined tensor that lie together in the result; infinite where the dimension is unknown."""
    dim = text(call, 1)
    if not dim.lstrip("-").isdigit() or not -len(arg.shape) <= int(dim) < len(arg.shape):
        return math.inf
    return math.prod(arg.shape[int(dim) % len(arg.shape) :]) * itemsize(arg.dtype)


@cost("aten::repeat", "aten::tile")
def repeat(call: OpCall) -> Cost:
    """Reads its input once, writes it as often as the repeats say."""
    source = tensor(call, 0)
    return _move(footprint(source), source.numel * math.prod(integers(call, 1)) * itemsize(source.dtype))


@cost(
    "aten::constant_pad_nd",
    "aten::pad",
    "aten::reflection_pad1d",
    "aten::reflection_pad2d",
    "aten::replication_pad1d",
    "aten::replication_pad2d",
    "aten::replication_pad3d",
    "aten::reflection_pad3d",
)
def pad(call: OpCall) -> Cost:
    """Reads the input, writes the padded one: ``[left, right]`` pairs from the last dimension backwards."""
    source = tensor(call, 0)
    pads = integers(call, 1)
    shape = list(source.shape)
    for index in range(len(pads) // 2):
        shape[-1 - index] += pads[2 * index] + pads[2 * index + 1]
    if any(size <= 0 for size in shape):
        raise Unknown("padding leaves nothing")
    return _move(min(footprint(source), size_bytes(shape, source.dtype)), size_bytes(shape, source.dtype))


@cost("aten::repeat_interleave")
def repeat_interleave(call: OpCall) -> Cost:
    """Reads its input once, writes each element `repeats` times where that is one number."""
    source = tensor(call, 0)
    return _move(footprint(source), source.numel * integer(call, 1) * itemsize(source.dtype))


@cost(
    "aten::slice_backward",
    "aten::select_backward",
    "aten::as_strided_scatter",
    "aten::slice_scatter",
    "aten::select_scatter",
    "aten::diagonal_backward",
    "aten::unfold_backward",
)
def scatter_view(call: OpCall) -> Cost:
    """Writes the gradient into a zeroed tensor of the view's base."""
    grad = tensor(call, 0)
    shape = integers(call, 1) if text(call, 1).startswith("[") else grad.shape
    source = optional(call, 1) or grad
    return _move(footprint(source), size_bytes(shape, promote(grad)))


@cost(
    "aten::_foreach_copy_",
    "aten::split_with_sizes_copy",
    "aten::_chunk_cat",
    "aten::chunk_cat",
    "fsdp::all_gather_copy_in",
    "fsdp::split_with_sizes_copy",
    "fsdp::chunk_cat",
)
def copy_lists(call: OpCall) -> Cost:
    """Copies lists of tensors: as much is read as is written, which is the largest argument's size."""
    names = (roles.element_dtype(launch.name) for launch in call.launches)
    named = next((name for name in names if name != "unknown"), "unknown")
    sizes = []
    for arg in call.inputs:
        if isinstance(arg, tuple) and arg:
            sizes.append(sum(item.numel for item in arg) * itemsize(named))
        elif isinstance(arg, Tensor) and arg.shape and arg.numel:
            sizes.append(arg.numel * itemsize(arg.dtype))
    if not sizes:
        raise Unknown("list not recorded")
    return _move(max(sizes), max(sizes))


@cost("_C::static_scaled_fp8_quant", "_C::dynamic_scaled_fp8_quant")
def quantise(call: OpCall) -> Cost:
    """vLLM's cast to fp8: (out, x, scale); a multiplication an element."""
    out, x = tensor(call, 0), tensor(call, 1)
    if out.numel != x.numel:
        raise Unknown("input and output differ in size")
    return Cost(float(x.numel), footprint(x), out.numel * itemsize(out.dtype), "vector_fp32")


@cost("_C_cache_ops::reshape_and_cache_flash", "_C_cache_ops::reshape_and_cache")
def into_cache(call: OpCall) -> Cost:
    """vLLM's writing of keys and values to their slots: as many elements, in the cache's dtype."""
    key, value, cache, slots = (tensor(call, at) for at in (0, 1, 2, 4))
    read = footprint(key) + footprint(value) + footprint(slots)
    return _move(read, (key.numel + value.numel) * itemsize(cache.dtype))
