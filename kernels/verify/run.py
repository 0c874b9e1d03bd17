"""Goes through a family's probes on one device."""

from __future__ import annotations

import importlib
import importlib.util
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import _triton
from .._family import families
from .._tf32 import without_tf32
from .judge import Wrong, judge, poisoned_memory
from .probe import DTYPES, Probe


@dataclass(frozen=True)
class Outcome:
    """What became of one probe in one dtype.

    Attributes:
        ok: right in every respect.
        share: of the allowed error, by the result and the measure where it is largest; None if none was made.
        worst: which result that is, e.g. ``gradient of x``.
        failure: what is wrong, or None.
        seconds: with compilation.
    """

    family: str
    kernel: str
    shape: str
    dtype: str
    ok: bool
    share: float | None
    worst: str | None
    failure: str | None
    seconds: float


def checked_families() -> list[str]:
    """Families that have probes."""
    return [name for name in families() if importlib.util.find_spec(f"{__package__}.{name}")]


def probes(family: str) -> Iterator[Probe]:
    """The family's probes."""
    return importlib.import_module(f"{__package__}.{family}").probes()


def default_device() -> torch.device:
    """The current GPU, or the CPU where kernels run under Triton's interpreter."""
    if _triton.INTERPRETED:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def verify(family: str, device: torch.device) -> Iterator[Outcome]:
    """An outcome a probe and dtype, as each is had. The interpreter's bf16 is wrong and passed over."""
    for probe in probes(family):
        for dtype in probe.dtypes:
            if device.type == "cpu" and dtype == "bf16":
                continue
            yield _outcome(family, probe, dtype, device)


def _outcome(family: str, probe: Probe, dtype: str, device: torch.device) -> Outcome:
    start = time.perf_counter()
    share = worst = failure = None
    try:
        share, worst, failure = _judged(probe, dtype, device)
    except Wrong as wrong:
        failure = str(wrong)
    except Exception as error:  # noqa: BLE001
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    seconds = time.perf_counter() - start
    return Outcome(family, probe.kernel, probe.shape, dtype, failure is None, share, worst, failure, seconds)


def _judged(probe: Probe, dtype: str, device: torch.device) -> tuple[float, str, str | None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), poisoned_memory(), without_tf32(), warnings.catch_warnings():
        # Deterministic mode, which poisons memory, warns where eager PyTorch has no such algorithm.
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        inputs = probe.inputs(device, DTYPES[dtype])
        found = judge(probe.ours, probe.reference, inputs, eager=probe.eager, **probe.options)
    worst = max(found, key=lambda error: error.share)
    return worst.share, worst.what, None if worst.share <= 1 else str(worst)
