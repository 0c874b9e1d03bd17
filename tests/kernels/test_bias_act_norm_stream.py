"""The backward of bias, activation and norm with rows in shared memory: its order of copies, its sums."""

import pytest
import torch
import torch.nn.functional as F
from advisor.kernels import _bias_act_norm_stream as stream
from advisor.kernels import _norm_stream
from advisor.kernels._triton import INTERPRETED
from advisor.kernels.bias_act_norm import bias_act_norm

from tests.kernels import rows_stand_in
from tests.kernels.rows_stand_in import check

pytestmark = pytest.mark.skipif(not stream.AVAILABLE, reason="this Triton has no Gluon")


def _gelu_slope(u, name, exact, rough):
    assert (name, exact) == ("gelu", False)
    return torch.special.ndtr(u) + u * (-u * u / 2).exp() / (2 * torch.pi) ** 0.5


@pytest.fixture
def streamed(monkeypatch):
    """Every backward takes this kernel, on three programs; gives the row of the table."""
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process: set TRITON_INTERPRET=1")
    copies, row = rows_stand_in.install(monkeypatch, stream, _norm_stream)
    for name, function in {
        "activation": lambda u, name, rough: F.gelu(u),
        "activation_gradient": _gelu_slope,
        "at_once": lambda x: x,
        "sum_as_eager": lambda x, y: (x + y).float(),
    }.items():
        monkeypatch.setattr(stream, name, function)
    yield row
    assert copies.most > 0


def _reference(x, bias=None, weight=None, shift=None):
    # As eager PyTorch has it, the sum is rounded.
    u = x if bias is None else x + bias
    u = u + (u.half().to(u) - u).detach()
    return F.layer_norm(F.gelu(u), x.shape[-1:], weight, shift)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("columns", [256, 1024])
def test_all_gradients_match_exact_ones(streamed, rows, columns):
    torch.manual_seed(0)
    x = torch.randn(rows, columns).half()
    vectors = [torch.randn(columns).half() for _ in range(3)]
    check(lambda x, *v: bias_act_norm(x, v[0], "gelu", *v[1:]), _reference, x, *vectors)


def test_without_vectors_the_input_alone_has_a_gradient(streamed):
    torch.manual_seed(0)
    check(lambda x: bias_act_norm(x, None, "gelu"), _reference, torch.randn(5, 512).half())


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True)])
def test_sums_that_are_not_asked_for_are_left_out(streamed, wanted):
    torch.manual_seed(0)
    x = torch.randn(5, 512).half()
    given = [torch.randn(512).half() for _ in range(3)]
    kept = [v for v, asked in zip(given, wanted, strict=True) if asked]

    def with_all(function):
        def call(x, *some):
            left = list(some)
            return function(x, *(left.pop(0) if w else v.to(x) for v, w in zip(given, wanted, strict=True)))

        return call

    check(with_all(lambda x, b, w, c: bias_act_norm(x, b, "gelu", w, c)), with_all(_reference), x, *kept)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no GPU, or interpreted")
@pytest.mark.parametrize(
    ("dtype", "activation", "columns", "warps", "programs"),
    [
        (torch.bfloat16, "gelu", 8192, 16, 1),
        (torch.bfloat16, "gelu_tanh", 8192, 16, 1),
        (torch.bfloat16, "relu", 8192, 16, 1),
        (torch.bfloat16, "gelu", 4096, 8, 2),
        (torch.float16, "silu", 8192, 16, 1),
        (torch.float16, "gelu", 4096, 8, 2),
    ],
)
def test_on_a_gpu_gradients_are_those_of_the_kernel_without_shared_memory(
    monkeypatch, dtype, activation, columns, warps, programs
):  # fmt: skip
    torch.manual_seed(0)
    x = torch.randn(601, columns, device="cuda").to(dtype)
    vectors = [torch.randn(columns, device="cuda").to(dtype) for _ in range(3)]

    def call(x, bias, weight, shift):
        return bias_act_norm(x, bias, activation, weight, shift)

    rows, used = [{"num_warps": 0}, {"num_warps": warps, "STAGES": 3, "programs_per_sm": programs}], []
    rows[1] |= {"maxnreg": 128}
    found = []
    for row in rows:
        monkeypatch.setattr(stream.STREAM, "pick", lambda size, device, row=row: used.append(row) or row)
        found.append(rows_stand_in.gradients(call, [x, *vectors], dtype))
    assert used == rows
    for a, b in zip(*found, strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 2 * torch.finfo(dtype).eps
