"""Generation: prediction loops that read all weights for a few rows, token after token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from advisor.advice.calls import product_of
from advisor.advice.edits import Estimate, Retime
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rule import NotApplicable, rule
from advisor.advice.wording import count, duration, percent, rate, size
from advisor.roofline.costs.model import DTYPE_BYTES

#: A product with no more rows is bound by reading its weight: the ridge of an H200 lies near 200 in bf16.
_FEW_ROWS = 16
#: Products of few rows must be this share of the time in products.
_MOSTLY = 0.6
_WORTH = 0.02
#: Weights read, of what 16-bit ones take: int8, and int4 with its scales. Kernels that unpack reach less of
#: the bandwidth than plain ones do.
_INT8, _INT4 = Estimate(0.75, 0.56, 0.5), 0.3
#: Calls with one weight over which growing rows show that the past is computed again.
_GROWING_CALLS = 3


@dataclass(frozen=True, slots=True)
class _Product:
    """Products of one shape: the launches, the rows of each call in order, bytes of the weight."""

    rows: np.ndarray
    m: np.ndarray
    weight_bytes: float
    dtype: str


@rule(
    "generation.quantise",
    title="Weights are read in as few bytes as they need",
    failure="Decoding is bound by reading 16-bit weights",
    source="Frantar et al., GPTQ, 2022; Lin et al., AWQ, 2023: weight-only int4\n"
    "roofline: time is bytes over bandwidth",
)
def quantise(loop: Loop) -> Iterator[Finding]:
    """To make one token each weight is read once and multiplied with one row a sequence: the memory's
    bandwidth divided by the model's bytes is the ceiling of tokens a second. Weights in int8 halve the
    bytes, in int4 they quarter them.

    Recognised in loops without backward whose products have few rows. Played for int8: products take 0.5 to
    0.75 of their time, 0.56 likely. Silent for training, for weights of 8 bits or fewer, and for products
    of many rows, which are bound by arithmetic.
    """
    products = _decoding(loop)
    wide = [one for one in products if (DTYPE_BYTES.get(one.dtype) or 0) >= 2]
    if not wide:
        return
    rows = np.concatenate([one.rows for one in wide])
    took_ns = loop.per_step_ns(rows)
    if loop.share(took_ns) < _WORTH:
        return
    read = sum(one.weight_bytes * len(one.m) for one in wide) / loop.steps
    model = sum(one.weight_bytes * len(one.m) for one in wide) / loop.steps / _tokens(wide, loop)
    now = loop.rows.dur_ns[rows].astype(float)
    bandwidth = loop.device.bandwidth_bytes_per_s
    ceiling = f"{bandwidth / model:,.0f} tokens/s a sequence" if bandwidth else "not known"
    yield Finding(
        title=f"decoding reads {size(model)} of {wide[0].dtype} weights a token, at "
        f"{rate(read / max(took_ns, 1.0) * 1e9)}: int8 or int4 weights would halve or quarter it",
        evidence=[
            f"products of {int(np.median(np.concatenate([one.m for one in wide])))} rows take "
            f"{duration(took_ns)}, {percent(loop.share(took_ns))} of the step",
            f"ceiling at this many bytes: {ceiling}; with int8 twice that, with int4 three to four times",
        ],
        edits=[Retime(rows, Estimate(now * _INT8.pessimistic, now * _INT8.likely, now * _INT8.optimistic))],
        fix="from torchao.quantization import Int8WeightOnlyConfig, quantize_\n"
        "quantize_(self.model, Int8WeightOnlyConfig())      # or Int4WeightOnlyConfig(group_size=128)",
        risk="weights lose precision: measure perplexity or the task; int4 more so than int8",
        confidence="modelled",
        note=f"told for int8; int4 would leave about {percent(_INT4)} of the products' time",
    )


@rule(
    "generation.batching",
    title="Several sequences share each read of the weights",
    failure="One sequence at a time reads all weights",
    source="roofline: arithmetic intensity of a product with m rows is about m FLOP/byte in 16 bits",
)
def batching(loop: Loop) -> Iterator[Finding]:
    """The same read of the weights serves one row or sixty: up to the ridge of the device, more sequences
    at once cost next to nothing, so tokens a second grow with the batch.

    Recognised by products of at most four rows in loops without backward. Told without a saving, since the
    step does not get shorter: it makes more tokens. Silent from five rows on.
    """
    products = _decoding(loop)
    rows_of = int(np.median(np.concatenate([one.m for one in products]))) if products else 0
    if not 0 < rows_of <= 4:
        return
    ridge = loop.device.ridge("tensor_bf16") or loop.device.ridge("tensor_fp16")
    batch = loop.setting("loader", "batch_size")
    was = "not recorded" if batch is None else repr(batch)
    number = sum(len(one.m) for one in products)
    limit = [f"up to about {ridge:,.0f} rows the time is that of reading the weights"] if ridge else []
    yield Finding(
        title=f"decoding with {count(rows_of, 'row')} a product: "
        f"the weights are read for {count(rows_of, 'token')} at a time",
        evidence=[
            f"{count(number / loop.steps, 'product')} a step, half of them with up to {rows_of} rows",
            *limit,
        ],
        edits=[],
        fix=f"DataLoader(prompts, batch_size=32)      # was {was}\n"
        "# model.generate(batch, ...) with left padding and a mask; or continuous batching in a server",
        risk="each token comes no sooner; the keys and values of all sequences need memory",
        confidence="modelled",
        note="told without a saving: a step makes more tokens, it is not shorter",
    )


@rule(
    "generation.kv_cache",
    title="The past is not computed again for each token",
    failure="Each token computes the whole sequence again",
    source="Pope et al., Efficiently Scaling Transformer Inference, 2022",
)
def kv_cache(loop: Loop) -> Iterator[Finding]:
    """Without a cache of keys and values each new token runs the whole sequence so far through the model:
    the products' rows grow by one a token, and the work by the square of the length.

    Recognised where calls with the same weight see rows that grow evenly, step by step, in a loop without
    backward. Played with the last row alone: each product takes the time of reading its weight. Silent
    where rows stay the same.
    """
    products = _products(loop)
    growing = [one for one in products if _grows(one, loop)]
    if not growing:
        return
    bandwidth = loop.device.bandwidth_bytes_per_s
    loop.require(bandwidth, "the memory's bandwidth is not known")
    assert bandwidth
    rows = np.concatenate([one.rows for one in growing])
    alone = [np.full(len(one.rows), one.weight_bytes / (0.6 * bandwidth) * 1e9 + 3_000.0) for one in growing]
    read = np.concatenate(alone)
    now = loop.rows.dur_ns[rows].astype(float)
    likely = np.minimum(read, now)
    first = max(growing, key=lambda one: float(loop.rows.dur_ns[one.rows].sum()))
    yield Finding(
        title="no KV cache: each token runs the whole sequence again, "
        f"{int(first.m.min())} to {int(first.m.max())} rows",
        evidence=[
            f"rows of one product, call by call: {', '.join(str(int(m)) for m in first.m[:8])}",
            f"products whose rows grow take {duration(loop.per_step_ns(rows))} a step; the last row alone "
            f"would take {duration(float(likely.sum()) / loop.steps)}",
        ],
        edits=[Retime(rows, Estimate.around(likely, worse=1.5, better=0.8))],
        fix="out = self.model.generate(batch, use_cache=True)   # or past_key_values=out.past_key_values\n"
        "x = x[:, -1:]                                      # only the newest token goes in",
        risk="the cache takes memory: two vectors a layer, token and sequence",
        confidence="modelled",
    )


def _products(loop: Loop) -> list[_Product]:
    """Matrix products of steady steps by weight shape, in loops without backward.

    Raises:
        NotApplicable: the loop trains, or shapes were not recorded.
    """
    if loop.in_phase("backward", "optimizer").any():
        raise NotApplicable("the loop trains")
    operators = loop.ops_named(r"^aten::(addmm|mm|bmm|_addmm_activation)$")
    owner = loop.under(operators)
    chosen = np.flatnonzero(loop.counted & (owner >= 0) & (loop.rows.kind == 0))
    found: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    for row in chosen.tolist():
        product = product_of(loop.call(int(owner[row])))
        if product is not None and product.batch == 1:
            found[product.n, product.k, product.b.dtype].append((row, product.m))
    if not found:
        raise NotApplicable("no matrix product with known shapes")
    return [
        _Product(
            np.array([row for row, _ in calls], np.int64),
            np.array([m for _, m in calls], np.int64),
            n * k * (DTYPE_BYTES.get(dtype) or 2.0),
            dtype,
        )
        for (n, k, dtype), calls in found.items()
    ]


def _decoding(loop: Loop) -> list[_Product]:
    """Products of few rows, where they are most of the time in products; else none."""
    products = _products(loop)
    few = [one for one in products if np.median(one.m) <= _FEW_ROWS]
    total, of_few = (sum(loop.per_step_ns(one.rows) for one in part) for part in (products, few))
    return few if of_few > _MOSTLY * total else []


def _tokens(products: list[_Product], loop: Loop) -> float:
    """Times that the weights are read in a step: calls of the rarest product, which a model has once."""
    return max(1.0, min(len(one.m) for one in products) / loop.steps)


def _grows(one: _Product, loop: Loop) -> bool:
    """Whether rows grow evenly, token by token: within each step, or from step to step."""
    step = loop.rows.step[one.rows]
    within = [one.m[step == number] for number in np.unique(step).tolist()]
    if all(len(set(m.tolist())) == 1 for m in within):
        within = [np.concatenate(within)]
    return all(_evenly(m) for m in within)


def _evenly(m: np.ndarray) -> bool:
    """Whether each length has as many calls, layer by layer, and the next one is longer by as much."""
    lengths, counts = np.unique(m, return_counts=True)
    return (
        len(lengths) >= _GROWING_CALLS
        and bool((np.diff(m) >= 0).all())
        and len(set(np.diff(lengths).tolist())) == 1
        and len(set(counts.tolist())) == 1
    )
