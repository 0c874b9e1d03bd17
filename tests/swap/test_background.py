"""Kernels are compiled while a loop goes on: launches are left out, nothing of the loop's changes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from advisor.swap import background
from advisor.swap.background import Background
from advisor.swap.site import Candidate, Example, Site
from advisor.swap.tensors import stand_in
from tests.swap.compiled import Kernel, as_if_on_a_gpu, compilers, offered, scale_by

pytest.importorskip("triton", reason="this is about Triton's compiler")


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight


def site(*candidates: Candidate) -> Site:
    example = Example((stand_in(Scale()), torch.randn(6, 8, requires_grad=True)))
    return Site("norm", ["scale"], "module", "Scale", Scale.forward, [example], list(candidates))


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    as_if_on_a_gpu(monkeypatch)
    yield
    assert compilers() == []


def test_what_a_candidate_launches_is_compiled_in_a_thread_and_not_launched(caplog) -> None:
    caplog.set_level("DEBUG", logger="advisor.swap")
    kernel = Kernel()
    made = site(offered(kernel))
    before, state = made.examples[0].args[1].clone(), torch.get_rng_state()

    compiling = Background([made])
    assert compiling.begun == 1
    assert compiling.wait(20)
    compiling.stop()

    assert [name[:21] for name in kernel.compiled_in] == ["advisor-swap-compiler"]
    assert kernel.launches == 0
    noted, beside = (record.swap for record in caplog.records if hasattr(record, "swap"))
    assert noted["kernels"] == 1
    assert beside["left"] == 0
    # AND nothing of the loop's has changed
    assert torch.equal(made.examples[0].args[1], before)
    assert torch.equal(torch.get_rng_state(), state)
    # AND it is at hand for whoever launches it
    scale_by(kernel)(*made.examples[0].args).sum().backward()
    assert kernel.launches == 2
    assert len(kernel.compiled_in) == 1


def test_who_launches_it_meanwhile_waits_for_the_thread_that_compiles() -> None:
    released = threading.Event()
    kernel = Kernel(lambda: released.wait(20))
    made = site(offered(kernel))
    compiling = Background([made])
    assert not compiling.done

    threading.Timer(0.2, released.set).start()
    y = scale_by(kernel)(*made.examples[0].args)

    assert torch.equal(y, made.examples[0].args[1])
    assert len(kernel.compiled_in) == 1
    compiling.stop()


def test_who_launches_what_no_thread_has_begun_compiles_it_and_waits_for_no_other(monkeypatch) -> None:
    monkeypatch.setattr(background, "_MOST_THREADS", 1)
    released = threading.Event()
    first, second = Kernel(lambda: released.wait(20)), Kernel()
    made = [site(offered(first)), site(offered(second))]
    compiling = Background(made)

    scale_by(second)(*made[1].examples[0].args)

    assert second.compiled_in == ["MainThread"]
    assert not compiling.done
    released.set()
    compiling.stop()
    assert len(second.compiled_in) == 1


def test_what_stop_leaves_uncompiled_is_compiled_where_it_is_launched(monkeypatch) -> None:
    monkeypatch.setattr(background, "_MOST_THREADS", 1)
    begun, released = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        released.wait(20)

    first, second = Kernel(slow), Kernel()
    made = [site(offered(first)), site(offered(second))]
    compiling = Background(made)
    assert begun.wait(20)
    threading.Timer(0.2, released.set).start()

    compiling.stop()

    # THEN the one that was being compiled is there, and the other one was not begun
    assert len(first.compiled_in) == 1
    assert second.compiled_in == []
    scale_by(second)(*made[1].examples[0].args)
    assert second.compiled_in == ["MainThread"]
    assert second.launches == 1


def test_what_cannot_be_compiled_fails_where_it_is_launched_as_ever() -> None:
    def fails() -> None:
        raise RuntimeError("ptxas died")

    kernel = Kernel(fails)
    made = site(offered(kernel))
    compiling = Background([made])
    assert compiling.wait(20)
    compiling.stop()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="ptxas died"):
            scale_by(kernel)(*made.examples[0].args)
    assert kernel.launches == 0


def test_launches_of_other_threads_are_not_left_out() -> None:
    theirs, inside, ran = Kernel(), threading.Event(), threading.Event()

    def other() -> None:
        inside.wait(20)
        scale_by(theirs)(Scale(), torch.ones(2, 8))
        ran.set()

    thread = threading.Thread(target=other)
    thread.start()

    def call(module, x):
        inside.set()
        assert ran.wait(20)
        return module(x)

    assert Background([site(Candidate("waits", call, "bundled"))]).begun == 0
    thread.join(20)
    assert theirs.launches == 1


def test_faults_and_refusals_are_passed_over_and_the_others_are_compiled() -> None:
    def fails(module, x):
        raise RuntimeError("no kernel image is available")

    kernel, never = Kernel(), Kernel()
    refused = Candidate("refused", scale_by(never), "bundled", unsupported=lambda example: ["too wide"])
    compiling = Background([site(Candidate("fails", fails, "bundled"), refused, offered(kernel))])
    assert compiling.begun == 1
    assert compiling.wait(20)
    compiling.stop()
    assert never.compiled_in == []


def test_what_is_compiled_already_is_not_compiled_again() -> None:
    kernel = Kernel()
    made = site(offered(kernel))
    scale_by(kernel)(*made.examples[0].args)
    compiling = Background([made])
    assert compiling.begun == 0
    assert compiling.done
    compiling.stop()


def test_a_triton_that_compiles_nothing_apart_is_left_alone(monkeypatch) -> None:
    import triton

    kernel = Kernel()
    monkeypatch.delattr(triton, "AsyncCompileMode")
    assert Background([site(offered(kernel))]).begun == 0
    assert (kernel.compiled_in, kernel.launches) == ([], 0)


def test_where_someone_else_compiles_apart_nothing_is_begun() -> None:
    import triton

    kernel = Kernel()
    with triton.AsyncCompileMode(None):
        assert Background([site(offered(kernel))]).begun == 0
    assert (kernel.compiled_in, kernel.launches) == ([], 0)


def test_an_interruption_goes_through_and_launches_are_launched_again() -> None:
    kernel = Kernel()
    made = site(offered(kernel))

    def interrupts(module, x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Background([made, site(Candidate("interrupts", interrupts, "bundled"))])
    scale_by(kernel)(*made.examples[0].args)
    assert kernel.launches == 1


SCRIPT = '''
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Driver:
    """A GPU that is not here: kernels are compiled for it, and a launch is an error."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@triton.jit
def double(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, 2 * tl.load(x + at))


def call(x):
    out = torch.empty_like(x)
    double[(1,)](x, out, N=64)
    return out


if __name__ == "__main__":
    driver.set_active(Driver())
    from advisor.swap import ahead
    from advisor.swap.background import Background
    from advisor.swap.site import Candidate, Example, Site

    ahead._on_gpu = lambda example: True
    kinds = torch.float32, torch.float16
    examples = [Example((torch.ones(64, dtype=kind),), grad=False) for kind in kinds]
    sites = [
        Site("norm", ["a"], "pattern", "2 * x", call, [one], [Candidate("double", call, "bundled")])
        for one in examples
    ]
    compiling = Background(sites)
    assert compiling.begun == 2, compiling.begun
    assert compiling.wait(100)
    compiling.stop()
    table = double.device_caches[0][0]
    assert [type(made).__name__ for made in table.values()] == ["CompiledKernel"] * 2, table
    assert all("ptx" in made.asm for made in table.values())
    assert Background(sites).begun == 0
    print("compiled")
'''


def test_tritons_own_compiler_is_told_what_to_compile_without_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    own = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0", "PYTHONPATH": os.getcwd()}
    made = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **own}, capture_output=True, text=True, timeout=180
    )
    assert made.stdout.strip() == "compiled", made.stderr
