"""Launch parameters by architecture and size, looked up and never searched for at call time.

A family declares its own table beside its kernel:

    FORWARD = LaunchTable("norm_forward", {
        "default": [(1024, {"num_warps": 4}), (None, {"num_warps": 8})],
        "sm_90": [(2048, {"num_warps": 4}), (None, {"num_warps": 16})],
    })
    params = FORWARD.pick(n_cols, x.device)

A row holds for sizes up to and including its first entry; None is without limit and comes last.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from ._device import architecture

Row = tuple[int | None, Mapping[str, int]]


class LaunchTable:
    """What to launch a kernel with.

    Args:
        name: of the kernel, unique; the tuning script writes rows under it.
        rows: by architecture as `architecture` names it; ``default`` is required.

    Raises:
        ValueError: no default, limits that do not rise, or no row without limit.
    """

    #: Every table by name, for the tuning script and for listings.
    known: ClassVar[dict[str, "LaunchTable"]] = {}

    def __init__(self, name: str, rows: Mapping[str, Sequence[Row]]) -> None:
        if "default" not in rows:
            raise ValueError(f"launch table {name}: no default rows")
        for arch, entries in rows.items():
            limits = [limit for limit, _ in entries]
            if limits != [*sorted({limit for limit in limits if limit is not None}), None]:
                raise ValueError(f"launch table {name}, {arch}: limits must rise and end in None: {limits}")
        self.name = name
        self.rows = {arch: tuple(entries) for arch, entries in rows.items()}
        LaunchTable.known[name] = self

    def pick(self, size: int, device: torch.device) -> Mapping[str, int]:
        """The parameters for a problem of `size` (what size means is the family's) on `device`."""
        entries = self.rows.get(architecture(device)) or self.rows["default"]
        for limit, params in entries:
            if limit is None or size <= limit:
                return params
        raise AssertionError("a table ends in a row without limit")


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least `n` and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """`a` over `b`, rounded up."""
    return -(-a // b)
