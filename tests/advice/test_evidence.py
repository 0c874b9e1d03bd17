"""Lines of evidence stay lines, whatever names a trace has."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.advice.evidence import kernel_lines, module_line, short_kernel
from tests.advice.rules.steps import Step, loop_of


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(P)",
         "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_a…"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816fprop>(cutlass_tensorop::Params)",
         "cutlass_tensorop_f16_s16816fprop"),
        ("void cutlass::Kernel<cutlass::gemm::kernel::GemmUniversal<A, B> >(P)", "GemmUniversal"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 10>(float*)", "softmax_warp_forward"),
        ("Kernel2", "Kernel2"),
    ],
)  # fmt: skip
def test_a_cutlass_kernel_is_called_by_its_operation(name, short):
    assert short_kernel(name) == short


def test_names_without_end_are_cut():
    # GIVEN an operator, a kernel and a module with names of thousands of characters
    def script(step: Step) -> None:
        step.range(f"advisor::module::{'block.' * 1000}", 0, 100)
        step.run(f"mine::{'o' * 5000}", 10, on_device=20, dur=40, kernel="k" * 5000)

    loop = loop_of(script)
    rows = np.flatnonzero(loop.counted).tolist()
    # THEN each is told by how it begins
    (line,) = kernel_lines(loop, rows)
    assert line.startswith("mine::ooo")
    assert len(line) < 250
    (place,) = module_line(loop, rows)
    assert place.startswith("in block.block.")
    assert len(place) < 250
