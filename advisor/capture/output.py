"""Where the files go, and the process that turns a raw recording into a trace and a report."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Environment of the worker: no GPU is visible to it, and it opens no second set of threads.
_NO_GPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "",
    "ZE_AFFINITY_MASK": "",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one rank's window, all in one folder ``step_<n>``."""

    folder: Path
    rank: int

    @property
    def trace(self) -> Path:
        """The finished trace, context block inside."""
        return self.folder / f"rank{self.rank}.pt.trace.json.gz"

    @property
    def raw(self) -> Path:
        """Kineto's own output, gone once the trace is finished."""
        return self.folder / f".rank{self.rank}.raw.json"

    @property
    def job(self) -> Path:
        """What the worker is to do."""
        return self.folder / f".rank{self.rank}.job.json"

    @property
    def log(self) -> Path:
        """What the worker printed."""
        return self.folder / f"rank{self.rank}.log"

    @property
    def report(self) -> Path:
        """The report page."""
        return self.folder / "report.html"

    def prepare(self) -> None:
        """Make the folder and see that it can be written to.

        Raises:
            OSError: if not.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f".rank{self.rank}.probe"
        probe.write_bytes(b"0" * 4096)
        probe.unlink()

    def discard(self) -> None:
        """Remove what an unfinished capture left, and the folder if nothing else is in it."""
        for leftover in self.folder.glob(f".rank{self.rank}.*"):  # Kineto has a temporary file of its own
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


class Worker:
    """The process that packs the trace and analyses it while training goes on."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, context: dict[str, Any], *, report: bool, ranks: Sequence[int]) -> None:
        """Start it. It sees no GPU, reads no terminal, runs niced and outlives an interrupt.

        Args:
            context: the block to put into the trace.
            report: analyse the traces when they are complete.
            ranks: the ranks whose traces belong in the report.
        """
        files = self.files
        job = {
            "raw": str(files.raw),
            "trace": str(files.trace),
            "log": str(files.log),
            "context": context,
            "report": report,
            "expected": [str(Files(files.folder, rank).trace) for rank in ranks],
        }
        files.job.write_text(json.dumps(job, default=str))
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **_NO_GPU, "PYTHONPATH": os.pathsep.join(paths)}
        with files.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "advisor.capture.worker", str(files.job)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, or None if it is still at work after ``timeout_s``."""
        if self._process is None:
            return None
        deadline = time.monotonic() + timeout_s
        try:
            return self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def last_line(self) -> str:
        """The last thing it printed, which on a failure says why."""
        try:
            lines = self.files.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""
