"""Tuning attention: the order of trials, and what tables answer while a trial runs."""

import pytest
import torch
from advisor.kernels import _attention_launch as launch
from advisor.kernels.attention import attention_reference
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernels import tune_attention
from benchmarks.kernels.attention_trials import KERNELS, Problem, Shape, Trial, _compile, _use


@pytest.fixture
def tables():
    yield launch.FORWARD
    _use({})


def test_what_is_in_the_table_is_timed_before_what_might_replace_it():
    found = tune_attention.trials([64, 128])
    for kernel in tune_attention.ROLES:
        for dim in (64, 128):
            own = [t.parameters for t in found if (t.kernel, t.dim) == (kernel, dim)]
            assert own[0] is None
            assert [p[0] for p in own[1:]] == sorted(p[0] for p in own[1:])
            assert len(set(own)) == len(own)


def test_a_trial_is_what_its_table_answers_for_its_dimension_alone(tables):
    device = torch.device("cpu")
    before = dict(tables.plain.pick(128, device))
    _use({("forward", 128): ("roles", 64, 4, 2, 0)})
    assert tables.roles.pick(128, device) == launch.roles(64, 4, 2, 0)
    assert not tables.roles.pick(64, device)
    assert tables.plain.pick(128, device) == before
    _use({("forward", 128): ("tile", 64, 32, 4, 2)})
    assert tables.plain.pick(128, device) == launch.tile(64, 32, 4, 2, 1)
    assert not tables.roles.pick(128, device)


def test_after_all_trials_the_tables_answer_as_before(tables):
    device = torch.device("cpu")
    before = dict(tables.plain.pick(128, device))
    _use({("forward", 128): ("tile", 64, 32, 4, 2)})
    _use({})
    assert tables.plain.pick(128, device) == before


@pytest.mark.parametrize("kernels", [KERNELS, *((name,) for name in KERNELS)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_compiled_ahead_takes_the_operators_as_they_are(kernels, dtype):
    with FakeTensorMode():
        assert _compile(Shape(1, 2, 2, 48, 48, 16, causal=True, dtype=dtype), kernels) == ""


def test_what_hangs_in_one_form_is_left_out_in_that_form_alone():
    roles, tile = Trial("forward", 64, ("roles", 128, 2, 2, 1)), Trial("forward", 128, ("tile", 64, 64, 4, 2))
    assert roles.like == Trial("forward", 128, ("roles", 64, 4, 2, 1)).like
    assert roles.like != tile.like
    assert tile.like == Trial("forward", 128, None).like


@pytest.mark.parametrize(
    "mask", ["", "bool_mask", "padding", "causal_padding", "documents", "float_mask", "bias", "alibi"]
)
def test_the_reference_of_a_case_is_attention_with_its_mask(mask):
    # GIVEN a case of two sequences, with two query heads to a key head
    problem = Problem(Shape(2, 4, 2, 48, 48, 16, causal=mask in ("", "alibi"), mask=mask), "cpu")
    for x in (problem.q, problem.k, problem.v, problem.grad):
        x.normal_()
    if problem.mask is not None and mask in ("bias", "alibi"):
        problem.mask.normal_()
    # THEN its parts, worked out one head at a time, are those of all heads together
    leaves = [x.float().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out = attention_reference(*leaves, problem.mask, causal=problem.shape.causal)
    wanted = (out.detach(), *torch.autograd.grad(out, leaves, problem.grad.float()))
    for mine, other in zip(problem.reference(), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
