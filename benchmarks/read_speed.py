"""How fast a saved trace is read: the whole `advisor analyze` beside other ways to read the same file.

Each measurement runs in a fresh process. For `advisor analyze` the whole process counts, start-up and report
included; for the others only the read itself does, without imports. Beside the elapsed time stands the
processor time, which a busy machine disturbs less. Peak memory is the process's.

    python benchmarks/read_speed.py trace.json.gz --runs 5
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import importlib.metadata
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parent.parent / "shared/traces/public/v100_large_noshapes.json.gz"
RESULTS = HERE / "results/read_speed.json"

#: Each way to read the file at `path`; only the lines below the mark are timed.
MARK = "# timed"
WAYS = {
    "advisor read": """
        from advisor.trace.read import read_trace
        # timed
        read_trace(path)
    """,
    "json.load (gc off)": """
        import gc, gzip, json
        gc.disable()
        # timed
        json.load(gzip.open(path))
    """,
    "json.load": """
        import gzip, json
        # timed
        json.load(gzip.open(path))
    """,
    "orjson.loads (gc off)": """
        import gc, gzip, orjson
        gc.disable()
        # timed
        orjson.loads(gzip.open(path).read())
    """,
    "orjson.loads": """
        import gzip, orjson
        # timed
        orjson.loads(gzip.open(path).read())
    """,
    "HTA parse": """
        import logging
        from hta.common.trace import parse_trace_file
        logging.disable()
        # timed
        parse_trace_file(path)
    """,
}
ANALYZE = "advisor analyze"
REFERENCE = "json.load (gc off)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", nargs="?", type=Path, default=DEFAULT, help="a .json.gz trace")
    parser.add_argument("--runs", type=int, default=5, help="runs of each; the median counts")
    parser.add_argument("--factor", type=int, default=10, help="how many times larger the second file is")
    parser.add_argument("--only", nargs="+", choices=[ANALYZE, *WAYS], help="measure these alone")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.trace.is_file():
        parser.error(f"{options.trace}: no such file; name a trace")
    chosen = options.only or [ANALYZE, *WAYS]

    with tempfile.TemporaryDirectory() as scratch:
        large = Path(scratch) / f"x{options.factor}.json.gz"
        # In a process of its own: a child's peak memory starts from what its parent held.
        worker = multiprocessing.get_context("spawn").Process(
            target=enlarge, args=(options.trace, large, options.factor)
        )
        worker.start()
        worker.join()
        files = [
            measured_file(path, label, chosen, options.runs, Path(scratch))
            for path, label in (
                (options.trace, options.trace.name),
                (large, f"{options.trace.name}, {options.factor} times"),
            )
        ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    outcome = {**circumstances(), "runs": options.runs, "files": files}
    options.output.write_text(json.dumps(outcome, indent=1) + "\n")


def measured_file(path: Path, label: str, ways: list[str], runs: int, scratch: Path) -> dict[str, object]:
    with gzip.open(path) as file:
        size = sum(len(piece) for piece in iter(lambda: file.read(1 << 24), b""))
    print(f"\n{label}: {size / 1e6:.0f} MB unpacked, {path.stat().st_size / 1e6:.1f} MB stored")
    # Interleaved, so that a busy spell of the machine falls on all alike.
    taken: dict[str, list[Taken]] = {way: [] for way in ways}
    for _ in range(runs):
        for way in ways:
            taken[way].append(analyze(path, scratch) if way == ANALYZE else read(path, WAYS[way]))
    results = {
        way: {
            "seconds": statistics.median(one.seconds for one in each),
            "seconds_all": [round(one.seconds, 3) for one in each],
            "processor_seconds": statistics.median(one.processor_seconds for one in each),
            "peak_bytes": max(one.peak_bytes for one in each),
        }
        for way, each in taken.items()
    }
    report(results)
    return {"file": label, "unpacked_bytes": size, "stored_bytes": path.stat().st_size, "results": results}


def report(results: dict[str, dict[str, Any]]) -> None:
    reference = results.get(REFERENCE)
    print(f"  {'':<22} {'elapsed':>9} {'processor':>11} {'peak':>9}   against {REFERENCE}")
    for way, result in results.items():
        ratios = ""
        if reference:
            kinds = ("seconds", "processor_seconds", "peak_bytes")
            ratios = "   ".join(f"{result[kind] / reference[kind]:.2f}" for kind in kinds)
        print(
            f"  {way:<22} {result['seconds']:7.2f} s {result['processor_seconds']:9.2f} s "
            f"{result['peak_bytes'] / 1e6:6.0f} MB   {ratios}",
            flush=True,
        )


class Taken(NamedTuple):
    """What one measurement took."""

    seconds: float
    processor_seconds: float
    peak_bytes: int


def analyze(path: Path, scratch: Path) -> Taken:
    """One whole `advisor analyze`."""
    command = [sys.executable, "-m", "advisor.cli", "analyze", str(path), "--quiet", "--force"]
    start = time.perf_counter()
    _, usage = run([*command, "-o", str(scratch / "report.html")])
    return Taken(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, peak_bytes(usage))


def read(path: Path, way: str) -> Taken:
    """The timed lines alone, and the process's peak."""
    lines = [line.strip() for line in way.strip().splitlines()]
    at = lines.index(MARK)
    script = [
        "import sys, time",
        "path = sys.argv[1]",
        *lines[:at],
        "start = time.perf_counter(), time.process_time()",
        *lines[at + 1 :],
        "print(time.perf_counter() - start[0], time.process_time() - start[1])",
    ]
    out, usage = run([sys.executable, "-c", "\n".join(script), str(path)])
    elapsed, processor = map(float, out.split()[-2:])
    return Taken(elapsed, processor, peak_bytes(usage))


def run(command: list[str]) -> tuple[str, resource.struct_rusage]:
    """Standard output of a process, and what it used."""
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            errors.seek(0)
            raise SystemExit(f"failed with {child.returncode}: {' '.join(command)}\n{errors.read()[-2000:]}")
    return out, usage


def peak_bytes(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def enlarge(source: Path, target: Path, factor: int) -> None:
    """Write the trace `factor` times over, each copy later than the one before and with ids of its own."""
    with gzip.open(source) as file:
        document = json.load(file)
    events = document.pop("traceEvents")
    timed = [event for event in events if event.get("ph") == "X"]
    span = max(e["ts"] + e.get("dur", 0) for e in timed) - min(e["ts"] for e in timed) + 1000
    ids = ("correlation", "External id", "Ev Idx", "Sequence number")
    step = 1 + max(e.get("args", {}).get(key) or 0 for e in timed for key in ids if key != "Sequence number")
    head = json.dumps(document)[:-1]
    with gzip.open(target, "wb", compresslevel=1) as out:
        out.write(f'{head}, "traceEvents": [\n'.encode())
        for copy in range(factor):
            for event in events:
                if copy:
                    event["ts"] = event.get("ts", 0) + span
                    if isinstance(event.get("id"), int):
                        event["id"] += step
                    arguments = event.get("args", {})
                    for key in ids:
                        if isinstance(arguments.get(key), int) and arguments[key] > 0:
                            arguments[key] += step
            body = ",\n".join(map(json.dumps, events))
            out.write((",\n" if copy else "").encode() + body.encode())
        out.write(b"\n]}")


def circumstances() -> dict[str, object]:
    packages = ("training-advisor", "msgspec", "isal", "numpy", "orjson", "traceinsight", "pandas")
    return {
        "command": " ".join(["python", "benchmarks/read_speed.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "load_average": os.getloadavg()},
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
