"""What every family rests on: launch tables, registration, imports, devices, random numbers, judging."""

import subprocess
import sys

import pytest
import torch
from advisor.kernels._attention_tiles import kept
from advisor.kernels._device import UnsupportedError, device_reasons, dtype_reasons, refuse
from advisor.kernels._launch import LaunchTable, cdiv, next_power_of_2
from advisor.kernels._math import ACTIVATIONS
from advisor.kernels._ops import operator
from advisor.kernels._random import draw_seed, keep_8, keep_threshold
from advisor.kernels._triton import tl, triton
from torch import Tensor

from tests.kernels.activation_checks import apply, check_rough, check_slopes, check_values
from tests.kernels.checks import check

CPU = torch.device("cpu")


@triton.jit
def _keep(seed_ptr, out_ptr, THRESHOLD: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.arange(0, GROUPS)[:, None]
    lane = tl.arange(0, 8)[None, :]
    kept = keep_8(tl.load(seed_ptr), group.to(tl.int64), lane, THRESHOLD)
    tl.store(out_ptr + group * 8 + lane, kept.to(tl.int8))


@triton.jit
def _tile(seed_ptr, out_ptr, n_rows, n_cols, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col, plane = tl.program_id(0) * ROWS, tl.program_id(1) * COLS, tl.program_id(2)
    keep = kept(tl.load(seed_ptr), plane, row, n_rows, col, n_cols, THRESHOLD, ROWS, COLS)
    rows, cols = row + tl.arange(0, ROWS)[:, None], col + tl.arange(0, COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    tl.store(out_ptr + (plane * n_rows + rows) * n_cols + cols, keep.to(tl.int8), mask=inside)


def _tiles(seed: torch.Tensor, rows: int, cols: int, tile: tuple[int, int], p: float) -> torch.Tensor:
    found = torch.full((2, rows, cols), -1, dtype=torch.int8, device=seed.device)
    grid = (triton.cdiv(rows, tile[0]), triton.cdiv(cols, tile[1]), 2)
    _tile[grid](seed, found, rows, cols, keep_threshold(p), *tile)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("tile", [(16, 16), (32, 64), (64, 16), (16, 128)])
def test_the_weights_that_attention_drops_are_those_of_any_tile(device, tile):
    seed = draw_seed(device)
    assert _tiles(seed, 70, 100, tile, 0.3).equal(_tiles(seed, 70, 100, (64, 32), 0.3))


@pytest.mark.quick
def test_the_weights_that_attention_drops_are_drawn_each_for_itself(device):
    # GIVEN 1024 blocks of 16 rows and 32 columns, in each of which 64 draws serve 512 weights
    found = _tiles(draw_seed(device), 1024, 256, (64, 64), 0.5).double()
    blocks = found.view(2, 64, 16, 8, 32).permute(0, 1, 3, 2, 4).reshape(1024, 512)
    # THEN no two of a block, and no two blocks, have more in common than chance gives them
    assert (blocks.mean(0) - 0.5).abs().max() < 6 * 0.5 / 1024**0.5
    among = torch.corrcoef(blocks.T) - torch.eye(512, device=device)
    between = torch.corrcoef(blocks) - torch.eye(1024, device=device)
    assert among.abs().max() < 6 / 1024**0.5
    assert between.abs().max() < 6 / 512**0.5


@pytest.mark.quick
@pytest.mark.parametrize("name", [*ACTIVATIONS, "tanh"])
def test_an_activation_is_as_near_to_the_truth_as_torchs(device, name):
    check_values(name, device)


@pytest.mark.quick
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_gradient_of_an_activation_is_as_near_to_the_truth_as_torchs(device, name):
    check_slopes(name, device)


@pytest.mark.quick
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_rough_activation_is_as_near_to_the_truth_as_torchs_in_bfloat16(device, name):
    check_rough(name, device)


@pytest.mark.quick
def test_a_rough_slope_from_its_sigmoid_is_as_near_to_the_truth_as_torchs_in_bfloat16(device):
    check_rough("gelu", device, 2)


def test_tanh_keeps_its_relative_accuracy_near_zero(device):
    x = torch.logspace(-20, 1, 1024, device=device)
    y = torch.empty_like(x)
    apply[(1,)](x, y, "tanh", False, 1024)
    truth = torch.tanh(x.double())
    assert ((y.double() - truth).abs() / truth).max() < 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_keeps_the_share_it_should_on_every_lane(device, p):
    # GIVEN 8192 groups of 8 elements
    kept = torch.empty(8192, 8, dtype=torch.int8, device=device)
    _keep[(1,)](draw_seed(device), kept, keep_threshold(p), 8192)
    # THEN each lane's share is 1 - p to 5 standard deviations, and lanes are uncorrelated
    share = kept.double().mean(0)
    deviation = (p * (1 - p) / 8192) ** 0.5
    assert ((share - (1 - p)).abs() <= 5 * deviation).all()
    if 0 < p < 1:
        correlation = torch.corrcoef(kept.double().T) - torch.eye(8, device=device)
        assert correlation.abs().max() < 5 / 8192**0.5


def test_a_seed_follows_torchs_generator(device):
    torch.manual_seed(7)
    first, second = draw_seed(device), draw_seed(device)
    torch.manual_seed(7)
    assert draw_seed(device).equal(first)
    assert not first.equal(second)


def test_a_table_gives_the_first_row_that_is_large_enough():
    table = LaunchTable("test_rows", {"default": [(64, {"num_warps": 1}), (None, {"num_warps": 8})]})
    assert table.pick(64, CPU) == {"num_warps": 1}
    assert table.pick(65, CPU) == {"num_warps": 8}


def test_a_table_prefers_the_architectures_own_rows():
    rows = {"default": [(None, {"num_warps": 4})], "interpreter": [(None, {"num_warps": 1})]}
    assert LaunchTable("test_arch", rows).pick(1, CPU) == {"num_warps": 1}


@pytest.mark.parametrize(
    "rows",
    [
        {"sm_90": [(None, {})]},
        {"default": [(64, {})]},
        {"default": [(64, {}), (32, {}), (None, {})]},
        {"default": [(None, {}), (64, {})]},
    ],
)
def test_a_table_with_a_hole_is_refused(rows):
    with pytest.raises(ValueError, match="launch table test_hole"):
        LaunchTable("test_hole", rows)


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_the_next_power_of_two(n, power):
    assert next_power_of_2(n) == power


def test_cdiv_rounds_up():
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def _twice_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _twice_backward(ctx, dy: Tensor) -> Tensor:
    return _twice_gradient(dy, ctx.saved_tensors[0])


@operator("test_twice_gradient", fake=lambda dy, x: torch.empty_like(x))
def _twice_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy * 2


@operator(
    "test_twice",
    fake=_twice_fake,
    backward=_twice_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
def _twice(x: Tensor) -> Tensor:
    return x * 2


def test_a_registered_operator_passes_torchs_own_checks(device):
    torch.library.opcheck(_twice, (torch.randn(3, device=device, requires_grad=True),))


def test_a_second_derivative_is_refused_in_words(device):
    x = torch.randn(3, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(_twice(x * x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="test_twice_gradient has no second derivative"):
        gradient.sum().backward()


def test_a_device_that_kernels_cannot_use_is_named():
    (reason,) = device_reasons(torch.empty(1, device="meta"))
    assert "meta" in reason
    assert any("several devices" in r for r in device_reasons(torch.empty(1), torch.empty(1, device="meta")))
    with pytest.raises(UnsupportedError, match="norm: on the moon; too cold"):
        refuse(["on the moon", "too cold"], "norm")


def test_a_dtype_that_kernels_cannot_use_is_named():
    assert dtype_reasons(torch.empty(1, dtype=torch.float64), None) == [
        "dtype float64: the kernel takes float32, float16, bfloat16"
    ]
    assert dtype_reasons(torch.empty(1)) == []


def test_importing_the_package_loads_neither_torch_nor_triton():
    code = "import sys, advisor.kernels; print(*sorted({'torch', 'triton'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_without_triton_a_kernel_is_importable_and_says_what_lacks_when_launched():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import advisor.kernels._math as m, advisor.kernels._random\n"
        "from advisor.kernels._triton import available, require_triton\n"
        "assert not available()\n"
        "for call in (lambda: m.tanh[(1,)](), require_triton):\n"
        "    try: call()\n"
        "    except ImportError as error: assert 'pip install triton' in str(error)\n"
        "    else: raise SystemExit('launched')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: x * 2 + x.abs().max() * 1e-2, "error"),
        (lambda x: (x * 2)[:2], "shape"),
        (lambda x: (x * 2).double(), "dtype"),
        (lambda x: x * 2 + torch.randn_like(x) * 1e-9, "two runs differ"),
        (
            lambda x: x.add_(0).mul(2) if not x.requires_grad else x.detach().add_(0).mul(2) + 0 * x,
            "written to",
        ),
        (lambda x: torch.where(x > 0, torch.nan, x * 2), "not finite"),
        (lambda x: x.detach() * 2 + (x - x.detach()), "gradient of x"),
    ],
)
def test_a_wrong_kernel_is_caught(wrong, says):
    x = torch.randn(64)
    with pytest.raises(AssertionError, match=says):
        check(wrong, lambda x: x * 2, {"x": x}, ulps=0.5)


def test_a_right_kernel_passes():
    check(lambda x: x + x, lambda x: x * 2, {"x": torch.randn(64)})


def test_every_public_name_is_found_where_the_package_says():
    import advisor.kernels as kernels

    for name in kernels.__all__:
        assert getattr(kernels, name).__name__ == name
