"""A rewritten step is held against the original as a whole, now and then."""

import pytest
import torch
from torch import Tensor, nn

from advisor.swap.rewrite.alike import Checked, Differs, alike, hold_to


def original(w: Tensor, x: Tensor) -> tuple[Tensor]:
    return ((x @ w).square().mean(),)


def run(call, steps: int = 20, timed: range = range(0)) -> tuple[list[str], list[int]]:
    """What was told, and in which steps the original was asked."""
    told: list[str] = []
    asked: list[int] = []
    step = 0

    def theirs(w: Tensor, x: Tensor) -> tuple[Tensor]:
        asked.append(step)
        return original(w, x)

    checked = Checked(call, theirs, told.append, lambda: step not in timed)
    w = nn.Parameter(torch.randn(4, 4))
    for i in range(steps):
        step = i + 1
        w.grad = None
        checked(w, torch.randn(3, 4))[0].backward()
        assert w.grad is not None
    return told, asked


def test_what_is_right_is_asked_about_ever_more_rarely() -> None:
    assert run(lambda w, x: original(w, x)) == ([], [1, 4, 16])


def test_a_step_that_is_timed_is_not_asked_about_and_one_after_it_is() -> None:
    assert run(lambda w, x: original(w, x), timed=range(3, 19)) == ([], [1, 19])


def test_what_is_wrong_from_some_step_on_is_told_once_and_the_original_serves() -> None:
    calls = []

    def drifting(w: Tensor, x: Tensor) -> tuple[Tensor]:
        calls.append(1)
        return (original(w, x)[0] * (1 if len(calls) < 5 else 2),)

    told, asked = run(drifting)
    assert len(told) == 1
    assert "with what was replaced in it, its outputs are not the same" in told[0]
    # The check of the fourth step finds it; from there on each step is the original's.
    assert asked == [1, 4, *range(4, 21)]


@pytest.mark.parametrize("error", [RuntimeError("no"), torch.OutOfMemoryError("no")], ids=str)
def test_what_cannot_be_compared_runs_as_it_is(error: Exception) -> None:
    def refusing(w: Tensor, x: Tensor) -> tuple[Tensor]:
        raise error

    told: list[str] = []
    checked = Checked(original, refusing, told.append)
    w = nn.Parameter(torch.randn(4, 4))
    checked(w, torch.randn(3, 4))[0].backward()
    assert told == []
    assert w.grad is not None


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_finite_number_in_both_is_the_same_and_in_one_is_not(value: float) -> None:
    plain = torch.tensor([1.0, 2.0])
    masked = torch.tensor([1.0, value])
    alike("output", [masked], [masked.clone()])
    for mine, expected in ((masked, plain), (plain, masked), (masked * 2, masked)):
        with pytest.raises(Differs, match="not the same"):
            alike("output", [mine], [expected])


@pytest.mark.parametrize(
    ("off", "dtype", "autocast", "right"),
    [
        (0.1, torch.float32, False, False),
        (0.1, torch.float32, True, True),
        (0.1, torch.bfloat16, False, True),
        (0.5, torch.bfloat16, False, False),
        (0.01, torch.float32, False, True),
    ],
)
def test_what_has_no_16_bits_is_held_to_less(off, dtype, autocast, right) -> None:
    exact = [torch.randn(50, dtype=dtype)]
    mine: list[Tensor | None] = [exact[0] * (1 + off)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        if right:
            hold_to((exact, exact), mine, mine)
        else:
            with pytest.raises(Differs, match="not the same"):
                hold_to((exact, exact), mine, mine)
