"""The weight-only product of one row whose words go straight to registers: its sums, and when it is taken."""

import pytest
import torch
from advisor.kernels import _quant_launch as launches
from advisor.kernels import _quant_stream as stream
from advisor.kernels import quant_matmul as qm
from advisor.kernels._triton import INTERPRETED

from tests.kernels import gluon_registers
from tests.kernels.checks import check

pytestmark = pytest.mark.skipif(not stream.AVAILABLE, reason="this Triton has no Gluon")
#: Group size, symmetric.
FORMATS = [(128, True), (64, True), (32, False)]
#: Less than a warp's share; several steps, the last one part full; rows that fill their tiles.
SIZES = [(37, 300), (19, 4480), (64, 2048)]


@pytest.fixture
def on_cpu(monkeypatch):
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process: set TRITON_INTERPRET=1")
    gluon_registers.install(monkeypatch, stream)


@pytest.fixture
def gpu(device):
    if device.type != "cuda":
        pytest.skip("no interpreter runs Gluon")
    return device


def _quantize(weight, form, scale_dtype=None):
    group, symmetric = form
    return qm.quantize_int4(weight, group_size=group, symmetric=symmetric, scale_dtype=scale_dtype)


def _streamed(x, weight, bias=None):
    # What the kernel does not write stays NaN.
    y = x.new_full((1, weight.out_features), torch.nan)
    zero = None if weight.zero is None else weight.zero.t()
    launches.launch_stream(x, weight.packed, weight.scale.t(), zero, bias, y, weight.bits)
    return y


def _judge(device, form, out, columns, dtype, scale_dtype=None):
    weight = _quantize(torch.randn(out, columns, device=device), form, scale_dtype)

    def reference(x, bias):
        return qm.weight_only_linear_reference(x, weight, bias)

    inputs = {
        "x": torch.randn(1, columns, device=device).to(dtype),
        "bias": torch.randn(out, device=device).to(dtype),
    }
    check(lambda x, bias: _streamed(x, weight, bias), reference, inputs, gradients=False)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("out", "columns"), SIZES)
def test_a_row_is_as_near_to_the_truth_as_eagers(on_cpu, form, out, columns):
    _judge(torch.device("cpu"), form, out, columns, torch.float16)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_scales_of_any_dtype_are_read_right(on_cpu, scale_dtype):
    _judge(torch.device("cpu"), (64, False), 20, 300, torch.float16, scale_dtype)


@pytest.mark.parametrize("row", [(16, 1, 1, 4), (16, 4, 2, 2), (32, 2, 1, 8), (16, 8, 2, 2)])
def test_every_way_to_share_out_the_blocks_is_right(on_cpu, monkeypatch, row):
    chosen = dict(zip(("ROWS", "AHEAD", "TOGETHER", "num_warps"), row, strict=True))
    monkeypatch.setattr(launches.STREAM, "rows", {"default": ((None, chosen),)})
    _judge(torch.device("cpu"), (128, True), 50, 1500, torch.float16)


def test_a_bias_may_be_missing_and_an_infinite_x_gives_what_eager_gives(on_cpu):
    # GIVEN weights that are not 0 where x is infinite, in the last block
    weight = _quantize(torch.rand(9, 260) + 1.0, (128, True), torch.float16)
    x = torch.randn(1, 260).half()
    x[0, 259] = torch.inf
    assert (_streamed(x, weight) == torch.inf).all()


def test_x_that_begins_within_a_word_is_copied(on_cpu):
    weight = _quantize(torch.randn(9, 256), (128, True), torch.float16)
    x = torch.randn(1, 257).half()[:, 1:]
    assert x.data_ptr() % 4
    torch.testing.assert_close(_streamed(x, weight), _streamed(x.clone(), weight), atol=0.0, rtol=0.0)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "bits", "arch", "taken"),
    [
        (1, 512, torch.bfloat16, 4, "sm_90", True),
        (1, 512, torch.float16, 4, "sm_90", True),
        (2, 512, torch.bfloat16, 4, "sm_90", False),
        (1, 512, torch.float32, 4, "sm_90", False),
        (1, launches.STREAM_COLUMNS + 1, torch.bfloat16, 4, "sm_90", False),
        (1, 512, torch.bfloat16, 8, "sm_90", False),
        (1, 512, torch.bfloat16, 4, "sm_80", False),
        (1, 512, torch.bfloat16, 4, "gfx942", False),
    ],
)
def test_it_is_taken_for_one_row_of_int4_where_it_was_the_fastest(
    monkeypatch, rows, columns, dtype, bits, arch, taken
):
    monkeypatch.setattr(launches, "architecture", lambda device: arch)
    assert launches.streams(torch.empty(rows, columns, dtype=dtype), bits) == taken


@pytest.mark.parametrize(("limit", "taken"), [(0, []), (1, ["stream"])])
def test_the_product_takes_it_up_to_its_limit(on_cpu, monkeypatch, limit, taken):
    monkeypatch.setattr(qm, "STREAM_ROWS", limit)
    monkeypatch.setattr(qm, "streams", lambda x, bits: True)
    asked = []
    monkeypatch.setattr(
        qm, "launch_stream", lambda *given: (asked.append("stream"), launches.launch_stream(*given))
    )
    weight = _quantize(torch.randn(9, 256), (128, True), torch.float16)
    x = torch.randn(1, 256).half()
    y = qm.weight_only_linear(x, weight)
    assert asked == taken
    torch.testing.assert_close(y, qm.weight_only_linear_reference(x, weight), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("out", "columns"), [*SIZES, (4096, 14336)])
def test_a_row_is_right_on_a_gpu(gpu, form, out, columns, dtype):
    _judge(gpu, form, out, columns, dtype)


@pytest.mark.gpu
@pytest.mark.quick
def test_it_is_bit_equal_from_run_to_run_on_a_gpu(gpu):
    weight = _quantize(torch.randn(4096, 4096, device=gpu), (128, True), torch.bfloat16)
    x = torch.randn(1, 4096, device=gpu).bfloat16()
    first = _streamed(x, weight)
    assert all(torch.equal(first, _streamed(x, weight)) for _ in range(20))
