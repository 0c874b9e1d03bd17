"""What the examples share: options, synthetic data, step times, and one run with or without the callback."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, by the first matrix product

import torch


def _lightning() -> Any:
    """The Lightning package named by ``--lightning``, else whichever is installed."""
    for i, word in enumerate(sys.argv):
        if word.startswith("--lightning"):
            return importlib.import_module(word.partition("=")[2] or sys.argv[i + 1])
    new = importlib.util.find_spec("lightning") is not None
    return importlib.import_module("lightning.pytorch" if new else "pytorch_lightning")


L = _lightning()
ON_GPU = torch.cuda.is_available()
#: Steps after the window that are left out of the times after it.
SETTLE = 3


class Pool(torch.utils.data.Dataset):
    """A few samples made once and handed out again and again, a batch at a time."""

    def __init__(self, samples: int, length: int, *tensors: torch.Tensor) -> None:
        self.samples, self.length, self.tensors = samples, length, tensors

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        picked = torch.tensor(indices) % self.samples
        return tuple(tensor[picked] for tensor in self.tensors)


def labelled_images(labels: torch.Tensor, size: int, generator: torch.Generator) -> torch.Tensor:
    """Noise a little brighter the higher the label, as bytes: a quarter of the work for the loader."""
    shape = (len(labels), 3, size, size)
    images = torch.randint(200, shape, generator=generator) + 5 * labels.view(-1, 1, 1, 1)
    return images.to(torch.uint8)


def as_floats(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 127.5 - 1


def as_is(batch: Any) -> Any:
    return batch


def loader(args: argparse.Namespace, *tensors: torch.Tensor) -> torch.utils.data.DataLoader:
    data = Pool(len(tensors[0]), args.steps * args.batch_size * args.devices, *tensors)
    return torch.utils.data.DataLoader(
        data,
        batch_size=args.batch_size,
        num_workers=args.num_workers,
        pin_memory=ON_GPU,
        persistent_workers=args.num_workers > 0,
        collate_fn=as_is,
    )


class Example(L.LightningModule):
    """A model, its loss and AdamW; its losses stay on the device, so that no step waits for them."""

    def __init__(self, model: torch.nn.Module, loss: Callable[..., torch.Tensor], fused: bool) -> None:
        super().__init__()
        self.model, self.loss, self.fused = model, loss, fused
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = self.loss(self.model(inputs), targets)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=self.fused or None)


class StepTimes(L.Callback):
    """Distance between the ends of successive batches, on the device where there is one."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        if ON_GPU:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def step_ms(self) -> list[float]:
        if ON_GPU:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return [(b - a) * 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]


class BareProfiler(L.Callback):
    """Plain torch.profiler, over the same batches and with the same options as the advisor's."""

    def __init__(self, first: int, capture: int, folder: str) -> None:
        self.first, self.capture, self.folder = first, capture, Path(folder)
        self.profiler: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1
        if done == self.first:
            self.profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=self.capture + 1, repeat=1),
                record_shapes=True,
            )
            self.profiler.start()
        elif self.profiler is not None and self.first < done < self.first + 2 + self.capture:
            self.profiler.step()
        elif self.profiler is not None and done == self.first + 2 + self.capture:
            self.profiler.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(self.folder / "bare.pt.trace.json"))


def parser(name: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options that every example has."""
    options = argparse.ArgumentParser(description=f"Train a {name} on synthetic data.")
    options.add_argument("--advisor", action=argparse.BooleanOptionalAction, default=True)
    options.add_argument(
        "--bare-profiler", action="store_true", help="record with plain torch.profiler instead"
    )
    options.add_argument("--lightning", choices=["lightning.pytorch", "pytorch_lightning"])
    options.add_argument("--steps", type=int, default=120)
    options.add_argument("--warmup-steps", default="auto", help="batches before the window, or auto")
    options.add_argument("--capture-steps", type=int, default=3)
    options.add_argument("--report", action=argparse.BooleanOptionalAction, default=True)
    options.add_argument("--modules", action=argparse.BooleanOptionalAction, default=True)
    options.add_argument("--ranks", default="first", choices=["first", "all"])
    options.add_argument("--batch-size", type=int, default=defaults.get("batch_size", 8))
    options.add_argument("--num-workers", type=int, default=2 if ON_GPU else 0)
    options.add_argument("--precision", default=defaults.get("precision", "32-true") if ON_GPU else "32-true")
    options.add_argument("--devices", type=int, default=1)
    options.add_argument("--strategy", default="auto")
    options.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    options.add_argument("--compile", action="store_true")
    options.add_argument("--fused", action="store_true", help="fused AdamW")
    options.add_argument("--deterministic", action="store_true", help="the same losses in every run")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--out", default="advisor_logs", help="folder for the traces and the report")
    options.add_argument("--losses-out", help="write every loss to this JSON file")
    options.add_argument("--json", action="store_true", help="print the outcome as one JSON line")
    return options


def run(args: argparse.Namespace, module: Any, data: Any) -> None:
    """Train, and print step times around the window and a digest of the losses."""
    times = StepTimes()
    callbacks: list[Any] = [times]
    warmup = args.warmup_steps if args.warmup_steps == "auto" else int(args.warmup_steps)
    advisor = None
    if args.bare_profiler:
        callbacks.append(BareProfiler(int(warmup), args.capture_steps, args.out))
    elif args.advisor:
        from advisor import TrainingAdvisor

        advisor = TrainingAdvisor(
            args.out,
            warmup_steps=warmup,
            capture_steps=args.capture_steps,
            ranks=args.ranks,
            modules=args.modules,
            report=args.report,
        )
        callbacks.append(advisor)
    if args.compile:
        module.model.compile()
    torch.utils.deterministic.fill_uninitialized_memory = False  # no extra kernels for determinism's sake
    trainer = L.Trainer(
        max_epochs=1,
        callbacks=callbacks,
        accelerator="gpu" if ON_GPU else "cpu",
        devices=args.devices,
        strategy=args.strategy,
        precision=args.precision,
        accumulate_grad_batches=args.accumulate,
        deterministic="warn" if args.deterministic else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        report(args, warmup, module, times, advisor)


def report(args: argparse.Namespace, warmup: Any, module: Any, times: StepTimes, advisor: Any) -> None:
    step_ms = times.step_ms()
    losses = torch.stack(module.losses).float().cpu()
    context = read_context(advisor)
    first = context["window"]["first_step"] if context else (None if warmup == "auto" else warmup)
    outcome: dict[str, Any] = {
        "losses_sha256": hashlib.sha256(losses.numpy().tobytes()).hexdigest(),
        "final_loss": float(losses[-1]),
        "steps": len(losses),
        "step_ms": median(step_ms[len(step_ms) // 4 :]),
    }
    if first is not None:
        # step_ms[i] is the time of batch i + 1; batch `first` arms the profiler, the next ones are recorded.
        end = first + 2 + args.capture_steps
        outcome["before_ms"] = median(step_ms[max(0, first - 1 - 30) : first - 1])
        outcome["inside_ms"] = median(step_ms[first + 1 : end - 1])
        outcome["after_ms"] = median(step_ms[end - 1 + SETTLE :])
    if advisor is not None:
        outcome["trace"] = str(advisor.trace_path) if advisor.trace_path else None
        outcome["report"] = str(advisor.report_path) if advisor.report_path else None
        outcome["baseline"] = context and {k: context["baseline"][k] for k in ("median_ms", "noise_ms", "n")}
        outcome["after"] = (
            context
            and context["after"]
            and {k: context["after"][k] for k in ("median_ms", "ratio", "verified")}
        )
    if args.losses_out:
        Path(args.losses_out).write_text(json.dumps(losses.tolist()))
    if args.json:
        print(json.dumps(outcome))
    else:
        for key, value in outcome.items():
            print(f"{key:15} {value}")


def read_context(advisor: Any) -> dict[str, Any] | None:
    if advisor is None or advisor.trace_path is None:
        return None
    import gzip

    with gzip.open(advisor.trace_path, "rb") as file:
        head = file.read(1 << 24).decode(errors="replace")
    found = head.index('"training_advisor":') + len('"training_advisor":')
    return json.JSONDecoder().raw_decode(head, found)[0]


def median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None
