"""16-bit attention whose gradient goes wrong once keys and values have much in common is never chosen."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from advisor.kernels.attention import attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from advisor.swap import adversaries
from advisor.swap.rewrite.attend import candidates
from advisor.swap.site import Candidate, Example, Site
from advisor.swap.verify import verify
from tests.swap.rewrite.support import one, rand

TOKENS, DIM = 48, 16
COMMON = "keys and values that have much in common"
STRAIGHT = (0, 1, 2, 3)
SETTINGS = {
    "orders": (STRAIGHT,) * 4,
    "batch": None,
    "forms": (),
    "causal": True,
    "diagonal": 0,
    "scale": DIM**-0.5,
    "softcap": 0.0,
    "dropout_p": 0.0,
}


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As autocast on a GPU has it: products in 16 bits, the softmax in fp32."""
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * DIM**-0.5).masked_fill(hidden, -math.inf)
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def bundled(q: Tensor, k: Tensor, v: Tensor, precise: bool) -> Tensor:
    return attention(q, k, v, causal=True, precise_gradient=precise)


PRECISE, PLAIN = partial(bundled, precise=True), partial(bundled, precise=False)


def refusal(original, call, dtype: torch.dtype) -> str:
    inputs = tuple(torch.randn(1, 2, TOKENS, DIM).to(dtype).requires_grad_() for _ in range(3))
    made = Site("attention", ["x"], "pattern", "x", original, [Example(inputs)], [])
    return verify(made, Candidate("c", call, "bundled", deterministic=False)).refused


# The interpreter has no bf16.
@pytest.mark.parametrize(
    ("call", "dtype"),
    [(sdpa, torch.bfloat16), (sdpa, torch.float16), (PLAIN, torch.float16)],
    ids=["SDPA in bf16", "SDPA in fp16", "bundled, plain"],
)
def test_what_rounds_its_output_for_the_backward_is_refused_beside_written_out_attention(
    call, dtype, monkeypatch
) -> None:
    why = refusal(written_out, call, dtype)
    assert why.startswith(f"with {COMMON} (as training makes them): gradient of input 0: ")
    # AND nothing else tells
    every = adversaries.hard

    def without(*args, **options):
        return [(name, hard) for name, hard in every(*args, **options) if COMMON not in name]

    monkeypatch.setattr(adversaries, "hard", without)
    assert refusal(written_out, call, dtype) == ""


def test_the_bundled_kernel_with_precise_gradients_is_taken() -> None:
    assert refusal(written_out, PRECISE, torch.float16) == ""


@pytest.mark.parametrize("call", [PRECISE, PLAIN, sdpa], ids=["precise", "plain", "SDPA"])
def test_beside_a_call_of_sdpa_others_may_be_as_far_off(call) -> None:
    assert refusal(sdpa, call, torch.float16) == ""


def test_in_fp32_nothing_is_refused_for_it() -> None:
    names = [name for name, _ in adversaries.hard(Example((torch.randn(1, 2, 8, 8),) * 3), saturates=True)]
    assert not any(COMMON in name for name in names)
    assert refusal(written_out, sdpa, torch.float32) == ""


def test_keys_and_values_get_the_common_part_and_queries_do_not() -> None:
    # GIVEN keys that lie transposed, and a mask
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    example = Example(
        (
            q.half().requires_grad_(),
            k.mT.half().requires_grad_(),
            v.half().requires_grad_(),
            torch.zeros(8, 8),
        )
    )
    made = dict(adversaries.hard(example, saturates=True))[f"{COMMON} (as training makes them)"]
    args = [t.detach().float() for t in made.args]
    assert args[0].square().mean().sqrt() == pytest.approx(0.25, rel=1e-2)
    for i, axis in ((1, -1), (2, -2)):
        assert args[i].mean(axis).min() > 5
        assert args[i].std() == pytest.approx(1.0, rel=0.1)
    assert args[3].count_nonzero() == 0


def test_the_candidate_of_a_site_is_the_precise_one_and_its_line_needs_no_argument() -> None:
    settings = {**SETTINGS, "compute": torch.float16, "dtype": torch.float16}
    found = {c.name: c for c in candidates(settings, 1)}
    assert [name for name in found if "attention" in name] == ["advisor.kernels.attention"]
    ours = found["advisor.kernels.attention"]
    assert "precise" not in ours.permanent
    assert refusal(written_out, ours.call, torch.float16) == ""
    assert COMMON in refusal(written_out, found["torch SDPA"].call, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "p", "trained", "refused"),
    [
        (torch.float16, 0.25, True, True),
        (torch.float16, 0.0, True, False),
        (torch.float16, 0.25, False, False),
        (torch.float32, 0.25, True, False),
    ],
)
def test_with_dropout_where_values_made_to_be_hard_tell_nothing_torchs_own_are_not_offered(
    dtype, p, trained, refused
) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.mT * DIM**-0.5).softmax(-1), p, True) @ v

    def called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p)

    example = Example(tuple(rand(1, 2, 8, DIM, dtype=dtype, grad=trained) for _ in range(3)))
    found = one("attention", fn, *example.args)
    (theirs,) = [c for c in found.match.candidates if c.name == "torch SDPA"]
    assert any("much in common" in why for why in theirs.unsupported(example)) is refused
    # AND those of a call of PyTorch's own are all the same to it
    others = one("sdpa", called, *example.args).match.candidates
    assert not any("much in common" in why for c in others for why in c.unsupported(example))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", ""])
def test_on_a_gpu_torchs_own_are_refused_and_the_bundled_kernel_is_taken(dtype, backend) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    # GIVEN autocast, which has the softmax in fp32 there, and heads as a projection leaves them
    inputs = tuple(
        torch.randn(2, 512, 4, 64, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    hidden = torch.ones(512, 512, dtype=torch.bool, device="cuda").triu(1)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 8).masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype) @ v

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return sdpa(q, k, v)

    # AND gradients laid out as they come where heads are put beside one another
    strides = {0: inputs[0].stride()}
    example = Example(inputs, autocast=dtype, gradient_strides=strides)
    made = Site("attention", ["x"], "pattern", "x", eager, [example], [])
    call = theirs if backend else PRECISE
    why = verify(made, Candidate("c", call, "bundled", deterministic=False)).refused
    if not backend:
        assert why == ""
    elif backend != "CUDNN_ATTENTION":
        assert COMMON in why
    else:  # whose gradients are wrong before, where another layout came first
        assert "gradient of input" in why
