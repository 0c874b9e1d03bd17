"""The worker process: splice the context into the raw trace, pack it, have it analysed. Imports no torch.

Run as ``python -m advisor.capture.worker JOB.json``; `advisor.capture.output.Worker` starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: The top-level key of the context block in the trace file.
KEY = "training_advisor"
_CHUNK_BYTES = 1 << 20
#: How long other ranks' traces are waited for, and how long with no sign that they are coming.
_RANKS_S = 120.0
_RANKS_SILENT_S = 15.0


def pack(raw: Path, trace: Path, context: dict[str, Any]) -> None:
    """Write ``raw`` with the context block at its front as ``trace``, gzipped, under a temporary name first.

    Raises:
        ValueError: if ``raw`` does not begin with a JSON object.
    """
    from isal import igzip

    temporary = trace.with_name(f".{trace.name}.part")
    try:
        with raw.open("rb") as source, igzip.open(temporary, "wb", compresslevel=2) as target:
            head = source.read(_CHUNK_BYTES).lstrip()
            if not head.startswith(b"{"):
                raise ValueError(f"{raw} is not a trace: it begins with {head[:20]!r}")
            target.write(b"{" + json.dumps(KEY).encode() + b":" + json.dumps(context).encode() + b",")
            target.write(head[1:])
            while chunk := source.read(_CHUNK_BYTES):
                target.write(chunk)
        os.replace(temporary, trace)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def wait_for_ranks(expected: list[Path], *, limit_s: float, silent_s: float) -> list[Path]:
    """The expected traces that exist, once all do or no more are to be waited for.

    A rank that has recorded but not finished has its raw file beside the trace; ranks on other
    machines, whose disk is not shared, never show up.
    """
    start = time.monotonic()
    while True:
        missing = [path for path in expected if not path.exists()]
        if not missing:
            break
        coming = any(path.with_name(f".{path.name.split('.')[0]}.raw.json").exists() for path in missing)
        waited_s = time.monotonic() - start
        if waited_s > limit_s or (not coming and waited_s > silent_s):
            print(f"no trace from: {', '.join(path.name for path in missing)}")
            break
        time.sleep(0.2)
    return [path for path in expected if path.exists()]


def analyze(paths: list[Path], folder: Path) -> int:
    """Write report.html, report.json and report.md into ``folder``; returns the exit status."""
    command = [sys.executable, "-m", "advisor.cli", "analyze", *map(str, paths)]
    command += ["-o", str(folder / "report.html"), "--json", str(folder / "report.json")]
    command += ["--markdown", str(folder / "report.md"), "--force", "--quiet"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def main(job_path: Path) -> int:
    """Do one job; the raw recording is kept if packing fails."""
    with contextlib.suppress(OSError):
        os.nice(10)
    job = json.loads(job_path.read_text())
    raw, trace = Path(job["raw"]), Path(job["trace"])
    pack(raw, trace, job["context"])
    raw.unlink()
    job_path.unlink()
    status = 0
    if job["report"]:
        found = wait_for_ranks([Path(p) for p in job["expected"]], limit_s=_RANKS_S, silent_s=_RANKS_SILENT_S)
        status = analyze(found, trace.parent)
    remove_if_empty(Path(job["log"]))
    return status


def remove_if_empty(log: Path) -> None:
    """Leave no log that says nothing: a run that crashed is no longer there to do it."""
    with contextlib.suppress(OSError):
        if log.stat().st_size == 0:
            log.unlink()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
