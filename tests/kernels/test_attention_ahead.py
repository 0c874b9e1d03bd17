"""Attention on Hopper without a mask or window: the table's own rows, whose programs work ahead."""

import pytest
import torch
from advisor.kernels import _attention_hopper_forward as forward
from advisor.kernels import _attention_hopper_keys as keys
from advisor.kernels import _attention_hopper_queries as queries
from advisor.kernels import _attention_hopper_tiles as tiles
from advisor.kernels import _attention_launch as launch
from advisor.kernels import _attention_ops as ops
from advisor.kernels import _launch
from advisor.kernels._triton import INTERPRETED
from advisor.kernels.attention import attention, attention_reference
from torch import Tensor

from tests.kernels import gluon_stand_in
from tests.kernels.checks import check

pytestmark = pytest.mark.skipif(not tiles.AVAILABLE, reason="this Triton has no Gluon for Hopper")
TABLES = (launch.FORWARD, launch.QUERY_GRADIENT, launch.KEY_GRADIENT)
KERNELS = ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel")


def _leaves(n, m, heads, heads_k, dim=64, dtype=torch.bfloat16, batch=2, device="cpu") -> list[Tensor]:
    return [
        torch.randn(batch, rows, h, dim, device=device).transpose(1, 2).to(dtype).requires_grad_()
        for rows, h in ((n, heads), (m, heads_k), (m, heads_k))
    ]


def _results(leaves: list[Tensor], grad: Tensor, **options) -> tuple[Tensor, ...]:
    out = attention(*leaves, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def _agree(leaves: list[Tensor], grad: Tensor, **options) -> None:
    mine = _results(leaves, grad, **options)
    options.pop("precise_gradient", None)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    out = attention_reference(*exact_leaves, **options)
    exact = (out.detach(), *torch.autograd.grad(out, exact_leaves, grad.double()))
    eps = torch.finfo(leaves[0].dtype).eps
    for a, b in zip(mine, exact, strict=True):
        # Probabilities and slopes are rounded to 16 bits before they are multiplied.
        assert float((a.double() - b).norm() / b.norm()) < 1.5 * eps


@pytest.fixture
def launched(monkeypatch):
    """What kernels with roles were launched with, by name: on three programs, as the tables have it."""
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process: set TRITON_INTERPRET=1")
    gluon_stand_in.install(monkeypatch, (tiles, forward, queries, keys))
    monkeypatch.setattr(_launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(ops, "sm_count", lambda device: 3)
    seen = {}
    index = gluon_stand_in._Kernel.__getitem__

    def noting(kernel, grid):
        def run(*arguments, **constants):
            seen[kernel.function.__name__] = constants
            return index(kernel, grid)(*arguments, **constants)

        return run

    monkeypatch.setattr(gluon_stand_in._Kernel, "__getitem__", noting)
    torch.manual_seed(0)
    return seen


LENGTHS = [
    ((300, 130), {}),
    ((130, 300), {"causal": True, "align": "lower_right"}),
    # Neither is a multiple of four: statistics are read by each thread.
    ((301, 301), {"causal": True}),
    ((1, 77), {}),
    # Fewer keys than a tile has.
    ((260, 40), {}),
    ((40, 17), {"causal": True}),
    ((384, 384), {"causal": True}),
]


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize(("lengths", "options"), LENGTHS, ids=str)
def test_any_length_matches_eager(launched, lengths, options, precise):
    leaves = _leaves(*lengths, 4, 2, dtype=torch.float16)
    _agree(leaves, torch.randn(2, 4, lengths[0], 64).to(torch.float16), precise_gradient=precise, **options)
    assert set(launched) == set(KERNELS)
    assert all(constants["AHEAD"] for constants in launched.values())
    assert launched["key_gradient_kernel"]["STATS"] == (lengths[0] % 4 == 0)
    assert launched["query_gradient_kernel"]["COPY"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [((4, 4), 64), ((4, 2), 16), ((4, 1), 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_in_groups_and_other_dimensions_match_eager(launched, heads, dim, dtype, causal):
    # GIVEN two blocks of each of eight planes on three programs: some take a fifth or sixth block
    leaves = _leaves(200, 200, *heads, dim, dtype)
    _agree(leaves, torch.randn(2, 4, 200, dim).to(dtype), causal=causal)
    assert launched["key_gradient_kernel"]["AHEAD"]


def test_parts_of_wider_tensors_match_eager(launched):
    # GIVEN q, k and v side by side, an output's gradient of other strides, and values of 20 columns
    qkv = torch.randn(2, 132, 2, 3 * 64).to(torch.float16).transpose(1, 2)
    q, k, v = (x.detach().requires_grad_() for x in qkv.split(64, dim=3))
    grad = torch.randn(2, 2, 132, 80).to(torch.float16)
    _agree([q, k, v], grad[..., 8:72], causal=True)
    assert launched["query_gradient_kernel"]["COPY"]
    _agree([q, k, v.detach()[..., :20].requires_grad_()], grad[..., :20], causal=True)
    # THEN the output, whose rows the copy engine cannot take, is read by each thread
    assert not launched["query_gradient_kernel"]["COPY"]
    assert launched["query_gradient_kernel"]["AHEAD"]


def test_what_rounding_takes_from_the_output_comes_along(launched):
    # GIVEN keys and values that are alike
    leaves = _leaves(150, 150, 1, 1, 16, torch.float16)
    with torch.no_grad():
        for x in leaves[1:]:
            x += 8.0 * torch.randn(1, 1, 1, 16).to(torch.float16)
    grad = torch.randn(2, 1, 150, 16).to(torch.float16)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = torch.autograd.grad(attention_reference(*exact_leaves), exact_leaves, grad.double())[0]

    def error(precise):
        mine = _results(leaves, grad, precise_gradient=precise)[1]
        assert launched["query_gradient_kernel"]["COPY"]
        return float((mine.double() - exact).norm() / exact.norm())

    # THEN the gradient for queries is several times as far off without
    assert error(True) < error(False) / 3.0


@pytest.mark.parametrize("n", [128, 130])
def test_key_gradients_wait_for_what_query_gradients_write(launched, monkeypatch, n):
    leaves, grad = _leaves(n, n, 2, 2, dtype=torch.float16), torch.randn(2, 2, n, 64).to(torch.float16)
    _results(leaves, grad)
    assert launched["key_gradient_kernel"]["launch_pdl"]
    # WHEN the wait is left out
    monkeypatch.setattr(gluon_stand_in, "PATIENCE_S", 1.0)
    monkeypatch.setattr(keys, "wait_for_kernel_before", lambda: None)
    # THEN delta is found to be read too early, by the warp that loads or by each thread
    with pytest.raises(AssertionError, match="before the kernel that writes it has ended"):
        _results(leaves, grad)


def _options(dim, **changed):
    lacking = dict.fromkeys(("BIAS", "LEFT", "PACKED", "SOFTCAP", "DROPOUT"), False)
    return {"COLS": dim, "COLS_V": dim, "RIGHT": True, **lacking, **changed}


#: Of forward, query gradients and key gradients.
MASKED = [launch.roles(128, 3), launch.roles(128, 3, unmasked=0), launch.roles(128, 3)]
AHEAD = [launch.roles(128, stages, ahead=1) for stages in (3, 2, 3)]


@pytest.mark.parametrize(
    ("dim", "changed", "rows"),
    [
        (64, {}, AHEAD),
        (64, {"RIGHT": False}, AHEAD),
        (64, {"LEFT": True}, [launch.roles(128, 3), {}, launch.roles(128, 3)]),
        (64, {"BIAS": 1}, MASKED),
        (64, {"BIAS": 2, "LEFT": True}, MASKED),
        (64, {"DROPOUT": True}, [{}, {}, {}]),
        (64, {"PACKED": True}, [{}, {}, {}]),
        (128, {}, [launch.roles(128, 2), launch.roles(64, 4), launch.roles(64, 3, persistent=0)]),
        (256, {}, [{}, {}, {}]),
    ],
)
def test_rows_that_work_ahead_are_for_what_was_timed(monkeypatch, dim, changed, rows):
    monkeypatch.setattr(_launch, "architecture", lambda device: "sm_90")
    q = torch.empty(1, dtype=torch.bfloat16)
    assert [table.pick_roles(q, _options(dim, **changed)) for table in TABLES] == rows
    assert not any(table.pick_roles(q.float(), _options(dim, **changed)) for table in TABLES)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100", "interpreter"])
def test_other_architectures_have_no_such_rows(monkeypatch, architecture):
    monkeypatch.setattr(_launch, "architecture", lambda device: architecture)
    q = torch.empty(1, dtype=torch.bfloat16)
    assert not any(table.pick_roles(q, _options(64)) for table in TABLES)


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("they are for compute capability 9")
    torch.manual_seed(0)


# Not in the quick subset: a kernel that waits for ever would take the rest of it along.
@pytest.mark.gpu
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((8, 12, 12, 1024, 1024, 64), torch.bfloat16, {"causal": True}),
        ((2, 8, 2, 1023, 1023, 64), torch.float16, {"causal": True}),
        ((2, 8, 2, 130, 700, 64), torch.bfloat16, {}),
        ((2, 4, 1, 1, 77, 64), torch.bfloat16, {}),
        ((3, 5, 5, 516, 40, 32), torch.float16, {}),
        ((2, 4, 4, 333, 650, 48), torch.bfloat16, {"causal": True, "align": "lower_right"}),
        ((4, 66, 66, 512, 512, 16), torch.bfloat16, {"causal": True}),
    ],
    ids=str,
)
def test_on_a_gpu_they_match_eager(hopper, shape, dtype, options, precise, poisoned):
    batch, heads, heads_k, n, m, dim = shape
    q, k, v = _leaves(n, m, heads, heads_k, dim, dtype, batch, "cuda")
    check(
        lambda q, k, v: attention(q, k, v, precise_gradient=precise, **options),
        lambda q, k, v: attention_reference(q, k, v, **options),
        {"q": q.detach(), "k": k.detach(), "v": v.detach()},
    )


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1024, 1023])
def test_on_a_gpu_a_graph_and_a_compiled_step_give_the_same_bits(hopper, n):
    # GIVEN key gradients that are launched before query gradients have ended
    leaves = _leaves(n, n, 12, 12, batch=8, device="cuda")
    grad = torch.randn(8, 12, n, 64, device="cuda", dtype=torch.bfloat16)
    expected = _results(leaves, grad, causal=True)
    for _ in range(20):
        assert all(map(torch.equal, _results(leaves, grad, causal=True), expected))
    # WHEN both are captured, and replayed on other numbers in between
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _results(leaves, grad, causal=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _results(leaves, grad, causal=True)
    kept = grad.clone()
    for _ in range(20):
        grad.copy_(2.0 * kept)
        graph.replay()
        grad.copy_(kept)
        graph.replay()
        # THEN each replay gives the same
        assert all(map(torch.equal, captured, expected))
    # and so does a step that is compiled
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True)
    out = compiled(*leaves)
    assert all(map(torch.equal, (out.detach(), *torch.autograd.grad(out, leaves, grad)), expected))
