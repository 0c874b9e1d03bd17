"""Attention: as accurate as eager PyTorch for every mask, layout and option."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from advisor.kernels import _attention_hopper_tiles as hopper
from advisor.kernels import _attention_launch as launch
from advisor.kernels import _attention_masks as masks
from advisor.kernels import _attention_ops as ops
from advisor.kernels._device import UnsupportedError
from advisor.kernels.attention import FlashAttention, attention, attention_reference, unsupported_reasons
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.kernels.checks import assert_bit_equal, cases, check, run, skip_unless_runnable

DTYPES = cases([torch.float32, torch.float16, torch.bfloat16])
#: Lengths, heads and head dimensions that fill blocks, do not fill them, or hold a single row.
SHAPES = cases(
    [(1, 2, 2, 33, 33, 16, 16), (1, 4, 2, 18, 33, 24, 24), (1, 3, 1, 1, 19, 64, 64)],
    [(1, 1, 1, 40, 17, 8, 8), (1, 2, 2, 16, 16, 80, 80), (1, 2, 1, 20, 20, 64, 16), (1, 1, 1, 5, 34, 1, 3)],
)


def _qkv(device, dtype, batch, heads, heads_k, n, m, dim, dim_v):
    def rows(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    return {
        "q": rows(batch, heads, n, dim),
        "k": rows(batch, heads_k, m, dim),
        "v": rows(batch, heads_k, m, dim_v),
    }


def _check(inputs, **options):
    """Ours against the reference, both with these options."""
    check(
        lambda q, k, v, mask=None: attention(q, k, v, mask, **options),
        lambda q, k, v, mask=None: attention_reference(q, k, v, mask, **options),
        inputs,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", cases([False, True]))
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_match_eager(device, dtype, causal, shape, poisoned):
    skip_unless_runnable(device, dtype)
    # A row that sees one key has gradients of exactly 0, which rounding cannot meet: none does here.
    _check(_qkv(device, dtype, *shape), causal=causal, align="lower_right")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases([torch.bfloat16], [torch.float16, torch.float32]))
@pytest.mark.parametrize("options", cases([{"causal": True}, {}], [{"window": (100, 0)}, {"softcap": 20.0}]))
@pytest.mark.parametrize(
    "shape",
    cases(
        [(2, 4, 2, 515, 515, 128, 128), (1, 4, 4, 1024, 1024, 64, 64)],
        [(1, 2, 2, 300, 700, 96, 96), (1, 2, 1, 257, 257, 256, 256), (1, 2, 2, 640, 640, 32, 32)],
    ),
)
def test_sizes_of_real_models_match_eager(device, dtype, options, shape):
    if device.type == "cpu":
        pytest.skip("too large for the interpreter")
    _check(_qkv(device, dtype, *shape), **options)


@pytest.mark.parametrize("align", cases(["upper_left", "lower_right"]))
@pytest.mark.parametrize("lengths", cases([(18, 40)], [(40, 18)]))
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (7, 3)}, {"causal": True, "window": (20, -1)}]
)
def test_windows_meet_the_keys_where_the_alignment_says(device, align, lengths, options, poisoned):
    _check(_qkv(device, torch.float32, 1, 1, 1, *lengths, 16, 16), align=align, **options)


@pytest.mark.quick
def test_a_window_shorter_than_a_block_skips_the_blocks_that_no_query_sees(device, poisoned):
    # GIVEN keys that are NaN wherever the window of (2, 2) around the queries of the last block ends before
    inputs = _qkv(device, torch.float32, 1, 1, 1, 64, 64, 16, 16)
    inputs["k"][:, :, :16] = torch.nan
    inputs["v"][:, :, :16] = torch.nan
    # THEN the rows whose blocks of keys hold none are finite
    out = attention(**inputs, window=(2, 2))
    if device.type == "cpu":
        assert out[:, :, 32:].isfinite().all()
    assert out[:, :, :14].isnan().all()


@pytest.mark.parametrize("dtype", cases([torch.float16, torch.bfloat16]))
@pytest.mark.parametrize("shape", cases([(2, 2, 20, 24), (1, 20, 24), (24,)], [(2, 1, 1, 24), (2, 20, 1)]))
def test_a_bool_mask_of_any_broadcastable_shape_hides_keys(device, dtype, shape, poisoned):
    skip_unless_runnable(device, dtype)
    inputs = _qkv(device, dtype, 2, 2, 1, 20, 24, 16, 16)
    mask = torch.rand(shape, device=device) > 0.4
    _check({**inputs, "mask": mask})


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_no_key_are_zero_with_zero_gradients(device, dtype, poisoned):
    skip_unless_runnable(device, dtype)
    inputs = _qkv(device, dtype, 1, 2, 2, 20, 20, 16, 16)
    mask = torch.rand(20, 20, device=device) > 0.3
    mask[3] = mask[17] = False
    _check({**inputs, "mask": mask})
    q = inputs["q"].requires_grad_()
    out = attention(q, inputs["k"], inputs["v"], mask)
    out.sum().backward()
    assert not out[:, :, [3, 17]].any()
    assert not q.grad[:, :, [3, 17]].any()


@pytest.mark.quick
@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("shape", [(20, 20), (1, 20)])
def test_the_least_number_hides_a_key_as_minus_infinity_does(device, hidden, shape):
    seen = torch.rand(shape, device=device) > 0.3
    seen[0] = False
    q, k, v = _qkv(device, torch.float32, 1, 2, 2, 20, 20, 16, 16).values()
    added = torch.zeros(shape, device=device).masked_fill(~seen, hidden)
    torch.testing.assert_close(attention(q, k, v, added), attention(q, k, v, seen), rtol=1e-5, atol=1e-6)
    assert not attention(q, k, v, added)[:, :, 0].any()


def _masks(n, m):
    """Masks whose blocks are hidden, open, or cut one off their edges; each query sees a key."""
    i, j = torch.arange(n)[:, None], torch.arange(m)
    yield "documents", (i // 16 == j // 16) | (j == 0)
    yield "off_by_one", (i // 17 == j // 17) | (j == 15)
    yield "padding", (j < 17)[None].expand(n, m)
    yield "single", j == (i * 29) % m
    yield "causal_padding", (j <= i) & (j < 31)


@pytest.mark.quick
@pytest.mark.parametrize("kind", [name for name, _ in _masks(1, 1)])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    "options", cases([{}, {"dropout_p": 0.2}], [{"causal": True}, {"window": (9, -1), "softcap": 3.0}])
)
def test_blocks_that_a_mask_hides_change_no_bit_by_being_left_out(
    device, monkeypatch, kind, added, options, poisoned
):
    n, m = 40, 64
    mask = dict(_masks(n, m))[kind].to(device)
    if added:
        mask = torch.zeros(n, m, device=device).masked_fill(~mask, -torch.inf)
    inputs = _qkv(device, torch.float32, 1, 2, 1, n, m, 16, 16)

    def ours(q, k, v):
        torch.manual_seed(3)
        return attention(q, k, v, mask, **options)

    left_out = run(ours, inputs)
    listed = masks.listed
    monkeypatch.setattr(masks, "listed", lambda cells, *rest: listed(torch.full_like(cells, 7), *rest))
    all_visited = run(ours, inputs, douts=left_out[2])
    assert_bit_equal(left_out[0][0], all_visited[0][0])
    for name, gradient in left_out[1].items():
        assert_bit_equal(gradient, all_visited[1][name])
    # Where one key is seen, the gradient for queries is 0 but for rounding.
    if "dropout_p" not in options and kind != "single":
        check(ours, lambda q, k, v: attention_reference(q, k, v, mask, **options), inputs, gradient_ulps=16)


@pytest.mark.quick
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("direction", ["keys", "queries"])
def test_blocks_that_a_mask_hides_are_not_read(device, added, direction):
    if device.type != "cpu":
        pytest.skip("blocks are larger on a GPU")
    # GIVEN two sequences of 32 that do not see each other, the second of NaN
    at = torch.arange(64) // 32
    mask = at[:, None] == at
    if added:
        mask = torch.zeros(64, 64).masked_fill(~mask, -torch.inf)
    inputs = _qkv(device, torch.float32, 1, 1, 1, 64, 64, 16, 16)
    for name in ("k", "v") if direction == "keys" else ("q",):
        inputs[name][:, :, 32:] = torch.nan
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    out = attention(**leaves, mask=mask)
    grads = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
    # THEN the first sequence has numbers, and numbers for gradients
    assert out[:, :, :32].isfinite().all()
    assert all(x[:, :, :32].isfinite().all() for x in grads)


def _with_bias(function, bias, **options):
    return lambda q, k, v: function(q, k, v, bias, **options)


@pytest.mark.parametrize("options", cases([{}, {"causal": True}], [{"softcap": 2.0}]))
def test_an_added_bias_with_infinities_matches_eager(device, options, poisoned):
    inputs = _qkv(device, torch.float16, 1, 2, 2, 20, 20, 16, 16)
    bias = torch.randn(2, 20, 20, device=device)
    bias[:, :, 5] = -torch.inf
    bias[0, 2] = -torch.inf
    check(
        _with_bias(attention, bias, **options),
        _with_bias(attention_reference, bias, **options),
        inputs,
    )


@pytest.mark.quick
def test_alibi_is_a_bias_along_the_keys(device):
    # GIVEN the distance-dependent bias of ALiBi in full, and its column form, equal up to a term of the row
    inputs = _qkv(device, torch.float32, 1, 2, 2, 24, 24, 16, 16)
    slopes = torch.tensor([0.5, 0.25], device=device).view(2, 1, 1)
    at = torch.arange(24.0, device=device)
    full, column = -slopes * (at[:, None] - at).abs(), slopes * at
    # THEN both give the same under a causal mask
    check(
        _with_bias(attention, column, causal=True),
        _with_bias(attention_reference, full, causal=True),
        inputs,
        ulps=16,
        gradient_ulps=16,
    )


@pytest.mark.parametrize(
    "options", cases([{"softcap": 1.5}, {"scale": 0.7}], [{"softcap": 30.0, "causal": True}])
)
def test_softcap_and_scale_match_eager(device, options):
    _check(_qkv(device, torch.float32, 1, 2, 1, 24, 24, 16, 16), **options)


def _packed(device, dtype, lengths_q, lengths_k, heads, heads_k, dim):
    def ends(lengths):
        total = torch.tensor([0, *lengths]).cumsum(0)
        return total.to(device=device, dtype=torch.int32), max(lengths)

    cu_q, max_q = ends(lengths_q)
    cu_k, max_k = ends(lengths_k)
    tensors = {
        "q": torch.randn(sum(lengths_q), heads, dim, device=device).to(dtype),
        "k": torch.randn(sum(lengths_k), heads_k, dim, device=device).to(dtype),
        "v": torch.randn(sum(lengths_k), heads_k, dim, device=device).to(dtype),
    }
    where = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return tensors, where


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", cases([{"causal": True}], [{"window": (5, 2), "align": "lower_right"}]))
def test_packed_sequences_do_not_see_each_other(device, dtype, options, poisoned):
    skip_unless_runnable(device, dtype)
    lengths_q, lengths_k = [5, 0, 18, 1], [7, 3, 18, 9]
    tensors, where = _packed(device, dtype, lengths_q, lengths_k, 2, 1, 16)

    def one_by_one(q, k, v):
        parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
        outs = [
            attention_reference(*(x.transpose(0, 1)[None] for x in part), **options)[0].transpose(0, 1)
            for part in parts
        ]
        return torch.cat(outs)

    check(lambda q, k, v: attention(q, k, v, **options, **where), one_by_one, tensors)


@pytest.mark.quick
def test_nan_in_one_packed_sequence_stays_there(device):
    tensors, where = _packed(device, torch.float32, [6, 6], [6, 6], 1, 1, 16)
    for x in tensors.values():
        x[6:] = torch.nan
        x.requires_grad_()
    out = attention(**tensors, causal=True, **where)
    out[:6].sum().backward()
    assert out[:6].isfinite().all()
    assert all(x.grad[:6].isfinite().all() for x in tensors.values())


def _kept_weights(device, p, n, m):
    """What dropout multiplies the weights by: values of the unit matrix show the weights themselves."""
    q = torch.zeros(1, 1, n, 16, device=device)
    k = torch.zeros(1, 1, m, 16, device=device)
    return attention(q, k, torch.eye(m, device=device)[None, None], dropout_p=p) * m


@pytest.mark.parametrize("causal", cases([False, True]))
def test_dropout_drops_the_same_weights_in_the_backward(device, causal):
    inputs = _qkv(device, torch.float32, 1, 1, 1, 40, 40, 16, 16)
    torch.manual_seed(3)
    kept = _kept_weights(device, 0.3, 40, 40).round(decimals=4)
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.7], abs=2e-4)

    def ours(q, k, v):
        torch.manual_seed(3)
        return attention(q, k, v, causal=causal, dropout_p=0.3)

    exact = (kept > 0).double() * 65536 / round(0.7 * 65536)
    check(
        ours,
        lambda q, k, v: attention_reference(q, k, v, causal=causal, weights_kept=exact.to(q.dtype)),
        inputs,
        gradient_ulps=8,
    )


@pytest.mark.quick
def test_dropout_follows_torchs_generator_and_drops_the_share_asked_for(device):
    torch.manual_seed(1)
    first, second = _kept_weights(device, 0.25, 60, 64), _kept_weights(device, 0.25, 60, 64)
    torch.manual_seed(1)
    again = _kept_weights(device, 0.25, 60, 64)
    assert_bit_equal(first, again)
    assert not first.equal(second)
    share = float((first == 0).float().mean())
    # Five standard deviations of a binomial of 3840 draws.
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 3840) ** 0.5
    # Rows and columns are dropped apart from each other: no row or column is lost as a whole.
    assert (first > 0).any(-1).all()
    assert (first > 0).any(-2).all()


@pytest.mark.quick
def test_dropping_everything_gives_zeros(device):
    inputs = _qkv(device, torch.float32, 1, 1, 1, 5, 5, 16, 16)
    q = inputs["q"].requires_grad_()
    out = attention(q, inputs["k"], inputs["v"], dropout_p=1.0)
    out.sum().backward()
    assert not out.any()
    assert not q.grad.any()


@pytest.mark.parametrize("layout", cases(["tokens_first", "fused", "strided_dim", "expanded"]))
def test_any_strides_are_taken(device, layout, poisoned):
    if layout == "tokens_first":
        q, k, v = (torch.randn(2, 20, 2, 16, device=device).transpose(1, 2) for _ in range(3))
    elif layout == "fused":
        q, k, v = torch.randn(2, 20, 2, 3, 16, device=device).transpose(1, 2).unbind(-2)
    elif layout == "strided_dim":
        q, k, v = (torch.randn(2, 2, 16, 20, device=device).mT for _ in range(3))
    else:
        q = torch.randn(2, 2, 20, 16, device=device)
        k, v = (torch.randn(1, 2, 20, 16, device=device).expand(2, -1, -1, -1) for _ in range(2))
    _check({"q": q, "k": k, "v": v}, causal=True)


@pytest.mark.quick
def test_the_output_is_laid_out_as_q(device):
    q = torch.randn(2, 20, 2, 16, device=device).transpose(1, 2)
    assert attention(q, q, q).transpose(1, 2).is_contiguous()
    assert attention(q.contiguous(), q, q).is_contiguous()


@pytest.mark.quick
def test_an_expanded_output_gradient_is_read_as_it_is(device):
    inputs = _qkv(device, torch.float32, 1, 1, 1, 20, 20, 16, 16)
    leaves = [x.requires_grad_() for x in inputs.values()]
    ours = torch.autograd.grad(attention(*leaves).sum(), leaves)
    theirs = torch.autograd.grad(attention_reference(*leaves).sum(), leaves)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", cases(["large", "equal", "one_huge"]))
def test_extreme_scores_stay_exact(device, dtype, kind):
    skip_unless_runnable(device, dtype)
    inputs = _qkv(device, dtype, 1, 1, 1, 20, 36, 16, 16)
    if kind == "large":
        inputs["q"] = inputs["q"].sign() * 1e4
        inputs["k"] = inputs["k"].sign() * 1e4
    elif kind == "equal":
        inputs["q"] = torch.full_like(inputs["q"], 3.0)
        inputs["k"] = torch.full_like(inputs["k"], 3.0)
    else:
        inputs["k"][:, :, 7] = inputs["q"][:, :, 2:3] * 100.0
    # fp16 scores of eager overflow: what ours is judged by is eager in fp32 on the same values
    outs, grads, _ = run(attention, inputs)
    assert outs[0].isfinite().all()
    assert all(g.isfinite().all() for g in grads.values())
    exact = attention_reference(*(x.double() for x in inputs.values()))
    # A score's own rounding shifts its weight; the other kinds' scores are exact in fp32.
    rounding = (
        float(inputs["q"].abs().max() * inputs["k"].abs().max()) * 2**-22 if kind == "one_huge" else 0.0
    )
    eps = torch.finfo(dtype).eps + rounding
    assert (outs[0].double() - exact).abs().max() <= 4 * eps * inputs["v"].abs().max()


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(0, 2, 2, 5, 5, 16, 16), (2, 2, 2, 0, 5, 16, 16), (2, 2, 2, 5, 0, 16, 16)])
def test_no_queries_or_no_keys_give_empty_or_zero(device, shape, poisoned):
    inputs = {name: x.requires_grad_() for name, x in _qkv(device, torch.float32, *shape).items()}
    out = attention(**inputs)
    out.sum().backward()
    assert out.shape == (shape[0], 2, shape[3], 16)
    assert not out.any()
    assert not any(x.grad.any() for x in inputs.values())


@settings(max_examples=8, deadline=None)
@given(
    n=st.integers(1, 34),
    m=st.integers(1, 34),
    dim=st.integers(1, 40),
    group=st.integers(1, 3),
    left=st.integers(-1, 20),
    right=st.integers(-1, 20),
    align=st.sampled_from(["upper_left", "lower_right"]),
    tokens_first=st.booleans(),
)
def test_any_shape_and_window_matches_eager(n, m, dim, group, left, right, align, tokens_first):
    # Where every query sees one key, the gradient of q is 0 and rounding is all there is to compare.
    assume(max(_visible_keys(i, n, m, left, right, align) for i in range(n)) > 1)
    device = torch.device("cuda" if torch.cuda.is_available() and not ops_interpreted() else "cpu")
    inputs = _qkv(device, torch.float32, 1, group, 1, n, m, dim, dim)
    if tokens_first:
        inputs = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    check(
        lambda q, k, v: attention(q, k, v, window=(left, right), align=align),
        lambda q, k, v: attention_reference(q, k, v, window=(left, right), align=align),
        inputs,
        repeat=False,
        ulps=8,
        gradient_ulps=16,
    )


def _visible_keys(query, n, m, left, right, align):
    at = query + (m - n if align == "lower_right" else 0)
    first = 0 if left < 0 else max(at - left, 0)
    last = m - 1 if right < 0 else min(at + right, m - 1)
    return max(last - first + 1, 0)


def test_where_one_key_is_seen_the_gradient_of_the_query_is_rounding(device):
    inputs = _qkv(device, torch.float32, 1, 2, 1, 9, 9, 16, 16)
    gradients = run(lambda q, k, v: attention(q, k, v, window=(0, 0)), inputs)[1]
    assert gradients["q"].abs().max() < 1e-5


def ops_interpreted():
    from advisor.kernels._triton import INTERPRETED

    return INTERPRETED


@pytest.mark.quick
@pytest.mark.skipif(ops.TensorDescriptor is None, reason="this Triton has no tensor descriptors")
def test_tiles_through_descriptors_are_those_through_pointers(device, monkeypatch):
    shape = (2, 2, 1, 40, 24, 24, 24)
    inputs = _qkv(device, torch.float32, *shape)
    plain = run(lambda q, k, v: attention(q, k, v, causal=True), inputs)
    for table in (launch.FORWARD, launch.QUERY_GRADIENT, launch.KEY_GRADIENT):
        params = {**table.fp32.pick(24, device), "TMA": 1}
        monkeypatch.setattr(table.fp32, "pick", lambda size, device, params=params: params)
    described = run(lambda q, k, v: attention(q, k, v, causal=True), inputs, douts=plain[2])
    assert_bit_equal(plain[0][0], described[0][0])
    for name, gradient in plain[1].items():
        assert_bit_equal(gradient, described[1][name])


@pytest.mark.quick
def test_few_key_heads_are_shared_out_in_parts_that_sum_to_the_same(device, monkeypatch):
    inputs = _qkv(device, torch.float32, 1, 4, 1, 16, 16, 16, 16)
    monkeypatch.setattr(ops, "sm_count", lambda device: 1)
    whole = run(attention, inputs)
    monkeypatch.setattr(ops, "sm_count", lambda device: 1000)
    parts = run(attention, inputs, douts=whole[2])
    for name in ("k", "v"):
        torch.testing.assert_close(parts[1][name], whole[1][name], atol=1e-5, rtol=1e-5)
    _check(inputs)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        ({"k": torch.zeros(1, 2, 5, 8)}, {}, "do not fit"),
        ({"k": torch.zeros(1, 3, 5, 16), "v": torch.zeros(1, 3, 5, 16)}, {}, "multiple"),
        ({"q": torch.zeros(1, 2, 5, 16, dtype=torch.float64)}, {}, "float64"),
        ({"q": torch.zeros(1, 2, 5, 16, dtype=torch.float16)}, {}, "differ"),
        ({"q": torch.zeros(2, 5, 16)}, {}, "dimensions"),
        ({"mask": torch.zeros(3, 5)}, {}, "broadcast"),
        ({"mask": torch.zeros(5, 5, requires_grad=True)}, {}, "gradient"),
        ({}, {"scale": -1.0}, "positive"),
        ({}, {"dropout_p": 1.5}, "probability"),
        ({}, {"align": "left"}, "align"),
        ({}, {"softcap": -1.0}, "softcap"),
    ],
)
def test_what_is_not_taken_is_refused_with_the_reason(change, options, says):
    q = torch.zeros(1, 2, 5, 16)
    arguments = {"q": q, "k": q, "v": q, **change}
    reasons = unsupported_reasons(**arguments, **options)
    assert any(says in reason for reason in reasons), reasons
    with pytest.raises(UnsupportedError, match=says):
        attention(**arguments, **options)


@pytest.mark.quick
def test_packed_arguments_come_all_together():
    q = torch.zeros(5, 2, 16)
    assert any("all four" in r for r in unsupported_reasons(q, q, q, cu_seqlens_q=torch.zeros(2)))


@pytest.mark.quick
def test_a_second_derivative_is_refused(device):
    inputs = [x.requires_grad_() for x in _qkv(device, torch.float32, 1, 1, 1, 4, 4, 16, 16).values()]
    (gradient,) = torch.autograd.grad(attention(*inputs).sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        gradient.sum().backward()


@pytest.mark.quick
def test_autocast_casts_as_it_does_for_torchs_own_attention(device):
    inputs = _qkv(device, torch.float32, 1, 1, 1, 4, 4, 16, 16).values()
    with torch.autocast(device.type, dtype=torch.float16):
        ours = attention(*inputs)
        theirs = torch.nn.functional.scaled_dot_product_attention(*inputs)
    assert ours.dtype == theirs.dtype == torch.float16


@pytest.mark.quick
def test_the_operator_passes_torchs_checks(device):
    q, k, v = (x.requires_grad_() for x in _qkv(device, torch.float32, 1, 2, 1, 6, 9, 16, 16).values())
    rest = (None, None, None, None, 0.25, 0.0, 0.0, -1, 0, False, 6, 9)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.advisor_kernels.attention.default, (q, k, v, *rest), test_utils=tests)


@pytest.mark.quick
def test_it_compiles_as_one_graph(device):
    inputs = _qkv(device, torch.float32, 1, 1, 1, 9, 9, 16, 16)
    module = FlashAttention(causal=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    ours = run(lambda q, k, v: compiled(q, k, v), inputs)
    theirs = run(lambda q, k, v: module(q, k, v), inputs, douts=ours[2])
    assert_bit_equal(ours[0][0], theirs[0][0])
    for name, gradient in theirs[1].items():
        assert_bit_equal(gradient, ours[1][name])


@pytest.mark.quick
def test_the_module_drops_weights_in_training_alone(device):
    q = torch.randn(1, 1, 20, 16, device=device)
    module = FlashAttention(dropout_p=0.5)
    assert not module(q, q, q).equal(attention(q, q, q))
    assert module.eval()(q, q, q).equal(attention(q, q, q))
    assert repr(module) == "FlashAttention(dropout_p=0.5)"


def test_the_kernels_compile_for_hopper_in_its_registers_with_its_matrix_instructions():
    # What the interpreter takes need not compile: an early return, say.
    pytest.importorskip("triton.backends.nvidia")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_attention"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    names = {"forward_kernel", "query_gradient_kernel", "key_gradient_kernel"}
    if hopper.AVAILABLE:
        names |= {f"{kind}_{name}" for name in names for kind in ("roles", "added", "ahead")}
    assert {name for name, *_ in lines} == names
    for name, spilled, matrix, waits in lines:
        # A few registers at the loop's edges may go to memory, a tile may not; two groups have edges each.
        allowed = {"roles": 512, "added": 640, "ahead": 256}.get(name.split("_")[0], 160)
        assert int(spilled) < allowed, f"{name} spills {spilled} bytes"
        assert int(matrix) > 0, f"{name} multiplies without wgmma"
        # It may start before query gradients, and with them delta, are there.
        early = name == "ahead_key_gradient_kernel"
        assert waits == ("first" if early else "never"), f"{name} waits {waits} for the kernel before it"
