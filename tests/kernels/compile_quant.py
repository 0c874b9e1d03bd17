"""Compiles the weight-only products for sm_90.

A line each: name, bits, rows of x that a program takes, bytes spilled, matrix instructions, asynchronous
copies of 16 bytes, shared memory, loads of 16 bytes to registers, registers.
"""

import re

import torch

from benchmarks.kernels import aot


def main() -> None:
    aot.pretend(90, 132)
    compiled = aot.Compiled(90)
    compiled.install()
    from advisor.kernels import _quant_launch as launches

    # One row of x, the most on the first way, and more; fp32 scales of groups of 32 for the largest stages.
    for rows, bits, launch in (
        (1, 4, launches.launch_split), (1, 8, launches.launch_split), (16, 4, launches.launch_split),
        (16, 8, launches.launch_split), (64, 4, launches.launch_tile), (64, 8, launches.launch_tile),
    ):  # fmt: skip
        x, y = (torch.empty(rows, 8192, dtype=torch.bfloat16) for _ in range(2))
        packed = torch.empty(8192, 256 * bits, dtype=torch.int32)
        scale = torch.empty(256 if bits == 4 else 1, 8192)
        zero = torch.empty(scale.shape, dtype=torch.uint8) if bits == 4 and rows != 1 else None
        launch(x, packed, scale, zero, None, y, bits)
    stream()
    for ptx, (name, kernel, note) in compiled.kernels.items():
        registers, spilled = aot._assembled(ptx, 90)
        found = dict(part.split("=") for part in note.split(", "))
        matrix = ptx.count("mma.sync") + ptx.count("wgmma.mma_async")
        copies = ptx.count("cp.async.cg.shared.global")
        loads = len(re.findall(r"ld\.global[\w.:]*\.v4\.b32", ptx))
        bits, x_rows = found.get("BITS", 4), found.get("X_ROWS", 1)
        print(name, bits, x_rows, spilled, matrix, copies, kernel.metadata.shared, loads, registers)


def stream() -> None:
    """One row of x with all that can come with a weight, and with the sizes that are to be fast."""
    from advisor.kernels import _quant_launch as launches
    from advisor.kernels import _quant_stream

    if not _quant_stream.AVAILABLE:
        return
    for group, zeros, scales in ((128, False, torch.bfloat16), (32, True, torch.float32)):
        x, y = (torch.empty(1, 8192, dtype=torch.bfloat16) for _ in range(2))
        packed = torch.empty(8192, 1024, dtype=torch.int32)
        scale = torch.empty(8192 // group, 8192, dtype=scales)
        zero = torch.empty(scale.shape, dtype=torch.uint8) if zeros else None
        launches.launch_stream(x, packed, scale, zero, None, y, 4)


if __name__ == "__main__":
    main()
