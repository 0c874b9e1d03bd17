"""Kernel names cut down to what tells them apart."""

import pytest

from advisor.report.names import short_name
from tests.report import reports


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (reports.ADD, "CUDAFunctor_add · elementwise"),
        (reports.ADAM, "FusedAdamMathFunctor · multi_tensor_apply"),
        (reports.COPY, "direct_copy_kernel_cuda · elementwise"),
        (reports.NORM, "vectorized_layer_norm_kernel"),
        ("nvjet_sm90_tst_192x128_64x5_2x1_v_bz_coopB_TNT", "nvjet_sm90_tst_192x128_64x5_2x1_v_bz_coopB_TNT"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_gemm_tn_align8>(Params)",
            "cutlass_80_tensorop_bf16_gemm_tn_align8",
        ),
        ("triton_poi_fused_add_gelu_3", "triton_poi_fused_add_gelu_3"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("void foo::bar<(int)3, baz<1>>(float*)", "bar"),
    ],
)
def test_a_name_keeps_what_tells_the_kernel_apart(name, short):
    assert short_name(name) == short


def test_the_launcher_goes_first_when_there_is_little_room():
    assert short_name(reports.ADAM, 24) == "FusedAdamMathFunctor"


def test_names_that_are_not_cpp_come_back_whole():
    assert short_name("</script><script>alert(1)</script>") == "</script><script>alert(1)</script>"
    assert short_name("") == ""


@pytest.mark.parametrize(
    "name",
    [
        *reports.HOSTILE,
        "a<" * 5000,
        f"vectorized_elementwise_kernel<{'N' * 50_000}>",
        "a<b" + ">" * 5000,
        "void " * 999,
    ],
)
def test_any_name_fits_the_width(name):
    assert len(short_name(name, 40)) <= 40
