"""Compiles the attention kernels for sm_90: a line each of name, bytes spilled, matrix instructions, and when
it waits for the kernel before it: ``never``, ``first`` of all, or ``late``.

Those with roles are ``roles_...`` without a mask or with bits, ``added_...`` where numbers are added, and
``ahead_...`` with the table's rows for what has neither mask nor window.
"""

from typing import Any

import torch

from benchmarks.kernels import aot


def _waits(ptx: str) -> str:
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    if not wait:
        return "never"
    # Other warps sleep until they are let go by a barrier of the whole block's.
    early = any(word in before for word in ("ld.global", "st.global", "cp.async", "barrier.sync"))
    return "late" if early else "first"


def _print(prefix: str, kernels: dict[str, tuple[str, Any, str]]) -> None:
    for ptx, (name, _, _) in kernels.items():
        if name.endswith(("forward_kernel", "gradient_kernel")):
            _, spilled = aot._assembled(ptx, 90)
            print(prefix + name, spilled, ptx.count("wgmma.mma_async"), _waits(ptx))


def main() -> None:
    aot.pretend(90, 132)
    compiled = aot.Compiled(90)
    compiled.install()
    from advisor.kernels import _attention_hopper_tiles as hopper
    from advisor.kernels import _attention_launch as launch
    from advisor.kernels import _attention_ops as ops

    x = torch.empty(1, 1, 1024, 128, dtype=torch.bfloat16)
    rest = (0.1, 0.0, 0.0, -1, 0, False, 1024, 1024)
    ops.attention_op(x, x, x, None, None, None, None, *rest)
    statistics = torch.empty(1, 1, 1024)
    ops.attention_gradient_op(x, x, x, x, x, statistics, None, None, None, None, *rest, x)
    _print("", compiled.kernels)
    if not hopper.AVAILABLE:
        return
    # Causal and in full, precise and not, with query heads that share a key head.
    compiled.kernels.clear()
    for heads_k, right, residue in ((4, 0, True), (1, -1, False)):
        q, k = (torch.empty(1, heads, 1024, 64, dtype=torch.bfloat16) for heads in (4, heads_k))
        options = (*rest[:4], right, *rest[5:])
        *_, kept = ops.attention_op(q, k, k, None, None, None, None, *options, residue)
        ops.attention_gradient_op(
            q, q, k, k, q, torch.empty(1, 4, 1024), None, None, None, None, *options, kept
        )
    _print("ahead_", compiled.kernels)
    # The kernels with roles, for a head dimension each of the two that the table tells apart, with a mask;
    # a number a score once for all heads, for each key, and for each head.
    n = 1024
    bits, numbers = (torch.empty(n, n, dtype=dtype) for dtype in (torch.bool, torch.bfloat16))
    for name, masks in (
        ("roles", (None, bits.expand(1, 2, n, n))),
        ("added", (
            numbers.expand(1, 2, n, n), numbers[:1].expand(1, 2, n, n), numbers.expand(2, n, n).clone()[None],
        )),
    ):  # fmt: skip
        compiled.kernels.clear()
        for dim, blocks in ((64, (128, 128, 64)), (128, (128, 64, 64))):
            x = torch.empty(1, 2, n, dim, dtype=torch.bfloat16)
            statistics = torch.empty(1, 2, n)
            for table, block in zip((ops.FORWARD, ops.QUERY_GRADIENT, ops.KEY_GRADIENT), blocks, strict=True):
                params = launch.roles(block, 2)
                table.pick_roles = lambda q, options, params=params: params
            for mask in masks:
                ops.attention_op(x, x, x, mask, None, None, None, *rest)
                ops.attention_gradient_op(x, x, x, x, x, statistics, mask, None, None, None, *rest, x)
        _print(f"{name}_", compiled.kernels)


if __name__ == "__main__":
    main()
