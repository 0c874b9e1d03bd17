"""Times are taken in turns, with an interval; what fails is left out and says why."""

from collections.abc import Callable

import pytest
import torch

from advisor.swap.clocks import MIN_ROUNDS, CpuClock, CudaClock
from advisor.swap.measure import ORIGINAL, interval, measure, timed
from advisor.swap.site import Example
from tests.swap import planted
from tests.swap.planted import ToldClock, site


class Steps:
    """A counter of nanoseconds that each call moves on by its own amount."""

    def __init__(self) -> None:
        self.now, self.order = 0, []

    def call(self, name: str, *costs: int) -> Callable[[], None]:
        costs_left = list(costs)

        def run() -> None:
            self.order.append(name)
            self.now += costs_left.pop(0) if len(costs_left) > 1 else costs_left[0]

        return run

    def __call__(self) -> int:
        return self.now


def test_calls_take_turns_and_the_first_run_of_each_is_not_counted() -> None:
    steps = Steps()
    calls = {"a": steps.call("a", 900, 10), "b": steps.call("b", 800, 20)}
    times = CpuClock(steps).times(calls, budget_s=0.0)
    assert times == {"a": [10.0] * MIN_ROUNDS, "b": [20.0] * MIN_ROUNDS}
    assert steps.order[:8] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_what_is_hopelessly_slow_is_run_once() -> None:
    steps = Steps()
    calls = {"original": steps.call("original", 10), "slow": steps.call("slow", 1000)}
    times = CpuClock(steps).times(calls, budget_s=0.0)
    assert times["slow"] == [1000.0]
    assert len(times["original"]) == MIN_ROUNDS


def test_the_original_is_timed_in_full_even_if_it_is_the_slow_one() -> None:
    steps = Steps()
    calls = {"original": steps.call("original", 1000), "fast": steps.call("fast", 10)}
    times = CpuClock(steps).times(calls, budget_s=0.0)
    assert len(times["original"]) == MIN_ROUNDS


def test_the_interval_of_a_median_is_between_order_statistics() -> None:
    # Binomial(25, 1/2): 12.5 -+ 4.9
    assert interval([float(i) for i in range(25)]) == (7.0, 18.0)
    assert interval([3.0]) == (3.0, 3.0)


def test_a_variant_that_fails_is_left_out_and_says_why() -> None:
    made = site(planted.right, planted.raising, planted.out_of_memory)
    found = measure(made, clock=ToldClock({"original": 10.0, "right": 5.0}))
    assert found["raising"].failure.startswith("raises RuntimeError")
    assert found["out_of_memory"].failure.startswith("ran out of memory")
    assert found["right"].median_ns == 5.0
    assert next(iter(found)) == ORIGINAL


def test_measuring_runs_forward_and_backward_and_accumulates_nothing() -> None:
    # GIVEN a call whose backward can be seen
    seen: list[str] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append("forward")
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            seen.append("backward")
            return dy

    module = planted.SlowNorm()
    made = site(lambda m, x: Seen.apply(planted.right(m, x)))
    made.examples[0] = Example((module, made.examples[0].args[1]))
    rng = torch.get_rng_state()
    # WHEN it is measured
    found = measure(made, budget_s=0.0)
    # THEN each run had both, and the module has no gradient
    assert seen.count("forward") == seen.count("backward") >= MIN_ROUNDS
    assert module.weight.grad is None
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(timed.median_ns > 0 for timed in found.values())


def test_on_a_cpu_memory_is_what_the_backward_holds_on_to() -> None:
    x = torch.randn(256, requires_grad=True)
    clock = CpuClock()
    assert clock.peak_bytes(lambda: x.exp()) == 1024  # its result
    assert clock.peak_bytes(lambda: x.exp().exp()) == 2048
    assert clock.peak_bytes(lambda: x * 2.0) == 0


def test_a_clock_that_fails_leaves_no_times() -> None:
    class Broken(ToldClock):
        def times(self, calls, budget_s):
            raise RuntimeError("the device is lost")

    found = timed({"original": lambda: None}, Broken({}), 0.1)
    assert found["original"].failure == "raises RuntimeError: the device is lost"


@pytest.mark.gpu
def test_on_a_gpu_a_longer_kernel_takes_longer_and_its_peak_counts_what_it_allocates() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    x = torch.randn(2**26, device="cuda")
    clock = CudaClock(x.device)
    times = clock.times({"one": lambda: x.exp(), "three": lambda: x.exp().exp().exp()}, 0.2)
    one, three = (sorted(times[name])[len(times[name]) // 2] for name in ("one", "three"))
    assert 2 < three / one < 4
    assert clock.peak_bytes(lambda: x.exp()) == x.numel() * 4
