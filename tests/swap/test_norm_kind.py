"""Norms are recognised by what they compute, and the bundled kernel then does the same."""

import pytest
import torch
from torch import nn

from advisor.swap.kinds.norm import _looks_like_one, norm, recognised, rounding
from advisor.swap.kinds.registry import Offer
from advisor.swap.site import Example, Site
from advisor.swap.tensors import stand_in
from advisor.swap.verify import verify
from tests.swap.networks import (
    DtypeEpsilonNorm,
    EpsilonOutside,
    GemmaNorm,
    HiddenEpsilonNorm,
    LlamaNorm,
    Scale,
    T5Norm,
    UnbiasedNorm,
)

SIZE = 24


@pytest.mark.parametrize(
    ("module", "rms", "eps", "offset"),
    [
        (nn.LayerNorm(SIZE), False, 1e-5, 0.0),
        (nn.LayerNorm(SIZE, bias=False), False, 1e-5, 0.0),
        (nn.LayerNorm(SIZE, elementwise_affine=False), False, 1e-5, 0.0),
        (nn.LayerNorm((4, 6)), False, 1e-5, 0.0),
        (nn.RMSNorm(SIZE, eps=1e-6), True, 1e-6, 0.0),
        (nn.RMSNorm(SIZE), True, None, 0.0),
        (LlamaNorm(SIZE), True, 1e-6, 0.0),
        (GemmaNorm(SIZE, 1e-5), True, 1e-5, 1.0),
        (T5Norm(SIZE), True, 1e-6, 0.0),
        (HiddenEpsilonNorm(SIZE), False, 1e-5, 0.0),
    ],
)
def test_a_norm_is_recognised_whatever_it_is_called(module, rms, eps, offset) -> None:
    x = torch.randn(3, *(getattr(module, "normalized_shape", None) or (SIZE,)))
    assert _looks_like_one(module)
    found = recognised(module, x)
    assert found is not None
    # eps=None is the input dtype's: in the float64 probe no other number is the same.
    assert (found.rms, found.eps, found.offset) == (rms, eps, offset)


@pytest.mark.parametrize("module", [EpsilonOutside(SIZE), Scale(SIZE), UnbiasedNorm(SIZE)])
def test_what_is_no_norm_is_not_taken_for_one(module) -> None:
    assert recognised(module, torch.randn(3, SIZE)) is None
    assert norm(module, Example((torch.randn(3, SIZE),))) == "computes neither LayerNorm nor RMSNorm"


@pytest.mark.parametrize("module", [nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.Linear(4, 4), nn.PReLU(8)])
def test_other_modules_are_not_even_looked_at(module) -> None:
    assert not _looks_like_one(module)


@pytest.mark.parametrize(
    ("module", "weights", "casting", "result"),
    [
        (LlamaNorm(256), torch.bfloat16, "llama", torch.bfloat16),
        (LlamaNorm(256), torch.float32, "llama", torch.float32),
        (GemmaNorm(256), torch.bfloat16, "fp32", torch.bfloat16),
        (GemmaNorm(256), torch.float32, "fp32", torch.bfloat16),
        (T5Norm(256), torch.bfloat16, "llama", torch.bfloat16),
        (T5Norm(256), torch.float32, "fp32", torch.float32),
        (nn.RMSNorm(256, eps=1e-6), torch.bfloat16, "fp32", torch.bfloat16),
    ],
)
def test_where_a_norm_rounds_is_found_at_the_dtypes_of_the_loop(module, weights, casting, result) -> None:
    module = module.to(weights)
    x = torch.randn(4, 256).bfloat16()
    formula = recognised(module, x)
    assert formula is not None
    found = rounding(module, formula, x, Example((x,)))
    assert found is not None
    assert found[1:] == (casting, result)


def test_a_norm_that_does_something_else_in_half_precision_is_left_alone() -> None:
    class Clamped(LlamaNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.clamp(-2, 2) if x.dtype == torch.float16 else x)

    said = norm(Clamped(SIZE), Example((torch.randn(4, SIZE).half(),)))
    assert said == "does not round as any known norm does, on float16"
    assert isinstance(norm(Clamped(SIZE), Example((torch.randn(4, SIZE),))), Offer)


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(SIZE),
        nn.RMSNorm(SIZE),
        LlamaNorm(SIZE),
        GemmaNorm(SIZE),
        T5Norm(SIZE),
        HiddenEpsilonNorm(SIZE),
        DtypeEpsilonNorm(SIZE),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_candidate_for_a_norm_is_right(module, dtype) -> None:
    if dtype == torch.float16 and isinstance(module, (nn.LayerNorm, HiddenEpsilonNorm)):
        module = module.half()
    x = torch.randn(6, SIZE).to(dtype).requires_grad_()
    offer = norm(stand_in(module), Example((x,)))
    example = Example((stand_in(module), x))
    site = Site(
        "norm", ["n"], "module", "n", type(module).forward, [example], offer.candidates,
        reference=offer.reference,
    )  # fmt: skip
    refused = {c.name: verify(site, c).refused for c in site.candidates}
    bundled = next(name for name in refused if name.startswith("advisor.kernels"))
    assert refused[bundled] == ""


def test_torchs_own_function_is_a_candidate_only_where_it_is_not_the_original() -> None:
    x = torch.randn(4, SIZE)
    names = [c.name for c in norm(GemmaNorm(SIZE), Example((x,))).candidates]
    assert names == ["advisor.kernels.rms_norm"]
    names = [c.name for c in norm(nn.LayerNorm(SIZE), Example((x,))).candidates]
    assert names == ["advisor.kernels.layer_norm"]
    names = [c.name for c in norm(HiddenEpsilonNorm(SIZE), Example((x,))).candidates]
    assert names == ["advisor.kernels.layer_norm", "torch.nn.functional.layer_norm"]


def test_the_code_that_makes_it_permanent_says_which_variant() -> None:
    (found,) = norm(GemmaNorm(SIZE), Example((torch.randn(4, SIZE),))).candidates
    assert found.permanent == "from advisor.kernels import RMSNorm\nRMSNorm(24, eps=1e-06, offset=1)"
