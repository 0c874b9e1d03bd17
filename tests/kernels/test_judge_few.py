"""The judge of results that are a few numbers."""

import torch
from advisor.kernels.verify.judge import errors


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
