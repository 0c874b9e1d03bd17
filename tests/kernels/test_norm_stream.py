"""The norms' backward over rows that stream through shared memory: its order of copies, its arithmetic."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from advisor.kernels import _bias_act_norm_stream as fused
from advisor.kernels import _launch
from advisor.kernels import _norm_stream as stream
from advisor.kernels._triton import INTERPRETED
from advisor.kernels.norm import layer_norm, rms_norm, rms_norm_reference

from tests.kernels import rows_stand_in
from tests.kernels.rows_stand_in import check

pytestmark = pytest.mark.skipif(not stream.AVAILABLE, reason="this Triton has no Gluon")


@pytest.fixture
def streamed(monkeypatch):
    """Every backward takes this kernel, on three programs; gives the copies that were made, and the row."""
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process: set TRITON_INTERPRET=1")
    copies, row = rows_stand_in.install(monkeypatch, stream)
    yield SimpleNamespace(copies=copies, params=row)
    assert copies.most > 0


@pytest.mark.parametrize("rows", [1, 2, 11])
@pytest.mark.parametrize("columns", [256, 1024])
def test_layer_norm_matches_exact_gradients(streamed, rows, columns):
    torch.manual_seed(0)
    x = (torch.randn(rows, columns) * 2 + 3).half()
    w, b = torch.randn(columns).half(), torch.randn(columns)
    check(
        lambda x, w, b: layer_norm(x, columns, w, b), lambda x, w, b: F.layer_norm(x, (columns,), w, b),
        x, w, b,
    )  # fmt: skip
    assert streamed.copies.most <= 2


@pytest.mark.parametrize("casting", ["fp32", "llama"])
def test_rms_norm_matches_exact_gradients(streamed, casting):
    torch.manual_seed(0)
    x, w = torch.randn(7, 512).half(), torch.randn(512).half()
    check(
        lambda x, w: rms_norm(x, 512, w, 1e-5, offset=1.0, casting=casting),
        lambda x, w: rms_norm_reference(x, 512, w, 1e-5, offset=1.0),
        x, w,
    )  # fmt: skip


def test_rows_that_lie_apart_are_taken_as_they_lie(streamed):
    torch.manual_seed(0)
    wide = torch.randn(5, 1024).half()
    check(lambda x: layer_norm(x[:, :512], 512), lambda x: F.layer_norm(x[:, :512], (512,)), wide)


def test_two_buffers_do_with_one_row_on_its_way(streamed):
    streamed.params["STAGES"] = 2
    torch.manual_seed(0)
    x = torch.randn(8, 512).half()
    check(lambda x: layer_norm(x, 512), lambda x: F.layer_norm(x, (512,)), x)
    assert streamed.copies.most == 1


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(2, 512), None),
        (torch.zeros(2, 768, dtype=torch.half), None),
        (torch.zeros(2 * 512 + 1, dtype=torch.half)[1:].view(2, 512), None),
        (torch.zeros(2, 520, dtype=torch.half)[:, :512], None),
        (torch.zeros(2, 32768, dtype=torch.half), None),
    ],
)
def test_other_rows_are_left_to_the_other_kernels(streamed, x, weight):
    assert stream.stream_row(stream.STREAM, x, x, weight) is None
    streamed.copies.most = 1


@pytest.mark.parametrize(
    ("table", "columns", "weight_dtype", "stages"),
    [
        (stream.STREAM, 8192, torch.half, None),
        (stream.STREAM, 16384, torch.half, 3),
        (stream.STREAM, 16384, torch.float32, 2),
        (stream.STREAM, 32768, torch.half, None),
        (fused.STREAM, 4096, torch.half, None),
        (fused.STREAM, 8192, torch.half, 2),
    ],
)
def test_on_hopper_rows_take_it_where_registers_do_not_hold_their_sums(
    monkeypatch, table, columns, weight_dtype, stages
):
    monkeypatch.setattr(_launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(stream, "shared_bytes", lambda device: 227 << 10)
    x = torch.empty(2, columns, dtype=torch.half)
    row = stream.stream_row(table, x, x, torch.empty(columns, dtype=weight_dtype))
    assert (row and row["STAGES"]) == stages


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no GPU, or interpreted")
@pytest.mark.parametrize(("warps", "programs"), [(32, 1), (16, 1), (8, 2)])
@pytest.mark.parametrize("columns", [8192, 16384])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_on_a_gpu_match_exact_gradients(monkeypatch, dtype, columns, warps, programs):
    used = []

    def chosen(size, device):
        used.append(size)
        return {"num_warps": warps, "STAGES": 3, "programs_per_sm": programs}

    monkeypatch.setattr(stream.STREAM, "pick", chosen)
    torch.manual_seed(0)
    x = (torch.randn(301, columns, device="cuda") * 2 + 3).to(dtype)
    w, b = (torch.randn(columns, device="cuda").to(dtype) for _ in range(2))
    check(
        lambda x, w, b: layer_norm(x, columns, w, b), lambda x, w, b: F.layer_norm(x, (columns,), w, b),
        x, w, b,
    )  # fmt: skip
    check(
        lambda x, w: rms_norm(x, columns, w, 1e-5), lambda x, w: rms_norm_reference(x, columns, w, 1e-5), x, w
    )
    assert used == [columns, columns]


def test_rows_of_16_bits_compile_for_hopper_to_as_many_programs_as_their_tables_count_on():
    pytest.importorskip("triton.backends.nvidia")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_rows"],
        capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2], timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    programs = {"_softmax_backward_kernel": 2, "norm_backward_stream_kernel": 1}
    programs["bias_act_norm_backward_stream_kernel"] = 1
    assert {name for name, *_ in lines} == programs.keys()
    for name, warps, registers, spilled, shared in lines:
        assert int(spilled) <= 48, f"{name} spills {spilled} bytes"
        assert programs[name] * int(warps) * 32 * int(registers) <= 1 << 16
        # A program's own kibibyte comes on top of what it asks for.
        assert programs[name] * (int(shared) + 1024) <= 228 << 10
