"""Attention in its spellings, and what looks like it and is not."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swap.rewrite.support import Holder, found_in, misses, one, rand, replacement_equals_original

B, H, T, D = 2, 2, 8, 16
INF = float("inf")


def qkv(*shape, dtype=torch.float32):
    return tuple(rand(*(shape or (B, H, T, D)), dtype=dtype) for _ in range(3))


def same(fn, *args, only="torch", **settings):
    """The interpreter is slow: unless the bundled kernel is asked for, PyTorch's own stands in."""
    return replacement_equals_original("attention", fn, *args, only=only, **settings)


def tril(q=T, k=T):
    return torch.tril(torch.ones(q, k))


def matmul_scale_after(q, k, v):
    return (q @ k.transpose(-2, -1) * (1 / math.sqrt(D))).softmax(-1) @ v


def scale_on_queries(q, k, v):
    return torch.matmul(F.softmax(torch.matmul(q * D**-0.5, k.mT), dim=-1), v)


def scale_on_both(q, k, v):
    scale = D**-0.25
    return torch.softmax((q * scale) @ (k * scale).transpose(2, 3), dim=3) @ v


def divided(q, k, v):
    return F.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(D), dim=-1).matmul(v)


def scale_is_a_tensor(q, k, v):
    scores = torch.matmul(q, k.transpose(-1, -2))
    return F.softmax(scores / torch.full([], D**0.5, dtype=scores.dtype), dim=-1) @ v


def without_scale(q, k, v):
    return F.softmax(q @ k.transpose(-2, -1), dim=-1) @ v


def odd_scale(q, k, v):
    return F.softmax(0.37 * (q @ k.transpose(-2, -1)), dim=-1) @ v


def einsum_heads_first(q, k, v):
    p = torch.einsum("bhid,bhjd->bhij", q, k).mul(D**-0.5).softmax(dim=-1)
    return torch.einsum("bhij,bhjd->bhid", p, v)


def softmax_in_fp32(q, k, v):
    p = F.softmax((q @ k.transpose(-2, -1) * D**-0.5).float(), dim=-1, dtype=torch.float32).to(q.dtype)
    return p @ v


def softmax_type_as(q, k, v):
    return F.softmax((q @ k.transpose(-2, -1)).float() * D**-0.5, dim=-1).type_as(q) @ v


def soft_capped(q, k, v):
    scores = q @ k.transpose(-2, -1) * D**-0.5
    return torch.softmax(torch.tanh(scores / 5.0) * 5.0, dim=-1) @ v


def written_in_place(q, k, v):
    scores = q @ k.transpose(-2, -1)
    scores *= D**-0.5
    scores.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), -INF)
    return scores.softmax(-1) @ v


PLAIN = [
    matmul_scale_after, scale_on_queries, scale_on_both, divided, scale_is_a_tensor, without_scale, odd_scale,
    einsum_heads_first, softmax_in_fp32, softmax_type_as, soft_capped, written_in_place,
]  # fmt: skip


@pytest.mark.parametrize("fn", PLAIN, ids=lambda f: f.__name__)
def test_each_spelling_is_found_and_replaced_by_the_same(fn):
    both = fn in (matmul_scale_after, soft_capped)
    found = same(fn, *qkv(1, 2, T, D), only="" if both else "torch")

    assert found.match.kind == "attention"


def test_einsum_with_tokens_before_heads_is_turned_and_turned_back():
    def fn(q, k, v):
        p = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(D**-0.5).softmax(dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", p, v)

    same(fn, *qkv(1, T, 2, D), only="")


def test_einsum_with_its_operands_the_other_way_round():
    def fn(q, k, v):
        p = torch.einsum("bkhd,bqhd->bhqk", k, q).mul(D**-0.5).softmax(dim=-1)
        return torch.einsum("bkhd,bhqk->bqhd", v, p)

    same(fn, *qkv(B, T, H, D))


def test_batched_products_of_three_dimensions():
    def fn(q, k, v):
        scores = torch.baddbmm(q.new_zeros(B * H, T, T), q, k.transpose(1, 2), beta=0, alpha=D**-0.5)
        return torch.bmm(F.softmax(scores, dim=-1), v)

    found = same(fn, *qkv(B * H, T, D))

    assert found.match.attributes["scale"] == pytest.approx(D**-0.5)


def test_keys_that_were_laid_out_transposed_from_the_start():
    def fn(q, k, v):
        return F.softmax(q @ k.permute(0, 2, 3, 1) * D**-0.5, dim=-1) @ v

    same(fn, rand(B, H, T, D), rand(B, T, H, D), rand(B, H, T, D))


def test_permuted_keys_stay_permuted():
    # Equal only if the kernel is given the flipped keys beside the values as they were.
    def fn(q, k, v):
        return F.softmax(q @ k.flip(2).transpose(-2, -1) * D**-0.5, dim=-1) @ v

    same(fn, *qkv())


@pytest.mark.parametrize("scale", [0.37, 1.0, 4.0])
def test_the_scale_is_carried_as_it_is(scale):
    found = one("attention", lambda q, k, v: ((q @ k.mT) * scale).softmax(-1) @ v, *qkv())

    assert found.match.attributes["scale"] == scale


MASKED = {
    "masked_fill of ones": lambda s: s.masked_fill(tril() == 0, -INF),
    "masked_fill of triu": lambda s: s.masked_fill(torch.triu(torch.ones(T, T), diagonal=1).bool(), -INF),
    "a large number": lambda s: s.masked_fill(tril().logical_not(), -1e9),
    "the least number": lambda s: s.masked_fill(~tril().bool(), torch.finfo(s.dtype).min),
    "where": lambda s: torch.where(tril().bool(), s, -INF),
    "where, a tensor": lambda s: torch.where(tril().bool(), s, torch.full([], -1e10)),
    "positions": lambda s: s.masked_fill(torch.arange(T)[None, :] > torch.arange(T)[:, None], -INF),
    "added": lambda s: s + torch.triu(torch.full((T, T), -INF), diagonal=1),
    "added, the least number": lambda s: s + torch.triu(torch.full((1, 1, T, T), -3.4e38), diagonal=1),
    "added, by hand": lambda s: s + (1.0 - tril()) * -1e9,
    "expanded": lambda s: s.masked_fill(tril().eq(0)[None, None].expand(B, 1, T, T), -INF),
}


@pytest.mark.parametrize("mask", MASKED.values(), ids=MASKED.keys())
def test_a_causal_mask_is_known_by_its_value(mask):
    def fn(q, k, v):
        return F.softmax(mask(q @ k.transpose(-2, -1) * D**-0.5), dim=-1) @ v

    found = same(fn, *qkv(), only="" if mask is MASKED["added"] else "torch")

    assert found.match.attributes["causal"]
    assert not found.match.attributes["forms"]


def test_fewer_queries_than_keys_end_with_the_last_key():
    def fn(q, k, v):
        seen = torch.ones(4, T, dtype=torch.bool).tril(T - 4)
        return (q @ k.mT * D**-0.5).masked_fill(~seen, -INF).softmax(-1) @ v

    found = same(fn, rand(1, 1, 4, D), rand(1, 1, T, D), rand(1, 1, T, D), only="")

    assert found.match.attributes["diagonal"] == T - 4


def test_a_modules_buffer_is_looked_at_and_remembered():
    def fn(self, q, k, v):
        return (q @ k.mT * D**-0.5).masked_fill(self.bias[:, :, :T, :T] == 0, -INF).softmax(-1) @ v

    module = Holder(fn, bias=tril(T + 4, T + 4)[None, None])
    found = same(module.forward, *qkv())

    assert found.match.attributes["causal"]
    assert [n.name for n in found.match.proofs] == ["l_self_buffers_bias_"]


ALMOST_CAUSAL = {
    "the diagonal hidden": tril().sub(torch.eye(T)),
    "one key more": torch.tril(torch.ones(T, T), 1),
    "transposed": tril().T.contiguous(),
    "a window": tril() * torch.triu(torch.ones(T, T), -3),
    "one bit": tril().index_put((torch.tensor(1), torch.tensor(5)), torch.tensor(1.0)),
}


@pytest.mark.parametrize("mask", ALMOST_CAUSAL.values(), ids=ALMOST_CAUSAL.keys())
def test_an_almost_causal_buffer_stays_a_mask(mask):
    def fn(self, q, k, v):
        return (q @ k.mT * D**-0.5).masked_fill(self.bias == 0, -INF).softmax(-1) @ v

    # GIVEN a mask that hides no row entirely; the first of these hides one
    mask = mask.clone()
    mask[0, 0] = 1
    found = same(Holder(fn, bias=mask).forward, *qkv())

    assert not found.match.attributes["causal"]
    assert found.match.attributes["forms"] == ("hidden",)


def test_a_causal_mask_that_the_step_was_given_is_no_proof():
    def fn(q, k, v, mask):
        return (q @ k.mT * D**-0.5).masked_fill(mask == 0, -INF).softmax(-1) @ v

    found = same(fn, *qkv(), tril())

    assert not found.match.attributes["causal"]


def test_a_constant_that_is_written_to_by_index_is_no_proof():
    def fn(q, k, v):
        seen = torch.ones(T, T).tril()
        seen[0, 5] = 1.0
        return (q @ k.mT * D**-0.5).masked_fill(seen == 0, -INF).softmax(-1) @ v

    def before(q, k, v):
        seen = torch.ones(T, T)
        seen[:, 5] = 0.0
        return (q @ k.mT * D**-0.5).masked_fill(seen.tril() == 0, -INF).softmax(-1) @ v

    for written in (fn, before):
        found, _ = found_in(written, *qkv())
        assert not any(f.match.attributes.get("causal") for f in found)


def test_a_buffer_that_the_step_writes_to_is_no_proof():
    def fn(self, q, k, v):
        self.bias.logical_or_(torch.ones(T, T, dtype=torch.bool).triu(3))
        return (q @ k.mT * D**-0.5).masked_fill(~self.bias, -INF).softmax(-1) @ v

    found, _ = found_in(Holder(fn, bias=tril().bool()).forward, *qkv())

    assert not any(f.match.attributes.get("causal") for f in found)


def test_an_added_mask_of_padding_is_handed_on():
    def fn(q, k, v, padding):
        return F.softmax(q @ k.mT / math.sqrt(D) + (1.0 - padding[:, None, None, :]) * -1e4, dim=-1) @ v

    padding = torch.ones(B, T)
    padding[1, 5:] = 0
    found = same(fn, *qkv(), padding)

    assert found.match.attributes["forms"] == ("added",)


def test_a_bool_mask_along_the_queries_is_handed_on_as_it_is():
    def fn(q, k, v, mask):
        return (q @ k.mT * D**-0.5).masked_fill(mask, -INF).softmax(-1).nan_to_num() @ v

    def right(q, k, v, mask):
        return (q @ k.mT * D**-0.5).masked_fill(mask, -INF).softmax(-1) @ v

    mask = torch.zeros(B, 1, T, 1, dtype=torch.bool)
    assert misses("attention", fn, *qkv(), mask) == ""
    same(right, *qkv(), mask)


def test_causal_and_padding_together():
    def fn(q, k, v, padding):
        scores = (q @ k.mT * D**-0.5).masked_fill(tril() == 0, -INF)
        return scores.masked_fill(~padding[:, None, None, :], -INF).softmax(-1) @ v

    padding = torch.ones(B, T, dtype=torch.bool)
    padding[1, 5:] = False
    found = same(fn, *qkv(), padding, only="")

    assert found.match.attributes["causal"]
    assert found.match.attributes["forms"] == ("hidden",)


def test_keys_repeated_for_groups_of_heads_are_not_repeated_any_more():
    def repeated(x, n):
        b, h, t, d = x.shape
        return x[:, :, None, :, :].expand(b, h, n, t, d).reshape(b, h * n, t, d)

    def fn(q, k, v):
        return F.softmax(q @ repeated(k, 2).mT * D**-0.5, dim=-1) @ repeated(v, 2)

    found = same(fn, rand(B, 4, T, D), rand(B, 2, T, D), rand(B, 2, T, D))

    assert found.match.attributes["grouped"] == 2
    assert tuple(found.match.inputs[1].meta["example_value"].shape) == (B, 2, T, D)


def test_keys_repeated_head_after_head_are_taken_as_they_come():
    # repeat() puts head 0 after the last: another order than that of grouped heads.
    def fn(q, k, v):
        return F.softmax(q @ k.repeat(1, 2, 1, 1).mT * D**-0.5, dim=-1) @ v.repeat(1, 2, 1, 1)

    found = same(fn, rand(B, 4, T, D), rand(B, 2, T, D), rand(B, 2, T, D))

    assert found.match.attributes["grouped"] == 1


def test_dropout_of_the_weights_is_carried_and_only_while_training():
    def fn(q, k, v):
        return F.dropout((q @ k.mT * D**-0.5).softmax(-1), 0.25, True) @ v

    def evaluating(q, k, v):
        return F.dropout((q @ k.mT * D**-0.5).softmax(-1), 0.25, False) @ v

    assert one("attention", fn, *qkv()).match.attributes["dropout_p"] == 0.25
    assert one("attention", fn, *qkv()).match.random
    assert same(evaluating, *qkv()).match.attributes["dropout_p"] == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_by_torchs_own(dtype):
    same(softmax_in_fp32, *qkv(dtype=dtype))


def test_sixteen_bits_on_the_bundled_kernel():
    # The interpreter has no bf16.
    same(softmax_in_fp32, *qkv(dtype=torch.float16), only="kernels")


def test_under_autocast_the_result_has_autocasts_dtype():
    found = same(matmul_scale_after, *qkv(), autocast=torch.bfloat16, only="torch")

    assert found.match.attributes["dtype"] == torch.bfloat16


MISSES = {
    "over the queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "dimension -2"),
    "over the heads": (lambda q, k, v: (q @ k.mT).softmax(1) @ v, "dimension 1"),
    "masked after the softmax": (
        lambda q, k, v: (q @ k.mT).softmax(-1).masked_fill(tril() == 0, 0.0) @ v, "between the softmax",
    ),
    "weights multiplied": (lambda q, k, v: ((q @ k.mT).softmax(-1) * 0.5) @ v, "between the softmax"),
    "a negative scale": (lambda q, k, v: ((q @ k.mT) * -0.5).softmax(-1) @ v, "scaled by -0.5"),
    "weights returned": (
        lambda q, k, v: (lambda p: (p @ v, p))((q @ k.mT).softmax(-1)), "used elsewhere",
    ),
    "scores returned": (
        lambda q, k, v: (lambda s: (s.softmax(-1) @ v, s))(q @ k.mT), "used elsewhere",
    ),
    "little is left to hidden keys": (
        lambda q, k, v: (q @ k.mT).masked_fill(tril() == 0, -5.0).softmax(-1) @ v, "leaves weight",
    ),
    "the fill is scaled away": (
        lambda q, k, v: ((q @ k.mT).masked_fill(tril() == 0, -1e4) * 1e-3).softmax(-1) @ v, "leaves weight",
    ),
    "masked before the cap": (
        lambda q, k, v: (torch.tanh((q @ k.mT).masked_fill(tril() == 0, -INF)) * 3).softmax(-1) @ v,
        "before they are capped",
    ),
    "values on the left": (lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1), ""),
    "weights transposed": (lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v, ""),
    "two products": (lambda q, k, v: (q @ k.mT + v @ q.mT).softmax(-1) @ v, "no product"),
    "values broadcast": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v[:, :1], ""),
    "its own mask": (lambda q, k, v: (lambda s: (s + s).softmax(-1) @ v)(q @ k.mT), "no product"),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "why"), MISSES.values(), ids=MISSES.keys())
def test_a_near_miss_is_left_alone(fn, why):
    assert why in misses("attention", fn, *qkv())


def test_a_finite_mask_that_is_not_causal_is_left_alone():
    def fn(q, k, v, mask):
        return (q @ k.mT).masked_fill(mask, -1e9).softmax(-1) @ v

    why = misses("attention", fn, *qkv(), torch.zeros(B, 1, 1, T, dtype=torch.bool))

    assert "a row that sees no key" in why


def test_a_finite_causal_mask_beside_padding_is_left_alone():
    def fn(q, k, v, padding):
        return ((q @ k.mT).masked_fill(tril() == 0, -1e9) + padding).softmax(-1) @ v

    assert "rows that both hide" in misses("attention", fn, *qkv(), torch.zeros(B, 1, 1, T))


def test_an_added_mask_under_the_scale_is_left_alone():
    def fn(q, k, v, mask):
        return ((q @ k.mT + mask) * D**-0.5).softmax(-1) @ v

    assert "before the scores are scaled" in misses("attention", fn, *qkv(), torch.zeros(T, T))


def test_a_mask_that_changes_from_step_to_step_in_place_is_left_alone():
    def fn(q, k, v, mask):
        out = (q @ k.mT + mask).softmax(-1) @ v
        mask.add_(1.0)
        return out

    assert "changed in place later" in misses("attention", fn, *qkv(), torch.zeros(T, T))


def test_parts_under_different_autocast_are_left_alone():
    def fn(q, k, v):
        scores = q @ k.mT
        with torch.autocast("cpu", dtype=torch.bfloat16):
            p = scores.softmax(-1)
        return p @ v

    assert "autocast or gradient modes" in misses("attention", fn, *qkv())


SCALES = {
    "none": lambda q, k: (q, k, lambda s: s),
    "queries": lambda q, k: (q * 0.3, k, lambda s: s),
    "keys": lambda q, k: (q, k / 3.0, lambda s: s),
    "after": lambda q, k: (q, k, lambda s: s * 0.3),
    "after, divided": lambda q, k: (q, k, lambda s: torch.div(s, 3.0)),
}
PRODUCTS = {
    "@": lambda q, k: q @ k.transpose(-2, -1),
    "matmul": lambda q, k: torch.matmul(q, k.permute(0, 1, 3, 2)),
    "einsum": lambda q, k: torch.einsum("xyqd,xykd->xyqk", q, k),
}
SOFTMAXES = {
    "method": lambda s: s.softmax(-1),
    "function": lambda s: F.softmax(s, dim=3),
    "fp32": lambda s: torch.softmax(s.float(), -1).to(s.dtype),
}
VALUES = {
    "@": lambda p, v: p @ v,
    "method": lambda p, v: p.matmul(v),
    "einsum": lambda p, v: torch.einsum("abij,abjd->abid", p, v),
}


@settings(max_examples=12)
@given(
    st.sampled_from(sorted(SCALES)),
    st.sampled_from(sorted(PRODUCTS)),
    st.sampled_from([*MASKED, ""]),
    st.sampled_from(sorted(SOFTMAXES)),
    st.sampled_from(sorted(VALUES)),
    st.booleans(),
)
def test_any_combination_of_spellings_is_found(scale, product, mask, softmax, values, scale_last):
    def fn(q, k, v):
        a, b, after = SCALES[scale](q, k)
        scores = PRODUCTS[product](a, b)
        masked = MASKED.get(mask, lambda s: s)
        added = mask.startswith("added")
        scores = after(masked(scores)) if scale_last and not added else masked(after(scores))
        return VALUES[values](SOFTMAXES[softmax](scores), v)

    found = same(fn, *qkv())

    assert found.match.attributes["causal"] == bool(mask)
    expected = {"none": 1.0, "keys": 1 / 3, "after, divided": 1 / 3}.get(scale, 0.3)
    assert found.match.attributes["scale"] == pytest.approx(expected)


def joined(x):
    return x.reshape(B * H, *x.shape[2:])


JOINED = {
    "back for the mask": lambda q, k, v: torch.bmm(
        torch.bmm(joined(q), joined(k).transpose(1, 2))
        .view(B, H, T, T)
        .add(torch.triu(torch.full((T, T), -INF), 1))
        .view(B * H, T, T)
        .softmax(-1),
        joined(v),
    ).view(B, H, T, D),
    "back for the softmax": lambda q, k, v: torch.bmm(
        (torch.bmm(joined(q), joined(k).transpose(1, 2)).view(B, H, T, T) * 0.3)
        .softmax(-1)
        .view(B * H, T, T),
        joined(v),
    ),
    "back for good": lambda q, k, v: (
        torch.bmm(joined(q), joined(k).transpose(1, 2)).view(B, H, T, T).softmax(-1) @ v
    ),
    "joined at the end": lambda q, k, v: torch.bmm(joined((q @ k.mT).softmax(-1)), joined(v)),
}


@pytest.mark.parametrize("fn", JOINED.values(), ids=JOINED.keys())
def test_batch_and_heads_in_one_dimension(fn):
    same(fn, *qkv())


def test_a_mask_of_padding_while_batch_and_heads_are_one_dimension():
    def fn(q, k, v, padding):
        scores = torch.bmm(joined(q), joined(k).mT).view(B, H, T, T) + padding
        return torch.bmm(scores.view(B * H, T, T).softmax(-1), joined(v))

    same(fn, *qkv(), torch.randn(B, 1, 1, T))


def test_a_mask_that_has_the_one_dimension_is_left_alone():
    def fn(q, k, v, mask):
        scores = (torch.bmm(joined(q), joined(k).mT) + mask).view(B, H, T, T)
        return torch.bmm(scores.view(B * H, T, T).softmax(-1), joined(v))

    assert "one dimension" in misses("attention", fn, *qkv(), torch.randn(B * H, T, T))


def test_a_reshape_that_mixes_queries_and_heads_is_left_alone():
    def fn(q, k, v):
        return ((q @ k.mT).reshape(B, T, H, T).softmax(-1).reshape(B, H, T, T)) @ v

    misses("attention", fn, *qkv())


CALLS = {
    "plain": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scale": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, scale=0.7),
    "seen": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
    "added": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m.to(q.dtype)),
}


@pytest.mark.parametrize("fn", CALLS.values(), ids=CALLS.keys())
def test_a_call_of_torchs_own_is_a_site_too(fn):
    mask = torch.ones(T, T, dtype=torch.bool)
    mask[:, 6:] = False
    found = replacement_equals_original("sdpa", fn, *qkv(), mask)

    assert "torch SDPA" not in [c.name for c in found.match.candidates]


def test_grouped_heads_of_a_call():
    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    replacement_equals_original("sdpa", fn, rand(B, 4, T, D), rand(B, 2, T, D), rand(B, 2, T, D))
