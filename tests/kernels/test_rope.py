"""Rotary embedding: queries and keys as accurate as eager's, in every layout."""

import pytest
import torch
from advisor.kernels import rope as rp
from advisor.kernels._device import UnsupportedError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.checks import assert_as_accurate, cases, check, skip_unless_runnable

DTYPES = cases([torch.float32, torch.bfloat16], [torch.float16])


def _tables(device, dtype, tokens, rotary_dim, *, full=True, interleaved=False, batch=None):
    base = (() if batch is None else (batch,)) + (tokens, rotary_dim // 2)
    angles = torch.rand(base, device=device) * 6.3
    if full:
        angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _judge(q, k, cos, sin, **options):
    tables = {} if k is None else {"k": k}

    def ours(q, k=None):
        return rp.rope(q, k, cos, sin, **options)

    def reference(q, k=None):
        # Eager in fp32, rounded once, is the stricter measure.
        wide = torch.promote_types(q.dtype, torch.float32)
        out = rp.rope_reference(
            q.to(wide), None if k is None else k.to(wide), cos.to(wide), sin.to(wide), **options
        )
        return tuple(o if o is None or q.dtype == torch.float64 else o.to(q.dtype) for o in out)

    check(ours, reference, {"q": q} | tables)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", rp.LAYOUTS)
@pytest.mark.parametrize("interleaved", cases([False, True]))
@pytest.mark.parametrize("full", cases([False, True]))
def test_both_layouts_and_pairings_match_eager(device, dtype, layout, interleaved, full, poisoned):
    skip_unless_runnable(device, dtype)
    shape = (2, 5, 6, 16) if layout == "bshd" else (2, 6, 5, 16)
    k_shape = (2, 5, 2, 16) if layout == "bshd" else (2, 2, 5, 16)
    q, k = (torch.randn(s, device=device).to(dtype) for s in (shape, k_shape))
    tables = _tables(device, torch.float32, 5, 16, full=full, interleaved=interleaved)
    _judge(q, k, *tables, layout=layout, interleaved=interleaved, rotary_dim=16)


@pytest.mark.quick
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", rp.LAYOUTS)
@pytest.mark.parametrize("k_heads", [None, 1, 3])
def test_tiles_of_heads_in_programs_of_their_own_match_eager(
    device, interleaved, layout, k_heads, monkeypatch, poisoned
):
    # GIVEN tiles of two heads, the last of them filled by half, and dimensions that are not rotated
    monkeypatch.setattr(rp.ROTATE, "rows", {"default": ((None, {"TILE": 32, "num_warps": 1, "SPREAD": 1}),)})
    q_shape, k_shape = [
        (2, 3, heads, 20) if layout == "bshd" else (2, heads, 3, 20) for heads in (5, k_heads or 1)
    ]
    q, k = torch.randn(q_shape, device=device), torch.randn(k_shape, device=device)
    tables = _tables(device, torch.float32, 3, 16, interleaved=interleaved)
    _judge(q, None if k_heads is None else k, *tables, layout=layout, interleaved=interleaved)
    if k_heads is not None:
        # AND keys of another dtype give what they give alone
        options = {"layout": layout, "interleaved": interleaved}
        together = rp.rope(q, k.half(), *tables, **options)
        assert together[0].equal(rp.rope(q, None, *tables, **options)[0])
        assert together[1].equal(rp.rope(k.half(), None, *tables, **options)[0])


@pytest.mark.parametrize("sizes", cases([(16, 10), (20, 20), (7, 2)], [(80, 80), (256, 64), (96, 32)]))
@pytest.mark.parametrize("interleaved", cases([False, True]))
def test_partial_and_odd_dimensions_match_eager(device, sizes, interleaved, poisoned):
    head_dim, rotary_dim = sizes
    q, k = torch.randn(1, 3, 4, head_dim, device=device), torch.randn(1, 1, 4, head_dim, device=device)
    _judge(
        q, k, *_tables(device, torch.float32, 4, rotary_dim, interleaved=interleaved), interleaved=interleaved
    )


@pytest.mark.quick
def test_tables_of_each_batch_and_of_16_bits_match_eager(device):
    q = torch.randn(2, 3, 4, 8, device=device, dtype=torch.float16)
    _judge(q, q[:, :1], *_tables(device, torch.float16, 4, 8, batch=2))
    _judge(q, q[:, :1], *_tables(device, torch.float16, 4, 8, batch=1))


@pytest.mark.quick
def test_tables_whose_halves_differ_are_read_in_full(device):
    cos, sin = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    q = torch.randn(1, 2, 4, 8, device=device)
    _judge(q, None, cos, sin)
    _judge(q, None, cos, sin, interleaved=True)


@pytest.mark.quick
def test_slices_of_a_packed_projection_are_read_in_place(device):
    qkv = torch.randn(2, 4, (6 + 2 + 2) * 8, device=device)
    q = qkv[..., :48].view(2, 4, 6, 8)
    k = qkv[..., 48:64].view(2, 4, 2, 8)
    _judge(q, k, *_tables(device, torch.float32, 4, 8), layout="bshd")
    _judge(q.transpose(1, 2), k.transpose(1, 2), *_tables(device, torch.float32, 4, 8))
    assert rp.rope(q.transpose(1, 2).contiguous(), None, *_tables(device, torch.float32, 4, 8))[
        0
    ].is_contiguous()


@pytest.mark.quick
def test_a_transposed_last_dimension_is_copied(device):
    q = torch.randn(2, 3, 8, 4, device=device).transpose(2, 3)
    _judge(q, None, *_tables(device, torch.float32, 4, 8))


@pytest.mark.quick
def test_lengths_of_pairs_are_kept(device):
    q = torch.randn(1, 2, 6, 32, device=device)
    out, _ = rp.rope(q, None, *_tables(device, torch.float32, 6, 32))
    assert torch.allclose(out.norm(dim=-1), q.norm(dim=-1), rtol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 0, 4, 8), (2, 2, 0, 8)])
def test_empty_inputs_give_empty_results(device, shape):
    q = torch.empty(shape, device=device, requires_grad=True)
    out, none = rp.rope(q, None, *_tables(device, torch.float32, shape[2], 8))
    out.sum().backward()
    assert none is None
    assert q.grad.shape == shape


def test_derivatives_match_finite_differences_and_may_be_differentiated_again(device):
    # Kernels compute in fp32: coarse steps and tolerances.
    tables = _tables(device, torch.float32, 2, 4)
    q, k = (torch.randn(1, h, 2, 4, device=device).requires_grad_() for h in (2, 1))
    assert torch.autograd.gradcheck(
        lambda q, k: rp.rope(q, k, *tables), (q, k), eps=1e-2, atol=1e-2, rtol=1e-2
    )
    out, _ = rp.rope(q, None, *tables)
    (g,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    # The rotation keeps squares, so that g = 2 q and the derivative of its sum is 2.
    (second,) = torch.autograd.grad(g.sum(), q)
    assert torch.allclose(second, torch.full_like(q, 2), atol=1e-5)


def test_the_operator_passes_torchs_own_checks(device):
    q, k = (torch.randn(1, h, 2, 4, device=device, requires_grad=True) for h in (2, 1))
    tables = _tables(device, torch.float32, 2, 4)
    torch.library.opcheck(rp.rope_op, (q, k, *tables, 4, "bhsd", False, False))
    torch.library.opcheck(rp.rope_op, (q, None, *tables, 4, "bhsd", True, False))


@pytest.mark.quick
def test_it_compiles_without_graph_breaks_and_autocast_changes_nothing(device):
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    q = torch.randn(1, 2, 3, 8, device=device, requires_grad=True)
    tables = _tables(device, torch.float32, 3, 8)

    def step(q):
        a, b = rp.rope(q, q * 2, *tables)
        return (a * b).sum()

    torch.compile(step, fullgraph=True, backend=backend)(q).backward()
    compiled, q.grad = q.grad, None
    with torch.autocast(device.type, dtype=torch.bfloat16):
        step(q).backward()
    assert torch.allclose(compiled, q.grad, atol=1e-5)


def test_what_cannot_be_taken_is_said(device):
    q, k = torch.randn(1, 2, 3, 8, device=device), torch.randn(1, 2, 3, 6, device=device)
    cos, sin = _tables(device, torch.float32, 3, 8)
    for args, options, says in [
        ((q.double(), None, cos, sin), {}, "float64"),
        ((q[0], None, cos, sin), {}, "four dimensions"),
        ((q, k, cos, sin), {}, "differ in more than heads"),
        ((q, None, cos, sin), {"layout": "bsd"}, "bsd"),
        ((q, None, cos[:2], sin[:2]), {}, "3 tokens"),
        ((q, None, cos, sin[:, :4]), {}, "tables"),
        ((q, None, cos[:, :7], sin[:, :7]), {}, "even number"),
        ((q, None, cos, sin), {"rotary_dim": 10}, "even number"),
        ((q, None, cos.clone().requires_grad_(), sin), {}, "require a gradient"),
    ]:
        with pytest.raises(UnsupportedError, match=says):
            rp.rope(*args, **options)


@settings(max_examples=12, deadline=None)
@given(
    heads=st.integers(1, 5), tokens=st.integers(1, 5), half=st.integers(1, 9), rest=st.integers(0, 5),
    interleaved=st.booleans(), layout=st.sampled_from(rp.LAYOUTS),
)  # fmt: skip
def test_any_shape_matches_float64(heads, tokens, half, rest, interleaved, layout):
    if torch.cuda.is_available():
        pytest.skip("the interpreter's own search; the GPU runs the grid")
    shape = (1, tokens, heads) if layout == "bshd" else (1, heads, tokens)
    q = torch.randn(*shape, 2 * half + rest + 1)[..., 1:]
    tables = _tables(torch.device("cpu"), torch.float32, tokens, 2 * half, interleaved=interleaved)
    options = {"layout": layout, "interleaved": interleaved}
    out, _ = rp.rope(q, None, *tables, **options)
    eager, _ = rp.rope_reference(q, None, *tables, **options)
    exact, _ = rp.rope_reference(q.double(), None, *(t.double() for t in tables), **options)
    assert_as_accurate(out, eager, exact)


@pytest.mark.gpu
def test_more_elements_than_an_int32_counts(device):
    if device.type != "cuda" or torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    q = torch.ones(1, 2, 2**23 + 3, 128, device=device, dtype=torch.bfloat16)
    zero = torch.zeros(2**23 + 3, 128, device=device, dtype=torch.bfloat16)
    out, _ = rp.rope(q, None, zero + 1, zero)
    assert out[0, -1].eq(1).all()
    assert out[0, 0].eq(1).all()
