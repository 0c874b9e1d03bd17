"""What trials of launch parameters store: where, when and by which command they ran, and their times."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton


def record(module: str, trials: Sequence[Mapping[str, Any]], copy_bytes_per_s: float) -> dict[str, Any]:
    """Trials on this GPU, now, with what tells them from those of another day or machine.

    Args:
        module: that was run, by its full name.
        trials: an entry each.
        copy_bytes_per_s: of this GPU's memory, as measured beside them.
    """
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda or torch.version.hip,
            "triton": triton.__version__,
        },
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": command(module, sys.argv[1:]),
        "copy_bytes_per_s": copy_bytes_per_s,
        "trials": list(trials),
    }


def command(module: str, arguments: Sequence[str]) -> str:
    """The command line, without the name of the file that the results go to."""
    words = list(arguments)
    for at, word in enumerate(words):
        if word == "--output" and at + 1 < len(words):
            words[at + 1] = "FILE"
        elif word.startswith("--output="):
            words[at] = "--output=FILE"
    return shlex.join(["python", "-m", module, *words])


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Replace the file at once, so that an interruption leaves what it held."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.replace(path)
