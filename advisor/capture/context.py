"""What a trace cannot know and the analysis needs: the context block. Reads torch objects, changes none.

Every value that cannot be read is None. The block is plain JSON data and holds no tensor.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from advisor.capture.ranges import split_modules

#: Raised when a key of the block changes its meaning.
SCHEMA = 1

_DTYPES = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float8_e4m3fnuz": "fp8", "float8_e5m2fnuz": "fp8",
    "float4_e2m1fn_x2": "fp4",
}  # fmt: skip

T = TypeVar("T")


def known(read: Callable[[], T]) -> T | None:
    """The value that ``read`` returns, or None where it cannot be read."""
    try:
        return read()
    except Exception:  # noqa: BLE001  a context value is never worth a failing step
        return None


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype, e.g. ``bf16``; integers keep theirs."""
    full = str(dtype).removeprefix("torch.")
    return _DTYPES.get(full, full)


def torch_context(device: torch.device) -> dict[str, Any]:
    """Versions, device and numeric flags of this process."""
    return {
        "versions": {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "hip": getattr(torch.version, "hip", None),
            "cudnn": known(torch.backends.cudnn.version) if torch.cuda.is_available() else None,
            "triton": _package_version("triton", "pytorch-triton"),
            "driver": _driver_version(),
        },
        "device": device_context(device),
        "flags": {
            "allow_tf32_matmul": known(lambda: _tf32(torch.backends.cuda.matmul)),
            "allow_tf32_cudnn": known(
                lambda: _tf32(torch.backends.cudnn, getattr(torch.backends.cudnn, "conv", None))
            ),
            "cudnn_benchmark": known(lambda: bool(torch.backends.cudnn.benchmark)),
            "cudnn_deterministic": known(lambda: bool(torch.backends.cudnn.deterministic)),
            "deterministic_algorithms": known(torch.are_deterministic_algorithms_enabled),
            "float32_matmul_precision": known(torch.get_float32_matmul_precision),
        },
    }


def _tf32(backend: Any, newer: Any = None) -> bool:
    """Whether a backend may use TF32; reading its older flag raises where the newer one was set."""
    precision = getattr(newer if newer is not None else backend, "fp32_precision", None)
    return bool(backend.allow_tf32) if precision is None else precision == "tf32"


def device_context(device: torch.device) -> dict[str, Any]:
    """Name, memory and place of the device that trains."""
    module = getattr(torch, device.type, None)
    if device.type not in ("cuda", "xpu") or module is None or not known(module.is_available):
        return {
            "type": device.type,
            "name": _cpu_name() if device.type == "cpu" else None,
            "total_memory_bytes": None,
            "index": None,
            "count": None,
        }
    index = device.index if device.index is not None else known(module.current_device)
    properties = known(lambda: module.get_device_properties(index))
    return {
        "type": device.type,
        "name": getattr(properties, "name", None),
        "total_memory_bytes": getattr(properties, "total_memory", None),
        "index": index,
        "count": known(module.device_count),
    }


def peak_memory_bytes(device: torch.device) -> int | None:
    """High-water mark of allocated device memory; the user's own statistics are not reset."""
    module = getattr(torch, device.type, None)
    if device.type not in ("cuda", "xpu") or module is None:
        return None
    return known(lambda: int(module.max_memory_allocated(device)))


def optimizer_context(optimizers: Iterable[Any]) -> list[dict[str, Any]]:
    """Class and the flags that decide which kernels an optimizer step launches."""
    return [
        {
            "class": type(optimizer).__name__,
            "fused": _option(optimizer, "fused"),
            "foreach": _option(optimizer, "foreach"),
            "capturable": _option(optimizer, "capturable"),
            "param_groups": len(getattr(optimizer, "param_groups", ())),
            "lr": _plain_number(_option(optimizer, "lr")),
        }
        for optimizer in optimizers
    ]


def parameter_context(optimizers: Iterable[Any]) -> list[dict[str, Any]]:
    """Local shapes and dtypes of the trained parameters in the optimizers' order; runs of equals are counted.

    The trace records tensor lists without shapes, so the cost of an optimizer step comes from here.
    """
    runs: list[dict[str, Any]] = []
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                local = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
                entry = {"shape": list(local.shape), "dtype": dtype_name(local.dtype)}
                if runs and all(runs[-1][key] == value for key, value in entry.items()):
                    runs[-1]["count"] += 1
                else:
                    runs.append({**entry, "count": 1})
    return runs


def module_context(model: torch.nn.Module) -> dict[str, Any]:
    """Class of each eager module by path (the root's is empty), and the paths that run compiled."""
    eager, compiled = split_modules(model)
    return {
        "modules": {path: type(module).__name__ for path, module in eager.items()},
        "compiled_modules": compiled,
    }


def loader_context(loader: Any) -> dict[str, Any] | None:
    """Settings of a DataLoader, or of the first one in a collection of them."""
    loaders = _flat_loaders(loader)
    if not loaders:
        return None
    first = loaders[0]
    return {
        "class": type(first).__name__,
        "batch_size": getattr(first, "batch_size", None),
        "num_workers": getattr(first, "num_workers", None),
        "pin_memory": getattr(first, "pin_memory", None),
        "persistent_workers": getattr(first, "persistent_workers", None),
        "prefetch_factor": getattr(first, "prefetch_factor", None),
        "loaders": len(loaders),
    }


def batch_context(batch: Any) -> list[list[Any]]:
    """``[shape, dtype, device]`` of each tensor in a batch, in the order of its leaves."""
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(batch)
    return [
        [list(leaf.shape), dtype_name(leaf.dtype), str(leaf.device)]
        for leaf in leaves
        if torch.is_tensor(leaf)
    ]


def _option(optimizer: Any, key: str) -> Any:
    groups = getattr(optimizer, "param_groups", None)
    return groups[0].get(key) if groups else None


def _plain_number(value: Any) -> float | None:
    """The value unless it is a tensor, whose reading would wait for the device."""
    return float(value) if isinstance(value, (int, float)) else None


def _flat_loaders(loader: Any) -> list[Any]:
    if loader is None:
        return []
    if isinstance(loader, torch.utils.data.DataLoader):
        return [loader]
    inner = getattr(loader, "flattened", None)  # Lightning's CombinedLoader
    if inner is None and isinstance(loader, dict):
        inner = loader.values()
    if inner is None and isinstance(loader, (list, tuple)):
        inner = loader
    return [loader] if inner is None else [leaf for part in inner for leaf in _flat_loaders(part)]


def _package_version(*names: str) -> str | None:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def nvidia_driver(text: str) -> str | None:
    """The version in the text of ``/proc/driver/nvidia/version``, of the open or the closed module."""
    found = re.search(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else None


def _driver_version() -> str | None:
    for path, parse in (
        ("/proc/driver/nvidia/version", nvidia_driver),
        ("/sys/module/amdgpu/version", str.strip),
    ):
        try:
            with open(path) as file:
                return parse(file.read())
        except OSError:
            continue
    return None


def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None
