"""Runs the source of the Gluon kernel that streams weights, on the CPU, one program after the other.

What a layout decides is where a number lies, not what it is, so layouts are left out here: that they fit, the
compiler says. Masked loads give what no kernel may use, buffers start as what none may use either.
"""

from types import SimpleNamespace

import torch

from tests.kernels.gluon_stand_in import Block, Pointer

#: In a register that a masked load did not write.
RUBBISH = 0x7FC07FC1


class Dtype(SimpleNamespace):
    """A dtype as kernels see it."""

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__


DTYPES = {
    t: Dtype(torch=t, primitive_bitwidth=8 * t.itemsize)
    for t in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
    )
}


class Value(Block):
    """A block whose dtype may be changed with its bits kept."""

    def to(self, dtype, bitcast=False):
        wanted = dtype.torch
        return self.contiguous().view(wanted) if bitcast else super().to(wanted)


def value(x, dtype=None):
    return torch.as_tensor(x, dtype=dtype).as_subclass(Value)


class Address(Pointer):
    """A place in a tensor's storage, or many; of another dtype by `to`."""

    def __init__(self, storage, at):
        super().__init__(storage, at)
        self.dtype = SimpleNamespace(element_ty=DTYPES[storage.dtype])

    def __add__(self, offset):
        return Address(self.storage, super().__add__(offset).at)

    def to(self, dtype):
        size = self.storage.element_size()
        return Address(self.storage.view(dtype.torch), self.at * size // dtype.torch.itemsize)


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, values):
        self.values = values

    def index(self, i):
        return Shared(self.values[int(i)])

    def slice(self, start, length):
        assert start >= 0
        assert start + length <= len(self.values)
        return Shared(self.values[start : start + length])

    def store(self, given):
        assert given.shape == self.values.shape
        self.values.copy_(given)

    def load(self, layout):
        return value(self.values.clone())


def load(pointer, mask=True, other=None):
    at, mask = pointer.places(mask)
    values = pointer.storage[at.clamp(0, len(pointer.storage) - 1)]
    filler = RUBBISH if other is None else other
    return value(torch.where(mask, values, torch.tensor(filler, dtype=values.dtype)))


def bits(at, mask):
    found = load(at, mask, 0).as_subclass(torch.Tensor)
    if found.dtype != torch.uint8:
        found = found.view({2: torch.int16, 4: torch.int32}[found.element_size()])
    found = found.to(torch.int32)
    return value(found & 0xFFFF if at.storage.element_size() == 2 else found)


def element(half, i, n_bits, dtype):
    u = (half.as_subclass(torch.Tensor).to(torch.int32) >> (n_bits * i)) & (2**n_bits - 1)
    return value((u - 2 ** (n_bits - 1)).to(dtype.torch))


def product(a, b, acc):
    a, b = (x.as_subclass(torch.Tensor).float() for x in (a, b))
    return value(a @ b + acc.as_subclass(torch.Tensor))


class _Language:
    """What the kernel names of Gluon, layouts as nothing."""

    constexpr = None
    program: list[int]

    def __getattr__(self, name):
        return DTYPES[getattr(torch, name)]

    def program_id(self, axis):
        return self.program[axis]

    SliceLayout = DotOperandLayout = NVMMADistributedLayout = SwizzledSharedLayout = staticmethod(
        lambda *a: None
    )
    DistributedLinearLayout = BlockedLayout = staticmethod(lambda *a: None)
    pointer_type = staticmethod(lambda dtype: dtype)
    static_range = staticmethod(range)
    load = staticmethod(load)
    to_tensor = staticmethod(value)
    join = staticmethod(lambda a, b: torch.stack((a, b), -1))
    convert_layout = staticmethod(lambda x, layout: x)
    expand_dims = staticmethod(lambda x, axis: x.unsqueeze(axis))
    minimum = staticmethod(lambda a, b: torch.minimum(value(a), value(b)))
    arange = staticmethod(lambda first, end, layout: value(torch.arange(first, end, dtype=torch.int32)))
    zeros = staticmethod(lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype.torch)))
    full = staticmethod(lambda shape, x, dtype, layout: value(torch.full(shape, x, dtype=dtype.torch)))
    sum = staticmethod(lambda x, axis: x.sum(axis))

    @staticmethod
    def allocate_shared_memory(dtype, shape, layout):
        return Shared(torch.full(shape, RUBBISH, dtype=dtype.torch))

    @staticmethod
    def store(pointer, given, mask):
        at, mask = pointer.places(mask)
        pointer.storage[at[mask]] = given.as_subclass(torch.Tensor).broadcast_to(at.shape)[mask]


class Kernel:
    """The kernel as the launch sees it."""

    def __init__(self, function, language):
        self.function, self.language = function, language

    def __getitem__(self, grid):
        def launch(*arguments, maxnreg=None, **constants):
            given = [Address.to_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            for program in range(grid[0]):
                self.language.program = [program]
                self.function(*given, **constants)

        return launch


def install(monkeypatch, module):
    """Until the test ends, the module's kernel runs here."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    language = _Language()
    replaced = {
        "gl": language, "mma_v2": product, "centred_element": element, "_bits": bits,
        "_in_order": lambda x: None, "_barrier": lambda: None,
        **dict.fromkeys(("_w_layout", "_x_layout", "_copy_layout"), lambda *sizes: None),
    }  # fmt: skip
    for name, given in list(vars(module).items()):
        if name in replaced:
            monkeypatch.setattr(module, name, replaced[name])
        elif isinstance(given, GluonJITFunction):
            runs = Kernel(given.fn, language) if name.endswith("_kernel") else given.fn
            monkeypatch.setattr(module, name, runs)
    # Loop counters are values, not Python's integers.
    monkeypatch.setattr(module, "range", lambda n: map(value, range(int(n))), raising=False)
