"""Runs Gluon kernels on the CPU: partitions are threads, barriers real ones, copies and products lazy.

Triton interprets its own language but not Gluon. What a kernel in Gluon can get wrong beyond its arithmetic
is order: a wait for a phase that never comes, a buffer handed back while it is read. So products are worked
out as late as the kernel's own waits allow, from what the buffers hold by then; buffers start as NaN; and a
wait that lasts seconds is a deadlock. A kernel that may start before the one before it has ended must wait
for it before it reads what that wrote. Layouts mean nothing here: that they fit, the compiler says.
"""

import threading
from types import SimpleNamespace

import torch

PATIENCE_S = 20.0
_local = threading.local()
#: What the last kernel wrote and the one now running, by their storages' addresses.
_written: dict[str, set[int]] = {"before": set(), "now": set()}


def read(storage):
    """Note that a thread reads a tensor; wrong where the kernel that writes it may still be running."""
    early = _local.early and storage.data_ptr() in _written["before"]
    assert not early, "read before the kernel that writes it has ended"


def wait_for_kernel_before():
    _local.early = False


class Block(torch.Tensor):
    """A tensor with the attributes that a Gluon value has."""

    @property
    def type(self):
        return SimpleNamespace(layout=None)


def block(value, dtype=None):
    return torch.as_tensor(value, dtype=dtype).as_subclass(Block)


class Pointer:
    """A place in a tensor's storage, or many."""

    def __init__(self, storage, at):
        self.storage, self.at = storage, at
        self.dtype = SimpleNamespace(element_ty=storage.dtype)
        self.shape = list(at.shape)

    @classmethod
    def to_tensor(cls, x):
        size = x.untyped_storage().nbytes() // x.element_size()
        return cls(x.as_strided((size,), (1,), 0), torch.tensor(x.storage_offset()))

    def __add__(self, offset):
        return Pointer(self.storage, self.at + torch.as_tensor(offset).as_subclass(torch.Tensor))

    def places(self, mask):
        at, mask = torch.broadcast_tensors(self.at, torch.as_tensor(mask).as_subclass(torch.Tensor))
        assert ((at >= 0) & (at < len(self.storage)) | ~mask).all(), "outside of memory"
        return at, mask


class Buffer:
    """Shared memory, or a view of it."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, list(values.shape), values.dtype

    def index(self, i):
        return Buffer(self.values[int(i)])

    def reshape(self, shape):
        return Buffer(self.values.view([int(n) for n in shape]))

    def permute(self, order):
        return Buffer(self.values.permute(order))

    def load(self, layout):
        return block(self.values.clone())

    def store(self, value):
        self.values.copy_(value.as_subclass(torch.Tensor))


class Barrier:
    """An mbarrier: a phase is over when all have arrived and all announced bytes with them."""

    def __init__(self):
        self.changed = threading.Condition()
        self.over, self.count, self.missing, self.bytes = 0, 0, 0, 0

    def update(self, arrivals, size):
        with self.changed:
            self.missing, self.bytes = self.missing - arrivals, self.bytes + size
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if not self.missing and not self.bytes:
                self.over, self.missing = self.over + 1, self.count
            self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            reached = self.changed.wait_for(lambda: self.over % 2 != int(parity), PATIENCE_S)
        assert reached, "deadlock"


class Barriers:
    def __init__(self, n):
        self.all = [Barrier() for _ in range(n)]

    def index(self, i):
        return self.all[int(i)]


class Product:
    """One product in flight; what it reads, it reads when it is waited for."""

    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc, self.result = a, b, acc, use_acc, None

    def finish(self):
        a = self.a.values.clone() if isinstance(self.a, Buffer) else self.a.as_subclass(torch.Tensor)
        product = a.float() @ self.b.values.float()
        acc = self.acc.as_subclass(torch.Tensor) if self.use_acc else 0.0
        self.result = block(product + acc)


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    assert is_async
    assert not isinstance(acc, Product), "an accumulator still in flight"
    _local.queue.append(Product(a, b, acc, use_acc))
    return _local.queue[-1]


def warpgroup_mma_wait(num_outstanding, deps):
    while len(_local.queue) > num_outstanding:
        _local.queue.pop(0).finish()
    done = []
    for dep in deps:
        if isinstance(dep, Product):
            assert dep.result is not None, "waited for too few products"
            dep = dep.result
        done.append(dep)
    return done[0] if len(done) == 1 else tuple(done)


class Descriptor:
    def __init__(self, x, rows, cols=0):
        shape = [1, 1, rows, cols or max(16, 1 << (x.shape[3] - 1).bit_length())]
        self.x, self.dtype, self.layout = x, x.dtype, None
        size = x.element_size()
        for n in shape:
            size *= n
        self.block_type = SimpleNamespace(shape=shape, nbytes=size)


def copy_tile(source, coordinates, ready, target):
    batch, head, row, col = (int(c) for c in coordinates)
    rows = source.x[batch, head, row : row + target.shape[2], col : col + target.shape[3]]
    read(source.x.untyped_storage())
    target.values.zero_()
    target.values[0, 0, : rows.shape[0], : rows.shape[1]] = rows
    ready.update(0, -source.block_type.nbytes)


def warp_specialize(parts, warps, registers):
    assert len(parts) == len(warps) + 1 == len(registers) + 1
    failures = []
    program, early = _local.program, _local.early

    def run(function, arguments):
        _local.program, _local.early, _local.queue = program, early, []
        try:
            # Whether gradients are recorded is a thread's own affair.
            with torch.no_grad():
                function(*arguments)
            assert not _local.queue, "products still in flight at the end"
        except BaseException as failure:  # noqa: BLE001
            failures.append(failure)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _allocate(dtype, shape, layout):
    if dtype == torch.int64:
        return Barrier() if len(shape) == 1 else Barriers(shape[0])
    return Buffer(torch.full([int(n) for n in shape], torch.nan, dtype=dtype))


def _init(barrier, count):
    barrier.count = barrier.missing = count


def _load(pointer, mask=True, other=0):
    at, mask = pointer.places(mask)
    read(pointer.storage.untyped_storage())
    values = pointer.storage[at.clamp(0, len(pointer.storage) - 1)]
    return block(torch.where(mask, values, torch.tensor(other, dtype=values.dtype)))


def _store(pointer, value, mask):
    at, mask = pointer.places(mask)
    value = value.as_subclass(torch.Tensor).broadcast_to(at.shape)
    _written["now"].add(pointer.storage.untyped_storage().data_ptr())
    pointer.storage[at[mask]] = value[mask].to(pointer.storage.dtype)


_INSTRUCTIONS = {
    "sub.f32 $0, $1, $2;": torch.sub,
    "griddepcontrol.wait; // $0": wait_for_kernel_before,
    "griddepcontrol.launch_dependents; // $0": lambda: None,
}


class _Language:
    constexpr = None
    float32, int32, int64 = torch.float32, torch.int32, torch.int64
    program_id = staticmethod(lambda axis: _local.program[0])
    num_programs = staticmethod(lambda axis: _local.program[1])
    minimum = staticmethod(lambda a, b: torch.minimum(block(a), block(b)))
    maximum = staticmethod(lambda a, b: torch.maximum(block(a), block(b)))
    cdiv = staticmethod(lambda a, b: -(-a // b))
    where = staticmethod(torch.where)
    exp2, log2 = staticmethod(torch.exp2), staticmethod(torch.log2)
    # In double: one rounding, as the instruction has.
    fma = staticmethod(lambda a, b, c: (a.double() * b + c.double()).float())
    max = staticmethod(lambda x, axis: x.amax(axis))
    sum = staticmethod(lambda x, axis: x.sum(axis))
    arange = staticmethod(lambda first, end, layout: block(torch.arange(int(first), int(end))))
    full = staticmethod(lambda shape, value, dtype, layout: block(torch.full(shape, value, dtype=dtype)))
    zeros = staticmethod(lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype)))
    convert_layout = staticmethod(lambda x, layout: x)
    inline_asm_elementwise = staticmethod(lambda asm, of, x, **rest: _INSTRUCTIONS[asm](*x))
    load, store = staticmethod(_load), staticmethod(_store)
    allocate_shared_memory = staticmethod(_allocate)
    warp_specialize = staticmethod(warp_specialize)
    static_range = staticmethod(range)
    NVMMADistributedLayout = DotOperandLayout = SliceLayout = BlockedLayout = staticmethod(lambda *a: None)
    NVMMASharedLayout = staticmethod(lambda *a: None)


_MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=_init,
    wait=lambda barrier, phase: barrier.wait(phase),
    expect=lambda barrier, size: barrier.update(1, size),
    arrive=lambda barrier, count: barrier.update(count, 0),
)


class _Kernel:
    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, enable_fp_fusion=True, launch_pdl=False, **constants):
            _written["before"], _written["now"] = _written["now"], set()
            given = [Pointer.to_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            for program in range(grid[0]):
                _local.program, _local.early = (program, grid[0]), launch_pdl
                self.function(*given, **constants)

        return launch


def install(monkeypatch, modules):
    """Until the test ends, the Gluon kernels of these modules run here."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    replaced = {
        "gl": _Language,
        "fence_async_shared": lambda: None,
        "mbarrier": _MBARRIER,
        "tma": SimpleNamespace(async_copy_global_to_shared=copy_tile),
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
        "described": Descriptor,
    }
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, GluonJITFunction):
                kernel = _Kernel(value.fn) if name.endswith("_kernel") else value.fn
                monkeypatch.setattr(module, name, kernel)
            elif name in replaced:
                monkeypatch.setattr(module, name, replaced[name])
        # Loop counters are values, not Python's integers.
        monkeypatch.setattr(module, "range", lambda *ends: map(block, range(*map(int, ends))), raising=False)
