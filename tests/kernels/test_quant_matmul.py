"""Weight-only products: packing, rounding bounds, and every way to multiply as accurate as eager's."""

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from advisor.kernels import _quant_format as fmt
from advisor.kernels import _quant_launch as launches
from advisor.kernels import _quant_unpack as unpack
from advisor.kernels import quant_matmul as qm
from advisor.kernels._device import UnsupportedError
from advisor.kernels._quant_stream import AVAILABLE
from advisor.kernels._triton import tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.kernels import ptx
from tests.kernels.checks import assert_bit_equal, cases, check, skip_unless_runnable

DTYPES = cases([torch.float32, torch.bfloat16], [torch.float16])
#: Bits, group size, symmetric.
FORMATS = cases([(8, None, True), (4, 128, True), (4, 32, False)], [(4, 64, True), (4, 32, True)])


def _quantize(weight, form, scale_dtype=None):
    bits, group, symmetric = form
    if bits == 8:
        return qm.quantize_int8(weight, scale_dtype=scale_dtype)
    return qm.quantize_int4(weight, group_size=group, symmetric=symmetric, scale_dtype=scale_dtype)


def _weight(device, form, out=37, columns=300, scale_dtype=None):
    return _quantize(torch.randn(out, columns, device=device), form, scale_dtype)


def _judge(x, weight, bias=None, **settings):
    def ours(x, bias=None):
        return qm.weight_only_linear(x, weight, bias)

    def reference(x, bias=None):
        return qm.weight_only_linear_reference(x, weight, bias)

    check(ours, reference, {"x": x} | ({} if bias is None else {"bias": bias}), **settings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", cases([1, 2, 19], [3, 16]))
def test_a_product_and_its_gradients_are_as_near_to_the_truth_as_eagers(device, dtype, form, rows, poisoned):
    # GIVEN sizes that fill neither blocks nor tiles; rows for the plain units, the matrix units, and fp32's
    # own way out
    skip_unless_runnable(device, dtype)
    x = torch.randn(rows, 300, device=device).to(dtype)
    _judge(x, _weight(device, form, out=19), torch.randn(19, device=device).to(dtype))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("way", "limit", "rows", "dtype"),
    [
        ("launch_gemv", "GEMV_ROWS", 7, torch.float32),
        ("launch_split", "SPLIT_ROWS", 19, torch.float16),
        ("launch_tile", "TILE_ROWS", 70, torch.float16),
        ("launch_dequantize", None, 7, torch.float16),
    ],
)
@pytest.mark.parametrize("form", [(8, None, True), (4, 64, False)])
def test_every_way_is_taken_and_right_at_any_number_of_rows(
    device, monkeypatch, way, limit, rows, dtype, form, poisoned
):
    # GIVEN only one way open, and more rows than one program of it takes
    for name in ("GEMV_ROWS", "STREAM_ROWS", "SPLIT_ROWS", "TILE_ROWS"):
        monkeypatch.setattr(qm, name, 999 if name == limit else 0)
    taken = []
    for name in ("launch_gemv", "launch_split", "launch_tile", "launch_dequantize"):
        original = getattr(qm, name)
        monkeypatch.setattr(qm, name, lambda *args, f=original, name=name: (taken.append(name), f(*args))[1])
    x = torch.randn(rows, 260, device=device).to(dtype)
    _judge(x, _weight(device, form, out=20, columns=260), gradients=False)
    assert set(taken) == {way}


@pytest.mark.parametrize("scale_dtype", cases([torch.float16], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("form", FORMATS)
def test_the_dequantising_kernel_gives_the_references_matrix_to_the_bit(device, form, scale_dtype, poisoned):
    if device.type == "cpu" and scale_dtype == torch.bfloat16:
        pytest.skip("bfloat16 is tested on the GPU")
    weight = _weight(device, form, scale_dtype=scale_dtype)
    for dtype in (torch.float32, torch.float16):
        by_group = weight.scale.t(), None if weight.zero is None else weight.zero.t()
        made = qm._matrix(weight.packed, *by_group, weight.bits, weight.in_features, dtype)
        assert_bit_equal(made, qm.dequantize(weight, dtype))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_int8_errs_by_half_a_step_at_most(dtype):
    weight = (torch.randn(9, 200) * torch.logspace(-3, 3, 9)[:, None]).to(dtype)
    found = qm.quantize_int8(weight, scale_dtype=torch.float32)
    error = (qm.dequantize(found, torch.float64) - weight.double()).abs()
    assert (error <= found.scale.double() * 0.500001).all()
    assert torch.allclose(found.scale.double(), weight.double().abs().amax(1, keepdim=True) / 127, rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_errs_by_half_a_step_at_most(group, symmetric):
    # GIVEN groups of one sign and of both, and sizes from 1e-3 to 1e3
    weight = torch.randn(8, 256) * torch.logspace(-3, 3, 8)[:, None]
    weight[0] = weight[0].abs()
    weight[1] = -weight[1].abs() - 1e-3
    found = qm.quantize_int4(weight, group_size=group, symmetric=symmetric)
    step = found.scale.double().repeat_interleave(group, 1)
    error = (qm.dequantize(found, torch.float64) - weight.double()).abs()
    assert (error <= step * 0.500001).all()
    # THEN the step is an exact fraction of the group's range: no bit is given away
    parts = weight.view(8, 256 // group, group)
    extent = parts.amax(2).clamp_min(0) - parts.amin(2).clamp_max(0)
    expected = parts.abs().amax(2) / 7 if symmetric else extent / 15
    assert torch.allclose(found.scale, expected, rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("form", [(8, None, True), (4, 64, True), (4, 64, False)])
def test_what_lies_on_the_grid_comes_back_exactly(form):
    # GIVEN multiples of 1/4 that reach both ends of the range in each group
    low, high = {(8, True): (-127, 127), (4, True): (-7, 7), (4, False): (-4, 11)}[form[0], form[2]]
    weight = torch.randint(low, high + 1, (5, 256)).float()
    weight[:, ::32], weight[:, 1::32] = low, high
    found = _quantize(weight / 4, form)
    assert (found.scale == 0.25).all()
    assert_bit_equal(qm.dequantize(found), weight / 4)


@pytest.mark.quick
@pytest.mark.parametrize("form", [(8, None, True), (4, 32, True), (4, 32, False)])
def test_zero_and_tiny_weights_have_scales_that_divide(form):
    weight = torch.zeros(3, 40, dtype=torch.float16)
    weight[1] = 6e-8  # the least fp16 number: its scale would underflow
    found = _quantize(weight, form)
    assert (found.scale > 0).all()
    assert qm.dequantize(found)[0].eq(0).all()
    assert (qm.dequantize(found) - weight).abs().max() <= found.scale[1].max() / 2


@pytest.mark.quick
@pytest.mark.parametrize("bits", [4, 8])
def test_a_halfword_holds_columns_a_plane_apart(bits):
    # GIVEN one block of elements that differ from column to column
    elements = 16 // bits
    u = torch.arange(fmt.BLOCK) * 7 % 2**bits
    packed = fmt._pack(u[None].float(), bits)
    length = fmt.BLOCK // elements
    halves = packed.view(torch.int16)[0].tolist()
    assert len(halves) == length
    for j in (0, 1, length - 1):
        assert halves[j] & 0xFFFF == sum(int(u[i * length + j]) << (bits * i) for i in range(elements))
    assert fmt._unpack(packed, bits, 1)[0].equal(u.int())


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_assembly_that_unpacks_gives_every_element_as_the_plain_form_does(monkeypatch, kind, bits):
    # GIVEN the calls that kernels make where there is assembly, every halfword in either place of a pair
    calls = []
    monkeypatch.setattr(unpack, "_HAS_PTX", True)
    monkeypatch.setattr(
        unpack.tl,
        "inline_asm_elementwise",
        lambda text, _, args, *rest, **options: calls.append((text, args)),
    )
    dtype = {"fp16": tl.float16, "bf16": tl.bfloat16}[kind]
    u = np.arange(2**16, dtype=np.uint32)
    pairs = u | (u[::-1] << 16)
    for index in range(16 // bits):
        unpack.centred_element.fn(None, index, bits, dtype)
        text, (_, *constants) = calls.pop()
        operands = {2 + 2 * i: getattr(value, "value", value) for i, value in enumerate(constants)}
        found = ptx.halves(ptx.run(getattr(text, "value", text), {1: pairs} | operands), kind)
        expected = (u >> (bits * index) & (2**bits - 1)).astype(np.float32) - 2 ** (bits - 1)
        # THEN both halves are right, and the numbers are exact: `ptx` refuses others
        assert (found == np.stack((expected, expected[::-1]), -1)).all()


@pytest.mark.quick
def test_packed_bytes_are_half_and_all_of_the_elements():
    weight = torch.randn(64, 1024)
    assert qm.quantize_int8(weight).packed.numel() * 4 == weight.numel()
    found = qm.quantize_int4(weight, group_size=64, symmetric=False)
    assert found.nbytes == weight.numel() // 2 + weight.numel() // 64 * (4 + 1)
    assert (found.out_features, found.group_size) == (64, 64)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda w: qm.quantize_int8(w[0]), "shape"),
        (lambda w: qm.quantize_int8(w.int()), "int32"),
        (lambda w: qm.quantize_int4(w.index_fill(0, torch.tensor(1), torch.nan)), "NaN"),
        (lambda w: qm.quantize_int4(w, group_size=16), "group_size 16"),
        (lambda w: qm.quantize_int8(w * 1e9, scale_dtype=torch.float16), "too large"),
        (lambda w: qm.WeightOnlyLinear.from_linear(nn.Linear(2, 2), bits=3), "3 bits"),
    ],
)
def test_what_cannot_be_quantised_is_said(call, says):
    with pytest.raises(ValueError, match=says):
        call(torch.randn(4, 8))


@pytest.mark.quick
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", [(8, None, True), (4, 32, False)])
def test_strided_rows_are_read_without_what_lies_between(device, form, rows):
    # GIVEN rows with NaN behind their columns, unaligned, and one transposed
    weight = _weight(device, form)
    x = torch.randn(rows, 300, device=device, dtype=torch.float16)
    wide = torch.full((rows, 333), torch.nan, device=device, dtype=torch.float16)
    wide[:, 1:301] = x
    expected = qm.weight_only_linear(x, weight)
    assert_bit_equal(qm.weight_only_linear(wide[:, 1:301], weight), expected)
    assert_bit_equal(qm.weight_only_linear(x.t().contiguous().t(), weight), expected)
    # THEN whole blocks at a wide stride are taken as they are
    whole = _weight(device, form, columns=256)
    broad = torch.full((rows, 512), torch.nan, device=device, dtype=torch.float16)
    broad[:, :256] = x[:, :256]
    assert_bit_equal(
        qm.weight_only_linear(broad[:, :256], whole), qm.weight_only_linear(x[:, :256].contiguous(), whole)
    )


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(2, 3, 64), (64,), (1, 1, 64)])
def test_leading_dimensions_are_kept(device, shape):
    weight = _weight(device, (4, 32, True), columns=64)
    y = qm.weight_only_linear(torch.randn(shape, device=device), weight)
    assert y.shape == (*shape[:-1], 37)


@pytest.mark.quick
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "out", "columns"), [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_empty_sizes_give_what_eager_gives(device, bits, rows, out, columns):
    weight = _weight(device, (bits, 32, True), out=out, columns=columns)
    x = torch.randn(rows, columns, device=device, requires_grad=True)
    bias = torch.randn(out, device=device, requires_grad=True)
    y = qm.weight_only_linear(x, weight, bias)
    assert_bit_equal(y, F.linear(x, torch.empty(out, columns, device=device), bias))
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert bias.grad.eq(rows).all()


@pytest.mark.quick
@pytest.mark.parametrize("form", [(8, None, True), (4, 128, True), (4, 128, False)])
@pytest.mark.parametrize("rows", [1, 4])
def test_large_and_equal_inputs_lose_nothing_to_what_is_added_to_the_weights(device, form, rows):
    # GIVEN x of 1e4 everywhere: the sum that is taken off again is 264e4 a column, the result far smaller
    weight = _weight(device, form, columns=1024, scale_dtype=torch.float16)
    weight = weight._replace(scale=weight.scale / 64)
    _judge(torch.full((rows, 1024), 1e4, device=device, dtype=torch.float16), weight)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 3])
def test_zero_weights_give_exactly_the_bias(device, dtype, rows):
    weight = qm.quantize_int4(torch.zeros(5, 256, device=device))
    bias = torch.randn(5, device=device).to(dtype)
    y = qm.weight_only_linear(torch.randn(rows, 256, device=device).to(dtype), weight, bias)
    assert_bit_equal(y, bias.expand(rows, 5))


@pytest.mark.quick
def test_unaligned_words_and_views_of_scales_are_read_right(device):
    weight = _weight(device, (4, 32, False))
    # GIVEN buffers that begin off 16 bytes and rows apart
    packed = torch.empty(weight.packed.numel() + 1, dtype=torch.int32, device=device)[1:]
    packed = packed.view_as(weight.packed).copy_(weight.packed)
    scale = torch.full((37, 40), torch.nan, device=device)
    scale[:, : weight.scale.shape[1]] = weight.scale
    moved = weight._replace(packed=packed, scale=scale[:, : weight.scale.shape[1]])
    x = torch.randn(2, 300, device=device)
    assert_bit_equal(qm.weight_only_linear(x, moved), qm.weight_only_linear(x, weight))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 20),
    out=st.integers(1, 40),
    columns=st.integers(1, 700),
    form=st.sampled_from([(8, None, True), (4, 32, False), (4, 64, True), (4, 128, False)]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_any_shape_is_right(device, rows, out, columns, form, dtype):
    x = torch.randn(rows, columns, device=device).to(dtype)
    _judge(x, _weight(device, form, out, columns), gradients=False, repeat=False)


@pytest.mark.quick
def test_the_weight_gets_no_gradient_and_a_second_derivative_is_refused(device):
    weight = _weight(device, (4, 64, False), columns=64)
    weight.scale.requires_grad_()
    x = torch.randn(3, 64, device=device, requires_grad=True)
    y = qm.weight_only_linear(x * x, weight)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()
    qm.weight_only_linear(x, weight).sum().backward()
    assert weight.scale.grad is None


@pytest.mark.parametrize("form", [(8, None, True), (4, 32, False)])
def test_the_operators_pass_torchs_own_checks(device, form):
    weight = _weight(device, form, out=6, columns=40)
    x = torch.randn(3, 40, device=device, requires_grad=True)
    bias = torch.randn(6, device=device, requires_grad=True)
    by_group = weight.scale.t(), None if weight.zero is None else weight.zero.t()
    torch.library.opcheck(qm.forward_op, (x, weight.packed, *by_group, bias, weight.bits))
    dy = torch.randn(3, 6, device=device)
    torch.library.opcheck(qm.gradient_op, (dy, weight.packed, *by_group, weight.bits, 40))


@pytest.mark.quick
def test_it_compiles_without_graph_breaks(device):
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    layer = qm.WeightOnlyLinear.from_linear(nn.Linear(64, 9, device=device), group_size=32)
    x = torch.randn(3, 64, device=device, requires_grad=True)

    def step(x):
        return layer(x * 2).sin()

    torch.compile(step, fullgraph=True, backend=backend)(x).sum().backward()
    compiled, x.grad = x.grad, None
    step(x).sum().backward()
    assert torch.allclose(compiled, x.grad, atol=1e-6)


@pytest.mark.quick
def test_autocast_multiplies_in_its_dtype_as_a_linear_layer_does(device):
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    weight = _weight(device, (8, None, True), columns=64)
    x = torch.randn(2, 64, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=dtype):
        y = qm.weight_only_linear(x, weight)
    assert y.dtype == dtype
    assert_bit_equal(y, qm.weight_only_linear(x.to(dtype), weight))
    y.sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.quick
def test_what_cannot_be_taken_is_said(device):
    weight = _weight(device, (4, 64, False), columns=64)
    x = torch.randn(2, 64, device=device)
    for x_, weight_, bias, says in [
        (x.double(), weight, None, "float64"),
        (x[:, :63], weight, None, r"\(\.\.\., 64\)"),
        (x, weight._replace(bits=3), None, "3 bits"),
        (x, weight._replace(packed=weight.packed[:, :8]), None, "packed"),
        (x, weight._replace(scale=weight.scale[:, :0]), None, "scale"),
        (x, weight._replace(zero=weight.zero[:, :1]), None, "zero points"),
        (x, weight, x[0], "bias"),
    ]:
        with pytest.raises(UnsupportedError, match=says):
            qm.weight_only_linear(x_, weight_, bias)


@pytest.mark.quick
@pytest.mark.parametrize("options", [{"bits": 8}, {"group_size": 32}, {"group_size": 64, "symmetric": False}])
def test_a_layer_is_exchanged_saved_and_loaded(device, options):
    linear = nn.Linear(96, 10, device=device)
    layer = qm.WeightOnlyLinear.from_linear(linear, **options)
    assert layer.bias is linear.bias
    x = torch.randn(2, 96, device=device)
    expected = F.linear(x, qm.dequantize(layer.weight), linear.bias)
    assert torch.allclose(layer(x), expected, atol=1e-5)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = qm.WeightOnlyLinear.from_linear(nn.Linear(96, 10, device=device), **options)
    other.load_state_dict(torch.load(file))
    assert_bit_equal(other(x), layer(x))
    assert set(layer.state_dict()) == {"packed", "scale", "bias"} | (
        {"zero"} if "symmetric" in options else set()
    )
    assert f"bits={options.get('bits', 4)}" in repr(layer)
    assert layer.out_features == 10


@pytest.mark.quick
@pytest.mark.parametrize("rows", [1, 3])
def test_nothing_is_copied_where_blocks_are_whole(device, monkeypatch, rows):
    # GIVEN a layer as it is made, cast, copied and loaded
    layer = qm.WeightOnlyLinear.from_linear(nn.Linear(256, 8, device=device), group_size=32, symmetric=False)
    other = copy.deepcopy(layer.half())
    other.load_state_dict({name: value.contiguous() for name, value in layer.state_dict().items()})
    given = []
    for name in ("launch_split", "launch_stream"):
        monkeypatch.setattr(qm, name, lambda *args: given.append(args))
    monkeypatch.setattr(qm, "SPLIT_ROWS", 16)
    x = torch.randn(rows, 256, device=device, dtype=torch.float16)
    other(x)
    # THEN the kernel gets its tensors' own memory, in the order that it reads
    x_given, packed, scale, zero, *_ = given[0]
    for tensor, own in [(packed, other.packed), (scale, other.scale), (zero, other.zero)]:
        assert (tensor.data_ptr(), tensor.is_contiguous()) == (own.data_ptr(), True)
    assert launches._whole_blocks(x_given).data_ptr() == x.data_ptr()


@pytest.mark.quick
def test_casting_a_layer_casts_scales_and_leaves_words(device):
    layer = qm.WeightOnlyLinear.from_linear(nn.Linear(64, 4, device=device), symmetric=False).half()
    assert (layer.scale.dtype, layer.bias.dtype) == (torch.float16, torch.float16)
    assert (layer.packed.dtype, layer.zero.dtype) == (torch.int32, torch.uint8)
    assert layer(torch.randn(1, 64, device=device).half()).dtype == torch.float16


@pytest.mark.quick
def test_a_model_keeps_its_head_its_subclasses_and_its_shared_layers():
    class Special(nn.Linear):
        pass

    shared = nn.Linear(64, 64)
    model = nn.ModuleDict(
        {"body": nn.Sequential(shared, nn.ReLU(), shared, Special(64, 64)), "lm_head": nn.Linear(64, 8)}
    )
    assert qm.quantize_model(model, bits=8) is model
    assert type(model["body"][0]) is qm.WeightOnlyLinear
    assert model["body"][2] is model["body"][0]
    assert type(model["body"][3]) is Special
    assert type(model["lm_head"]) is nn.Linear
    qm.quantize_model(model, skip=lambda name, layer: layer.out_features != 8)
    assert type(model["lm_head"]) is qm.WeightOnlyLinear
    assert type(qm.quantize_model(nn.Linear(4, 4))) is qm.WeightOnlyLinear


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("bits", [4, 8])
def test_decoding_sizes_are_right(device, bits):
    if device.type != "cuda":
        pytest.skip("too large for the interpreter")
    # GIVEN each row of the launch table, a long row, and a number of rows for each tile
    for out, columns in [(512, 4096), (4096, 11008), (8192, 8192), (14336, 4096)]:
        weight = _weight(device, (bits, 128, True), out, columns, torch.bfloat16)
        for rows in (1, 2, 8, 16, 24, 64):
            x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
            _judge(x, weight, gradients=False)


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31_are_right(device):
    if device.type != "cuda":
        pytest.skip("needs 9 GB")
    # GIVEN more than 2^31 packed words: random ones are as good as packed ones
    out, columns = 2**17 + 3, 2**17
    packed = torch.randint(-(2**31), 2**31 - 1, (out, columns // 8), device=device, dtype=torch.int32)
    scale = torch.rand(out, columns // 128, device=device, dtype=torch.bfloat16)
    weight = qm.QuantizedWeight(packed, scale, None, 4, columns)
    last = weight._replace(packed=packed[-5:].clone(), scale=scale[-5:].clone())
    for rows in (1, 16):
        x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        y = qm.weight_only_linear(x, weight)[:, -5:]
        truth = qm.weight_only_linear_reference(x.double(), last)
        assert (y.double() - truth).norm() < 4e-3 * truth.norm()


def test_the_kernels_compile_for_hopper_with_matrix_instructions_and_16_byte_copies():
    # What the interpreter takes need not compile.
    pytest.importorskip("triton.backends.nvidia")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_quant"],
        capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2], timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    streamed = [line for line in lines if line[0] == "_stream_kernel"]
    assert len(streamed) == 2 * AVAILABLE
    for *_, spilled, matrix, copies, _, loads, registers in streamed:
        # Words go from memory to registers, 16 bytes at a time, and stay there: a pointer may be spilled.
        assert (int(spilled) <= 8, int(copies)) == (True, 0)
        assert int(matrix) > 0
        assert int(loads) >= 8
        assert int(registers) <= 255
    # 16 warps share a multiprocessor, but where there are four scales and zero points.
    assert all(int(line[-1]) <= 128 for line in streamed[:1])
    lines = [line for line in lines if line not in streamed]
    assert {(name, bits) for name, bits, *_ in lines} == {
        (name, bits) for name in ("_split_kernel", "_tile_kernel") for bits in ("4", "8")
    }
    for name, _, x_rows, spilled, matrix, copies, shared, *_ in lines:
        assert int(matrix) > 0, f"{name}: products without matrix instructions"
        assert int(copies) > 0, f"{name}: tiles do not come in asynchronous copies of 16 bytes"
        assert int(shared) <= 227 << 10
        if x_rows == "8":
            # Two programs of 256 threads share a multiprocessor.
            assert (int(spilled), int(shared) <= 113 << 10) == (0, True)
