"""Rotary embeddings, and rotations that are others."""

import pytest
import torch

from tests.swap.rewrite.support import found_in, misses, names, rand, replacement_equals_original

B, H, T, D = 2, 2, 6, 8


def tables(full=True):
    angles = torch.arange(T)[:, None] * 0.3 ** torch.arange(D // 2)[None]
    angles = torch.cat((angles, angles), -1) if full else angles
    return angles.cos(), angles.sin()


def rotate_half(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def by_chunks(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([b.neg(), a], -1)


def neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def both(turn):
    def fn(q, k, cos, sin):
        cos, sin = cos[None].unsqueeze(1), sin[None].unsqueeze(1)
        return (q * cos) + (turn(q) * sin), (k * cos) + (turn(k) * sin)

    return fn


@pytest.mark.parametrize("turn", [rotate_half, by_chunks, neighbours])
def test_queries_and_keys_are_turned_in_one(turn):
    found = replacement_equals_original("rope", both(turn), rand(B, H, T, D), rand(B, 1, T, D), *tables())

    assert len(found.match.outputs) == 2
    assert found.match.attributes["form"] == ("interleaved" if turn is neighbours else "half")


def test_tokens_before_heads():
    def fn(q, k, cos, sin):
        cos, sin = cos[None, :, None], sin[None, :, None]
        return q * cos + rotate_half(q) * sin, sin * rotate_half(k) + cos * k

    found = replacement_equals_original("rope", fn, rand(B, T, H, D), rand(B, T, H, D), *tables())

    assert found.match.attributes["layout"] == "bshd"


def test_one_tensor_alone_and_tables_without_batch():
    found = replacement_equals_original(
        "rope", lambda q, cos, sin: q * cos + rotate_half(q) * sin, rand(B, H, T, D), *tables()
    )

    assert not found.match.attributes["both"]


def test_part_of_a_head():
    def fn(q, cos, sin):
        turned, rest = q[..., :D], q[..., D:]
        return torch.cat((turned * cos + rotate_half(turned) * sin, rest), -1)

    replacement_equals_original("rope", fn, rand(B, H, T, 2 * D), *tables())


def test_complex_numbers():
    def fn(q, k, cis):
        def turn(x):
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * cis.view(1, T, 1, D // 2)).flatten(3).type_as(x)

        return turn(q), turn(k)

    cos, sin = tables(full=False)
    found, facts = found_in(fn, rand(B, T, H, D), rand(B, T, H, D), torch.complex(cos, sin))
    assert names(found) == ["rope"], [r.why for r in facts.refusals]
    # In float64 a view as complex numbers would need float64 tables: the kernel is compared in fp32.
    call = found[0].match.candidates[0].call
    q, k = torch.randn(B, T, H, D), torch.randn(B, T, H, D)
    cis = torch.complex(cos, sin)
    for mine, theirs in zip(call(q, k, cis.view(1, T, 1, D // 2)), fn(q, k, cis), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def turned_up(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b, -a), -1)


def not_negated(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b, a), -1)


def not_swapped(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-a, b), -1)


def odd_and_even(x):
    return torch.stack((-x[..., ::2], x[..., 1::2]), dim=-1).flatten(-2)


def neighbours_apart(x):
    return torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1)


@pytest.mark.parametrize("turn", [turned_up, not_negated, not_swapped, odd_and_even, neighbours_apart])
def test_another_rotation_is_left_alone(turn):
    misses("rope", both(turn), rand(B, H, T, D), rand(B, H, T, D), *tables())


def test_the_other_sign_is_explained():
    why = misses("rope", both(turned_up), rand(B, H, T, D), rand(B, H, T, D), *tables())

    assert "other way round" in why


def test_a_difference_in_place_of_the_sum_is_left_alone():
    misses("rope", lambda q, cos, sin: q * cos - rotate_half(q) * sin, rand(B, H, T, D), *tables())


def test_another_tensor_under_the_sine_is_left_alone():
    def fn(q, k, cos, sin):
        return q * cos + rotate_half(k) * sin

    misses("rope", fn, rand(B, H, T, D), rand(B, H, T, D), *tables())


def test_tables_for_each_head_and_token_are_left_alone():
    def fn(q, cos, sin):
        return q * cos + rotate_half(q) * sin

    why = misses("rope", fn, rand(B, H, T, D), torch.randn(B, H, T, D), torch.randn(B, H, T, D))

    assert "do not go along the tokens" in why


def test_sixteen_bit_inputs_that_tables_turn_into_fp32():
    q, k = rand(B, H, T, D, dtype=torch.float16), rand(B, H, T, D, dtype=torch.float16)

    found = replacement_equals_original("rope", both(rotate_half), q, k, *tables())

    assert len(found.match.outputs) == 2


def test_inputs_that_are_rounded_first_are_left_alone():
    def fn(q, cos, sin):
        q = q.half()
        return q * cos.half() + rotate_half(q) * sin.half()

    assert "another dtype" in misses("rope", fn, rand(B, H, T, D), *tables())


def test_sixteen_bit_inputs_that_are_cast_back():
    def fn(q, k, cos, sin):
        a, b = both(rotate_half)(q.float(), k.float(), cos, sin)
        return a.to(q.dtype), b.to(k.dtype)

    q, k = rand(B, H, T, D, dtype=torch.float16), rand(B, H, T, D, dtype=torch.float16)
    replacement_equals_original("rope", fn, q, k, *tables())


def test_learned_tables_are_left_alone():
    cos, sin = (t.requires_grad_() for t in tables())

    assert "gradient" in misses("rope", both(rotate_half), rand(B, H, T, D), rand(B, H, T, D), cos, sin)
