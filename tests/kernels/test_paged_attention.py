"""Paged attention: as accurate as eager PyTorch on the gathered cache, which it reads no further than told.

Every cache here holds NaN where no sequence has a token, and every table numbers far outside of the cache
where no sequence has a block: reading either shows.
"""

import ctypes
import mmap
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from advisor.kernels import _paged_ops as ops
from advisor.kernels._device import UnsupportedError
from advisor.kernels._triton import INTERPRETED
from advisor.kernels.bench import paged_attention as bench
from advisor.kernels.bench.paged_attention import Shape
from advisor.kernels.paged_attention import (
    paged_attention,
    paged_attention_reference,
    unsupported_reasons,
    write_to_cache,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.checks import assert_bit_equal, cases, check, skip_unless_runnable

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = cases(FLOATS)
GARBAGE = 2**30


def cases_of(quick, full):
    """`cases` of several parameters at once, so that a combination is quick only if it is said to be."""
    return [pytest.param(*values, marks=[pytest.mark.quick]) for values in quick] + list(full)


def _paged(device, dtype, lens, heads=4, kv_heads=2, dim=16, block_size=16, queries=1, seen_from=None):
    """Queries, and a cache whose sequences lie in blocks in random order.

    `seen_from` gives the first token that is in the cache, for each sequence.
    """
    seen_from = seen_from or [0] * len(lens)
    width = max([*(-(-n // block_size) for n in lens), 1]) + 1
    table = torch.full((len(lens), width), GARBAGE, dtype=torch.int32)
    owned = [
        (b, at) for b, n in enumerate(lens) for at in range(seen_from[b] // block_size, -(-n // block_size))
    ]
    blocks = len(owned) + 2
    for (b, at), block in zip(owned, torch.randperm(blocks).tolist(), strict=False):
        table[b, at] = block
    shape = (blocks, block_size, kv_heads, dim)
    k, v = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    for b, n in enumerate(lens):
        for j in range(seen_from[b], n):
            block = table[b, j // block_size]
            for cache in (k, v):
                cache[block, j % block_size] = torch.randn(kv_heads, dim, device=device).to(dtype)
    q = torch.randn(len(lens), queries, heads, dim, device=device).to(dtype)
    return {
        "q": q[:, 0] if queries == 1 else q,
        "k_cache": k,
        "v_cache": v,
        "block_table": table.to(device),
        "context_lens": torch.tensor(lens, dtype=torch.int32, device=device),
    }


def _check(inputs, ulps=4.0, **options):
    """Ours against the reference, both with these options, outputs and log-sum-exps."""
    tensors = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    rest = {name: x for name, x in options.items() if name not in tensors}
    check(
        lambda **given: paged_attention(**given, **rest, return_lse=True),
        lambda **given: paged_attention_reference(**given, **rest),
        {**inputs, **tensors},
        gradients=False,
        ulps=ulps,
    )


def _with_slots(monkeypatch, processors):
    """Let the device have this many multiprocessors, each for one program: as many splits are worth it."""
    monkeypatch.setattr(ops, "sm_count", lambda device: processors)
    ops.split_count.cache_clear()


SHAPES = [
    {"lens": [33, 1, 16], "heads": 4, "kv_heads": 2, "dim": 16, "block_size": 16},
    {"lens": [40], "heads": 3, "kv_heads": 1, "dim": 80, "block_size": 32, "queries": 3},
    {"lens": [70, 5], "heads": 2, "kv_heads": 2, "dim": 24, "block_size": 64},
    {"lens": [30], "heads": 20, "kv_heads": 1, "dim": 64, "block_size": 8},
    {"lens": [19, 5, 30], "heads": 3, "kv_heads": 3, "dim": 1, "block_size": 3},
    {"lens": [24], "heads": 2, "kv_heads": 1, "dim": 256, "block_size": 16},
    {"lens": [45], "heads": 2, "kv_heads": 1, "dim": 16, "block_size": 16, "queries": 40},
]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    cases_of(product(FLOATS, SHAPES[:2]), product(FLOATS, SHAPES[2:])),
)
def test_outputs_match_eager_on_the_gathered_cache(device, dtype, shape, poisoned):
    skip_unless_runnable(device, dtype)
    _check(_paged(device, dtype, **shape))


MODELS = [
    {"heads": 32, "kv_heads": 8, "dim": 128},
    {"heads": 12, "kv_heads": 12, "dim": 64},
    {"heads": 16, "kv_heads": 8, "dim": 256},
    {"heads": 20, "kv_heads": 4, "dim": 96},
    {"heads": 32, "kv_heads": 8, "dim": 128, "queries": 4},
    {"heads": 32, "kv_heads": 2, "dim": 128, "queries": 5},
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "block_size", "options", "shape"),
    cases_of(
        product([torch.bfloat16], [16], [{}], MODELS),
        [
            *product([torch.bfloat16], [48, 64, 128, 256], [{}], MODELS),
            *product([torch.bfloat16], [128], [{"window_left": 700}, {"softcap": 20.0}], MODELS),
            *product([torch.float16, torch.float32], [16], [{}], MODELS),
        ],
    ),
)
def test_sizes_of_real_models_match_eager(device, dtype, block_size, options, shape, poisoned):
    if device.type == "cpu":
        pytest.skip("too large for the interpreter")
    _check(_paged(device, dtype, [1500, 3, 0, 777], block_size=block_size, **shape), **options)


OPTIONS = [
    {"window_left": 5},
    {"window_left": 0},
    {"softcap": 3.0},
    {"scale": 0.7},
    {"slopes": True},
    {"slopes": True, "softcap": 3.0, "window_left": 20},
]


@pytest.mark.parametrize(
    ("dtype", "queries", "options"),
    cases_of(
        product([torch.bfloat16], [3], OPTIONS),
        [*product([torch.bfloat16], [1], OPTIONS), *product([torch.float32, torch.float16], [1, 3], OPTIONS)],
    ),
)
def test_options_match_eager(device, dtype, queries, options, poisoned):
    skip_unless_runnable(device, dtype)
    inputs = _paged(device, dtype, [37, 6], queries=queries)
    options = dict(options)
    if options.pop("slopes", False):
        options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.125, 1.0], device=device)
    _check(inputs, **options)


@pytest.mark.quick
@pytest.mark.parametrize("splits", [2, 3, 20])
@pytest.mark.parametrize("options", [{}, {"window_left": 30}])
def test_a_sequence_in_splits_is_that_in_one(device, splits, options, monkeypatch, poisoned):
    # GIVEN sequences that have tokens for all splits, for some of them and for none
    inputs = _paged(device, torch.float32, [150, 40, 0], heads=2, kv_heads=1, queries=2)
    _with_slots(monkeypatch, 3)
    whole, whole_lse = paged_attention(**inputs, return_lse=True, **options)
    _with_slots(monkeypatch, 3 * splits)
    cut, cut_lse = paged_attention(**inputs, return_lse=True, **options)
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(cut_lse, whole_lse, atol=1e-6, rtol=1e-6)
    _check(inputs, **options)


@pytest.mark.quick
@pytest.mark.parametrize("hint", [1, 64, 10**9])
def test_the_result_does_not_depend_on_what_the_host_believes_of_lengths(device, hint, monkeypatch, poisoned):
    inputs = _paged(device, torch.float32, [90, 7])
    _with_slots(monkeypatch, 64)
    expected, _ = paged_attention_reference(**inputs)
    got = paged_attention(**inputs, max_context_len=hint, total_context_len=hint)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("processors", [1, 64])
def test_a_sequence_of_no_tokens_gives_zeros(device, processors, monkeypatch, poisoned):
    _with_slots(monkeypatch, processors)
    inputs = _paged(device, torch.float32, [0, 50, 0])
    out, lse = paged_attention(**inputs, return_lse=True)
    assert not out[[0, 2]].any()
    assert (lse[[0, 2]] == -torch.inf).all()
    assert out[1].abs().min() > 0


@pytest.mark.quick
@pytest.mark.parametrize("processors", [1, 64])
def test_queries_before_the_first_token_give_zeros(device, processors, monkeypatch, poisoned):
    _with_slots(monkeypatch, processors)
    inputs = _paged(device, torch.float32, [34], heads=1, kv_heads=1, queries=36)
    out, lse = paged_attention(**inputs, return_lse=True)
    assert not out[0, :2].any()
    assert (lse[0, :2] == -torch.inf).all()
    _check(inputs)


@pytest.mark.quick
@pytest.mark.parametrize("empty", ["batch", "blocks", "table"])
def test_nothing_in_gives_nothing_or_zeros_out(device, empty, poisoned):
    inputs = _paged(device, torch.float32, [0, 0])
    if empty == "batch":
        inputs = {name: x[:0] for name, x in inputs.items()}
    elif empty == "blocks":
        inputs |= {name: inputs[name][:0] for name in ("k_cache", "v_cache")}
    else:
        inputs["block_table"] = inputs["block_table"][:, :0]
    out = paged_attention(**inputs)
    assert out.shape == inputs["q"].shape
    assert not out.any()


@pytest.mark.quick
@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize("processors", [1, 64])
def test_blocks_that_the_window_has_left_are_not_read(device, block_size, processors, monkeypatch, poisoned):
    # GIVEN a cache that gave back every block before the one where the window begins
    _with_slots(monkeypatch, processors)
    inputs = _paged(device, torch.float32, [90], block_size=block_size, seen_from=[90 - 1 - 20])
    _check(inputs, window_left=20)


@pytest.mark.quick
@pytest.mark.parametrize("processors", [1, 64])
def test_a_negative_length_is_none(device, processors, monkeypatch, poisoned):
    _with_slots(monkeypatch, processors)
    inputs = _paged(device, torch.float32, [40, 20])
    inputs["context_lens"][0] = -17
    out, lse = paged_attention(**inputs, return_lse=True)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all()


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect by its Linux numbers")
def test_the_table_is_not_read_past_its_end(device):
    if device.type == "cuda":
        pytest.skip("compute-sanitizer tells there")
    # GIVEN a table that ends where a page begins that nobody may read, and a tile of more blocks than it has
    page = mmap.PAGESIZE
    pages = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
    inputs = _paged(device, torch.float32, [9], block_size=4)
    used = inputs["block_table"][:, :3]
    table = torch.frombuffer(pages, dtype=torch.int32, count=3, offset=page - 12).view(1, 3).copy_(used)
    # THEN reading on would end this process
    expected = paged_attention(**inputs)
    assert_bit_equal(paged_attention(**{**inputs, "block_table": table}), expected)


@pytest.mark.quick
def test_a_length_beyond_the_table_is_cut_to_it(device):
    inputs = _paged(device, torch.float32, [32])
    inputs["block_table"] = inputs["block_table"][:, :2]
    expected = paged_attention(**inputs)
    for excess in (1000, 2**32):
        lens = inputs["context_lens"].long() + excess
        assert_bit_equal(paged_attention(**{**inputs, "context_lens": lens}), expected)


@pytest.mark.parametrize("layout", cases(["heads_first", "together", "strided_q", "strided_table", "long"]))
def test_any_strides_are_taken(device, layout, poisoned):
    inputs = _paged(device, torch.float32, [37, 6])
    k, v = inputs["k_cache"], inputs["v_cache"]
    if layout == "heads_first":
        inputs |= {n: inputs[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("k_cache", "v_cache")}
    elif layout == "together":
        both = torch.stack([k, v], 1)
        inputs |= {"k_cache": both[:, 0], "v_cache": torch.stack([v, k], 3)[:, :, :, 0]}
    elif layout == "strided_q":
        inputs["q"] = torch.randn(2, 16, 4, device=device).mT
    elif layout == "strided_table":
        inputs["block_table"] = inputs["block_table"].T.contiguous().T
    else:
        inputs |= {n: inputs[n].long() for n in ("block_table", "context_lens")}
    _check(inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", cases(["large", "equal", "one_huge"]))
def test_extreme_scores_stay_exact(device, dtype, kind, monkeypatch, poisoned):
    skip_unless_runnable(device, dtype)
    _with_slots(monkeypatch, 8)
    inputs = _paged(device, dtype, [90], heads=2, kv_heads=1)
    k = inputs["k_cache"]
    if kind == "large":
        inputs["q"], inputs["k_cache"] = inputs["q"].sign() * 1e4, k.sign() * 1e4
    elif kind == "equal":
        inputs["q"], inputs["k_cache"] = torch.full_like(inputs["q"], 3.0), torch.full_like(k, 3.0)
    else:
        # Token 20, of the second block, is the one that the first head looks for.
        k[inputs["block_table"][0, 1], 4] = inputs["q"][0, :1] * 100.0
    out = paged_attention(**inputs)
    exact, _ = paged_attention_reference(
        **{n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    )
    # A score's own rounding shifts its weight; the other kinds' scores are exact in fp32.
    rounding = 0.0
    if kind == "one_huge":
        rounding = float(inputs["q"].abs().max() * k.nan_to_num().abs().max()) * 2**-22
    assert out.isfinite().all()
    eps = torch.finfo(dtype).eps + rounding
    assert (out.double() - exact).abs().max() <= 4 * eps * inputs["v_cache"].nan_to_num().abs().max()


def _quantized(inputs, dtype):
    """The same with a cache of 8 bits, as eager arithmetic makes it, and its scales by head."""
    limit = ops.LIMITS[dtype]
    found = {}
    for name in ("k", "v"):
        cache = inputs[f"{name}_cache"].float()
        scale = cache.nan_to_num().abs().amax((0, 1, 3)) / limit
        stored = (cache / scale[:, None]).clamp(-limit, limit)
        if dtype == torch.int8:
            # Poison of 8 bits is a large number.
            stored = (stored + 0.5).floor().nan_to_num(limit)
        found |= {f"{name}_cache": stored.to(dtype), f"{name}_scale": scale}
    return {**inputs, **found}


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}])
def test_a_cache_of_8_bits_is_read_with_its_scales(device, dtype, options, poisoned):
    skip_unless_runnable(device, dtype)
    inputs = _quantized(_paged(device, torch.float16, [37, 6]), dtype)
    # Float8 cannot be compared, which is how inputs are seen to be unchanged.
    caches = {name: inputs.pop(name) for name in ("k_cache", "v_cache")}
    check(
        lambda **given: paged_attention(**given, **caches, **options),
        lambda **given: paged_attention_reference(**given, **caches, **options)[0],
        inputs,
        gradients=False,
        ulps=4.0,
    )


@pytest.mark.quick
def test_caches_of_more_than_2_to_the_31_elements_are_read_and_written(device):
    # GIVEN one cache whose last block begins beyond 2^31 elements, of which only touched pages take memory
    block_size, heads, dim = 256, 2, 64
    blocks = 2**31 // (block_size * heads * dim) + 2
    cache = torch.empty(blocks, block_size, heads, dim, dtype=torch.int8, device=device)
    unit = torch.full((heads,), 0.05, device=device)
    key = torch.randn(20, heads, dim, device=device)
    slots = (blocks - 1) * block_size + torch.arange(20, device=device)
    # WHEN its tokens are written and looked at
    write_to_cache(key, key, cache, cache, slots, k_scale=unit, v_scale=unit)
    inputs = {
        "q": torch.randn(1, heads, dim, device=device),
        "block_table": torch.tensor([[blocks - 1]], dtype=torch.int32, device=device),
        "context_lens": torch.tensor([20], dtype=torch.int32, device=device),
        "k_scale": unit,
        "v_scale": unit,
    }
    out = paged_attention(**inputs, k_cache=cache, v_cache=cache)
    # THEN they are those of a small cache
    inputs["block_table"] = torch.zeros_like(inputs["block_table"])
    small = cache[-1:].clone()
    torch.testing.assert_close(small[0, :20].float() * 0.05, key.clamp(-6.35, 6.35), atol=0.026, rtol=0)
    assert_bit_equal(out, paged_attention(**inputs, k_cache=small, v_cache=small))


@settings(max_examples=12, deadline=None)
@given(
    lens=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    dim=st.integers(1, 40),
    block_size=st.integers(1, 40),
    queries=st.integers(1, 4),
    window=st.none() | st.integers(0, 30),
    processors=st.integers(1, 12),
    seed=st.integers(0, 100),
)
def test_any_lengths_and_blocks_match_eager(
    lens, kv_heads, group, dim, block_size, queries, window, processors, seed
):
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
    inputs = _paged(
        device, torch.float32, lens, kv_heads * group, kv_heads, dim, block_size, queries,
        [max(n - queries - (n if window is None else window), 0) for n in lens],
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        _with_slots(patch, processors)
        found = paged_attention(**inputs, window_left=window, return_lse=True)
    exact = paged_attention_reference(
        **{n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}, window_left=window
    )
    # Few outputs, which may cancel: what rounding leaves is measured by the values that are summed.
    largest = (
        float(inputs["v_cache"].nan_to_num().abs().max()),
        float(exact[1].nan_to_num(neginf=0).abs().max()),
    )
    for got, right, scale in zip(found, exact, largest, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=0, atol=2**-20 * max(scale, 1.0))


@pytest.mark.parametrize(
    ("programs", "slots", "tiles", "splits"),
    [
        (1000, 1, 100, 1),  # many more than fit: no splits
        (1, 100, 16, 8),  # no work for more than 8
        (8, 264, 2000, 33),  # one full wave
        (8, 396, 512, 47),  # 11 tiles each; 43 to 46 would have 12, and 49 no fewer than 11
        (320, 264, 200, 4),  # 1.2 waves leave 40 % idle, 4.8 leave 3 %
        (264, 264, 200, 1),
        (5, 100, 0, 1),
    ],
)
def test_splits_fill_the_device(programs, slots, tiles, splits):
    assert ops.split_count(programs, slots, tiles) == splits


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        ({"q": torch.zeros(2, 3, 16)}, {}, "no multiple"),
        ({"q": torch.zeros(2, 4, 8)}, {}, "head dimensions"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float16)}, {}, "alike"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float64)}, {}, "float64"),
        ({"q": torch.zeros(4, 16)}, {}, "dimensions"),
        ({"v_cache": torch.zeros(3, 16, 2, 8)}, {}, "caches"),
        ({"k_cache": torch.zeros(3, 16, 16, 2).mT}, {}, "side by side"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, {}, "block_table"),
        ({"context_lens": torch.zeros(2)}, {}, "float32"),
        ({"q": torch.zeros(2, 4, 16, requires_grad=True)}, {}, "no_grad"),
        ({}, {"alibi_slopes": torch.zeros(3)}, "alibi_slopes"),
        ({}, {"scale": 0.0}, "positive"),
        ({}, {"softcap": -1.0}, "softcap"),
        ({}, {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}, "8 bits"),
        (
            {n: torch.zeros(3, 16, 2, 16, dtype=torch.int8) for n in ("k_cache", "v_cache")},
            {"k_scale": torch.ones(2)},
            "v_scale",
        ),
    ],
)
def test_what_is_not_taken_is_refused_with_the_reason(change, options, says):
    cache = torch.zeros(3, 16, 2, 16)
    given = {
        "q": torch.zeros(2, 4, 16),
        "k_cache": cache,
        "v_cache": cache,
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "context_lens": torch.zeros(2, dtype=torch.int32),
        **change,
    }
    reasons = unsupported_reasons(**given, **options)
    assert any(says in reason for reason in reasons), reasons
    with pytest.raises(UnsupportedError, match=says):
        paged_attention(**given, **options)


@pytest.mark.quick
def test_a_gradient_is_taken_where_none_is_asked_for_and_refused_where_one_is(device):
    inputs = _paged(device, torch.float32, [20])
    inputs["q"].requires_grad_()
    with torch.no_grad():
        assert not paged_attention(**inputs).requires_grad
    out, _ = ops.paged_attention_op(
        inputs["q"][:, None], *list(inputs.values())[1:], None, None, None, 0.25, 0.0, -1, 32, -1
    )
    with pytest.raises(NotImplementedError, match="for decoding"):
        out.sum().backward()


@pytest.mark.quick
def test_autocast_casts_the_queries_to_the_caches_dtype(device):
    inputs = _paged(device, torch.float16, [20])
    inputs["q"] = inputs["q"].float()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert paged_attention(**inputs).dtype == torch.float16


@pytest.mark.quick
def test_the_operators_pass_torchs_checks(device):
    inputs = _paged(device, torch.float32, [20], queries=2)
    rest = (None, None, None, 0.25, 0.0, -1, 32, 20)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    names = torch.ops.advisor_kernels
    torch.library.opcheck(names.paged_attention.default, (*inputs.values(), *rest), test_utils=tests)
    key = torch.randn(3, 2, 16, device=device)
    caches = [torch.zeros(2, 16, 2, 16, device=device) for _ in range(2)]
    slots = torch.tensor([5, -1, 17], device=device)
    written = (key, key, *caches, slots, None, None)
    torch.library.opcheck(names.write_to_cache.default, written, test_utils=tests)


@pytest.mark.quick
def test_a_step_compiles_as_one_graph_that_writes_before_it_reads(device):
    inputs = _paged(device, torch.float32, [20])
    # The last token is to come.
    slot = inputs["block_table"][:, 1].long() * 16 + 3
    key, value = torch.randn(2, 1, 2, 16, device=device).unbind()

    def step(q, k_cache, v_cache, block_table, context_lens, longest):
        write_to_cache(key, value, k_cache, v_cache, slot)
        return paged_attention(q, k_cache, v_cache, block_table, context_lens, max_context_len=longest) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    runs = []
    for function in (step, compiled):
        given = {name: x.clone() for name, x in inputs.items()}
        runs.append((function(**given, longest=20), given["k_cache"]))
    assert runs[0][0].isfinite().all()
    assert_bit_equal(runs[0][0], runs[1][0])
    assert_bit_equal(runs[0][1], runs[1][1])


@pytest.mark.quick
def test_longer_sequences_are_not_compiled_anew(device):
    inputs = _paged(device, torch.float32, [20])
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(paged_attention, fullgraph=True, backend=counter)
    for longest in range(20, 25):
        compiled(**inputs, max_context_len=longest, total_context_len=longest)
    # Once for a number that is constant, once for one that is not.
    assert counter.frame_count <= 2


@pytest.mark.quick
def test_the_benchmark_counts_the_tokens_that_are_seen():
    ragged = Shape([10, 3, 40], 4, 2, 16, 8, window_left=11)
    assert ragged.seen == 10 + 3 + 12
    assert not ragged.is_uniform
    case = next(iter(bench.cases(True)))
    assert str(bench.QUICK[0]) == case.shape == "16x8192x32/8x128b16"
    # Keys and values of 16 x 8192 tokens, queries and outputs of 16
    assert case.bytes == 2 * 128 * (2 * 8 * 16 * 8192 + 2 * 32 * 16)


@pytest.mark.gpu
@pytest.mark.quick
def test_what_the_benchmark_times_beside_ours_computes_the_same(device):
    if device.type == "cpu":
        pytest.skip("in bfloat16")
    given = bench.inputs(Shape([96] * 3, 4, 2, 64, 16))()
    ours, theirs = paged_attention(*given), bench.contiguous(bench._sdpa)(given)()
    torch.testing.assert_close(ours, theirs[:, :, 0], atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("graphed", [False, True])
def test_splits_put_together_by_a_kernel_that_began_before_they_ended_give_the_same_bits(
    device, monkeypatch, graphed
):
    if device.type == "cpu" or torch.version.hip or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no programmatic dependent launches")
    # GIVEN calls right after one another, each of the last one's output, over a cache in splits
    q, *cache = bench.inputs(Shape([5000], 8, 2, 128, 16))()

    def chain():
        out = [q]
        for _ in range(16):
            out.append(paged_attention(out[-1], *cache))
        return torch.cat(out)

    expected = chain()
    row = dict(ops.SPLIT.pick(128, device))
    monkeypatch.setattr(ops.SPLIT, "rows", {"default": ((None, row | {"OVERLAP": 1}),)})
    found = chain()
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain()
        graph.replay()
    # THEN
    assert expected.isfinite().all()
    assert torch.equal(found, expected)


def test_the_kernels_compile_for_hopper_in_its_registers_with_16_byte_copies():
    # What the interpreter takes need not compile.
    pytest.importorskip("triton.backends.nvidia")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_paged_attention"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, compilations = [line.split() for line in done.stdout.splitlines()]
    # For blocks of 16 with and without splits and of 128 without; to put 8 and 16 splits together. Growing
    # sequences call for no others.
    assert compilations == ["3", "2"]
    assert {name for name, *_ in lines} == {
        "paged_attention_kernel",
        "paged_combine_kernel",
        "cache_write_kernel",
    }
    for name, spilled, matrix, copies, registers in lines:
        assert int(spilled) < 64, f"{name} spills {spilled} bytes"
        if name == "paged_attention_kernel":
            assert int(matrix) > 0, "products without matrix instructions"
            assert int(copies) > 0, "tiles do not come in asynchronous copies of 16 bytes"
            # Two programs leave registers enough.
            assert (int(spilled), 2 * 128 * int(registers) <= 65536) == (0, True)
