"""What the kernels of the weight-only products are launched with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _quant_stream
from ._device import architecture, sm_count
from ._launch import LaunchTable, cdiv
from ._quant_format import BLOCK, blocks_of
from ._quant_kernels import _dequantize_kernel, _gemv_kernel, _split_kernel, _tile_kernel
from ._triton import available, triton

#: Rows of x that a program of the plain units takes at most.
GEMV_X_ROWS = 4
_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) if available() else (0, 0)
#: The narrowest x that Triton gives to matrix units.
_NARROWEST = 8 if _TRITON >= (3, 5) else 16
#: The most rows of 16-bit x for the split kernel, whose tiles in three dimensions Triton 3.2 can't compile.
SPLIT_ROWS = 16 if _TRITON >= (3, 3) else 0

#: Size: rows of W.
GEMV = LaunchTable(
    "quant_gemv",
    {
        "default": [(4096, {"ROWS": 2, "num_warps": 4}), (None, {"ROWS": 4, "num_warps": 2})],
        "interpreter": [(None, {"ROWS": 16, "num_warps": 1})],
    },
)
#: Size: rows of x. Of a stage's shared memory a row of int4 takes 64 bytes for each warp and block, a row of
#: x 256. Few rows of W a program make more programs, but each fetches x for itself.
SPLIT = LaunchTable(
    "quant_split",
    {
        # 100 KiB of shared memory at most, which is what the smallest of these GPUs have.
        "default": [
            (1, {"ROWS": 16, "WARPS": 4, "BLOCKS": 1, "STAGES": 4}),
            (None, {"ROWS": 32, "WARPS": 4, "BLOCKS": 1, "STAGES": 4}),
        ],
        "sm_90": [
            (8, {"ROWS": 32, "WARPS": 4, "BLOCKS": 1, "STAGES": 5}),
            (None, {"ROWS": 64, "WARPS": 4, "BLOCKS": 1, "STAGES": 4}),
        ],
        "interpreter": [(None, {"ROWS": 32, "WARPS": 2, "BLOCKS": 1, "STAGES": 2})],
    },
)
#: Size: rows of x. A row of W takes twice the shared memory.
SPLIT_INT8 = LaunchTable(
    "quant_split_int8",
    {
        "default": [
            (1, {"ROWS": 16, "WARPS": 4, "BLOCKS": 1, "STAGES": 3}),
            (None, {"ROWS": 32, "WARPS": 4, "BLOCKS": 1, "STAGES": 3}),
        ],
        "sm_90": [
            (8, {"ROWS": 32, "WARPS": 4, "BLOCKS": 1, "STAGES": 4}),
            (None, {"ROWS": 64, "WARPS": 4, "BLOCKS": 1, "STAGES": 4}),
        ],
        "interpreter": [(None, {"ROWS": 32, "WARPS": 2, "BLOCKS": 1, "STAGES": 1})],
    },
)
#: Size: rows of W. The limit on registers lets four programs share a multiprocessor; where a block has
#: several scales or zero points, programs have 16 rows and no limit. Taken on the architectures named here.
STREAM = LaunchTable(
    "quant_stream",
    {
        "default": [(None, {"ROWS": 32, "AHEAD": 1, "TOGETHER": 1, "num_warps": 8})],
        "sm_90": [(None, {"ROWS": 16, "AHEAD": 4, "TOGETHER": 2, "num_warps": 4, "maxnreg": 128})],
    },
)
#: The most columns of x for the stream kernel, which keeps all of them in shared memory.
STREAM_COLUMNS = 32768
#: Size: rows of x.
TILE = LaunchTable(
    "quant_tile",
    {
        "default": [
            (32, {"X_ROWS": 32, "ROWS": 32, "BLOCKS": 2, "STAGES": 4, "num_warps": 2}),
            (None, {"X_ROWS": 64, "ROWS": 64, "BLOCKS": 2, "STAGES": 2, "num_warps": 4}),
        ],
        "sm_90": [
            (32, {"X_ROWS": 32, "ROWS": 64, "BLOCKS": 2, "STAGES": 4, "num_warps": 4}),
            (None, {"X_ROWS": 64, "ROWS": 64, "BLOCKS": 2, "STAGES": 3, "num_warps": 4}),
        ],
        "interpreter": [(None, {"X_ROWS": 64, "ROWS": 32, "BLOCKS": 2, "STAGES": 1, "num_warps": 1})],
    },
)
#: Size: words of W.
DEQUANTIZE = LaunchTable(
    "quant_dequantize",
    {
        "default": [(None, {"ROWS": 16, "HALFS": 128, "num_warps": 4})],
        "interpreter": [(None, {"ROWS": 32, "HALFS": 256, "num_warps": 1})],
    },
)


# In all of these scales and zero points are (groups, out).


def _groups(scale: Tensor, bits: int, n_blocks: int) -> int:
    """Groups in a block of a row; 1 where the row is one."""
    return 1 if bits == 8 or not n_blocks else scale.shape[0] // n_blocks


def _whole_blocks(x: Tensor) -> Tensor:
    """`x` with columns of 0 up to whole blocks and rows that begin on 16 bytes: itself where it is so."""
    missing = -x.shape[1] % BLOCK
    # Padding by nothing copies, which is a launch as long as the product's own for a small weight.
    x = F.pad(x, (0, missing)) if missing else x
    return x if x.stride(1) == 1 and (x.shape[0] == 1 or x.stride(0) % 16 == 0) else x.contiguous()


def _rows(rows: int, x_blocks: int, n_out: int, least: int, device: torch.device) -> int:
    """Rows of W a program: fewer, down to the least, where programs would be too few for the device.

    A tenth of the multiprocessors may idle before smaller tiles, which fetch x more often, pay.
    """
    while rows > least and x_blocks * cdiv(n_out, rows) < 0.9 * sm_count(device):
        rows //= 2
    return rows


def launch_gemv(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, y: Tensor, bits: int
) -> None:
    """Few rows of x (rows, in) on the plain units, into y (rows, out)."""
    x = _whole_blocks(x)
    n_rows, n_out, n_blocks = x.shape[0], packed.shape[0], x.shape[1] // BLOCK
    params = dict(GEMV.pick(n_out, x.device))
    quads = 32 * params["num_warps"]
    x_rows = min(1 << (n_rows - 1).bit_length(), GEMV_X_ROWS)
    params["ROWS"] = max(params["ROWS"] // x_rows, 1)
    _gemv_kernel[(cdiv(n_rows, x_rows) * cdiv(n_out, params["ROWS"]),)](
        x, packed, scale, zero, bias, y, n_rows, n_out, n_blocks, x.stride(0),
        BITS=bits, GROUPS=_groups(scale, bits, n_blocks), FULL=packed.shape[1] // 2 % quads == 0,
        X_ROWS=x_rows, QUADS=quads, **params,
    )  # fmt: skip


def launch_split(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, y: Tensor, bits: int
) -> None:
    """Few rows of 16-bit x (rows, in) on the matrix units, into y (rows, out)."""
    x = _whole_blocks(x)
    n_rows, n_out, n_blocks = x.shape[0], packed.shape[0], x.shape[1] // BLOCK
    params = dict((SPLIT_INT8 if bits == 8 else SPLIT).pick(n_rows, x.device))
    x_rows = _NARROWEST if n_rows <= _NARROWEST else 16
    x_blocks = cdiv(n_rows, x_rows)
    groups = _groups(scale, bits, n_blocks)
    # Registers for several scales and zero points.
    most = 32 if groups > 1 or zero is not None else params["ROWS"]
    params["ROWS"] = _rows(min(params["ROWS"], most), x_blocks, n_out, 16, x.device)
    _split_kernel[(x_blocks * cdiv(n_out, params["ROWS"]),)](
        x, packed, scale, zero, bias, y, n_rows, n_out, n_blocks, x.stride(0),
        BITS=bits, GROUPS=groups, X_ROWS=x_rows, num_warps=params["WARPS"], **params,
    )  # fmt: skip


def streams(x: Tensor, bits: int) -> bool:
    """Whether to `launch_stream` with x (rows, in): one row of 16 bits, on a GPU where it is the fastest.

    With int8 it is not: the split kernel, which reads as fast, is 3 % faster.
    """
    return (
        _quant_stream.AVAILABLE
        and bits == 4
        and x.shape[0] == 1
        and x.shape[1] <= STREAM_COLUMNS
        and x.dtype in (torch.float16, torch.bfloat16)
        and architecture(x.device) in STREAM.rows
    )


def launch_stream(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, y: Tensor, bits: int
) -> None:
    """One row of 16-bit x (1, in) on the matrix units, int4 through registers alone, into y (1, out)."""
    assert bits == 4, "int8 goes the split kernel's way"
    x = _whole_blocks(x)
    # Read two columns at a time.
    x = x if x.data_ptr() % 4 == 0 else x.clone()
    n_out, n_blocks = packed.shape[0], x.shape[1] // BLOCK
    params = dict(STREAM.pick(n_out, x.device))
    groups = _groups(scale, bits, n_blocks)
    if groups > 1 or zero is not None:
        params["ROWS"] = 16
        params.pop("maxnreg", None)
    params["ROWS"] = _rows(params["ROWS"], 1, n_out, 16, x.device)
    steps = cdiv(n_blocks, params["num_warps"] * params["AHEAD"])
    _quant_stream._stream_kernel[(cdiv(n_out, params["ROWS"]),)](
        x, packed, scale, zero, bias, y, n_out, n_blocks, GROUPS=groups, STEPS=steps, **params,
    )  # fmt: skip


def launch_tile(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, y: Tensor, bits: int
) -> None:
    """More rows of 16-bit x (rows, in) on the matrix units, into y (rows, out)."""
    x = _whole_blocks(x)
    n_rows, n_out, n_blocks = x.shape[0], packed.shape[0], x.shape[1] // BLOCK
    params = dict(TILE.pick(n_rows, x.device))
    x_blocks = cdiv(n_rows, params["X_ROWS"])
    rows = _rows(params["ROWS"], x_blocks, n_out, params["ROWS"] // params["num_warps"], x.device)
    params["num_warps"], params["ROWS"] = params["num_warps"] * rows // params["ROWS"], rows
    _tile_kernel[(x_blocks * cdiv(n_out, params["ROWS"]),)](
        x, packed, scale, zero, bias, y, n_rows, n_out, n_blocks, x.stride(0),
        BITS=bits, GROUPS=_groups(scale, bits, n_blocks), **params,
    )  # fmt: skip


def launch_dequantize(packed: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, bits: int) -> None:
    """The matrix itself, into out (out, in) of any floating-point dtype, contiguous."""
    (n_out, n_in), n_blocks = out.shape, blocks_of(out.shape[1])
    params = DEQUANTIZE.pick(packed.numel(), out.device)
    tiles = cdiv(2 * packed.shape[1], params["HALFS"])
    _dequantize_kernel[(tiles * cdiv(n_out, params["ROWS"]),)](
        packed, scale, zero, out, n_out, n_in, n_blocks, tiles,
        BITS=bits, GROUPS=_groups(scale, bits, n_blocks), **params,
    )  # fmt: skip
