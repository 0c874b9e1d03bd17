"""Lines of evidence stay lines, whatever names a trace has."""

from __future__ import annotations

import numpy as np

from advisor.advice.evidence import kernel_lines, module_line
from tests.advice.rules.steps import Step, loop_of


def test_names_without_end_are_cut():
    # GIVEN an operator, a kernel and a module with names of thousands of characters
    def script(step: Step) -> None:
        step.range(f"advisor::module::{'block.' * 1000}", 0, 100)
        step.run(f"mine::{'o' * 5000}", 10, on_device=20, dur=40, kernel="k" * 5000)

    loop = loop_of(script)
    rows = np.flatnonzero(loop.counted).tolist()
    # THEN each is told by how it begins
    (line,) = kernel_lines(loop, rows)
    assert line.startswith("mine::ooo")
    assert len(line) < 250
    (place,) = module_line(loop, rows)
    assert place.startswith("in block.block.")
    assert len(place) < 250
