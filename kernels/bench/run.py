"""Goes through a family's cases: times, and the share of the measured roofs that each variant reaches."""

import datetime
import importlib
import importlib.util
import itertools
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._device import architecture
from .._family import families, fingerprint
from .in_a_row import SHORT_S
from .timing import Case, Result, copy_bandwidth, matmul_rate, measure, why


@dataclass(frozen=True)
class Roofs:
    """What this device reaches: a copy's bytes per second, a bf16 matrix product's FLOPs per second."""

    bytes_per_s: float
    flops_per_s: float


def measured_roofs() -> Roofs:
    """Of the current device; takes a second."""
    return Roofs(copy_bandwidth(), matmul_rate())


def timed_families() -> list[str]:
    """Families that have cases."""
    return [name for name in families() if importlib.util.find_spec(f"{__package__}.{name}")]


def cases(family: str, quick: bool, only: str = "") -> Iterator[Case]:
    """The family's cases whose kernel, shape and direction hold the text `only`."""
    module = importlib.import_module(f"{__package__}.{family}")
    return (case for case in module.cases(quick) if only in _name(case))


def gridded_families() -> list[str]:
    """Families that have a grid of sizes."""
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in timed_families()}
    return [name for name, module in modules.items() if hasattr(module, "grid")]


def grid(families: Sequence[str], only: str = "") -> list[tuple[str, Case]]:
    """The families' grids, with each case's family: kernels take turns, a size each, in the sizes' order.

    So whoever stops early has of every kernel the sizes that its family names first.
    """
    sizes: dict[tuple[str, str], dict[str, list[tuple[str, Case]]]] = {}
    for family in families:
        for case in importlib.import_module(f"{__package__}.{family}").grid():
            if only in _name(case):
                of_size = sizes.setdefault((family, case.kernel), {}).setdefault(case.shape, [])
                of_size.append((family, case))
    turns = itertools.zip_longest(*(by_shape.values() for by_shape in sizes.values()), fillvalue=())
    return [entry for turn in turns for of_size in turn for entry in of_size]


def _name(case: Case) -> str:
    return f"{case.kernel} {case.shape} {case.direction}"


def floor_s(case: Case, roofs: Roofs) -> float:
    """The least time: of the bytes or the FLOPs, whichever take longer."""
    return max(case.bytes / roofs.bytes_per_s, case.flops / roofs.flops_per_s)


def row(result: Result, roofs: Roofs) -> dict[str, Any]:
    """A result as it is written: times, and the share of the roof that each variant reaches."""
    case = result.case
    floor_ms = floor_s(case, roofs) * 1e3
    in_a_row = result.in_a_row
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "dtype": case.dtype,
        "direction": case.direction,
        "bytes": case.bytes,
        "flops": case.flops,
        "floor_ms": floor_ms,
        "ms": result.ms,
        "spread_ms": result.spread_ms,
        "interval": result.interval,
        "repeats": result.repeats,
        "share_of_roof": {name: floor_ms / ms for name, ms in result.ms.items()},
        "in_a_row_ms": in_a_row.ms,
        "in_a_row_share_of_roof": {name: floor_ms / ms for name, ms in in_a_row.ms.items()},
        "in_a_row_ungraphed": in_a_row.ungraphed,
        "peak_bytes": result.peak_bytes,
        "failures": result.failures,
    }


def line(entry: dict[str, Any]) -> str:
    """A row for a reader: time in ms and share of the roof of each variant, and the same in a row."""
    cells = _times(entry["ms"], entry["share_of_roof"])
    cells += [f"{name} failed: {reason[:100]}" for name, reason in entry["failures"].items()]
    if entry["in_a_row_ms"]:
        cells += ["in a row", *_times(entry["in_a_row_ms"], entry["in_a_row_share_of_roof"])]
    head = f"{entry['kernel']:24} {entry['shape']:>18} {entry['dtype']:5} {entry['direction']:16}"
    return f"{head} floor {entry['floor_ms']:.4f} | " + " | ".join(cells)


def clocks(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row of results, and once more with the times of calls in a row where those were taken."""
    yield entry
    if entry.get("in_a_row_ms"):
        ms, shares = entry["in_a_row_ms"], entry["in_a_row_share_of_roof"]
        yield {**entry, "direction": f"{entry['direction']}, in a row", "ms": ms, "share_of_roof": shares}


def _times(ms: dict[str, float], shares: dict[str, float]) -> list[str]:
    return [f"{name} {time:.4f} ({shares[name]:4.0%})" for name, time in ms.items()]


def document(family: str, quick: bool, roofs: Roofs, command: str) -> dict[str, Any]:
    """What a family's results say besides their rows: where, when and of which sources they are."""
    import triton

    device = torch.device("cuda", torch.cuda.current_device())
    return {
        "family": family,
        "quick": quick,
        "sources": fingerprint(family),
        "device": torch.cuda.get_device_name(device),
        "architecture": architecture(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "copy_bytes_per_s": roofs.bytes_per_s,
        "matmul_flops_per_s": roofs.flops_per_s,
        "rows": [],
    }


def rows(
    family: str, quick: bool, roofs: Roofs, *, only: str = "", repeats: int = 40
) -> Iterator[dict[str, Any]]:
    """A row a case, as each is measured. One that fails is a row that says so, and the next goes on."""
    for case in cases(family, quick, only):
        yield row(measured(case, repeats, in_a_row=floor_s(case, roofs) < SHORT_S), roofs)


def measured(case: Case, repeats: int, *, in_a_row: bool) -> Result:
    """A case's result; one that says so, where the case fails."""
    try:
        return measure(case, repeats=repeats, in_a_row=in_a_row)
    except Exception as error:  # noqa: BLE001
        return Result(case, failures={"ours": why(error)})
