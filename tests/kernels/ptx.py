"""The few of NVIDIA's instructions that kernels ask for by name, on NumPy arrays.

By NVIDIA's PTX reference; exact where results are, as the kernels' are. Two 16-bit numbers lie in 32 bits.
"""

from __future__ import annotations

import re

import numpy as np


def run(assembly: str, operands: dict[int, np.ndarray | int]) -> np.ndarray:
    """What `assembly` leaves in $0, as 32 bits.

    Args:
        assembly: statements with operands $1 and on, and named registers.
        operands: by number, 32 bits each.

    Raises:
        KeyError: an instruction that is not known here, or a register read before it is written.
    """
    registers = {f"${i}": np.asarray(value, np.uint32) for i, value in operands.items()}

    def read(name: str) -> np.ndarray:
        return np.uint32(int(name, 0)) if name[0].isdigit() else registers[name]

    for statement in re.sub(r"[{}]", "", assembly).split(";"):
        words = statement.replace(",", " ").split()
        if words and not words[0].startswith(".reg"):
            registers[words[1]] = _INSTRUCTIONS[words[0]](*map(read, words[2:]))
    return registers["$0"]


def halves(pairs: np.ndarray, kind: str) -> np.ndarray:
    """The lower and the upper number of each pair, last."""
    bits = np.stack((pairs & 0xFFFF, pairs >> 16), -1).astype(np.uint32)
    if kind == "bf16":
        return (bits << 16).view(np.float32)
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def _pairs(numbers: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bf16":
        bits = numbers.astype(np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any(), "not exact in bf16"
        bits >>= 16
    else:
        bits = numbers.astype(np.float16).view(np.uint16).astype(np.uint32)
        assert (numbers.astype(np.float16) == numbers).all(), "not exact in fp16"
    return bits[..., 0] | (bits[..., 1] << 16)


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Bit by bit, the table's bit number abc."""
    out = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for i in range(8):
        if int(table) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _fma_bf16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return _pairs(halves(a, "bf16") * halves(b, "bf16") + halves(c, "bf16"), "bf16")


def _sub_fp16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _pairs(halves(a, "fp16") - halves(b, "fp16"), "fp16")


_INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, n: a >> np.minimum(n, 31),
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma_bf16,
    "sub.rn.f16x2": _sub_fp16,
}
