"""Sizes: rows that begin unaligned, tiles that do not fill the device, batches that leave it idle."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from advisor.advice.calls import Matrix
from advisor.advice.edits import Estimate, Retime
from advisor.advice.evidence import kernel_lines, module_line, short_kernel
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rates import aligned, at_most, matmul_ns
from advisor.advice.rule import rule
from advisor.advice.wording import count, duration, percent, size
from advisor.roofline.costs.tiles import tile, whole

#: A product this much slower than an aligned one would be is worth a word.
_CRAWLS = 1.25
#: Sizes whose products take less of the step are told of together.
_MINOR = 0.03
#: Padded sizes are multiples of this: whole tiles of every library's kernels, and of 128 bytes in 16 bits.
_MULTIPLE = 64


@dataclass(eq=False)
class _Slow:
    rows: list[int] = field(default_factory=list)
    times: list[Estimate] = field(default_factory=list)
    matrices: list[Matrix] = field(default_factory=list)


@rule(
    "shape.alignment",
    title="Rows of matrices begin at multiples of 16 bytes",
    failure="A size that is no multiple of 8 makes matrix products crawl",
    source="""\
NVIDIA, Deep Learning Performance: Matrix Multiplication Background, requirements for tensor cores
An H200 (torch 2.11, cuBLAS 13), 8192 x 768 by 768 x V in bf16: 6.7 ms for V = 50257, 0.87 ms for V = 50304;
a 6-layer GPT with that vocabulary: 30.8 ms a step, padded 17.4 ms""",
)
def alignment(loop: Loop) -> Iterator[Finding]:
    """Tensor cores are fed by loads of 16 bytes, so rows have to begin at multiples of that.

    With an odd vocabulary (50257), a sequence of 1025 tokens or 25 channels, the library falls back to
    kernels of two generations ago that load element by element. All three products of the layer suffer:
    forward, and both gradients, since each has an operand or a result with rows of that length.

    Recognised by the strides of operands and results, in a product that takes a quarter longer than an
    aligned one of its size would. The change is to pad that size to the next multiple of 64; labels never
    point at padded entries of a vocabulary.

    Sizes whose products take less than 3 % of the step come together as one finding. Silent for products in
    fp32 on plain units, for small ones, and where the library copes well.
    """
    matrices = loop.calls.matrices
    loop.require(matrices, "no matrix products with recorded shapes")
    slow: dict[int, _Slow] = defaultdict(_Slow)
    pipes = loop.analysis.costs.pipes
    for matrix in matrices:
        pipe = int(loop.analysis.costs.pipe[matrix.row])
        odd = {length for length in matrix.row_lengths if not aligned(length, matrix.itemsize)}
        if not odd or pipe < 0 or not pipes[pipe].startswith("tensor_"):
            continue
        time = matmul_ns(loop.device, matrix.flops, matrix.nbytes, pipes[pipe])
        now = float(loop.rows.dur_ns[matrix.row])
        if time is None or now < _CRAWLS * float(time.likely):
            continue
        entry = slow[max(odd)]
        entry.rows.append(matrix.row)
        entry.times.append(at_most(time, now))
        entry.matrices.append(matrix)
    sizes = sorted(slow.items(), key=lambda item: -loop.per_step_ns(np.array(item[1].rows)))
    minor = [item for item in sizes if loop.share(loop.per_step_ns(np.array(item[1].rows))) < _MINOR]
    if len(minor) < 2:
        minor = []
    for length, entry in sizes[: len(sizes) - len(minor)]:
        yield _unaligned(loop, length, entry)
    if minor:
        yield _several_unaligned(loop, minor)


def _owners(loop: Loop, length: int) -> list[tuple[int, ...]]:
    """Shapes of the trained parameters with a side of this length."""
    return [tensor.shape for tensor in loop.trained if length in tensor.shape]


def _padded(loop: Loop, length: int) -> tuple[str, int]:
    """What an unaligned length is of, and what to pad it to."""
    embedding = any(
        unit.name == "embedding" and unit.tensors and unit.tensors[0].shape[:1] == (length,)
        for unit in loop.calls.units
    )
    owned = bool(_owners(loop, length))
    of_weights = (embedding or owned) and length >= 4 * _MULTIPLE
    what = "vocabulary" if embedding else "a layer's size" if owned else "the sequence or batch"
    return what, whole(length, _MULTIPLE if of_weights else 8)


_RISK = (
    "a checkpoint of the old size has to be padded when it is loaded; the added logits are never "
    "labels, and should be masked when sampling"
)


def _taken(loop: Loop, rows: np.ndarray) -> str:
    """How many products these are, and what they take."""
    taken = loop.per_step_ns(rows)
    products = count(len(rows) / loop.steps, "matrix product", "take")
    return f"{products} {duration(taken)}, {percent(loop.share(taken))} of the step"


def _several_unaligned(loop: Loop, sizes: list[tuple[int, _Slow]]) -> Finding:
    """One finding on several lengths, none of which takes much by itself."""
    padded = {length: _padded(loop, length) for length, _ in sizes}
    listed = [str(length) for length, _ in sizes]
    named = f"{', '.join(listed[:3])} and {len(listed) - 3} more" if len(listed) > 4 else (
        f"{', '.join(listed[:-1])} and {listed[-1]}"
    )  # fmt: skip
    rows = np.concatenate([entry.rows for _, entry in sizes])
    return Finding(
        title=f"rows of {named} elements begin unaligned: {_taken(loop, rows)}; pad each size",
        evidence=[
            *(
                f"{length} ({padded[length][0]}): {_taken(loop, np.array(entry.rows))}"
                for length, entry in sizes[:6]
            ),
            *kernel_lines(loop, rows.tolist()),
            *module_line(loop, rows.tolist()),
        ],
        edits=[Retime(np.array(entry.rows), Estimate.stacked(entry.times)) for _, entry in sizes],
        fix="\n".join(f"# {length} -> {to} ({what})" for length, (what, to) in padded.items()),
        risk=_RISK if any(_owners(loop, length) for length in padded) else "",
    )


def _unaligned(loop: Loop, length: int, entry: _Slow) -> Finding:
    rows, owners = np.array(entry.rows), _owners(loop, length)
    example = max(entry.matrices, key=lambda matrix: matrix.flops)
    product, of = example.product, int(16 / example.itemsize)
    reached = example.flops / max(float(loop.rows.dur_ns[example.row]), 1.0) / 1e3
    what, padded = _padded(loop, length)
    return Finding(
        title=f"{length} ({what}) is no multiple of {of}: {_taken(loop, rows)}; pad to {padded}",
        evidence=[
            f"{product.m} x {product.k} by {product.k} x {product.n} in {product.a.dtype} reaches "
            f"{reached:.0f} TFLOP/s: rows of {length} elements begin unaligned",
            *(f"parameter {list(shape)}" for shape in list(dict.fromkeys(owners))[:2]),
            *kernel_lines(loop, entry.rows),
            *module_line(loop, entry.rows),
        ],
        edits=[Retime(rows, Estimate.stacked(entry.times))],
        fix=_padding_fix(what, length, padded),
        risk=_RISK if owners else "",
    )


def _padding_fix(what: str, length: int, padded: int) -> str:
    if what == "vocabulary":
        return (
            f"# {length} -> {padded}, in the embedding and in the head (tied weights included)\n"
            f"vocab_size = {padded}  # (vocab_size + 63) // 64 * 64\n"
            "self.embedding = torch.nn.Embedding(vocab_size, width)\n"
            "self.head = torch.nn.Linear(width, vocab_size, bias=False)\n"
            "# Hugging Face: model.resize_token_embeddings(vocab_size, pad_to_multiple_of=64)"
        )
    if what == "a layer's size":
        return f"# {length} -> {padded} in the layers of this size\nwidth = {padded}"
    return (
        f"# {length} -> {padded} (or {padded - 8}): pad or cut each batch to a multiple of 8\n"
        "collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)"
    )


#: Products above this time at the roof count; the last wave of smaller ones is lost in their start-up.
_WORTH_NS = 15_000
#: Tiles in the last wave over those that fit, below which a wave counts as badly filled.
_EMPTY = 0.6
_WAVE_SHARE = 0.05


@rule(
    "shape.wave_quantization",
    title="Tiles of large products fill the device evenly",
    failure="The last wave of tiles leaves most of the device idle",
    source="NVIDIA, Deep Learning Performance: Matrix Multiplication Background, wave quantization",
)
def wave_quantization(loop: Loop) -> Iterator[Finding]:
    """A product is computed in tiles, as many at once as there are multiprocessors: a wave.

    Where the tiles are just more than a multiple of that, a last wave with few tiles takes as long as a full
    one. A batch or width a little smaller runs faster; a little larger costs nothing.

    Recognised by the tile in the kernel's name and the sizes. No saving is told: the library chooses its tile
    by the sizes, and may choose another. Silent where less than a twentieth of the step is lost so, and for
    kernels whose names tell no tile.
    """
    loop.require(loop.device.sms, "the number of multiprocessors is not known")
    sms = loop.device.sms or 1
    lost: dict[tuple[str, int, int, int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    names, pipes = loop.timeline.trace.names, loop.analysis.costs.pipes
    for matrix in loop.calls.matrices:
        sides, p = tile(names[loop.rows.name[matrix.row]]), matrix.product
        pipe = int(loop.analysis.costs.pipe[matrix.row])
        if pipe < 0 or not pipes[pipe].startswith("tensor_"):
            continue
        if sides is None or loop.analysis.bounds.roof_ns[matrix.row] < _WORTH_NS:
            continue
        tiles = p.batch * math.ceil(p.n / sides.first) * math.ceil(p.m / sides.second)
        waves = tiles / sms
        if waves < 1 or waves / math.ceil(waves) >= _EMPTY + 0.4 * (1 - 1 / math.ceil(waves)):
            continue
        entry = lost[names[loop.rows.name[matrix.row]], p.batch, p.m, p.n, p.k]
        entry[0] += float(loop.rows.dur_ns[matrix.row]) / loop.steps
        entry[1] += float(loop.rows.dur_ns[matrix.row]) * (1 - waves / math.ceil(waves)) / loop.steps
    idle = sum(entry[1] for entry in lost.values())
    if loop.share(idle) < _WAVE_SHARE:
        return
    worst = sorted(lost.items(), key=lambda item: -item[1][1])[:4]
    yield Finding(
        title=f"last waves of {count(len(lost), 'product', 'leave')} {duration(idle)} of the device's time "
        "idle",
        evidence=[
            f"{f'{batch} x ' if batch > 1 else ''}{m} x {k} by {k} x {n} ({short_kernel(kernel)}): "
            f"{duration(spent)}, of which {duration(gone)} idle"
            for (kernel, batch, m, n, k), (spent, gone) in worst
        ],
        edits=[],
        fix="# try batch sizes and widths around the present ones; multiples of 128 first\n"
        'model = torch.compile(model, mode="max-autotune")  # chooses tiles by trying them',
        confidence="heuristic",
        note="the library may choose another tile for another size, so no saving is told",
    )


#: A batch is called small where weights make up most of what its products read, in so much of the step.
_WEIGHT_BOUND_SHARE = 0.25


@rule(
    "shape.batch",
    title="The batch is large enough to compute on",
    failure="The batch is small: products wait for weights from memory",
    source="Williams, Waterman, Patterson, Roofline (2009): below the ridge a product is bound by memory",
)
def batch(loop: Loop) -> Iterator[Finding]:
    """A layer reads its weights once a batch; with few rows it does little arithmetic on each.

    Below about ridge / (1 - ridge (1/n + 1/k)) rows a product of width n and depth k is bound by memory, and
    a larger batch is nearly free.

    Recognised by products with a trained weight that are bound by memory with fewer rows than that, in a
    quarter of the step or more. No saving is told, for a larger batch changes the training: learning rate
    and schedule have to follow. Silent where memory would not hold it, as far as that is known.
    """
    weights = {frozenset(tensor.shape) for tensor in loop.trained if len(tensor.shape) == 2}
    loop.require(weights, "the trained parameters are not known")
    bound = loop.analysis.bounds.is_bound("memory")
    pipes, taken, factors, rows = loop.analysis.costs.pipes, 0.0, [], []
    for matrix in loop.calls.matrices:
        p, pipe = matrix.product, int(loop.analysis.costs.pipe[matrix.row])
        ridge = loop.device.ridge(pipes[pipe]) if pipe >= 0 else None
        if not bound[matrix.row] or ridge is None or p.batch > 1 or frozenset((p.n, p.k)) not in weights:
            continue
        room = 1 - ridge * matrix.itemsize / 2 * (1 / p.n + 1 / p.k)
        enough = ridge * matrix.itemsize / 2 / room if room > 0 else math.inf
        if p.m < enough and math.isfinite(enough):
            taken += float(loop.rows.dur_ns[matrix.row]) / loop.steps
            factors.append(enough / p.m)
            rows.append(matrix.row)
    if not factors or loop.share(taken) < _WEIGHT_BOUND_SHARE:
        return
    factor = 2 ** math.ceil(math.log2(float(np.median(factors))))
    memory = _room(loop, factor)
    if memory is None:
        return
    yield Finding(
        title=f"products with {duration(taken)} a step ({percent(loop.share(taken))}) wait for weights: "
        f"the batch would have to be {factor} times as large to be bound by arithmetic",
        evidence=[*memory, *kernel_lines(loop, rows), *module_line(loop, rows)],
        edits=[],
        fix=f"DataLoader(dataset, batch_size={factor} * batch_size, ...)  # and the learning rate with it\n"
        "# with Trainer(accumulate_grad_batches=n): n times the batch size in place of accumulating",
        risk="a larger batch is another training: fewer, less noisy steps",
        confidence="heuristic",
        note="the time for each item falls, not that of a step; how far depends on the learning rate",
    )


def _room(loop: Loop, factor: int) -> list[str] | None:
    """What is known of memory for a batch so much larger; None where it would not fit."""
    peak, total = loop.peak_memory_bytes, loop.memory_bytes
    if not peak or not total:
        return ["peak memory was not recorded: watch it when the batch grows"]
    fixed = sum(tensor.numel * 16 for tensor in loop.trained)
    needed = fixed + max(0.0, peak - fixed) * factor
    if needed > 0.9 * total:
        return None
    return [f"about {size(needed)} of {size(total)} would be in use, {size(peak)} now"]
