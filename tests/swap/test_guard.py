"""Global state is after a trial as before it."""

import random

import numpy as np
import pytest
import torch

from advisor.swap.guard import kept_state, seed

CPU = [torch.device("cpu")]


def disturb() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_math_sdp(False)
    torch.rand(3)
    random.random()
    np.random.rand()


def state() -> tuple:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.math_sdp_enabled(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


@pytest.mark.parametrize("error", [None, RuntimeError(), KeyboardInterrupt()])
def test_everything_that_was_disturbed_is_put_back(error: BaseException | None) -> None:
    before = state()

    def trial() -> None:
        with kept_state(CPU):
            disturb()
            assert state() != before
            if error is not None:
                raise error

    if error is None:
        trial()
    else:
        with pytest.raises(type(error)):
            trial()
    assert state() == before


def test_a_seed_gives_the_same_numbers_again() -> None:
    with kept_state(CPU):
        seed(CPU, 3)
        first = torch.rand(4)
        seed(CPU, 3)
        assert torch.equal(torch.rand(4), first)
