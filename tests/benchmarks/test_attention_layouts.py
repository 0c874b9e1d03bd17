"""The script that tells of wrong gradients finds one that is planted, and none where there is none."""

import json
import subprocess
import sys

import torch
from torch import Tensor

from benchmarks.attention_layouts import LAYOUTS, ROOT, WRONG, second_error, ways


class Planned(torch.autograd.Function):
    """The identity, whose backward takes any gradient to be laid out as the first that it met."""

    strides: tuple[int, ...] = ()

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        Planned.strides = Planned.strides or gradient.stride()
        return gradient.as_strided(gradient.shape, Planned.strides)


def test_a_plan_for_one_layout_shows_with_the_other_and_only_then():
    (right,) = ways(tiny=True).values()
    for first in LAYOUTS:
        for second in LAYOUTS:
            assert second_error(right, LAYOUTS[0], first, second, 16) < 0.02
            Planned.strides = ()
            wrong = second_error(lambda q, k, v: Planned.apply(right(q, k, v)), LAYOUTS[0], first, second, 16)
            assert (wrong > WRONG) is (first != second)


def test_it_runs_and_leaves_its_results(tmp_path):
    out = tmp_path / "layouts.json"
    script = str(ROOT / "benchmarks/attention_layouts.py")
    subprocess.run([sys.executable, script, "--tiny", "--out", str(out)], check=True, capture_output=True)
    record = json.loads(out.read_text())
    assert {"device", "versions", "date", "command"} <= record.keys()
    assert len(record["pairs"]) == 8
