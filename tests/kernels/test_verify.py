"""The checks of `advisor kernels check`: they pass as the kernels are, and fail where one is wrong."""

import dataclasses

import pytest
import torch
from advisor.kernels.verify import run
from advisor.kernels.verify.judge import Error, Wrong, errors
from advisor.kernels.verify.probe import Probe, random

CPU = torch.device("cpu")


def probe(ours, **options) -> Probe:
    return Probe("twice", "8x8", ours, lambda x: x * 2, random({"x": (8, 8)}), options=options)


def outcomes(monkeypatch, device, *probes):
    monkeypatch.setattr(run, "probes", lambda family: probes)
    return list(run.verify("family", device))


@pytest.mark.parametrize("family", run.checked_families())
def test_every_familys_first_probe_passes_under_the_interpreter(device, monkeypatch, family):
    if device.type == "cuda":
        pytest.skip("the next test runs all of them")
    first = next(iter(run.probes(family)))
    dtype = "fp32" if "fp32" in first.dtypes else "fp16"
    (outcome,) = outcomes(monkeypatch, device, dataclasses.replace(first, dtypes=(dtype,)))
    assert outcome.ok, outcome.failure


@pytest.mark.gpu
@pytest.mark.quick
@pytest.mark.parametrize("family", run.checked_families())
def test_every_probe_passes_on_a_gpu(device, family):
    if device.type == "cpu":
        pytest.skip("the interpreter runs the first of each")
    assert [outcome for outcome in run.verify(family, device) if not outcome.ok] == []


def test_a_right_kernel_is_told_in_each_dtype_but_the_interpreters_bf16(monkeypatch):
    found = outcomes(monkeypatch, CPU, probe(lambda x: x + x))
    assert [(o.dtype, o.ok, o.failure) for o in found] == [("fp32", True, None), ("fp16", True, None)]
    assert all(o.share <= 1 for o in found)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: x * 2.01, "output 0: rms error"),
        (lambda x: (x * 2).double(), "shape or dtype"),
        (lambda x: x * 2 + torch.rand_like(x) * 0.1, "two runs differ"),
        (lambda x: torch.full((), 1, device="meta") + x, "RuntimeError"),
        (lambda x: x.detach() * 2 + (x - x.detach()), "gradient of x"),
    ],
)
def test_a_wrong_kernel_is_told_with_what_is_wrong_and_the_next_one_is_checked(monkeypatch, wrong, says):
    found = outcomes(monkeypatch, CPU, probe(wrong), probe(lambda x: x + x))
    assert [o.ok for o in found] == [False, False, True, True]
    assert says in found[0].failure


def test_a_second_run_is_on_the_same_inputs_and_torchs_generator_is_as_it_was(monkeypatch):
    torch.manual_seed(3)
    outcomes(monkeypatch, CPU, probe(lambda x: x + x))
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.rand(1) == after


def test_uninitialised_memory_is_poisoned_while_a_kernel_is_judged(monkeypatch):
    # GIVEN a kernel that forgets to write a part of its result
    def forgetful(x):
        y = torch.empty_like(x)
        y[1:] = x.detach()[1:] * 2
        return y + 0 * x

    found = outcomes(monkeypatch, CPU, probe(forgetful, gradients=False))
    assert "not finite" in found[0].failure


def test_errors_are_by_the_largest_and_by_the_root_mean_square():
    truth = torch.zeros(4, dtype=torch.float64)
    # GIVEN ours off by 4 in one of four, eager by 1 in all
    ours, eager = torch.tensor([4.0, 0, 0, 0]), torch.ones(4)
    largest, rms = errors(ours, eager, truth, factor=2, ulps=2, what="output")
    assert (largest.got, largest.eager, largest.allowed) == (4.0, 1.0, 2.0)
    assert (rms.got, rms.eager, rms.allowed) == (2.0, 1.0, 2.0)
    assert (largest.share, rms.share) == (2.0, 1.0)


def test_the_floor_is_in_units_of_the_last_place_of_what_is_large():
    truth = torch.zeros(32, dtype=torch.float64)
    truth[0] = 8.0
    largest, rms = errors(truth.float(), truth.float(), truth, factor=2, ulps=4, what="output")
    eps = torch.finfo(torch.float32).eps
    assert largest.allowed == 4 * eps * 8
    assert rms.allowed == pytest.approx(eps * 8 / 32**0.5, rel=1e-6, abs=0.0)


def test_a_loss_that_is_off_by_one_unit_in_the_last_place_passes():
    # GIVEN one number whose eager result happens to be exact
    truth = torch.tensor(2.9, dtype=torch.float32).double()
    eager = truth.float()
    ours = torch.nextafter(eager, torch.tensor(10.0))

    found = errors(ours, eager, truth, factor=2.0, ulps=2.0, what="loss")

    assert all(error.got <= error.allowed for error in found)


def test_a_loss_that_is_off_by_four_does_not():
    truth = torch.tensor(2.9, dtype=torch.float32).double()
    ours = truth.float() + 4 * 2.0**-22

    found = errors(ours, truth.float(), truth, factor=2.0, ulps=2.0, what="loss")

    assert any(error.got > error.allowed for error in found)


def test_of_many_numbers_the_mean_stays_the_sharper_measure():
    # GIVEN many numbers, all off by one unit in the last place, which no fair rounding is
    truth = torch.full((64,), 1.5, dtype=torch.float64)
    ours = truth.float() + 2.0**-23

    found = {e.measure: e for e in errors(ours, truth.float(), truth, factor=2.0, ulps=2.0, what="y")}

    assert found["largest"].got <= found["largest"].allowed
    assert found["rms"].got > found["rms"].allowed


def test_nothing_allowed_and_nothing_wrong_is_no_share_of_it():
    assert Error("output", "rms", torch.float32, 0.0, 0.0, 0.0).share == 0.0
    assert Error("output", "rms", torch.float32, 1e-9, 0.0, 0.0).share == float("inf")


def test_infinities_must_be_where_eagers_are():
    inf = torch.tensor([torch.inf, 1.0])
    with pytest.raises(Wrong, match="infinities"):
        errors(torch.ones(2), inf, inf.double(), factor=2, ulps=2, what="output")
