"""Compile what a benchmark will run, in processes side by side, into the caches on disk.

    python -m benchmarks.kernels.ahead norm softmax --quick --budget-s 100

Each process takes a case at a time, makes one set of its inputs and calls each variant once. Afterwards the
process that measures finds Triton's and Inductor's results in their caches. One that ends, hangs or fails
costs its time alone: the measuring process compiles that case itself.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.kernels.spread import Outcome, spread

if TYPE_CHECKING:
    from advisor.kernels.bench.timing import Case

#: The longest for one case, the start of its process included.
LIMIT_S = 90.0
#: Of the GPU's memory, for all processes together.
MEMORY = 0.9


@dataclass(frozen=True)
class Job:
    """What has this name, mostly one case, for another process to find."""

    family: str
    sizes: str
    name: str


def settle_caches() -> None:
    """Have every process look in the same folders, and compile in itself: call this before any does.

    Inductor would move Triton's cache when it first compiles, and start as many processes as there are cores.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def jobs_of(cases: Iterable[tuple[str, Case]], sizes: str) -> list[Job]:
    """A job for each name of a case, in the cases' order."""
    return list(dict.fromkeys(Job(family, sizes, _name(case)) for family, case in cases))


def found(families: Sequence[str], sizes: str, only: str = "") -> Iterator[tuple[str, Case]]:
    """The cases of a choice of sizes, each with its family.

    Args:
        families: by name.
        sizes: ``quick``, ``full`` or ``grid``.
        only: text that their names hold.
    """
    from advisor.kernels.bench.run import cases, grid

    if sizes == "grid":
        yield from grid(families, only)
    else:
        for family in families:
            yield from ((family, case) for case in cases(family, sizes == "quick", only))


def _name(case: Case) -> str:
    return f"{case.kernel} {case.shape} {case.dtype} {case.direction}"


def named(job: Job) -> Iterator[Case]:
    """What has the job's name; the family's cases are made one by one, since some hold masks."""
    return (case for _, case in found([job.family], job.sizes) if _name(case) == job.name)


@functools.cache
def _prepare(share: float) -> None:
    """Once a process: with more than its share of memory it fails, rather than those beside it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)
    leave_choices_untimed()


def leave_choices_untimed() -> None:
    """Have Inductor compile its candidates and run the first: their times here would say little."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    # Without this method a version of torch times them as ever.
    if hasattr(CachingAutotuner, "bench"):
        CachingAutotuner.bench = lambda self, *args, **kwargs: 1.0


def compile_job(job: Job, share: float) -> None:
    """Call the variants of what has the job's name; raises where one fails."""
    _prepare(share)
    for case in named(job):
        call_variants(case)


def call_variants(case: Case) -> None:
    """Call each variant that compiles once, on one set of inputs.

    Raises:
        RuntimeError: names those that failed, and why.
    """
    import torch
    from advisor.kernels.bench.timing import why

    failed = []
    given = case.inputs()
    for name, variant in case.variants.items():
        if name.startswith("eager"):
            continue
        try:
            variant(given)()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001
            failed.append(f"{name}: {why(error)}")
    del given
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if failed:
        raise RuntimeError("; ".join(failed))


def compile_ahead(jobs: Sequence[Job], processes: int, budget_s: float) -> list[Outcome]:
    """What became of each job that was begun and ended within the budget; prints what failed."""
    settle_caches()
    start = time.time()
    began = time.monotonic()
    work = functools.partial(compile_job, share=MEMORY / processes)
    ended = []
    try:
        for outcome in spread(work, jobs, processes=processes, budget_s=budget_s, limit_s=LIMIT_S):
            ended.append(outcome)
            if outcome.failure:
                print(f"  ahead: {outcome.item.name}: {outcome.failure[:300]}", flush=True)
    finally:
        forgotten = forget_tuning(inductor_cache(), start)
    failed = sum(outcome.failure is not None for outcome in ended)
    print(
        f"compiled {len(ended)} of {len(jobs)} cases in {time.monotonic() - began:.0f} s, "
        f"{failed} of them not whole; {sum(outcome.seconds for outcome in ended):.0f} s of {processes} "
        f"processes; {forgotten} of Inductor's choices to be made anew",
        flush=True,
    )
    return ended


def inductor_cache() -> Path:
    """Where Inductor keeps what it compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def forget_tuning(cache: Path, since: float) -> int:
    """Remove Inductor's choices of launch settings since that time: how many.

    It chooses at a kernel's first launch, here untimed or beside the work of other processes. The process
    that measures has the GPU for itself and chooses again, among candidates that are compiled.
    """
    choices = [path for path in cache.rglob("*.best_config") if path.stat().st_mtime >= since - 1]
    for path in choices:
        path.unlink(missing_ok=True)
    return len(choices)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of how much is compiled side by side."""
    parser.add_argument(
        "--jobs", type=int, default=min(os.cpu_count() or 1, 16), metavar="N",
        help="processes that compile ahead; 0 for none",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    settle_caches()
    from advisor.kernels.bench.run import gridded_families, timed_families

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(timed_families())}")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="one or two sizes a kernel")
    which.add_argument("--grid", action="store_true", help="the grids of sizes")
    parser.add_argument("--budget-s", type=float, default=300.0, help="no longer than this")
    add_options(parser)
    args = parser.parse_args(arguments)
    families: list[str] = args.families or (gridded_families() if args.grid else timed_families())
    sizes = "quick" if args.quick else "grid" if args.grid else "full"
    compile_ahead(jobs_of(found(families, sizes), sizes), max(args.jobs, 1), args.budget_s)


if __name__ == "__main__":
    main()
