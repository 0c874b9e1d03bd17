"""Chains of pointwise work, as units follow one another."""

from __future__ import annotations

import time

from advisor.advice.calls import Unit
from advisor.advice.patterns.pointwise import chain
from advisor.roofline.costs import OpCall, Tensor


def unit(at: int, *sizes: int, name: str = "mul") -> Unit:
    inputs = tuple(Tensor((size,), "bf16") for size in sizes)
    return Unit(at, name, 0, 0, [at], calls=[OpCall(f"aten::{name}", inputs)])


def test_a_chain_holds_what_is_of_the_size_of_its_first():
    units = [unit(0, 1 << 20), unit(1, 1 << 20, 1), unit(2, 1 << 19), unit(3, 1 << 19)]
    assert [[one.op for one in group.units] for group in chain(units)] == [[0, 1], [2, 3]]


def test_a_chain_without_end_takes_linear_time():
    units = [unit(at, 1 << 20) for at in range(6000)]
    begun = time.process_time()
    (group,) = chain(units)
    assert len(group.units) == 6000
    assert time.process_time() - begun < 3
