"""What recording costs a loop: each example with the callback, without it, and with bare torch.profiler.

    python benchmarks/observer_effect.py                   all three examples, a few minutes on one GPU
    python benchmarks/observer_effect.py --examples gpt

Each run is a process of its own. The same batches are timed in each: before the window, inside it and
after it, as distances between device events at the ends of batches. Two runs without anything give the noise
between runs. The outcome is printed and written to benchmarks/results/observer_effect.json.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Sizes that keep the whole benchmark within a few minutes.
SIZES = {"gpt": ["--batch-size", "4"]}
VARIANTS = {
    "without": ["--no-advisor"],
    "without_again": ["--no-advisor"],
    "advisor": ["--no-report"],
    "bare_profiler": ["--bare-profiler"],
}


def run(example: str, variant: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), "--json", "--deterministic"]
    command += ["--steps", str(args.steps), "--warmup-steps", str(args.warmup_steps)]
    if on_gpu():
        command += SIZES.get(example, [])
    command += ["--out", f"{folder}/{example}_{variant}", *VARIANTS[variant]]
    if args.lightning:
        command += ["--lightning", args.lightning]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    outcome = json.loads(done.stdout.strip().splitlines()[-1])
    return {**outcome, "wall_s": round(time.monotonic() - start, 1)}


@functools.cache
def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def device_and_versions() -> dict[str, Any]:
    import torch

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
    }


def row(example: str, variant: str, outcome: dict[str, Any], reference: dict[str, Any]) -> str:
    before, inside, after = (outcome.get(k) for k in ("before_ms", "inside_ms", "after_ms"))
    same = "equal" if outcome["losses_sha256"] == reference["losses_sha256"] else "DIFFER"
    inside_ratio = f"{inside / before:.2f}x" if inside and before else "-"
    after_ratio = f"{after / before:.3f}x" if after and before else "-"
    return (
        f"{example:8} {variant:15} losses {same:6}  before {before:8.2f} ms  inside {inside:8.2f} ms "
        f"{inside_ratio:>6}  after {after:8.2f} ms {after_ratio:>7}  ({outcome['wall_s']:.0f} s)"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--examples", nargs="+", default=["gpt", "vit", "resnet"])
    options.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    options.add_argument("--steps", type=int, default=120)
    options.add_argument("--warmup-steps", type=int, default=50)
    options.add_argument("--lightning", choices=["lightning.pytorch", "pytorch_lightning"])
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "observer_effect.json")
    args = options.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for example in args.examples:
            results[example] = {}
            for variant in args.variants:
                outcome = run(example, variant, args, folder)
                outcome.pop("trace", None)
                outcome.pop("report", None)
                results[example][variant] = outcome
                reference = results[example][args.variants[0]]
                print(row(example, variant, outcome, reference), flush=True)
            write(args.out, results)
    print(f"written to {args.out}")


def write(path: Path, results: dict[str, Any]) -> None:
    record = {
        "command": "python benchmarks/observer_effect.py " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        **device_and_versions(),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
