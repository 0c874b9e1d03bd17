"""Whole training runs in a Lightning Trainer: eager, swap, Liger, torch.compile, swap with torch.compile, and
with PyTorch's own attention written into the model.

    python benchmarks/end_to_end.py --quick                 one round each, under twelve minutes on an H200
    python benchmarks/end_to_end.py                         three rounds, all variants, loss curves of all
    python benchmarks/end_to_end.py --only gpt2 --variants eager swap swap_unreplayed
    python benchmarks/end_to_end.py --tiny --only mixer     tiny models on the CPU: does it run at all

A process a model, which ends with the one that started it. In it the variants take turns, a fresh model
each: every round trains each of them for some steps, whose distances on the device are taken once it runs
steadily (for swap: once that has decided). Peak memory is the allocator's in half of those steps and, where
the step is replayed, what its graphs hold beside (``graph_bytes`` of it); ``largest_peak_bytes`` is that of
all, among which swap may hold one against the loop's own step, with its memory. The loss curve is that of
300 steps: swap, begun at the second batch, and "sdpa", against two seeds of the eager loop. What a child
has measured is written at once, and a later call keeps what is there unless told otherwise (``--again``).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

#: "swap_unreplayed" swaps and leaves the step unreplayed, to tell what each of the two is worth; "sdpa" has
#: `scaled_dot_product_attention` in the model, without swap, to tell what is PyTorch's own doing.
VARIANTS = ("eager", "swap", "compile", "liger", "swap_compile", "swap_unreplayed", "sdpa")
#: Variants of a quick run, besides the eager loop's second turn; the model that matters most gets all.
QUICK, QUICK_FIRST = ("eager", "swap", "compile"), "gpt2"
#: Batches before steps are timed: those that warm up, those in which swap decides, and those that it may pass
#: while kernels are compiled (of what a run has to spare, half).
WARM, DECIDING, COMPILING = 60, 80, 2000
TIMED, CURVE = 30, 300
#: Steps over which curves are compared closely, and the window over which they are smoothed.
CLOSE, SMOOTH = 20, 20
#: Told of results that a later call has added to.
SEVERAL = ", the last of several calls"
#: Of the losses of a curve, each so-many-th is kept.
EVERY = 10
#: Share by which two measurements of one thing may differ.
NOISE = 0.02
PACKAGES = ("triton", "lightning", "pytorch-lightning", "transformers", "timm", "torchvision", "liger-kernel")


def options(task: Any, args: argparse.Namespace) -> dict[str, Any]:
    return {"precision": "32-true" if args.tiny else task.precision}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """A variant's figures over its rounds: median of all steps, the rounds' medians, peak, what swap did."""
    medians = [statistics.median(one["step_ms"]) for one in rounds if one["step_ms"]]
    every = [value for one in rounds for value in one["step_ms"]]
    peaks = [one["peak_bytes"] for one in rounds if one["peak_bytes"] is not None]
    largest = [one["largest_peak_bytes"] for one in rounds if one.get("largest_peak_bytes") is not None]
    graphs = [one["graph_bytes"] for one in rounds if one.get("graph_bytes") is not None]
    reserved = [one["reserved_bytes"] for one in rounds if one.get("reserved_bytes") is not None]
    host = [value for one in rounds for value in one.get("host_ms", ())]
    found: dict[str, Any] = {
        "step_ms": round(statistics.median(every), 4) if every else None,
        "rounds_ms": [round(value, 4) for value in medians],
        "steps": len(every),
        "host_ms": round(statistics.median(host), 4) if host else None,
        "garbage_ms": [round(one["garbage_ms"], 2) for one in rounds if "garbage_ms" in one],
        "peak_bytes": max(peaks, default=None),
        "largest_peak_bytes": max(largest, default=None),
        "graph_bytes": max(graphs, default=None),
        "reserved_bytes": max(reserved, default=None),
        "run_s": [one["seconds"] for one in rounds],
    }
    swaps = next((one["swaps"] for one in reversed(rounds) if "swaps" in one), None)
    if swaps is not None:
        found["swaps"] = {
            "verdict": swaps["verdict"],
            "kept": swaps["kept"],
            "pause_s": swaps["pause_s"],
            "steps": swaps["steps"],
            "sites": [
                {key: site[key] for key in ("kind", "what", "calls_per_step", "chosen", "reason", "trials")}
                for site in swaps["sites"]
            ],
            "stages": rounds[-1].get("stages"),
            "remarks": swaps["remarks"][-20:],
        }
    return found


def curve(
    eager: list[float], other_seed: list[float], swapped: list[float], sdpa: list[float] | None = None
) -> dict[str, Any]:
    """Whether a swapped run learns as the eager one does, and one with PyTorch's own attention in the model.

    Returns:
        ``first_difference``: largest of the first `CLOSE` steps; ``spread`` and ``distance``: mean distance
        of the smoothed curves of the two eager seeds, and of the swapped from the eager one; ``within``;
        ``last_losses`` of the three; ``sdpa``: its distance and last loss, where it was run; ``losses``.
    """
    runs = {"eager": eager, "other_seed": other_seed, "swap": swapped, **({"sdpa": sdpa} if sdpa else {})}
    smooth = [_smoothed(losses) for losses in (eager, other_seed, swapped)]
    spread, distance = _distance(smooth[0], smooth[1]), _distance(smooth[0], smooth[2])
    found: dict[str, Any] = {
        "steps": len(eager),
        "first_difference": max(abs(a - b) for a, b in zip(eager[:CLOSE], swapped[:CLOSE], strict=True)),
        "spread": spread,
        "distance": distance,
        "within": distance <= spread,
        "last_losses": [statistics.mean(losses[-SMOOTH:]) for losses in (eager, other_seed, swapped)],
        "losses": {name: [round(loss, 5) for loss in losses[::EVERY]] for name, losses in runs.items()},
    }
    if sdpa:
        distance = _distance(smooth[0], _smoothed(sdpa))
        found["sdpa"] = {"distance": distance, "last_loss": statistics.mean(sdpa[-SMOOTH:])}
    return found


def _smoothed(losses: list[float]) -> list[float]:
    return [statistics.mean(losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(losses))]


def _distance(one: list[float], other: list[float]) -> float:
    return statistics.mean(abs(a - b) for a, b in zip(one, other, strict=True))


def child(args: argparse.Namespace) -> None:
    """All variants of one model; a line of JSON for each as it is done."""
    from end_to_end_models import tasks
    from end_to_end_run import train

    task = tasks(args.tiny)[args.child]
    missing = task.missing()
    if missing:
        say("skipped", f"{', '.join(missing)} not installed")
        return
    turns: dict[str, list[dict[str, Any]]] = {variant: [] for variant in args.variants}
    order = [variant for _ in range(args.rounds) for variant in args.variants]
    if args.rounds == 1 and "eager" in order and len(order) > 1:
        order.append("eager")  # what has drifted meanwhile
    end_s = time.monotonic() + args.budget_s
    for variant in order:
        reason = _cannot(task, variant)
        if time.monotonic() > end_s:
            reason = reason or "the time was used up"
        if reason:
            if not turns[variant]:
                say("variant", {variant: {"skipped": reason}})
            continue
        swaps = variant.startswith("swap")
        steps = DECIDING if swaps else WARM
        try:
            with tempfile.TemporaryDirectory() as folder:
                turns[variant].append(
                    train(task, variant, steps + args.timed, Path(folder), 0, timed=args.timed,
                          lightning_options=options(task, args), to_spare=COMPILING if swaps else 0)
                )  # fmt: skip
            say("variant", {variant: summary(turns[variant])})
        except Exception as error:  # noqa: BLE001  one variant's failure is a result like any other
            say("variant", {variant: {"failed": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}})
        free()
    if args.curve and "swap" in args.variants and time.monotonic() < end_s:
        losses = []
        runs = [("eager", 0), ("eager", 1), ("swap", 0)]
        if "sdpa" in args.variants and not _cannot(task, "sdpa"):
            runs.append(("sdpa", 0))
        for variant, seed in runs:
            with tempfile.TemporaryDirectory() as folder:
                losses.append(
                    train(task, variant, args.curve, Path(folder), seed, timed=1, warmup_steps=1,
                          lightning_options=options(task, args))["losses"]
                )  # fmt: skip
            free()
            if len(losses) > 2:
                say("curve", curve(*losses))


def _cannot(task: Any, variant: str) -> str:
    import importlib.util

    if variant == "sdpa":
        return "" if task.sdpa is not None else "its attention is not written out here"
    if variant != "liger":
        return ""
    if task.liger is None:
        return "Liger has nothing for this model"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger_kernel is not installed"
    return ""


def free() -> None:
    """Let go of the last model, compiled code included."""
    import torch

    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def say(what: str, content: Any) -> None:
    print(json.dumps({what: content}), flush=True)


def parent(args: argparse.Namespace) -> None:
    """A child for each model; results as they come."""
    record = start_record(args)
    end_s = time.monotonic() + args.budget_s
    for name in args.only:
        if name in record["models"] and not args.again:
            print(f"{name}: kept from before (--again measures anew)")
            continue
        if time.monotonic() > end_s:
            print(f"{name}: not begun, the {args.budget_s:.0f} s are used up")
            continue
        found = record["models"].setdefault(name, {"variants": {}})
        found.pop("failed", None)
        # Of stdin the child sees the end when this process ends, in whatever way.
        with subprocess.Popen(
            command(args, name, end_s - time.monotonic()),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                take(found, name, line)
                write(args.out, record)
        if process.returncode:
            found["failed"] = f"the process ended with status {process.returncode}"
        write(args.out, record)
    for line in slower(record["models"]) or [f"nothing is slower with swaps, beyond {NOISE:.0%}"]:
        print(line)
    print(f"written to {args.out}")


def end_with_parent() -> None:
    """In a child: end this process once the parent has, whose pipe stdin is."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def command(args: argparse.Namespace, name: str, left_s: float) -> list[str]:
    """The child's command line."""
    variants = args.variants
    if args.quick and name != QUICK_FIRST:
        variants = [variant for variant in variants if variant in QUICK]
    curve_steps = args.curve if not args.quick or name == QUICK_FIRST else 0
    words = ["--child", name, "--rounds", str(args.rounds), "--timed", str(args.timed)]
    words += ["--curve", str(curve_steps), "--budget-s", f"{left_s:.0f}"]
    return [sys.executable, __file__, *words, "--variants", *variants, *(["--tiny"] if args.tiny else [])]


def take(found: dict[str, Any], name: str, line: str) -> None:
    """Enter a child's line into the results, and print it."""
    try:
        told = json.loads(line)
    except ValueError:
        print(line, end="")
        return
    if "variant" in told:
        ((variant, figures),) = told["variant"].items()
        found["variants"][variant] = {**figures, "date": today()}
        print(f"{name:10} {variant:13} {_line(figures)}", flush=True)
        return
    dated = {what: {**of, "date": today()} if isinstance(of, dict) else of for what, of in told.items()}
    found.update(dated)
    print(f"{name:10} {json.dumps(told)}", flush=True)


def _line(figures: dict[str, Any]) -> str:
    if figures.get("step_ms") is None:
        return str(figures.get("skipped") or figures.get("failed") or "ended before a step was timed")
    peak = f"{figures['peak_bytes'] / 1e9:6.2f} GB" if figures["peak_bytes"] else "-"
    if figures.get("graph_bytes"):
        peak += f" ({figures['graph_bytes'] / 1e9:.2f} of them its graphs')"
    told = figures.get("swaps", {})
    swaps = "; ".join([told.get("verdict", ""), *(r for r in told.get("remarks", ()) if "CUDA graph" in r)])
    host = f"{figures['host_ms']:7.2f} ms host" if figures.get("host_ms") is not None else ""
    return f"{figures['step_ms']:9.2f} ms {host} {peak}  {figures['run_s'][-1]:6.1f} s  {swaps}"


def start_record(args: argparse.Namespace) -> dict[str, Any]:
    """The results so far, where they are of this machine and these versions; else none."""
    about = {
        "command": "python benchmarks/end_to_end.py " + " ".join(sys.argv[1:]),
        "date": today(),
        "tiny": args.tiny,
        **device_and_versions(),
    }
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    same = all(before.get(key) == about[key] for key in ("device", "versions", "tiny"))
    if same and before["models"]:
        about["command"] += SEVERAL
    return {**about, "models": before["models"] if same else {}}


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def device_and_versions() -> dict[str, Any]:
    import importlib.metadata

    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    return {"device": device, "versions": versions}


def slower(models: dict[str, Any]) -> list[str]:
    """Where a variant with swaps takes longer than the one without, by more than `NOISE`."""
    found = []
    for name, model in models.items():
        times = {variant: figures.get("step_ms") for variant, figures in model["variants"].items()}
        for with_swaps, without in (("swap", "eager"), ("swap_compile", "compile")):
            if times.get(with_swaps) and times.get(without):
                ratio = times[with_swaps] / times[without]
                if ratio > 1 + NOISE:
                    found.append(f"{name}: {with_swaps} takes {ratio:.3f} times {without}'s step")
    return found


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    import torch
    from end_to_end_models import tasks

    names = list(tasks(tiny=True))
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument(
        "--quick", action="store_true", help="one round; all variants and the curve for gpt2 alone"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, on the CPU too")
    parser.add_argument("--rounds", type=int, help="turns of each variant [3, quick 1]")
    parser.add_argument("--timed", type=int, default=TIMED, help="steps timed in a turn")
    parser.add_argument("--curve", type=int, default=CURVE, help="steps of the loss curve; 0 for none")
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin nothing more after so long")
    parser.add_argument("--again", action="store_true", help="measure anew what the results have")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "end_to_end.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        end_with_parent()
    elif not (args.tiny or torch.cuda.is_available()):
        print("end_to_end.py: there is no GPU here: --tiny trains small models on the CPU", file=sys.stderr)
        sys.exit(2)
    args.rounds = args.rounds or (1 if args.quick else 3)
    (child if args.child else parent)(args)


if __name__ == "__main__":
    main()
