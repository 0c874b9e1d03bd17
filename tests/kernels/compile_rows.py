"""Compiles backwards of rows for sm_90; a line each: name, warps, registers, bytes spilled, shared bytes."""

import torch

from benchmarks.kernels import aot


def main() -> None:
    aot.pretend(90, 132)
    compiled = aot.Compiled(90)
    compiled.install()
    from advisor.kernels import _bias_act_norm_stream as fused
    from advisor.kernels import _norm_stream as norms
    from advisor.kernels import softmax

    def rows(columns: int) -> tuple[torch.Tensor, ...]:
        x = torch.empty(64, columns, dtype=torch.bfloat16)
        return x, x[0], torch.empty(2, 64, dtype=torch.float32)

    x, w, stats = rows(16384)
    softmax.gradient_op(x, x, 1.0, False, 0, False, False, torch.bfloat16)
    if norms.AVAILABLE:
        for is_rms in (False, True):
            row = dict(norms.STREAM.rows["sm_90"][1][1])
            norms.backward_stream(x, x, w, stats, x, 0.0, is_rms, False, 2 - is_rms, row)
        x, w, stats = rows(8192)
        for name in ("gelu", "gelu_tanh"):
            row = dict(fused.STREAM.rows["sm_90"][1][1])
            fused.backward_stream(x, x, w, w, stats, x, name, True, 3, row)
    for ptx, (name, kernel, _) in compiled.kernels.items():
        registers, spilled = aot._assembled(ptx, 90)
        print(name, kernel.metadata.num_warps, registers, spilled, kernel.metadata.shared)


if __name__ == "__main__":
    main()
