"""Compiles the attention kernels for sm_90: a line each of name, bytes spilled, matrix instructions."""

import torch

from benchmarks.kernels import aot


def main() -> None:
    aot.pretend(90, 132)
    compiled = aot.Compiled(90)
    compiled.install()
    from advisor.kernels import _attention_ops as ops

    x = torch.empty(1, 1, 1024, 128, dtype=torch.bfloat16)
    rest = (0.1, 0.0, 0.0, -1, 0, False, 1024, 1024)
    ops.attention_op(x, x, x, None, None, None, None, *rest)
    statistics = torch.empty(1, 1, 1024)
    ops.attention_gradient_op(x, x, x, x, x, statistics, None, None, None, None, *rest)
    for ptx, (name, _, _) in compiled.kernels.items():
        _, spilled = aot._assembled(ptx, 90)
        print(name, spilled, ptx.count("wgmma.mma_async"))


if __name__ == "__main__":
    main()
