"""Capture the zoo twice on one GPU: a plain torch.profiler trace, and Nsight Compute's hardware counters.

    python -m benchmarks.counters.capture --out /tmp/zoo            needs ncu on the PATH; some five minutes
    python -m benchmarks.counters.capture --out /tmp/zoo --plain    the trace alone

Writes to the folder:
    NAME.json.gz            the trace, cut down to the windows and to what an analysis reads
    NAME_counters.csv.gz    a row a kernel, in the same order
    NAME_meta.json          device, versions, date, commands, cases that were left out and why
    NAME_raw_sample.csv     the first rows as Nsight Compute printed them

Both runs are processes of their own which do the same calls in the same order. The cases take turns between
families, so that when the time for counters (--budget-s) runs out there is some of each; what has no counters
by then is cut from the trace too. A case whose kernels differ between the runs is left out of both.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from advisor.errors import InputError
from advisor.roofline.counters import Counted, read_counters
from benchmarks.counters.windows import (
    INSTRUCTIONS,
    RANGE,
    agreeing,
    cut_down,
    windows_of,
    write_counters,
    write_gz,
)

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("gpu__time_duration", "dram__bytes_read", "dram__bytes_write", "dram__throughput")
TENSOR = re.compile(r"sm__ops_path_tensor_src_([a-z]+\d+)(_dst_[a-z]+\d+)?")
TENSOR_INSTRUCTIONS = re.compile(r"sm__inst_executed_pipe_tensor(_op_[a-z]+)?")
TENSOR_DTYPES = ("bf16", "fp16", "tf32", "fp8", "int8", "fp64")
#: Used where the device's list of metrics cannot be had.
TENSOR_FALLBACK = (
    "sm__ops_path_tensor_src_bf16_dst_fp32",
    "sm__ops_path_tensor_src_fp16_dst_fp32",
    "sm__ops_path_tensor_src_tf32_dst_fp32",
)
#: Tried when Nsight Compute will not start with the full list.
CORE = (
    *PLAIN[:3],
    "sm__sass_thread_inst_executed_op_ffma_pred_on",
    "sm__sass_thread_inst_executed_op_fadd_pred_on",
    "sm__sass_thread_inst_executed_op_fmul_pred_on",
    *TENSOR_FALLBACK,
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--name", default="zoo")
    options.add_argument("--only", default="", help="cases whose names contain this")
    options.add_argument("--plain", action="store_true", help="the trace alone, without counters")
    options.add_argument("--budget-s", type=float, default=240, help="time for counters")
    options.add_argument("--ncu", default="ncu")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    options.add_argument("--worker", choices=("plain", "ncu"), help=argparse.SUPPRESS)
    options.add_argument("--cases", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    # Both runs find the same compiled kernels, with the same choice among their variants.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(args.out / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(args.out / "triton"))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if args.worker:
        work(args)
        return
    capture(args)


def capture(args: argparse.Namespace) -> None:
    """The whole of it: both runs, then the files."""
    started = time.monotonic()
    plain = worker(args, "plain")
    run(plain)
    outcome = json.loads((args.out / "plain_outcome.json").read_text())
    trace = json.loads((args.out / "plain_trace.json").read_text())
    windows = windows_of(trace)
    say(f"trace: {len(windows)} cases, {time.monotonic() - started:.0f} s")
    counted: list[Counted] = []
    commands: list[str] = [shown(plain)]
    if not args.plain:
        if shutil.which(args.ncu) is None:
            say(f"{args.ncu} is not here: the trace alone is written")
        else:
            counted, done, command = count(args, [window.name for window in windows])
            commands.append(command)
            windows = agreeing([window for window in windows if window.name in done], counted)
            counted = [counted[j] for window in windows for j in window.counted]
    kept = cut_down(trace, windows)
    write_gz(args.out / f"{args.name}.json.gz", json.dumps(kept, separators=(",", ":")))
    if counted:
        write_counters(args.out / f"{args.name}_counters.csv.gz", windows, counted)
    left_out = outcome["left_out"] | {
        name: "no counters, or other kernels than in the trace"
        for name in outcome["ran"]
        if name not in {window.name for window in windows}
    }
    meta = {
        **outcome["environment"],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commands": commands,
        "kernels": sum(len(window.kernels) for window in windows),
        "cases": [window.name for window in windows],
        "left_out": left_out,
    }
    (args.out / f"{args.name}_meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    for name, reason in left_out.items():
        say(f"left out: {name}: {reason}")
    took = time.monotonic() - started
    say(f"{meta['kernels']} kernels of {len(windows)} cases, {took:.0f} s, in {args.out}")


def say(text: str) -> None:
    print(text, flush=True)


def shown(command: Sequence[str]) -> str:
    """A command as it may be written down: without this machine's paths."""
    return " ".join(Path(part).name if part.startswith("/") else part for part in command)


def worker(args: argparse.Namespace, kind: str) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.counters.capture", "--worker", kind, "--out", str(args.out)]
    command += ["--device", args.device, "--only", args.only]
    return command + (["--tiny"] if args.tiny else [])


def run(command: Sequence[str], timeout_s: float | None = None) -> str:
    """Standard output of a command; a worker of ours that fails ends the capture."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        say(f"{command[0]} did not end in {timeout_s:.0f} s")
        # Interrupted, Nsight Compute still writes what it has; the group takes the profiled program along.
        os.killpg(process.pid, signal.SIGINT)
        try:
            output, errors = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
    if process.returncode != 0:
        say(f"{shown(command[:6])} ... returned {process.returncode}\n{output[-2000:]}\n{errors[-3000:]}")
        if command[0] == sys.executable:
            raise SystemExit(1)
    return output


def work(args: argparse.Namespace) -> None:
    """What a worker process does: run the cases, under torch.profiler or under Nsight Compute."""
    import torch

    from benchmarks.counters import zoo

    cases = zoo.interleaved(entry for entry in zoo.all_cases() if args.only in entry.name)
    if args.cases:
        names = args.cases.read_text().splitlines()
        by_name = {entry.name: entry for entry in cases}
        cases = [by_name[name] for name in names]
    maker = zoo.Maker(args.device, args.tiny)
    torch.backends.cudnn.benchmark = False
    if args.worker == "ncu":
        count_cases(args, zoo, cases, maker)
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if args.device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        left_out = zoo.run_cases(cases, maker, lambda name: torch.profiler.record_function(RANGE + name))
        from benchmarks.counters.cases.optimizer import PARAMETERS

        entries = [{"shape": list(shape), "dtype": "fp32", "count": 1} for shape in PARAMETERS]
        profiler.add_metadata_json("parameters", json.dumps(entries))
    profiler.export_chrome_trace(str(args.out / "plain_trace.json"))
    outcome = {
        "ran": [entry.name for entry in cases if entry.name not in left_out],
        "left_out": left_out,
        "environment": environment(args.device),
    }
    (args.out / "plain_outcome.json").write_text(json.dumps(outcome))


def environment(device: str) -> dict[str, Any]:
    import torch

    return {
        "device": torch.cuda.get_device_name() if device != "cpu" else platform.processor() or "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        },
    }


def count_cases(args: argparse.Namespace, zoo: Any, cases: Sequence[Any], maker: Any) -> None:
    """Under Nsight Compute: the profiler is on inside the windows only; stop when the time is up."""
    import torch

    progress = (args.out / "progress.txt").open("a")
    deadline = time.monotonic() + args.budget_s

    @contextmanager
    def window(name: str) -> Iterator[None]:
        torch.cuda.profiler.start()
        try:
            yield
        finally:
            torch.cuda.profiler.stop()
        progress.write(f"done {name}\n")
        progress.flush()

    for entry in cases:
        if time.monotonic() > deadline:
            break
        progress.write(f"start {entry.name}\n")
        progress.flush()
        zoo.run_cases([entry], maker, window)


def count(args: argparse.Namespace, names: Sequence[str]) -> tuple[list[Counted], set[str], str]:
    """Counters of these cases' kernels, the cases done, and the command.

    A case that ends the process is left out, and the rest run again.
    """
    metrics = available_metrics(args.ncu)
    say(f"metrics: {', '.join(metrics)}")
    deadline = time.monotonic() + args.budget_s
    progress = args.out / "progress.txt"
    progress.unlink(missing_ok=True)
    counted: list[Counted] = []
    remaining, done, part = list(names), set[str](), 0
    command: list[str] = []
    while remaining and deadline - time.monotonic() > 30:
        (args.out / "cases.txt").write_text("\n".join(remaining))
        report = args.out / f"part{part}.ncu-rep"
        command = [args.ncu, "--target-processes", "application-only", "--profile-from-start", "off"]
        command += ["--clock-control", "none"]
        command += ["--cache-control", "all", "--metrics", ",".join(metrics), "--force-overwrite"]
        command += ["--export", str(report), *worker(args, "ncu"), "--cases", str(args.out / "cases.txt")]
        command += ["--budget-s", str(max(deadline - time.monotonic() - 20, 10))]
        began = time.monotonic()
        run(command, timeout_s=deadline - time.monotonic() + 60)
        lines = progress.read_text().splitlines() if progress.exists() else []
        begun = [line.split(" ", 1)[1] for line in lines if line.startswith("start ")]
        done = {line.split(" ", 1)[1] for line in lines if line.startswith("done ")}
        say(f"part {part}: {len(begun)} cases begun so far, {time.monotonic() - began:.0f} s")
        if report.exists():
            counted += import_report(args, report, part)
        seen = set(begun)
        if not seen & set(remaining):
            core = with_suffix(CORE)
            if metrics == core:
                break
            say("no case was run; trying again with few metrics")
            metrics = core
            continue
        remaining = [name for name in remaining if name not in seen]
        part += 1
    return counted, done, shown(command)


def import_report(args: argparse.Namespace, report: Path, part: int) -> list[Counted]:
    options = ["--csv", "--page", "raw", "--print-units", "base", "--print-fp"]
    printed = run([args.ncu, "--import", str(report), *options])
    table = args.out / f"part{part}.csv"
    table.write_text(printed)
    if part == 0:
        lines = printed.splitlines()[:14]
        (args.out / f"{args.name}_raw_sample.csv").write_text("\n".join(lines) + "\n")
    try:
        return read_counters(table).launches
    except InputError as error:
        say(f"part {part} holds no counters: {str(error)[:200]}")
        return []


def available_metrics(ncu: str) -> list[str]:
    """The metrics wanted that this device has; a few that most have, where it does not say."""
    listed = run([ncu, "--query-metrics"])
    there = {line.split()[0] for line in listed.splitlines() if line.strip()}
    names = [name for name in PLAIN if not there or name in there]
    for instruction in INSTRUCTIONS:
        spellings = [f"{unit}__sass_thread_inst_executed_op_{instruction}_pred_on" for unit in ("sm", "smsp")]
        names.append(next((name for name in spellings if name in there), spellings[0]))
    tensor = {n for n in there if TENSOR.fullmatch(n) and dtype_of(n) in TENSOR_DTYPES}
    instructions = {n for n in there if TENSOR_INSTRUCTIONS.fullmatch(n)}
    # The whole makes its parts needless, and each metric may cost another replay of every kernel.
    for found, mark in ((tensor, "_dst_"), (instructions, "_op_")):
        names += sorted(n for n in found if mark not in n or n.partition(mark)[0] not in found)
    return with_suffix(names if tensor else [*names, *TENSOR_FALLBACK])


def with_suffix(names: Sequence[str]) -> list[str]:
    suffix = {"dram__throughput": "avg.pct_of_peak_sustained_elapsed"}
    return [f"{name}.{suffix.get(name, 'sum')}" for name in names]


def dtype_of(metric: str) -> str:
    found = TENSOR.fullmatch(metric)
    return found[1] if found else ""


if __name__ == "__main__":
    main()
