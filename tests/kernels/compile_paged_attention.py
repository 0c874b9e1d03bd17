"""Compiles the kernels of paged attention for sm_90.

A line each: name, bytes spilled, matrix instructions, 16-byte asynchronous copies, registers. The last line:
how many compilations of the first kernel and of the one that puts splits together the launches called for.
"""

import torch

from benchmarks.kernels import aot


def main() -> None:
    aot.pretend(90, 132)
    compiled = aot.Compiled(90)
    compiled.install()
    from advisor.kernels import _paged_ops as ops

    ops.device_reasons = lambda *tensors: []
    # In splits with blocks smaller than a tile, and one split a sequence with larger ones; then as sequences
    # grow: tables of widths and numbers of splits that are and are not multiples of 16.
    for batch, block_size, width, longest in (
        (4, 16, 512, 8192), (400, 128, 64, 8192), (4, 16, 511, 8176), (1, 16, 128, 2048), (1, 16, 1, 16),
    ):  # fmt: skip
        q = torch.empty(batch, 1, 32, 128, dtype=torch.bfloat16)
        cache = torch.empty(64, block_size, 8, 128, dtype=torch.bfloat16)
        table = torch.empty(batch, width, dtype=torch.int32)
        lens = torch.empty(batch, dtype=torch.int32)
        ops.paged_attention_op(q, cache, cache, table, lens, None, None, None, 0.1, 0.0, -1, longest, -1)
    assert ops.split_count(8, 132 * 2, 2048 // 64) == 16
    ops.write_to_cache_op(q[:, 0, :8], q[:, 0, 8:16], cache, cache, lens, None, None)
    for ptx, (name, _, _) in compiled.kernels.items():
        registers, spilled = aot._assembled(ptx, 90)
        copies = ptx.count("cp.async.cg.shared.global")
        print(name, spilled, ptx.count("mma.sync"), copies, registers)
    caches = (ops.paged_attention_kernel.device_caches[0], ops.paged_combine_kernel.device_caches[0])
    print(*(len(cache[0]) for cache in caches))


if __name__ == "__main__":
    main()
