"""Attention's kernels with warps of different roles: their order of waits, their masks, their sums."""

from types import SimpleNamespace

import pytest
import torch
from advisor.kernels import _attention_hopper_forward as forward
from advisor.kernels import _attention_hopper_keys as keys
from advisor.kernels import _attention_hopper_queries as queries
from advisor.kernels import _attention_hopper_tiles as tiles
from advisor.kernels import _attention_launch as launch
from advisor.kernels import _attention_masks as masks
from advisor.kernels import _attention_ops as ops
from advisor.kernels._triton import INTERPRETED
from advisor.kernels.attention import attention, attention_reference

from tests.kernels import gluon_stand_in
from tests.kernels.checks import check

MODULES = (tiles, forward, queries, keys)
pytestmark = pytest.mark.skipif(not tiles.AVAILABLE, reason="this Triton has no Gluon for Hopper")


@pytest.fixture
def by_roles(monkeypatch):
    """Every call takes these kernels, with the parameters that the test sets."""
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process: set TRITON_INTERPRET=1")
    gluon_stand_in.install(monkeypatch, MODULES)
    chosen = {"forward": launch.roles(64, 2), "query": launch.roles(64, 2), "key": launch.roles(64, 2)}
    used = []

    def pick(name):
        def picked(q, options):
            used.append(name)
            return chosen[name]

        return picked

    for name, table in (("forward", ops.FORWARD), ("query", ops.QUERY_GRADIENT), ("key", ops.KEY_GRADIENT)):
        monkeypatch.setattr(table, "pick_roles", pick(name))
    monkeypatch.setattr(ops, "sm_count", lambda device: 3)
    yield chosen
    assert set(used) == {"forward", "query", "key"}


def _check(n, m, heads=2, heads_k=2, dim=64, dim_v=64, dtype=torch.float16, batch=1, **options):
    torch.manual_seed(0)
    leaves = [
        torch.randn(batch, rows, h, d).transpose(1, 2).to(dtype).requires_grad_()
        for rows, h, d in ((n, heads, dim), (m, heads_k, dim), (m, heads_k, dim_v))
    ]
    out = attention(*leaves, **options)
    grad = torch.randn_like(out)
    ours = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    options.pop("precise_gradient", None)
    exact = attention_reference(*exact_leaves, **options)
    theirs = (exact.detach(), *torch.autograd.grad(exact, exact_leaves, grad.double()))
    # Probabilities and slopes are rounded to 16 bits before they are multiplied.
    eps = torch.finfo(dtype).eps
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine.double() - other).norm() / other.norm().clamp_min(1e-9)) < 1.5 * eps


@pytest.mark.parametrize("persistent", [0, 1])
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_outputs_and_gradients_match_eager(by_roles, groups, persistent, options):
    by_roles["forward"] = launch.roles(64, 2, groups, persistent)
    by_roles["query"] = by_roles["key"] = launch.roles(64, 2, 2, persistent)
    _check(400, 400, **options)


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (-1, 30)}, {"window": (30, -1)}, {"mask": torch.ones(400, 400).tril() > 0}],
)
def test_blocks_in_pairs_give_what_blocks_alone_give(by_roles, monkeypatch, options):
    # GIVEN two programs for four blocks of each of three planes
    monkeypatch.setattr(ops, "sm_count", lambda device: 2)
    assert tiles.items(4, 3, 2, True, launch.roles(64, 2)) == (6, 2, True)
    torch.manual_seed(0)
    leaves = [torch.randn(1, 3, 400, 64).to(torch.float16).requires_grad_() for _ in range(3)]

    def results():
        out = attention(*leaves, **options)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    paired = results()
    # WHEN blocks are not paired
    for name in by_roles:
        by_roles[name] = launch.roles(64, 2, persistent=0)
    # THEN each result is the same to the bit
    assert all(map(torch.equal, paired, results()))
    _check(400, 400, heads=3, heads_k=3, **options)


@pytest.mark.parametrize("blocks", [8, 9])
@pytest.mark.parametrize("planes", [8, 96])
def test_every_block_is_worked_on_once_and_by_programs_with_as_much_work(monkeypatch, blocks, planes):
    gluon_stand_in.install(monkeypatch, MODULES)
    programs = 132
    count, grid, paired = tiles.items(blocks, planes, programs, True, launch.roles(128, 2))
    work = []
    seen = set()
    for program in range(grid):
        gluon_stand_in._local.program = (program, grid)
        own = [
            tiles.work_tile(gluon_stand_in.block(turn), blocks, planes, 80, True, paired)
            for turn in range(int(tiles.turns(count, paired)))
        ]
        seen |= {(int(block), int(plane)) for block, plane in own}
        work.append(sum(int(block) + 1 for block, _ in own))
    assert len(seen) == blocks * planes
    assert sum(work) == planes * blocks * (blocks + 1) // 2
    # Pairs are for where they fill the last round and no block is left over.
    assert paired == (blocks == 8 and planes == 96)
    assert not paired or max(work) < 1.04 * sum(work) / programs


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((300, 130), {"causal": True}),
        ((130, 300), {"causal": True, "align": "lower_right"}),
        ((200, 333), {}),
        ((400, 400), {"window": (70, 20)}),
        ((300, 300), {"causal": True, "window": (40, -1)}),
        ((260, 130), {"window": (30, -1), "align": "lower_right"}),
        ((1, 77), {}),
    ],
)
def test_blocks_are_cut_where_the_mask_and_the_ends_cut_them(by_roles, block, lengths, options):
    for name in by_roles:
        by_roles[name] = launch.roles(block, 3)
    _check(*lengths, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grouped_heads_and_odd_dimensions_match_eager(by_roles, dtype):
    _check(140, 140, heads=4, heads_k=2, dim=24, dim_v=40, dtype=dtype, batch=2, causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("persistent", [0, 1])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (70, 20)}, {"mask": torch.ones(300, 300).tril(-9) > 0}]
)
def test_precise_gradients_match_eager(by_roles, options, persistent, dtype):
    for name in by_roles:
        by_roles[name] = launch.roles(64, 2, 2, persistent)
    _check(300, 300, heads=4, heads_k=2, dtype=dtype, batch=2, precise_gradient=True, **options)


def test_precise_gradients_of_what_keys_and_values_have_in_common(by_roles):
    # GIVEN keys and values that are alike
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 150, 16) for _ in range(3))
    k, v = (x + 8.0 * torch.randn(1, 1, 1, 16) for x in (k, v))
    leaves = [x.to(torch.float16).requires_grad_() for x in (q, k, v)]
    grad = torch.randn(1, 1, 150, 16).to(torch.float16)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = torch.autograd.grad(attention_reference(*exact_leaves), exact_leaves, grad.double())[0]

    def error(precise):
        out = attention(*leaves, precise_gradient=precise)
        dq = torch.autograd.grad(out, leaves, grad)[0]
        return float((dq.double() - exact).norm() / exact.norm())

    # THEN the other gradient is several times as far off
    assert error(True) < error(False) / 3.0


def test_few_key_heads_are_shared_out_in_parts(by_roles, monkeypatch):
    monkeypatch.setattr(ops, "sm_count", lambda device: 1000)
    _check(140, 140, heads=4, heads_k=1)


def test_large_scores_stay_exact(by_roles):
    # GIVEN scores of 1e8 and more, of which some are equal
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, 70, 16).sign().to(torch.float16) * 1e4 for _ in range(2))
    v = torch.randn(1, 1, 70, 16).to(torch.float16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    exact = attention_reference(*(x.detach().double() for x in leaves))
    assert (out.double() - exact).abs().max() < 4e-3
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(
    ("shape", "block"), [((2, 2, 150, 170), 64), ((150, 170), 128), ((2, 1, 1, 170), 64), ((150, 1), 128)]
)
def test_a_bool_mask_of_any_broadcastable_shape_hides_keys(by_roles, shape, block):
    for name in by_roles:
        by_roles[name] = launch.roles(block, 2)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    _check(150, 170, batch=2, mask=mask)


def test_a_bool_mask_hides_what_a_causal_mask_leaves(by_roles):
    mask = torch.rand(2, 150, 150, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[:, 70] = False
    _check(150, 150, mask=mask, causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 2, 150, 170), (2, 1, 150, 170), (150, 170), (150, 1)])
def test_a_bias_a_score_is_added(by_roles, shape, dtype):
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias[..., 30:60, :] = -torch.inf
    bias[..., 31, 0] = 1.0
    _check(150, 170, batch=2, mask=bias)
    _check(150, 170, batch=2, heads=2, heads_k=1, mask=bias, causal=True)


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("causal", [False, True])
def test_an_added_mask_of_zeros_gives_what_a_bool_mask_gives(by_roles, hidden, causal):
    # GIVEN padding, sequences that do not see each other and a row that sees none, as numbers
    seen = _documents(400, 129) & (torch.arange(400) < 390)
    seen[7] = False
    added = torch.zeros(1, 1, 400, 400).masked_fill(~seen, hidden)
    leaves = [torch.randn(1, 2, 400, 64).to(torch.float16).requires_grad_() for _ in range(3)]
    grad = torch.randn(1, 2, 400, 64).to(torch.float16)

    def results(mask):
        out = attention(*leaves, mask, causal=causal)
        return out, *torch.autograd.grad(out, leaves, grad)

    # THEN both agree, up to where scores are scaled
    for mine, other in zip(results(added), results(seen), strict=True):
        assert float((mine - other).detach().norm() / other.detach().norm()) < 1e-3
        assert torch.equal(mine == 0, other == 0)


def test_blocks_of_zeros_of_a_bias_are_not_read(by_roles, monkeypatch):
    # GIVEN a bias with one number in the first block, and blocks that are hidden
    bias = torch.zeros(1, 1, 300, 300)
    bias[..., 128:] = -torch.inf
    bias[..., 5, 7] = 2.0
    read = []
    load = tiles.load_numbers

    def counted(source, row, col, *rest):
        read.append((int(row), int(col))) if int(rest[4]) == 3 else None
        return load(source, row, col, *rest)

    def copied(source, coordinates, *rest):
        copies.append(tuple(map(int, coordinates)))
        return copy(source, coordinates, *rest)

    copies, copy = [], gluon_stand_in.copy_tile
    for module in (forward, queries):
        monkeypatch.setattr(module, "load_numbers", counted)
    monkeypatch.setattr(keys, "tma", SimpleNamespace(async_copy_global_to_shared=copied))
    _check(300, 300, mask=bias)
    # THEN numbers are read for the block that has that one: in two kernels, for both heads and groups
    assert sorted(read) == [(0, 0)] * 4 + [(64, 0)] * 4
    # and copied for it in the third, for both heads a tile for each group's keys
    assert sorted(copies) == [(0, 0, 0, 0)] * 2 + [(0, 0, 0, 64)] * 2


@pytest.mark.parametrize("shape", [(2, 2, 1, 170), (2, 1, 170), (170,)])
def test_a_bias_that_all_queries_share_is_added(by_roles, shape):
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    bias[..., 30] = -torch.inf
    _check(150, 170, batch=2, mask=bias)
    _check(150, 170, batch=2, heads=2, heads_k=1, mask=bias, causal=True)


def _documents(n, length=128):
    at = torch.arange(n) // length
    return at[:, None] == at


def _open_but_for_one(n):
    mask = torch.ones(n, n, dtype=torch.bool)
    mask[n - 10, 3] = False
    return mask


def _one_key_each(n):
    mask = torch.zeros(n, n, dtype=torch.bool)
    mask[torch.arange(n), (torch.arange(n) * 67) % n] = True
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "mask",
    [_documents(400), _documents(400, 129), _documents(400).flip(0), _open_but_for_one(400)],
    ids=["documents", "off_by_one", "turned", "open"],
)
def test_blocks_that_a_mask_hides_change_no_bit_by_being_left_out(by_roles, monkeypatch, mask, causal):
    # GIVEN a mask that leaves each query a key, itself where it must be
    mask = mask | torch.eye(400, dtype=torch.bool) if causal else mask
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 400, 64).to(torch.float16).requires_grad_() for _ in range(3)]

    def results():
        out = attention(*leaves, mask, causal=causal)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    left_out = results()
    # WHEN every block is visited, and masked
    listed = masks.listed
    monkeypatch.setattr(masks, "listed", lambda cells, *rest: listed(torch.full_like(cells, 3), *rest))
    # THEN nothing differs
    assert all(map(torch.equal, left_out, results()))
    _check(400, 400, mask=mask, causal=causal)


def test_a_single_key_for_each_query_is_found(by_roles):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 200, 64).to(torch.float16) for _ in range(3))
    mask = _one_key_each(200)
    out = attention(q.requires_grad_(), k, v, mask)
    out.sum().backward()
    assert torch.equal(out[0, 0], v[0, 0][mask.int().argmax(1)])


def test_blocks_of_queries_that_see_no_key_are_zero(by_roles):
    mask = _documents(400) & (torch.arange(400) < 128)
    q, k, v = (torch.randn(1, 2, 400, 64).to(torch.float16).requires_grad_() for _ in range(3))
    out = attention(q, k, v, mask)
    out.sum().backward()
    assert not out[:, :, 128:].any()
    assert not any(x.grad[:, :, 128:].any() for x in (q, k, v))
    assert all(x.grad[:, :, :128].any() for x in (q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_that_a_mask_hides_are_not_loaded(by_roles, monkeypatch, causal):
    # GIVEN sequences of 128 that do not see each other, and blocks of 128 queries and 64 keys
    loaded = {"forward": 0, "gradients": 0}
    copy = gluon_stand_in.copy_tile

    def counted(name):
        def load(*arguments):
            loaded[name] += 1
            return copy(*arguments)

        return SimpleNamespace(async_copy_global_to_shared=load)

    monkeypatch.setattr(forward, "tma", counted("forward"))
    monkeypatch.setattr(tiles, "tma", counted("gradients"))
    # WHEN attention runs with them as a mask
    q, k, v = (torch.randn(1, 1, 512, 64).to(torch.float16).requires_grad_() for _ in range(3))
    out = attention(q, k, v, _documents(512), causal=causal)
    # THEN each of the four blocks of queries loads itself, in two halves, and two blocks of keys and values
    assert loaded["forward"] == 4 * (2 + 2 * 2)
    out.sum().backward()
    # and the gradients' too, with the output's gradient beside q, and the same for blocks of keys
    assert loaded["gradients"] == 2 * 4 * (2 * 2 + 2 * 2)


def _mask_on_a_gpu(kind, heads, n, m):
    i, j = torch.arange(n, device="cuda")[:, None], torch.arange(m, device="cuda")
    if kind == "dense_16":
        return torch.randn(heads, n, m, device="cuda").to(torch.bfloat16)
    if kind in ("per_key", "dense"):
        return torch.randn(heads, 1 if kind == "per_key" else n, m, device="cuda")
    if kind == "random":
        return torch.rand(n, m, device="cuda") > 0.3
    if kind == "documents":
        return (i // 129 == j // 129) | (j == 0)
    # Whole rows of blocks see one corner of one block.
    return (j == m - 1) | ((i < 200) & (j < 64)) if kind else None


# Not in the quick subset: a kernel that waits for ever would take the rest of it along.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "options", "dtype", "persistent"),
    [
        ((2, 4, 2, 515, 700, 128), {"causal": True, "align": "lower_right"}, torch.bfloat16, 1),
        ((1, 4, 4, 700, 300, 64), {}, torch.bfloat16, 0),
        ((2, 2, 2, 650, 650, 128), {"mask": "random"}, torch.bfloat16, 1),
        ((2, 4, 2, 650, 650, 128), {"mask": "documents"}, torch.bfloat16, 1),
        ((2, 2, 2, 777, 333, 64), {"mask": "documents", "added": True}, torch.float16, 0),
        ((2, 2, 2, 650, 650, 128), {"mask": "per_key", "causal": True}, torch.bfloat16, 1),
        ((2, 4, 2, 333, 777, 128), {"mask": "dense"}, torch.bfloat16, 1),
        ((2, 4, 2, 520, 640, 128), {"mask": "dense_16", "causal": True}, torch.bfloat16, 1),
        ((2, 4, 4, 1000, 520, 64), {"mask": "dense_16"}, torch.bfloat16, 0),
        ((2, 4, 4, 650, 650, 64), {"mask": "corner", "added": True}, torch.bfloat16, 1),
        ((1, 4, 1, 1000, 1000, 96), {"window": (100, 30)}, torch.float16, 0),
        ((2, 4, 4, 2048, 2048, 64), {"causal": True}, torch.float16, 1),
        ((4, 66, 66, 512, 512, 64), {"causal": True}, torch.bfloat16, 1),
        ((2, 2, 2, 333, 777, 64), {"mask": "random", "window": (300, -1)}, torch.bfloat16, 1),
    ],
)
def test_on_a_gpu_they_match_eager(monkeypatch, shape, options, dtype, persistent, poisoned):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("they are for compute capability 9")
    batch, heads, heads_k, n, m, dim = shape
    blocks = (128, 64, 64) if dim > 64 else (128, 128, 64)
    for table, block in zip((ops.FORWARD, ops.QUERY_GRADIENT, ops.KEY_GRADIENT), blocks, strict=True):
        params = launch.roles(block, 2, 2, persistent)
        monkeypatch.setattr(table, "pick_roles", lambda q, options, params=params: params)
    inputs = {
        name: torch.randn(batch, rows, h, dim, device="cuda").to(dtype).transpose(1, 2)
        for name, rows, h in (("q", n, heads), ("k", m, heads_k), ("v", m, heads_k))
    }
    options = dict(options)
    mask = _mask_on_a_gpu(options.pop("mask", None), heads, n, m)
    if options.pop("added", False):
        mask = torch.where(mask, 0.0, -torch.inf)
        # Numbers in one block alone, none of them in a hidden score.
        mask[:60, :60] += torch.randn(60, 60, device="cuda")
    check(
        lambda q, k, v: attention(q, k, v, mask, **options),
        lambda q, k, v: attention_reference(q, k, v, mask, **options),
        inputs,
    )
