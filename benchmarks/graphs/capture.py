"""Capture a small training step run eagerly and replayed from CUDA graphs, with shapes.

    python benchmarks/graphs/capture.py OUT
    python benchmarks/graphs/capture.py OUT --modes whole callables

Each mode writes OUT/<mode>_eager.json.gz and OUT/<mode>_graph.json.gz, or one file that holds both:

    whole      the whole step in one torch.cuda.graph; eager and graph apart, for `--reference`
    callables  torch.cuda.make_graphed_callables on each block; eager steps, then graphed ones, in one file
    compile    torch.compile, and the same with mode="reduce-overhead"; apart

The projection after attention and the one after the activation write as much and may run the same kernel on
the same grid with another inner size: only their place in the sequence tells them apart.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

BATCH, LENGTH, WIDTH, HEADS, LAYERS, WORDS = 8, 256, 512, 8, 3, 2048
EAGER_STEPS, GRAPH_STEPS, WARM_UP = 2, 3, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1).float(), wanted.flatten())


class Loop:
    """A model, its optimizer and one batch in fixed places, as graphs need them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model().to("cuda", torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True, capturable=True)
        self.words = torch.randint(WORDS, (BATCH, LENGTH), device="cuda")
        self.wanted = torch.randint(WORDS, (BATCH, LENGTH), device="cuda")

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self.words, self.wanted).backward()
        self.optimizer.step()


def warm_up(step: Callable[[], None], times: int = WARM_UP) -> None:
    # Capture needs everything that is set up lazily to be there, and work on a stream of its own.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def record(file: Path, *runs: tuple[Callable[[], None], int]) -> None:
    """Profile so many steps of each, one after the other, into one packed file."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
        # A process's later profiler sessions garble their first records: let these be of no interest.
        for _ in range(8):
            torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        number = 0
        for step, times in runs:
            for _ in range(times):
                with torch.profiler.record_function(f"ProfilerStep#{number}"):
                    step()
                torch.cuda.synchronize()
                number += 1
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(file, "wb", compresslevel=9) as target:
            shutil.copyfileobj(source, target)
    print(f"{file} {file.stat().st_size / 1e3:.0f} kB")


def whole(out: Path) -> None:
    loop = Loop()
    warm_up(loop.step)
    record(out / "whole_eager.json.gz", (loop.step, EAGER_STEPS))
    graph = torch.cuda.CUDAGraph()
    loop.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loop.step()
    graph.replay()
    torch.cuda.synchronize()
    record(out / "whole_graph.json.gz", (graph.replay, GRAPH_STEPS))


def callables(out: Path) -> None:
    plain, graphed = Loop(), Loop()
    sample = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    blocks = torch.cuda.make_graphed_callables(
        tuple(graphed.model.blocks), tuple((sample.clone().detach().requires_grad_(),) for _ in range(LAYERS))
    )
    graphed.model.blocks = nn.ModuleList(blocks)
    warm_up(plain.step)
    warm_up(graphed.step)
    record(out / "callables_both.json.gz", (plain.step, EAGER_STEPS), (graphed.step, GRAPH_STEPS))


def compiled(out: Path) -> None:
    for name, mode, times in (
        ("eager", "default", EAGER_STEPS),
        ("graph", "reduce-overhead", GRAPH_STEPS),
    ):
        torch._dynamo.reset()
        loop = Loop()
        loop.model = torch.compile(loop.model, mode=mode)  # type: ignore[assignment]
        for _ in range(WARM_UP):
            torch.compiler.cudagraph_mark_step_begin()
            loop.step()
        torch.cuda.synchronize()
        record(out / f"compile_{name}.json.gz", (loop.step, times))


MODES = {"whole": whole, "callables": callables, "compile": compiled}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for mode in given.modes:
        MODES[mode](given.out)
