"""What a kernel runs on: which tensors it takes, the architecture's name, and the guard around a launch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from . import _triton

#: What every family computes in, unless it says otherwise. Arithmetic is fp32 whatever the storage.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

#: Stands for the multiprocessors of a GPU under the interpreter, where every program costs milliseconds.
_INTERPRETED_SM_COUNT = 2
#: And for the shared memory of a program and the L2 cache: Hopper's.
_INTERPRETED_SHARED_BYTES = 227 << 10
_INTERPRETED_L2_BYTES = 50 << 20


class UnsupportedError(ValueError):
    """Arguments that a bundled kernel does not take; the message says which and what to use instead."""


def device_reasons(*tensors: Tensor | None) -> list[str]:
    """Why a kernel cannot run on these tensors' devices; empty if it can. None entries are passed over."""
    given = [t for t in tensors if t is not None]
    devices = {t.device for t in given}
    reasons = []
    if not _triton.available():
        reasons.append("Triton is not installed")
    if len(devices) > 1:
        reasons.append(f"tensors lie on several devices: {', '.join(sorted(map(str, devices)))}")
    for device in devices:
        if device.type != "cuda" and not (device.type == "cpu" and _triton.INTERPRETED):
            reasons.append(
                f"tensors on {device.type}: the kernel runs on a GPU (or, to test it, on CPU tensors with "
                "TRITON_INTERPRET=1 set before the import)"
            )
    return reasons


def dtype_reasons(*tensors: Tensor | None, allowed: Sequence[torch.dtype] = FLOATS) -> list[str]:
    """Which tensors' dtypes are none of `allowed`; None entries are passed over."""
    wrong = sorted({str(t.dtype) for t in tensors if t is not None and t.dtype not in allowed})
    names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
    return [f"dtype {name.removeprefix('torch.')}: the kernel takes {names}" for name in wrong]


def refuse(reasons: Sequence[str], kernel: str) -> None:
    """Raise for the first caller whose arguments cannot be taken.

    Raises:
        UnsupportedError: `reasons` is not empty.
    """
    if reasons:
        raise UnsupportedError(f"{kernel}: {'; '.join(reasons)}")


def guard(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` current, since Triton launches on the current one; free of cost where it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def architecture(device: torch.device) -> str:
    """``sm_90`` and the like; ``gfx942`` and the like on AMD; ``interpreter`` for CPU tensors."""
    return "interpreter" if device.type != "cuda" else _architecture(device.index)


def sm_count(device: torch.device) -> int:
    """Multiprocessors (compute units) of the device."""
    return _INTERPRETED_SM_COUNT if device.type != "cuda" else _sm_count(device.index)


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have: 99 KiB on many GPUs, 227 KiB on the largest."""
    return _INTERPRETED_SHARED_BYTES if device.type != "cuda" else _shared_bytes(device.index)


def l2_bytes(device: torch.device) -> int:
    """Of the device's last cache."""
    return _INTERPRETED_L2_BYTES if device.type != "cuda" else _l2_bytes(device.index)


@cache
def _architecture(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@cache
def _shared_bytes(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    # ROCm has no larger one to ask for.
    known = getattr(properties, "shared_memory_per_block_optin", 0)
    return int(known or getattr(properties, "shared_memory_per_block", 48 << 10))


@cache
def _l2_bytes(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).L2_cache_size)


@cache
def _sm_count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
