"""Finds launch parameters of the attention kernels on this GPU, and says how far they get.

    python -m benchmarks.kernels.tune_attention [--dims 64 128] [--budget-s 90] [--skip-checks]
        [--skip-search] [--shape BATCH HEADS TOKENS] [--only TEXT]

Compiling takes longer than timing: candidates are compiled ahead by as many processes as there are cores, the
likeliest first, while another process times those that are ready. Each result is compared with that of the
present parameters, and both with PyTorch's. A candidate that hangs or faults costs its process and is named;
those like it are then left out. It prints rows for `kernels/_attention_launch.py`, then the fastest of each
beside PyTorch's backends, then whether masks, windows, odd lengths and grouped heads come out right.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.kernels import attention_trials
from benchmarks.kernels.attention_trials import CASES, CHECKS, Parameters, Trial, compile_ahead, serve

#: Of each kernel by head dimension, likeliest first: (block, stages, groups, persistent).
ROLES: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {
    "forward": {
        128: [(128, 2, 2, 1), (128, 2, 2, 0), (64, 4, 2, 1), (128, 3, 2, 1)],
        64: [(128, 2, 3, 1), (128, 3, 2, 1), (128, 2, 3, 0), (64, 4, 3, 1)],
    },
    "query_gradient": {
        128: [(64, 3, 2, 1), (64, 3, 2, 0), (128, 2, 2, 1), (64, 4, 2, 1)],
        64: [(128, 3, 2, 1), (64, 4, 2, 1), (128, 3, 2, 0)],
    },
    "key_gradient": {
        128: [(64, 3, 2, 1), (64, 3, 2, 0), (64, 2, 2, 1)],
        64: [(64, 4, 2, 1), (128, 3, 2, 1), (64, 4, 2, 0)],
    },
}
#: (queries, keys, warps, stages) of the kernels without roles, tried after those above.
TILES: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {
    "forward": {128: [(128, 64, 8, 3), (64, 128, 4, 2)], 64: [(128, 128, 8, 2), (128, 128, 8, 3)]},
    "query_gradient": {128: [(64, 64, 4, 2), (128, 64, 8, 3)], 64: [(128, 64, 8, 2), (64, 64, 4, 3)]},
    "key_gradient": {128: [(32, 128, 8, 2), (64, 64, 4, 2)], 64: [(64, 64, 4, 3), (128, 128, 8, 2)]},
}
SILENCE_S = 15.0
#: Kept back for the comparison at the end.
RESERVE_S = 30.0


@dataclass
class Timer:
    """The process that owns the GPU, started again when a trial breaks it."""

    context: Any
    process: Any = None
    pipe: Connection | None = None
    broken: set[tuple[str, bool]] = field(default_factory=set)

    def ask(self, request: tuple[str, Any], patience_s: float = SILENCE_S) -> dict[str, Any]:
        """The answer, or an ``error`` where there was none in time."""
        if self.process is None:
            self.pipe, other = self.context.Pipe()
            self.process = self.context.Process(target=serve, args=(other,), daemon=True)
            self.process.start()
            # Importing PyTorch and its first work on the GPU.
            patience_s += 60.0
        assert self.pipe is not None
        self.pipe.send(request)
        try:
            if self.pipe.poll(patience_s):
                answer = self.pipe.recv()
                if answer.get("fatal"):
                    self.stop()
                return answer
            answer = {"error": f"no answer within {patience_s:.0f} s: it hangs"}
        except (EOFError, ConnectionError):
            answer = {"error": "its process died"}
        self.stop()
        answer["fatal"] = True
        return answer

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def trials(dims: list[int], shape: tuple[int, int, int] | None = None) -> list[Trial]:
    """All of them: what is in the table now, then roles by rank over kernels and dimensions, then tiles."""
    ranked: list[tuple[int, Trial]] = []
    for kernel, by_dim in ROLES.items():
        for dim in dims:
            ranked.append((-1, Trial(kernel, dim, None, shape)))
            ranked += [(n, Trial(kernel, dim, ("roles", *p), shape)) for n, p in enumerate(by_dim[dim])]
            ranked += [(9, Trial(kernel, dim, ("tile", *p), shape)) for p in TILES[kernel][dim]]
    return [trial for _, trial in sorted(ranked, key=lambda entry: entry[0])]


def search(timer: Timer, ready: list[tuple[Trial, Future[str]]], stop: float) -> Parameters:
    """The fastest correct parameters of each kernel and dimension; nothing where those of now are."""
    now: dict[tuple[str, int], dict[str, Any]] = {}
    best: dict[tuple[str, int], tuple[float, Trial]] = {}
    for trial, compiled in ready:
        key = (trial.kernel, trial.dim)
        left = stop - time.monotonic()
        if trial.like in timer.broken:
            compiled.cancel()
            continue
        try:
            failure = compiled.result(timeout=max(left, 0.1))
        except TimeoutError:
            print("  out of time", flush=True)
            break
        answer: dict[str, Any] = {"error": failure} if failure else timer.ask(("time", trial))
        if answer.get("fatal"):
            timer.broken.add(trial.like)
        line = f"{trial.dim:3} {trial.kernel:14} {trial}"
        if "error" in answer:
            print(f"{line}: {answer['error'][:160]}", flush=True)
            continue
        if trial.parameters is None:
            now[key] = answer
        wrong = key in now and answer["error_size"] > 2.0 * now[key]["error_size"] + 1e-4
        verdict = "WRONG" if wrong else ""
        print(
            f"{line}: {answer['ms']:.4f} ms, error {answer['error_size']:.2e} {verdict}",
            flush=True,
        )
        if not wrong and answer["ms"] < best.get(key, (float("inf"), trial))[0]:
            best[key] = (answer["ms"], trial)
    for future in ready:
        future[1].cancel()
    return {key: trial.parameters for key, (_, trial) in best.items() if trial.parameters is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64], choices=sorted(ROLES["forward"]))
    parser.add_argument("--budget-s", type=float, default=90.0, help="stop trying after this long")
    parser.add_argument("--skip-checks", action="store_true", help="not the odd shapes at the end")
    parser.add_argument("--skip-search", action="store_true", help="only compare and check what is there")
    parser.add_argument("--shape", type=int, nargs=3, help="batch, heads and tokens to search with")
    parser.add_argument("--only", default="", metavar="TEXT", help="compare the cases that have TEXT in them")
    args = parser.parse_args()
    stop = time.monotonic() + args.budget_s - RESERVE_S
    context = multiprocessing.get_context("spawn")
    workers = max(min(len(os.sched_getaffinity(0)) - 2, 14), 1)
    with ProcessPoolExecutor(workers, context, attention_trials.prepare) as pool:
        timer = Timer(context)
        found = [] if args.skip_search else trials(args.dims, tuple(args.shape) if args.shape else None)
        ready = [(trial, pool.submit(compile_ahead, [trial])) for trial in found]
        checks = [] if args.skip_checks else CHECKS
        checking = [pool.submit(attention_trials.compile_check, check) for check in checks]
        chosen = search(timer, ready, stop)
        print("\nfor kernels/_attention_launch.py, `roles` under by_role, `tile` under plain, sm_90:")
        for (kernel, dim), parameters in sorted(chosen.items()):
            assert parameters is not None
            print(f"  {kernel}: ({dim}, {parameters[0]}{parameters[1:]})")
        cases = [case for case in CASES if case.dim in args.dims and args.only in str(case)]
        # The processes share what they have compiled through Triton's cache on disk.
        waiting = [pool.submit(attention_trials.compile_case, case, chosen) for case in cases]
        print("\nms: ours with these, ours as the table has it, and PyTorch's backends", flush=True)
        for case, compiled in zip(cases, waiting, strict=True):
            failure = compiled.result()
            answer = {"error": failure} if failure else timer.ask(("compare", (case, chosen)))
            print(f"{case!s:50} {answer.get('line') or answer['error'][:160]}", flush=True)
        for check, compiled in zip(checks, checking, strict=True):
            failure = compiled.result()
            answer = {"error": failure} if failure else timer.ask(("check", check))
            print(f"check {check!s:60} {answer.get('line') or answer['error'][:160]}", flush=True)
        timer.stop()


if __name__ == "__main__":
    main()
