"""Launch parameters of the attention kernels, by architecture and head dimension.

Registers bound the tiles: for Hopper, `benchmarks.kernels.aot` shows 168 to 255 a thread, without spills,
for head dimensions up to 128. Triton's own warp specialisation (`tl.range(warp_specialize=True)`) is not
used: on Hopper, Triton 3.6 either fails to compile these (4 warps) or leaves them as they are (8 warps). The
kernels of `_attention_hopper_*.py` do it by hand; plain attention takes them where its row is not empty.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._launch import LaunchTable

Params = Mapping[str, int]
Rows = Mapping[str, Sequence[tuple[int | None, Params]]]


def tile(block_m: int, block_n: int, warps: int, stages: int, tma: int = 0) -> Params:
    """One row: queries and keys a tile, warps, pipeline stages, and whether the copy engine loads tiles."""
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages, "TMA": tma}


def roles(
    block: int, stages: int, groups: int = 2, persistent: int = 1, unmasked: int = 1, ahead: int = 0
) -> Params:
    """One row of the kernels with warps of different roles.

    Args:
        block: keys (or queries) a tile.
        stages: buffers in the ring.
        groups: of four warps, with 64 rows each.
        persistent: whether programs stay for further blocks.
        unmasked: whether it is also the faster kernel where there is neither mask nor bias.
        ahead: whether a second buffer takes the next block's own tiles, the copy engine brings lse, delta and
            the output too, results are stored 16 bytes a thread, and key gradients start while query
            gradients end.
    """
    return {
        "BLOCK": block, "STAGES": stages, "GROUPS": groups, "PERSISTENT": persistent, "UNMASKED": unmasked,
        "AHEAD": ahead,
    }  # fmt: skip


_NO_ROLES: Rows = {"default": [(None, {})]}
_INTERPRETER = {"interpreter": [(None, tile(16, 16, 4, 1))]}


class Tiles:
    """The launch tables of one kernel: plain, fp32, and with what takes registers (bias, soft-cap, dropout).

    `by_role` has the rows of the kernel with warps of different roles, `roles(...)` or empty for none; where
    there is one, plain attention takes it, also with masks and with a bias. `bare` has rows that go before
    them where there is neither mask nor bias nor a bound on the left: all keys are seen, or those up to one.

    Sizes are head dimensions, padded to a power of two. The defaults fit in 99 KiB of shared memory.
    """

    def __init__(
        self,
        name: str,
        plain: Rows,
        modified: Rows,
        fp32: Rows,
        by_role: Rows | None = None,
        bare: Rows | None = None,
    ) -> None:
        self.plain = LaunchTable(f"attention_{name}", {**plain, **_INTERPRETER})
        self.modified = LaunchTable(f"attention_{name}_modified", {**modified, **_INTERPRETER})
        self.fp32 = LaunchTable(f"attention_{name}_fp32", {**fp32, **_INTERPRETER})
        self.roles = LaunchTable(f"attention_{name}_roles", {**_NO_ROLES, **(by_role or {})})
        self.bare = LaunchTable(f"attention_{name}_bare", {**_NO_ROLES, **(bare or {})})

    def pick(self, q: Tensor, options: Mapping[str, Any]) -> dict[str, int]:
        """The parameters for these options on q's device."""
        table = self.plain
        if q.dtype == torch.float32:
            table = self.fp32
        elif options["BIAS"] or options["SOFTCAP"] or options["DROPOUT"]:
            table = self.modified
        return dict(table.pick(max(options["COLS"], options["COLS_V"]), q.device))

    def pick_roles(self, q: Tensor, options: Mapping[str, Any]) -> Params:
        """The parameters of the kernel with warps of different roles; empty where it is not to be used."""
        beyond = ("PACKED", "SOFTCAP", "DROPOUT")
        if q.dtype == torch.float32 or any(options[name] for name in beyond):
            return {}
        size = max(options["COLS"], options["COLS_V"])
        if not (options["BIAS"] or options["LEFT"]) and (params := self.bare.pick(size, q.device)):
            return params
        params = self.roles.pick(size, q.device)
        return params if not params or options["BIAS"] or params["UNMASKED"] else {}


# `ahead` was timed at 8 x 12 x 1024 x 64 in bf16, causal and in full, alone: rows with masks, with a bound on
# the left and for head dimension 128 go without until they are.
FORWARD = Tiles(
    "forward",
    plain={
        "default": [(64, tile(64, 64, 4, 2)), (128, tile(64, 32, 4, 2)), (None, tile(32, 32, 4, 1))],
        "sm_80": [(64, tile(128, 64, 4, 3)), (128, tile(128, 64, 8, 2)), (None, tile(64, 32, 4, 2))],
        "sm_90": [
            (64, tile(128, 64, 4, 3, 1)),
            (128, tile(128, 128, 8, 2, 1)),
            (None, tile(128, 64, 8, 2, 1)),
        ],
    },
    modified={
        "default": [(64, tile(64, 32, 4, 2)), (128, tile(64, 32, 4, 1)), (None, tile(32, 32, 4, 1))],
        "sm_90": [
            (64, tile(128, 64, 8, 2, 1)),
            (128, tile(128, 64, 8, 2, 1)),
            (None, tile(128, 32, 8, 2, 1)),
        ],
    },
    fp32={"default": [(64, tile(64, 32, 8, 1)), (128, tile(32, 32, 8, 1)), (None, tile(16, 16, 4, 1))]},
    by_role={"sm_90": [(64, roles(128, 3)), (128, roles(128, 2)), (None, {})]},
    bare={"sm_90": [(64, roles(128, 3, ahead=1)), (None, {})]},
)
QUERY_GRADIENT = Tiles(
    "query_gradient",
    plain={
        "default": [(64, tile(64, 64, 4, 1)), (128, tile(64, 32, 4, 1)), (None, tile(32, 16, 4, 1))],
        "sm_80": [(64, tile(128, 64, 8, 2)), (128, tile(64, 64, 4, 2)), (None, tile(64, 32, 4, 1))],
        "sm_90": [
            (64, tile(64, 64, 4, 3, 1)),
            (128, tile(128, 64, 8, 2, 1)),
            (None, tile(64, 32, 8, 2, 1)),
        ],
    },
    modified={
        "default": [(64, tile(64, 32, 4, 1)), (128, tile(32, 32, 4, 1)), (None, tile(32, 16, 4, 1))],
        "sm_90": [
            (64, tile(128, 64, 8, 2, 1)),
            (128, tile(128, 32, 8, 2, 1)),
            (None, tile(64, 32, 8, 1, 1)),
        ],
    },
    fp32={"default": [(64, tile(32, 32, 8, 1)), (128, tile(32, 16, 8, 1)), (None, tile(16, 16, 8, 1))]},
    by_role={"sm_90": [(64, roles(128, 3, unmasked=0)), (128, roles(64, 4)), (None, {})]},
    bare={"sm_90": [(64, roles(128, 2, ahead=1)), (None, {})]},
)
KEY_GRADIENT = Tiles(
    "key_gradient",
    plain={
        "default": [(64, tile(32, 64, 4, 1)), (128, tile(32, 64, 4, 1)), (None, tile(16, 32, 4, 1))],
        "sm_80": [(64, tile(64, 128, 8, 2)), (128, tile(32, 128, 8, 2)), (None, tile(16, 64, 8, 1))],
        "sm_90": [
            (64, tile(64, 128, 8, 2, 1)),
            (128, tile(64, 128, 8, 2, 1)),
            (None, tile(32, 64, 8, 2, 1)),
        ],
    },
    modified={
        "default": [(64, tile(32, 64, 4, 1)), (128, tile(16, 64, 4, 1)), (None, tile(16, 32, 4, 1))],
        "sm_90": [
            (64, tile(32, 128, 8, 2, 1)),
            (128, tile(32, 128, 8, 2, 1)),
            (None, tile(16, 64, 8, 1, 1)),
        ],
    },
    fp32={"default": [(64, tile(32, 32, 8, 1)), (128, tile(16, 32, 8, 1)), (None, tile(16, 16, 8, 1))]},
    by_role={"sm_90": [(64, roles(128, 3)), (128, roles(64, 3, persistent=0)), (None, {})]},
    bare={"sm_90": [(64, roles(128, 3, ahead=1)), (None, {})]},
)
