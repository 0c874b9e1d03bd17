"""What the compiler makes of the kernels, without a GPU: registers, spills, shared memory.

    python -m benchmarks.kernels.aot norm --quick

Runs a family's cases on CPU tensors, whose pages are never touched, with every launch replaced by a
compilation for the named architecture: so what is compiled is what would be launched, with the same
specialisation. The figures come from NVIDIA's assembler, which Triton carries.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from advisor.kernels.bench.timing import Case
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class _NoDevice:
    """A driver that knows its target and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Every distinct kernel that the patched launches compiled, by its assembly's hash."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.kernels: dict[str, tuple[str, Any, str]] = {}

    def install(self) -> None:
        """From here on a launch compiles and returns."""
        driver.set_active(_NoDevice(GPUTarget("cuda", self.capability, 32)))
        run = JITFunction.run

        def compile_only(jit: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = run(jit, *args, grid=grid, warmup=True, **kwargs)
            note = ", ".join(f"{k}={v}" for k, v in kwargs.items() if isinstance(v, (int, str)))
            self.kernels.setdefault(kernel.asm["ptx"], (jit.__name__, kernel, note))
            return kernel

        JITFunction.run = compile_only

    def report(self) -> list[str]:
        """A line a kernel: registers a thread, bytes spilled, shared memory, and how wide its loads are."""
        lines = []
        for ptx, (name, kernel, note) in self.kernels.items():
            registers, spilled = _assembled(ptx, self.capability)
            widths = sorted(set(re.findall(r"ld\.global[\w.:]*?\.(v\d\.)?b(\d+)", ptx)))
            loads = ",".join(f"{v}b{b}" for v, b in widths)
            lines.append(
                f"{name:28} regs {registers:4} spill {spilled:6} shared {kernel.metadata.shared:7} "
                f"warps {kernel.metadata.num_warps:2} loads {loads:18} {note}"
            )
        return lines


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    suffix = "a" if capability >= 90 else ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(tool), "-v", f"--gpu-name=sm_{capability}{suffix}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)), default=0)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    return registers, spilled


def pretend(capability: int, sm_count: int) -> None:
    """Let CPU tensors pass for tensors on a device of this kind."""
    from advisor.kernels import _device, _launch, _ops

    _ops.device_reasons = lambda *tensors: []
    _device.device_reasons = lambda *tensors: []
    _launch.architecture = _device.architecture = lambda device: f"sm_{capability}"
    _device._INTERPRETED_SM_COUNT = sm_count


def run(case: Case) -> None:
    """Launch, that is compile, what the case's own variant launches."""
    # Random numbers would be written; the compiler looks at shapes alone.
    with torch.random.fork_rng():
        case.variants["ours"](case.inputs())()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", help="a family of kernels")
    parser.add_argument("--quick", action="store_true", help="one or two sizes a kernel")
    parser.add_argument("--grid", action="store_true", help="the grid of sizes")
    parser.add_argument("--capability", type=int, default=90, help="compute capability, 90 for Hopper")
    parser.add_argument("--sm-count", type=int, default=132)
    args = parser.parse_args(arguments)
    for name in ("randn", "randint", "randn_like", "rand"):
        setattr(torch, name, _untouched(getattr(torch, name)))
    pretend(args.capability, args.sm_count)
    compiled = Compiled(args.capability)
    compiled.install()
    module = importlib.import_module(f"advisor.kernels.bench.{args.family}")
    for case in module.grid() if args.grid else module.cases(args.quick):
        run(case)
    print("\n".join(compiled.report()))


def _untouched(function: Any) -> Any:
    """The same tensor on the CPU without its values."""

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("generator", None)
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if function.__name__ == "randn_like":
            return torch.empty_like(*args, **kwargs)
        if function.__name__ == "randint":
            kwargs.setdefault("dtype", torch.int64)
            return torch.zeros(args[-1], **kwargs)
        return torch.empty(*args, **kwargs)

    return empty


if __name__ == "__main__":
    main()
