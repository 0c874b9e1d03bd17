"""The process's global state, put back as it was whatever happens within."""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


def _flags() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How each global setting is read and set."""
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    flags: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.is_grad_enabled, torch._C._set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda old: torch.use_deterministic_algorithms(old[0], warn_only=old[1]),
        ),
        (lambda: cuda.matmul.allow_tf32, lambda old: setattr(cuda.matmul, "allow_tf32", old)),
        (lambda: cudnn.allow_tf32, lambda old: setattr(cudnn, "allow_tf32", old)),
        (lambda: cudnn.benchmark, lambda old: setattr(cudnn, "benchmark", old)),
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    ]
    for kind in _AUTOCAST_DEVICES:
        flags.append((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)))
        flags.append((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)))
    return flags


def generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The CPU's random numbers' and those of each of these GPUs; no GPU is woken up for it."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += [torch.cuda.default_generators[d.index or 0] for d in devices if d.type == "cuda"]
    return found


def seed(devices: Iterable[torch.device], number: int) -> None:
    """Seed the CPU's random numbers and those of these GPUs, and no others."""
    for generator in generators(devices):
        generator.manual_seed(number)


@contextmanager
def kept_state(devices: Iterable[torch.device]) -> Iterator[None]:
    """Random numbers, grad mode, autocast, numeric and deterministic settings are after it as before it."""
    with ExitStack() as stack:
        for read, write in _flags():
            # Those that the loop has set by torch's newer names cannot be read by the older: left alone.
            with suppress(RuntimeError):
                stack.callback(_put_back, read, write, read())
        for generator in generators(devices):
            stack.callback(generator.set_state, generator.get_state())
        stack.callback(random.setstate, random.getstate())
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            stack.callback(torch.cuda.set_device, torch.cuda.current_device())
        yield


@contextmanager
def unwarned() -> Iterator[None]:
    """Warnings within are neither shown nor made errors: what is tried out may well deserve them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _put_back(read: Callable[[], Any], write: Callable[[Any], Any], old: Any) -> None:
    # Only where it was changed: to write a setting is not always without effect.
    if read() != old:
        write(old)


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """The collector does not start by itself within."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
