"""Measure pairs one after the other, then judge their traces."""

from __future__ import annotations

import argparse
import fnmatch
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.payoff import judge
from benchmarks.payoff.processes import Processes
from benchmarks.payoff.store import RESULTS, Store, stored_cases, write_results

#: Longest that a case may take, compilation included.
_LIMIT_S = 180.0


def measure_all(args: argparse.Namespace, store: Store) -> bool:
    """Measure what is chosen and not there yet; whether all of it went well."""
    from benchmarks.payoff.case import all_cases
    from benchmarks.payoff.measure import QUICK, TINY, Plan, has_gpu, in_child

    plan = TINY if args.tiny else QUICK if args.quick else Plan()
    cases, start = all_cases(), time.monotonic()
    chosen = _chosen(args.only, list(cases))
    if not (args.tiny or has_gpu()):
        raise SystemExit("there is no GPU here: --tiny tries the cases without one")
    processes = Processes(["benchmarks.payoff.measure", "benchmarks.payoff.cases"], args.start_method)
    well = True
    for at, name in enumerate(chosen, 1):
        if not args.again and store.has(name, asdict(plan)):
            continue
        if time.monotonic() - start > args.budget_s:
            print(f"{args.budget_s:.0f} s are over: {name} and what follows are left for another run")
            return False
        began = time.monotonic()
        answer = processes.run(in_child, name, plan, store.folder, timeout_s=_LIMIT_S)
        took = f"({time.monotonic() - began:.0f} s, {at} of {len(chosen)})"
        if isinstance(answer, str):
            well = False
            print(f"{name:28} failed: {answer} {took}", flush=True)
            continue
        machine, outcome = answer
        store.add(name, machine, outcome)
        after = "" if outcome["after_ms"] is None else f" -> {outcome['after_ms']:8.2f}"
        print(f"{name:28} {outcome['before_ms']:8.2f}{after} ms {took}", flush=True)
    return well


def judge_all(args: argparse.Namespace, store: Store, command: str) -> bool:
    """Analyse the traces, print and write the verdicts; whether all figures are reached."""
    some = _chosen(args.only if args.judge_only else [], list(store.cases))
    names = [name for name in some if store.trace(name).exists()]
    for name, report in _reports(names, store, args.jobs):
        store.cases[name]["verdict"] = judge.verdict(store.cases[name], report)
        print(judge.line(name, store.cases[name]), flush=True)
    if len(names) < len(store.cases):
        return True
    # What small sizes give says nothing, and is not the benchmark's result.
    tiny = any(case["plan"]["tiny"] for case in store.cases.values())
    output = args.output or (store.folder / "results.json" if tiny else RESULTS)
    others = stored_cases(output, store) if args.merge else {}
    found = judge.figures({**others, **store.cases})
    for figure in found:
        print(f"{figure.name}: {figure.value:g} ({figure.goal}){'' if figure.reached else '  NOT REACHED'}")
    write_results(output, store, command, [figure._asdict() for figure in found], others)
    print(f"written to {output}")
    return all(figure.reached for figure in found)


def _reports(names: list[str], store: Store, jobs: int) -> Iterator[tuple[str, dict]]:
    with ThreadPoolExecutor(jobs) as pool:
        baselines = [store.cases[name]["before_ms"] for name in names]
        yield from zip(names, pool.map(judge.analyze, map(store.trace, names), baselines), strict=True)


def _chosen(only: list[str], names: list[str]) -> list[str]:
    unknown = [wanted for wanted in only if not fnmatch.filter(names, wanted)]
    if unknown:
        raise SystemExit(f"no case {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    return [name for name in names if not only or any(fnmatch.fnmatch(name, wanted) for wanted in only)]


def main() -> None:
    from benchmarks import payoff

    options = argparse.ArgumentParser(
        prog="python -m benchmarks.payoff",
        description=payoff.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--only", nargs="+", default=[], metavar="CASE", help="or a pattern: 'other_*'")
    options.add_argument("--list", action="store_true", help="name the cases and stop")
    options.add_argument("--traces", type=Path, default=Path("advisor_logs/payoff"), metavar="FOLDER")
    options.add_argument("--output", type=Path, metavar="FILE", help="for the verdicts")
    options.add_argument("--merge", action="store_true", help="keep verdicts on what the folder lacks")
    options.add_argument("--again", action="store_true", help="measure anew what is there already")
    options.add_argument("--quick", action="store_true", help="two short rounds")
    options.add_argument("--tiny", action="store_true", help="small sizes, to try the cases without a GPU")
    options.add_argument("--budget-s", type=float, default=float("inf"), help="start no case after so long")
    options.add_argument("--jobs", type=int, default=4, help="traces analysed at a time")
    options.add_argument("--start-method", choices=["forkserver", "spawn"], default="forkserver")
    stages = options.add_mutually_exclusive_group()
    stages.add_argument("--no-judge", action="store_true", help="measure and record alone")
    stages.add_argument("--judge-only", action="store_true", help="judge what --traces holds")
    args = options.parse_args()
    if args.list:
        from benchmarks.payoff.case import all_cases

        for name, case in all_cases().items():
            print(f"{name:28} {case.rule or '(well tuned)':24} {case.title}")
        return
    store = Store(args.traces)
    well = True
    if not args.judge_only:
        well = measure_all(args, store)
    if not args.no_judge and store.cases:
        given = ["FOLDER" if argument == str(args.traces) else argument for argument in sys.argv[1:]]
        command = shlex.join(["python", "-m", "benchmarks.payoff", *given])
        well = judge_all(args, store, command) and well
    sys.exit(not well)


if __name__ == "__main__":
    main()
