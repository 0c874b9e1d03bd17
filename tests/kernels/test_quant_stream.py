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
#: Bits, group size, symmetric.
FORMATS = [(8, None, True), (4, 128, True), (4, 64, True), (4, 32, False)]
#: Less than a warp's share; several steps, the last one part full; rows that fill their tiles.
SIZES = [(37, 300), (19, 4480), (64, 2048)]


@pytest.fixture
def on_cpu(monkeypatch):
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process: set TRITON_INTERPRET=1")
    return gluon_registers.install(monkeypatch, stream)


@pytest.fixture
def gpu(device):
    if device.type != "cuda":
        pytest.skip("no interpreter runs Gluon")
    return device


def _quantize(weight, form, scale_dtype=None):
    bits, group, symmetric = form
    if bits == 8:
        return qm.quantize_int8(weight, scale_dtype=scale_dtype)
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
    _judge(torch.device("cpu"), (4, 64, False), 20, 300, torch.float16, scale_dtype)


def _only(monkeypatch, row):
    keys = ("ROWS", "AHEAD", "TOGETHER", "num_warps", "PAST_L1", "OVERLAP", "FETCH", "PIECE", "STAGES")
    chosen = dict(zip(keys, row, strict=False))
    for table in (launches.STREAM, launches.STREAM_INT8):
        monkeypatch.setattr(table, "rows", {"default": ((None, chosen),)})


@pytest.mark.parametrize(
    "row",
    [
        (16, 1, 1, 4),
        (16, 4, 2, 2),
        (32, 2, 1, 8),
        (16, 8, 2, 2),
        (16, 4, 1, 4, 1, 1),
        (16, 1, 1, 2, 0, 2, 2, 64),
    ],
)
@pytest.mark.parametrize("form", [(4, 128, True), (8, None, True)])
def test_every_way_to_share_out_the_blocks_is_right(on_cpu, monkeypatch, row, form):
    _only(monkeypatch, row)
    _judge(torch.device("cpu"), form, 50, 1500, torch.float16)


@pytest.mark.parametrize("piece", [0, 32, 128])
@pytest.mark.parametrize("steps", [1, 3, 9])
@pytest.mark.parametrize("form", [(4, 128, True), (4, 32, False), (8, None, True)])
def test_of_the_words_after_the_first_step_each_is_asked_for_once(on_cpu, monkeypatch, form, steps, piece):
    # GIVEN 18 blocks a row, and a step of 4 blocks
    _only(monkeypatch, (16, 2, 1, 2, 0, 0, steps, piece))
    weight = _quantize(torch.randn(37, 2200), form, torch.float16)
    # WHEN
    y = _streamed(torch.randn(1, 2200).half(), weight)
    # THEN
    assert y.isfinite().all()
    asked = torch.zeros(weight.packed.numel(), dtype=torch.int32)
    for storage, places, size in on_cpu:
        if storage.dtype == torch.int32:
            sizes = [piece] * len(places) if size is None else size.tolist()
            for place, n in zip(places.tolist(), sizes, strict=True):
                # A piece may reach beyond the row's end; what is asked for is where it begins.
                row_end = (place // weight.packed.shape[1] + 1) * weight.packed.shape[1]
                asked[place : min(place + n // 4, row_end)] += 1
    first = 4 * weight.packed.shape[1] // 18
    asked = asked.view_as(weight.packed)
    assert (asked[:, :first] == 0).all()
    assert (asked[:, first:] == 1).all()


def test_all_scales_are_asked_for_ahead(on_cpu, monkeypatch):
    _only(monkeypatch, (16, 2, 1, 2, 0, 0, 2, 64))
    weight = _quantize(torch.randn(32, 3000), (4, 32, False), torch.float16)
    _streamed(torch.randn(1, 3000).half(), weight)
    for dtype in (torch.float16, torch.uint8):
        places = torch.cat([places for storage, places, _ in on_cpu if storage.dtype == dtype])
        # THEN of every group those of each program's first row
        wanted = torch.arange(weight.scale.shape[1])[:, None] * 32 + torch.tensor([0, 16])
        assert sorted(places.tolist()) == sorted(wanted.flatten().tolist())


@pytest.mark.parametrize("row", [(16, 2, 1, 2), (16, 1, 1, 4), (32, 4, 2, 2)])
@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("form", [(4, 128, True), (4, 32, False), (8, None, True)])
def test_words_that_pass_through_shared_memory_are_waited_for(on_cpu, monkeypatch, form, stages, row):
    _only(monkeypatch, (*row, 0, 0, 0, 0, stages))
    _judge(torch.device("cpu"), form, 50, 1500, torch.float16)


def test_a_bias_may_be_missing_and_an_infinite_x_gives_what_eager_gives(on_cpu):
    # GIVEN weights that are not 0 where x is infinite, in the last block
    weight = _quantize(torch.rand(9, 260) + 1.0, (4, 128, True), torch.float16)
    x = torch.randn(1, 260).half()
    x[0, 259] = torch.inf
    assert (_streamed(x, weight) == torch.inf).all()


def test_x_that_begins_within_a_word_is_copied(on_cpu):
    weight = _quantize(torch.randn(9, 256), (4, 128, True), torch.float16)
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
    weight = _quantize(torch.randn(9, 256), (4, 128, True), torch.float16)
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
    weight = _quantize(torch.randn(4096, 4096, device=gpu), (4, 128, True), torch.bfloat16)
    x = torch.randn(1, 4096, device=gpu).bfloat16()
    first = _streamed(x, weight)
    assert all(torch.equal(first, _streamed(x, weight)) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("form", [(4, 128, True), (4, 32, False), (8, None, True)])
def test_loads_past_the_first_cache_are_right_on_a_gpu(gpu, monkeypatch, form):
    _only(monkeypatch, (16, 2, 1, 4, 1, 0))
    _judge(gpu, form, 37, 4480, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("stages", [2, 5])
@pytest.mark.parametrize("form", [(4, 128, True), (4, 32, False), (8, None, True)])
def test_a_way_through_shared_memory_changes_no_bit_on_a_gpu(gpu, monkeypatch, form, stages):
    weight = _quantize(torch.randn(37, 4480, device=gpu), form)
    x = torch.randn(1, 4480, device=gpu).bfloat16()
    _only(monkeypatch, (16, 2, 1, 4))
    expected = _streamed(x, weight)
    _only(monkeypatch, (16, 2, 1, 4, 0, 0, 0, 0, stages))
    assert torch.equal(_streamed(x, weight), expected)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("piece", [0, 64])
@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("form", [(4, 128, True), (4, 32, False), (8, None, True)])
def test_asking_ahead_changes_no_bit_on_a_gpu(gpu, monkeypatch, form, steps, piece):
    weight = _quantize(torch.randn(37, 4480, device=gpu), form)
    x = torch.randn(1, 4480, device=gpu).bfloat16()
    _only(monkeypatch, (16, 2, 1, 4))
    expected = _streamed(x, weight)
    _only(monkeypatch, (16, 2, 1, 4, 0, 0, steps, piece))
    assert torch.equal(_streamed(x, weight), expected)


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("row", [(16, 4, 2, 4, 0, 1), (16, 2, 2, 4, 0, 2, 8, 64), (16, 2, 2, 4, 0, 1, 1, 0)])
@pytest.mark.parametrize("graphed", [False, True])
def test_a_start_while_the_kernel_before_ends_reads_what_that_wrote(gpu, monkeypatch, graphed, row):
    # GIVEN products right after one another, each of the last one's result, that fit on the GPU side by side
    given = [_quantize(torch.randn(2048, 2048, device=gpu) / 45.0, (4, 128, True)) for _ in range(4)]
    weights = [(weight.packed, weight.scale.t().contiguous()) for weight in given]
    ys = torch.full((33, 1, 2048), torch.nan, device=gpu, dtype=torch.bfloat16)

    def chain():
        for i in range(32):
            packed, scale = weights[i % 4]
            launches.launch_stream(ys[i], packed, scale, None, None, ys[i + 1], 4)

    ys[0] = torch.randn(2048, device=gpu)
    _only(monkeypatch, row[:4])
    chain()
    expected = ys.clone()
    ys[1:] = torch.nan
    _only(monkeypatch, row)
    chain()
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        ys[1:] = torch.nan
        graph.replay()
    # THEN none began to read too early
    assert expected.isfinite().all()
    assert expected[-1].float().norm() > 1.0
    assert torch.equal(ys, expected)
