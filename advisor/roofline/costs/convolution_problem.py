"""One convolution as all its passes see it: sizes, FLOPs, and the kernels that work on it.

``2 n c_out out_spatial (c_in / groups) kernel`` FLOPs forward, as many for each of the two gradients: each is
the same set of multiply-adds, summed over another index (Dumoulin & Visin, A guide to convolution arithmetic,
2016). Winograd and FFT kernels are counted by this direct form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import Unknown, itemsize
from advisor.roofline.costs.model import Cost, Launch, OpCall, Tensor
from advisor.roofline.costs.tiles import convolution_flops
from advisor.roofline.costs.traffic import outgrows_cache


@dataclass(frozen=True)
class Problem:
    """One convolution, seen from the side that the window slides over and the side with an element a window.

    Attributes:
        wide: the input of a plain convolution, the output of a transposed one.
        narrow: the other.
        weight: shape of the weight.
        flops: of the forward pass.
        touched: share of `wide` that any window covers (under 1 where the stride leaps over elements).
        strides: of the window, one a dimension.
    """

    wide: tuple[int, ...]
    narrow: tuple[int, ...]
    weight: tuple[int, ...]
    flops: float
    touched: float
    strides: tuple[int, ...]

    def executed(self, kernel: str) -> float:
        """FLOPs that this kernel executes: whole tiles, where its name tells them."""
        if self.wide[1] != self.weight[1]:
            return self.flops
        narrow, wide, taps = self.weight[0], self.weight[1], math.prod(self.weight[2:])
        positions = self.narrow[0] * math.prod(self.narrow[2:])
        if roles.role(kernel) == "dgrad":
            # Positions of one remainder modulo the strides meet the same taps: each is a product of its own.
            positions = math.ceil(self.wide[0] * math.prod(self.wide[2:]) / math.prod(self.strides))
        plain = 2.0 * positions * narrow * wide * taps
        return self.flops * max(1.0, convolution_flops(kernel, positions, narrow, wide, taps) / plain)

    @property
    def phases(self) -> int:
        """Products that make up a strided data gradient: remainders modulo the strides that meet a tap."""
        return math.prod(min(step, size) for step, size in zip(self.strides, self.weight[2:], strict=True))


def problem_of(
    wide: Sequence[int], narrow: Sequence[int], weight: Sequence[int], stride: Sequence[int]
) -> Problem:
    """The convolution of these shapes; groups follow from the channels.

    Raises:
        Unknown: if the shapes contradict each other.
    """
    spatial = len(weight) - 2
    if spatial < 1 or not len(wide) == len(narrow) == len(weight) or wide[0] != narrow[0]:
        raise Unknown("ranks or batches differ")
    if narrow[1] != weight[0] or wide[1] % weight[1]:
        raise Unknown("channels differ")
    strides = tuple(stride) * spatial if len(stride) == 1 else tuple(stride)
    if len(strides) != spatial or min(strides) < 1:
        raise Unknown("strides do not fit")
    touched = math.prod(
        min(1.0, out * kernel / size) if kernel < step else 1.0
        for size, out, kernel, step in zip(wide[2:], narrow[2:], weight[2:], strides, strict=True)
    )
    flops = 2.0 * math.prod(narrow) * math.prod(weight[1:])
    return Problem(tuple(wide), tuple(narrow), tuple(weight), flops, touched, strides)


def batched(x: Tensor, w: Tensor) -> Tensor:
    """An unbatched input as a batch of one."""
    return Tensor((1, *x.shape), x.dtype) if len(x.shape) == len(w.shape) - 1 else x


def as_executed(whole: Cost, problem: Problem, launch: Launch, dtype: str, call: OpCall) -> Cost:
    """An ideal cost as this kernel has it: its pipe, its tiles, what a strided data gradient reads again."""
    flops = problem.executed(launch.name)
    again = 0.0
    if roles.role(launch.name) == "dgrad" and "strided" in launch.name:
        gradient = itemsize(dtype) * math.prod(problem.narrow)
        again = (problem.phases - 1) * gradient if outgrows_cache(call, gradient) else 0.0
    pipe = roles.matrix_pipe(launch.name, dtype, call.settings, "allow_tf32_cudnn")
    return Cost(flops, whole.bytes_read + again, whole.bytes_written, pipe, again, flops - whole.flops)


def which_multiply(launches: Sequence[Launch]) -> list[bool]:
    """Which launches multiply: the matrix kernels, or where none is known by name all of unknown part."""
    matrix = [roles.is_matrix(launch.name) for launch in launches]
    return matrix if any(matrix) else [roles.role(launch.name) == "other" for launch in launches]


def beside(
    launch: Launch, shapes: Sequence[tuple[int, ...]], width: float, result: tuple[int, ...]
) -> Cost | None:
    """A kernel that prepares, moves or sums one of the tensors.

    Args:
        launch: the kernel.
        shapes: of the activation, the weight, and the output or its gradient.
        width: bytes an element.
        result: shape of what the multiplying kernel after it writes.
    """
    role = roles.role(launch.name)
    if role == "workspace":
        return Cost(0.0, 0.0, 0.0, "none")
    if role == "clear":
        return Cost(0.0, 0.0, width * math.prod(result), "none")
    if role == "sum_partials":
        moved = width * math.prod(shapes[1])
        return Cost(float(math.prod(shapes[1])), moved, moved)
    moved_shape = {"winograd_data": shapes[0], "winograd_filter": shapes[1], "winograd_output": result}.get(
        role
    )
    if role == "layout":
        moved_shape = _laid_out(launch.grid_blocks, shapes)
    if moved_shape is None:
        return None
    moved = width * math.prod(moved_shape)
    return Cost(0.0, moved, moved, "none")


def _laid_out(blocks: int | None, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The tensor that a layout kernel moves: in 32 x 32 tiles of (channels, positions), a block each."""
    if len({math.prod(shape) for shape in shapes}) == 1:
        return shapes[0]
    if not blocks or blocks < 0:
        return None
    distance = {
        shape: abs(
            math.log(shape[0] * math.ceil(shape[1] / 32) * math.ceil(math.prod(shape[2:]) / 32) / blocks)
        )
        for shape in shapes
    }
    nearest = min(shapes, key=lambda shape: distance[shape])
    return nearest if distance[nearest] < math.log(8) else None
