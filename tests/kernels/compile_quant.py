"""Compiles the weight-only products for sm_90.

A line each: name, bits, rows of x that a program takes, bytes spilled, matrix instructions, asynchronous
copies of 16 bytes, shared memory.
"""

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
    for ptx, (name, kernel, note) in compiled.kernels.items():
        _, spilled = aot._assembled(ptx, 90)
        found = dict(part.split("=") for part in note.split(", "))
        matrix = ptx.count("mma.sync") + ptx.count("wgmma.mma_async")
        copies = ptx.count("cp.async.cg.shared.global")
        print(name, found["BITS"], found["X_ROWS"], spilled, matrix, copies, kernel.metadata.shared)


if __name__ == "__main__":
    main()
