"""The norms' backward over rows that stream through shared memory: its order of copies, its arithmetic."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from advisor.kernels import _norm_stream as stream
from advisor.kernels._triton import INTERPRETED
from advisor.kernels.norm import layer_norm, rms_norm, rms_norm_reference

from tests.kernels import gluon_stand_in
from tests.kernels.gluon_stand_in import Buffer, block

pytestmark = pytest.mark.skipif(not stream.AVAILABLE, reason="this Triton has no Gluon")
WARPS = 1


class _Rows(Buffer):
    """Shared memory of which parts are taken, and to which is written."""

    def index(self, i):
        return _Rows(self.values[int(i)])

    def slice(self, start, length):
        return _Rows(self.values[start : start + length])

    def store(self, value):
        self.values.copy_(value)


class _Copies:
    """Asynchronous copies, made as late as the waits allow."""

    def __init__(self):
        self.groups, self.group, self.most = [], [], 0

    def async_copy_global_to_shared(self, target, source):
        target.values.fill_(torch.nan)
        self.group.append((target, source))

    def commit_group(self):
        self.groups.append(self.group)
        self.group = []

    def wait_group(self, num_outstanding):
        self.most = max(self.most, sum(bool(group) for group in self.groups))
        while len(self.groups) > num_outstanding:
            for target, source in self.groups.pop(0):
                target.store(gluon_stand_in._load(source))


class _Language(gluon_stand_in._Language):
    bfloat16 = torch.bfloat16
    program_id = staticmethod(lambda axis: block(gluon_stand_in._local.program[0]))
    num_warps = staticmethod(lambda: WARPS)
    reduce = staticmethod(lambda pair, axis, combine: tuple(x.sum(axis) for x in pair))
    store = staticmethod(lambda pointer, value: gluon_stand_in._store(pointer, value, True))
    BlockedLayout = SwizzledSharedLayout = staticmethod(lambda *a: None)
    allocate_shared_memory = staticmethod(
        lambda dtype, shape, layout: _Rows(torch.full(shape, torch.nan, dtype=dtype))
    )


@pytest.fixture
def streamed(monkeypatch):
    """Every backward takes this kernel, on three programs; gives the copies that were made."""
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process: set TRITON_INTERPRET=1")
    gluon_stand_in.install(monkeypatch, [stream])
    copies = _Copies()
    monkeypatch.setattr(stream, "gl", _Language)
    monkeypatch.setattr(stream, "async_copy", copies)
    params = {"num_warps": WARPS, "STAGES": 3, "programs_per_sm": 1}
    monkeypatch.setattr(stream.STREAM, "pick", lambda size, device: params)
    monkeypatch.setattr(stream, "sm_count", lambda device: 3)
    monkeypatch.setattr(stream, "shared_bytes", lambda device: 1 << 17)
    launch = gluon_stand_in._Kernel.__getitem__
    monkeypatch.setattr(
        gluon_stand_in._Kernel, "__getitem__",
        lambda kernel, grid: lambda *given, **constants: launch(kernel, grid)(
            *given, maxnreg=None, **constants
        ),
    )  # fmt: skip
    yield SimpleNamespace(copies=copies, params=params)
    assert copies.most > 0


def _gradients(function, *leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    torch.manual_seed(1)
    return torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out))


def _check(ours, reference, *leaves):
    mine = _gradients(ours, *leaves)
    # The same gradient of the result, which had 16 bits.
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = reference(*exact)
    torch.manual_seed(1)
    theirs = torch.autograd.grad(out, exact, torch.randn(out.shape).to(leaves[0]).double())
    for a, b in zip(mine, theirs, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < torch.finfo(a.dtype).eps


@pytest.mark.parametrize("rows", [1, 2, 11])
@pytest.mark.parametrize("columns", [256, 1024])
def test_layer_norm_matches_exact_gradients(streamed, rows, columns):
    torch.manual_seed(0)
    x = (torch.randn(rows, columns) * 2 + 3).half()
    w, b = torch.randn(columns).half(), torch.randn(columns)
    _check(
        lambda x, w, b: layer_norm(x, columns, w, b), lambda x, w, b: F.layer_norm(x, (columns,), w, b),
        x, w, b,
    )  # fmt: skip
    assert streamed.copies.most <= 2


@pytest.mark.parametrize("casting", ["fp32", "llama"])
def test_rms_norm_matches_exact_gradients(streamed, casting):
    torch.manual_seed(0)
    x, w = torch.randn(7, 512).half(), torch.randn(512).half()
    _check(
        lambda x, w: rms_norm(x, 512, w, 1e-5, offset=1.0, casting=casting),
        lambda x, w: rms_norm_reference(x, 512, w, 1e-5, offset=1.0),
        x, w,
    )  # fmt: skip


def test_rows_that_lie_apart_are_taken_as_they_lie(streamed):
    torch.manual_seed(0)
    wide = torch.randn(5, 1024).half()
    _check(lambda x: layer_norm(x[:, :512], 512), lambda x: F.layer_norm(x[:, :512], (512,)), wide)


def test_two_buffers_do_with_one_row_on_its_way(streamed):
    streamed.params["STAGES"] = 2
    torch.manual_seed(0)
    x = torch.randn(8, 512).half()
    _check(lambda x: layer_norm(x, 512), lambda x: F.layer_norm(x, (512,)), x)
    assert streamed.copies.most == 1


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(2, 512), None),
        (torch.zeros(2, 768, dtype=torch.half), None),
        (torch.zeros(2 * 512 + 1, dtype=torch.half)[1:].view(2, 512), None),
        (torch.zeros(2, 520, dtype=torch.half)[:, :512], None),
        (torch.zeros(2, 32768, dtype=torch.half), None),
    ],
)
def test_other_rows_are_left_to_the_other_kernels(streamed, x, weight):
    assert stream.stream_row(x, x, weight) is None
    streamed.copies.most = 1


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize(("warps", "programs"), [(16, 1), (8, 2)])
@pytest.mark.parametrize("columns", [8192, 16384])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_on_a_gpu_match_exact_gradients(monkeypatch, dtype, columns, warps, programs):
    used = []

    def chosen(size, device):
        used.append(size)
        return {"num_warps": warps, "STAGES": 3, "programs_per_sm": programs}

    monkeypatch.setattr(stream.STREAM, "pick", chosen)
    torch.manual_seed(0)
    x = (torch.randn(301, columns, device="cuda") * 2 + 3).to(dtype)
    w, b = (torch.randn(columns, device="cuda").to(dtype) for _ in range(2))
    _check(
        lambda x, w, b: layer_norm(x, columns, w, b), lambda x, w, b: F.layer_norm(x, (columns,), w, b),
        x, w, b,
    )  # fmt: skip
    _check(
        lambda x, w: rms_norm(x, columns, w, 1e-5), lambda x, w: rms_norm_reference(x, columns, w, 1e-5), x, w
    )
    assert used == [columns, columns]
