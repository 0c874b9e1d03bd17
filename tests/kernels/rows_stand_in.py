"""Runs kernels in Gluon whose rows come by asynchronous copies: beside `gluon_stand_in`, what these need."""

import torch

from tests.kernels import gluon_stand_in
from tests.kernels.gluon_stand_in import Buffer, block

WARPS = 1


class Rows(Buffer):
    """Shared memory of which parts are taken, and to which is written."""

    def index(self, i):
        return Rows(self.values[int(i)])

    def slice(self, start, length):
        return Rows(self.values[start : start + length])

    def store(self, value):
        self.values.copy_(value)


class Copies:
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


class Language(gluon_stand_in._Language):
    bfloat16 = torch.bfloat16
    program_id = staticmethod(lambda axis: block(gluon_stand_in._local.program[0]))
    num_warps = staticmethod(lambda: WARPS)
    reduce = staticmethod(lambda pair, axis, combine: tuple(x.sum(axis) for x in pair))
    store = staticmethod(lambda pointer, value: gluon_stand_in._store(pointer, value, True))
    BlockedLayout = SwizzledSharedLayout = staticmethod(lambda *a: None)
    allocate_shared_memory = staticmethod(
        lambda dtype, shape, layout: Rows(torch.full(shape, torch.nan, dtype=dtype))
    )


def install(monkeypatch, module, *names):
    """Until the test ends, the kernel of this module runs here on one warp; gives the copies that it makes.

    Args:
        monkeypatch: the test's.
        module: what has the kernel, and a table STREAM, whose row is changed.
        names: of other modules that have device functions of the kernel.

    Returns:
        the copies, and the row, which a test may change.
    """
    copies = Copies()
    for each in (module, *names):
        gluon_stand_in.install(monkeypatch, [each])
        monkeypatch.setattr(each, "gl", Language)
        monkeypatch.setattr(each, "async_copy", copies)
        monkeypatch.setattr(each, "widened", lambda x: x.float())
    row = {"num_warps": WARPS, "STAGES": 3, "programs_per_sm": 1}
    monkeypatch.setattr(module.STREAM, "pick", lambda size, device: row)
    monkeypatch.setattr(module, "sm_count", lambda device: 3)
    launch = gluon_stand_in._Kernel.__getitem__
    monkeypatch.setattr(
        gluon_stand_in._Kernel, "__getitem__",
        lambda kernel, grid: lambda *given, **constants: launch(kernel, grid)(
            *given, maxnreg=None, **constants
        ),
    )  # fmt: skip
    return copies, row


def gradients(function, leaves, dtype):
    """Of all leaves, where the result's gradient is random numbers of this dtype."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    torch.manual_seed(1)
    dout = torch.randn(out.shape).to(dtype).to(out)
    return torch.autograd.grad(out, leaves, dout)


def check(ours, reference, *leaves):
    """Gradients are the exact ones but for a rounding or two."""
    mine = gradients(ours, leaves, leaves[0].dtype)
    theirs = gradients(reference, [x.double() for x in leaves], leaves[0].dtype)
    for a, b in zip(mine, theirs, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < torch.finfo(a.dtype).eps
