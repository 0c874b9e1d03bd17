"""Of what was replaced in a step, the parts that are wrong by themselves are found, or none."""

import pytest
import torch
from torch import Tensor

from advisor.swap.rewrite.blame import blamed

asked: list[str] = []


def step(scales: dict[str, float]):
    """A step of three parts, each of which a replacement makes larger."""

    def call(w: Tensor, x: Tensor) -> tuple[Tensor]:
        a, b, c = (scales.get(name, 1.0) for name in "abc")
        return ((x @ w * a).tanh().mul(b).square().mean() * c,)

    return call


def found(wrong: dict[str, float], names: str = "abc") -> dict[str, str]:
    asked.clear()

    def made(some):
        asked.append("".join(some))
        return step({name: wrong.get(name, 1.0) for name in some})

    torch.manual_seed(0)
    args = (torch.randn(4, 4, requires_grad=True), torch.randn(8, 4))
    return blamed(list(names), made, step({}), args)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"b": 3.0}, "b"),
        ({"a": 3.0, "c": 0.1}, "ac"),
        ({"b": float("nan")}, "b"),
        # Where each is right by itself, or none is, there is nothing to keep or to leave out.
        ({"a": 1.008, "b": 1.008, "c": 1.008}, ""),
        ({"a": 3.0, "b": 3.0, "c": 3.0}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_parts_that_are_wrong_by_themselves_are_named_where_the_others_are_right(wrong, expected) -> None:
    told = found(wrong)
    assert "".join(sorted(told)) == expected
    for why in told.values():
        assert why.startswith("in the whole step, with nothing else replaced in it, its ")
    assert not told or asked[-1] == "".join(n for n in "abc" if n not in expected)


def test_the_others_must_be_right_together() -> None:
    # GIVEN one that is wrong, and two of which only both together are too far off
    assert found({"a": 3.0, "b": 1.008, "c": 1.008}) == {}
    assert asked[-1] == "bc"


def test_of_one_part_alone_there_is_nothing_to_find_out() -> None:
    assert found({"a": 3.0}, "a") == {}
    assert asked == []
