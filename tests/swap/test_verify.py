"""A candidate that is wrong in any way is refused, and named; one that is right is not."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from advisor.swap import adversaries
from advisor.swap.site import Candidate, Example, Site
from advisor.swap.verify import Known, verify
from tests.swap import planted
from tests.swap.planted import candidate, random_site, site

ROOT = Path(__file__).parents[2]


def refusal(made: Site, **options) -> str:
    return verify(made, made.candidates[0], **options).refused


def test_a_right_candidate_is_accepted_with_its_error_beside_the_originals() -> None:
    made = site(planted.right)
    trial = verify(made, made.candidates[0])
    assert trial.refused == ""
    assert 0 < trial.error < 1e-6
    assert 0 < trial.eager_error < 1e-6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (planted.wrong_value, "output 0: largest error"),
        (planted.wrong_gradient, "gradient of "),
        (planted.wrong_weight_gradient, "gradient of weight: largest error"),
        (planted.not_a_number, "output 0: not finite where eager is"),
        (planted.raising, "raises RuntimeError: no kernel image"),
        (planted.out_of_memory, "ran out of memory"),
        (planted.writes_input, "writes to its input 1"),
        (planted.writes_weight, "writes to its weight"),
        (planted.nondeterministic, "two runs differ"),
        (planted.other_dtype, "output 0: dtype torch.float64"),
        (planted.other_shape, "output 0: shape (1, 6, 5, 8)"),
        (planted.transposed, "not contiguous"),
        (planted.swallows_nan, "a NaN in the input shows in one result"),
    ],
)
def test_a_wrong_candidate_is_refused_with_what_is_wrong(call, words: str) -> None:
    assert words in refusal(site(call))


def test_an_epsilon_that_real_inputs_hide_shows_on_hard_ones() -> None:
    # GIVEN inputs so large that eps does not count
    made = site(planted.other_eps)
    module, x = made.examples[0].args
    made.examples[0] = Example((module, (x.detach() * 1e3).requires_grad_()))
    # THEN only the hard values tell
    assert refusal(made, adversarial=False) == ""
    assert refusal(made).startswith("with ")


def test_a_weight_that_is_left_out_shows_though_it_is_one() -> None:
    def squares_weight(module: nn.Module, x: Tensor) -> Tensor:
        # Value and gradient are right for a weight of 1.
        w = module.weight
        return planted.right(_with(module, w + (w - 1).square()), x)

    assert refusal(site(squares_weight), adversarial=False) == ""
    assert "everything drawn anew" in refusal(site(squares_weight))


def _with(module: nn.Module, weight: Tensor):
    class Shown:
        pass

    shown = Shown()
    shown.weight, shown.bias, shown.eps = weight, module.bias, module.eps
    return shown


def test_deterministic_mode_takes_only_what_claims_to_be_deterministic() -> None:
    made = site(candidate(planted.right, deterministic=False))
    assert refusal(made) == ""
    assert "deterministic" in refusal(made, deterministic=True)


def test_what_does_not_claim_to_be_deterministic_may_differ_between_runs() -> None:
    assert refusal(site(candidate(planted.nondeterministic, deterministic=False))) == ""


def test_a_candidate_that_says_it_cannot_is_not_called() -> None:
    made = site(Candidate("never", planted.raising, "bundled", unsupported=lambda e: ["rows of odd length"]))
    assert refusal(made) == "rows of odd length"


def test_an_original_that_writes_to_its_input_is_left_alone() -> None:
    def original(x: Tensor) -> Tensor:
        return x.mul_(2)

    made = Site("norm", ["x"], "pattern", "x", original, [Example((torch.randn(4),), grad=False)], [])
    assert verify(made, candidate(lambda x: x * 2, "pure")).refused == "the original writes to its input 0"


def test_a_missing_gradient_is_refused() -> None:
    def detached(module: nn.Module, x: Tensor) -> Tensor:
        return planted.right(module, x.detach())

    assert refusal(site(candidate(detached))) == "gradient of input 1: one has it, the other has not"


def test_a_result_that_is_built_otherwise_is_refused() -> None:
    assert "built otherwise" in refusal(site(candidate(lambda m, x: (planted.right(m, x), None), "pair")))


@pytest.mark.parametrize(
    "call", [planted.writes_input, planted.writes_weight, planted.leaves_grad_mode_off, planted.raising]
)
def test_the_loop_is_after_it_as_before_it(call) -> None:
    # GIVEN a site on a live module, and the loop's state
    made = site(call)
    module = planted.SlowNorm()
    made.examples[0] = Example((module, made.examples[0].args[1]))
    kept = made.examples[0].args[1].detach().clone()
    rng = torch.get_rng_state()
    # WHEN a candidate that misbehaves is tried
    verify(made, made.candidates[0])
    # THEN parameters, gradients, inputs, versions, random numbers and settings are what they were
    assert torch.equal(module.weight, torch.ones(8))
    assert module.weight.grad is None
    assert module.weight._version == 0
    assert torch.equal(made.examples[0].args[1], kept)
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_an_interruption_goes_through_and_leaves_the_state_as_it_was() -> None:
    def interrupted(module: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        raise KeyboardInterrupt

    made = site(candidate(interrupted))
    rng = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        verify(made, made.candidates[0])
    assert torch.equal(torch.get_rng_state(), rng)


def test_inner_casts_of_the_original_do_not_blunt_the_reference() -> None:
    # GIVEN code that computes in float32 whatever it is given, and a candidate ten times less exact
    def original(x: Tensor) -> Tensor:
        return torch.softmax(x.float(), -1, dtype=torch.float32).to(x.dtype)

    def coarse(x: Tensor) -> Tensor:
        return torch.softmax(x, -1) * (1 + 1e-6)

    x = torch.randn(32, 16, requires_grad=True)
    made = Site("softmax", ["x"], "pattern", "softmax", original, [Example((x,))], [])
    trial = verify(made, candidate(coarse))
    assert "output 0" in trial.refused
    assert trial.eager_error > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_under_autocast_is_judged_against_float64(dtype: torch.dtype) -> None:
    linear = nn.Linear(16, 16)
    example = Example((linear, torch.randn(4, 16, requires_grad=True)), autocast=dtype)

    def exact(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x, module.weight, module.bias).to(dtype)

    def rough(module: nn.Module, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, module.weight, module.bias)
        return (y.float() * (1 + 8 * torch.finfo(dtype).eps)).to(dtype)

    made = Site("gate", ["x"], "module", "Linear", nn.Linear.forward, [example], [])
    assert verify(made, candidate(exact)).refused == ""
    assert "output 0" in verify(made, candidate(rough)).refused


def test_only_the_original_may_overflow() -> None:
    # GIVEN float16 that overflows in between, and a candidate that does not
    x = (torch.randn(8, 16).clamp(-1, 1) * 300).half()

    def original(x: Tensor) -> Tensor:
        return x * x / 300

    made = Site("norm", ["x"], "pattern", "x", original, [Example((x,), grad=False)], [])
    wide = candidate(lambda x: (x.float() * x.float() / 300).half(), "wide")
    assert verify(made, wide, adversarial=False).refused == ""


def dropout(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.2) / 0.8


def test_dropout_by_other_random_numbers_of_the_same_law_is_accepted() -> None:
    made = random_site(dropout)
    rng = torch.get_rng_state()
    assert refusal(made) == ""
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x * (torch.rand_like(x) > 0.2), "output 0"),
        (lambda x: x * (torch.rand_like(x) > 0.3) / 0.7, "variance"),
        (lambda x: x * 1.0, "variance"),
        (lambda x: dropout(x.detach()) + 0 * x, "gradient of input 0"),
        (lambda x: x * (torch.rand(x.shape, generator=_OWN) > 0.2) / 0.8, "same random numbers differ"),
        (lambda x: dropout(x).flip(-1), "squared z"),
        (lambda x: dropout(x) * 1.05, "times the original's"),
        (lambda x: dropout(x).double(), "float64"),
    ],
)
def test_dropout_of_another_law_is_refused(call, words: str) -> None:
    call.__name__ = "planted"
    assert words in refusal(random_site(call))


_OWN = torch.Generator().manual_seed(0)


def kept_anew(x: Tensor, p: float) -> Tensor:
    """A mask by other random numbers, of 16 bits each."""
    threshold = round((1 - p) * 65536)
    return (torch.randint(65536, x.shape) < threshold) * (65536 / threshold)


@pytest.mark.parametrize("p", [0.1, 0.01])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_that_is_rounded_once_less_is_of_the_same_law(dtype: torch.dtype, p: float) -> None:
    # GIVEN a sum in float32 with what is dropped from in 16 bits, of which a draw of 32 may drop nothing
    def original(x: Tensor, residual: Tensor) -> Tensor:
        return nn.functional.dropout(x, p) + residual

    def ours(scale: float) -> Candidate:
        return candidate(lambda x, residual: x.float() * kept_anew(x, p) * scale + residual, "ours")

    x, residual = torch.randn(64, 256).to(dtype), torch.randn(64, 256)
    example = Example((x.requires_grad_(), residual.requires_grad_()), rng=True)
    right, wrong = ours(1.0), ours(1.0 - p)
    made = Site("norm", ["drop"], "pattern", "dropout", original, [example], [right, wrong])
    assert verify(made, right, adversarial=False).refused == ""
    # THEN what forgets to scale what it keeps is refused
    assert "output 0" in verify(made, wrong, adversarial=False).refused


class Dropped(torch.autograd.Function):
    """With a mask for the output and one for the gradient, each with its scale."""

    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor, mask_back: Tensor) -> Tensor:
        ctx.save_for_backward(mask_back)
        return (x.float() * mask).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return (dy.float() * ctx.saved_tensors[0]).to(dy.dtype), None, None


def drops(p: float, how: str) -> Candidate:
    """Dropout that is wrong in one way, or right."""

    def planted(x: Tensor) -> Tensor:
        mask = back = kept_anew(x, p)
        if how == "another draw":
            back = kept_anew(x, p)
        elif how == "a share more":
            mask = back = kept_anew(x, 1.5 * p)
        elif how == "the gradient is not scaled":
            back = mask * (1 - p)
        elif how == "none":
            mask = back = torch.ones_like(mask)
        elif how == "rows alike":
            mask = back = kept_anew(x[:1], p).expand(x.shape)
        elif how == "columns alike":
            mask = back = kept_anew(x[:, :1], p).expand(x.shape)
        elif how == "four at a time":
            mask = back = kept_anew(x[:, ::4], p).repeat_interleave(4, 1)
        return Dropped.apply(x, mask, back)

    return candidate(planted)


def dropout_site(p: float, shape: tuple[int, ...], dtype: torch.dtype, *candidates: Candidate) -> Site:
    def original(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, p)

    example = Example((torch.randn(shape).to(dtype).requires_grad_(),), rng=True)
    return Site("norm", ["drop"], "pattern", "dropout", original, [example], list(candidates))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("p", "how", "words"),
    [
        (0.1, "another draw", "not of the outputs' draws"),
        (0.01, "another draw", "not of the outputs' draws"),
        (0.1, "a share more", "output 0"),
        (0.01, "a share more", "output 0"),
        (0.1, "the gradient is not scaled", "gradient of input 0"),
        (0.01, "none", "output 0"),
        (0.1, "rows alike", "of rows together"),
        (0.1, "columns alike", "of neighbours together"),
        (0.1, "four at a time", "of neighbours together"),
    ],
)
def test_masks_that_are_of_another_law_are_refused_in_any_dtype(
    dtype: torch.dtype, p: float, how: str, words: str
) -> None:
    made = dropout_site(p, (64, 256), dtype, drops(p, how))
    assert words in refusal(made, adversarial=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("p", [0.5, 0.01, 0.001])
@pytest.mark.parametrize("shape", [(2, 3), (8, 16), (64, 256)])
def test_dropout_of_few_numbers_and_rare_draws_is_accepted(dtype: torch.dtype, p: float, shape) -> None:
    assert refusal(dropout_site(p, shape, dtype, drops(p, "right")), adversarial=False) == ""


def test_hard_values_are_tried_on_few_rows_where_the_original_takes_fewer() -> None:
    rows: list[int] = []

    def counted(module: nn.Module, x: Tensor) -> Tensor:
        rows.append(x.shape[0])
        return planted.SlowNorm.forward(module, x)

    made = site(counted, shape=(2**16, 8))
    assert verify(made, made.candidates[0]).refused == ""
    assert rows[:2] == [2**16, 2**16]
    assert set(rows[2:]) == {2**15}


def test_hard_values_are_tried_on_all_rows_where_the_original_does_not_take_fewer() -> None:
    def original(module: nn.Module, x: Tensor) -> Tensor:
        return planted.SlowNorm.forward(module, x.view(2**16, 8))

    made = site(candidate(original), shape=(2**16, 8))
    made.original = original
    assert verify(made, made.candidates[0]).refused == ""


def test_where_float64_of_all_rows_does_not_fit_fewer_must_do() -> None:
    def hungry(module: nn.Module, x: Tensor) -> Tensor:
        if x.dtype == torch.float64 and x.shape[0] > 2**15:
            raise torch.OutOfMemoryError("out of memory")
        return planted.SlowNorm.forward(module, x)

    for call, words in ((planted.SlowNorm.forward, ""), (planted.wrong_value, "output 0")):
        made = site(candidate(call), shape=(2**16, 8))
        made.original = hungry
        trial = verify(made, made.candidates[0])
        assert words in trial.refused
        assert trial.error is not None


def test_a_loop_that_sets_tf32_by_torchs_newer_names_can_be_tried_and_is_left_so() -> None:
    code = (
        "import torch\n"
        "from tests.swap.planted import right, site\n"
        "from advisor.swap.verify import verify\n"
        "set_to = getattr(torch.backends.cuda.matmul, 'fp32_precision', None)\n"
        "if set_to is not None: torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "made = site(right)\n"
        "assert verify(made, made.candidates[0]).refused == ''\n"
        "assert set_to is None or torch.backends.cuda.matmul.fp32_precision == 'tf32'\n"
        "print('tried')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout == "tried\n", run.stderr


def test_a_precision_of_products_that_the_loop_has_set_can_still_be_read() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        made = site(planted.right)
        assert verify(made, made.candidates[0]).refused == ""
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def fused_like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as fused kernels have it: the backward makes the scores anew, in sums of another order."""
    return _Recomputed.apply(q, k, v)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        log_sum = scores.logsumexp(-1, keepdim=True)
        out = (scores - log_sum).exp() @ v
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, log_sum = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        scores = sum(a @ b.mT for a, b in zip(q.split(4, -1), k.split(4, -1), strict=True)) * scale
        p = (scores - log_sum).exp()
        ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
        return ds @ k * scale, ds.mT @ q * scale, p.mT @ grad


@pytest.mark.parametrize("seed", range(6))
def test_attention_that_makes_its_scores_anew_is_not_refused_for_rows_of_equal_numbers(
    monkeypatch, seed
) -> None:
    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    torch.manual_seed(seed)
    inputs = tuple(torch.randn(1, 2, 33, 64, requires_grad=True) for _ in range(3))
    made = Site(
        "attention", ["x"], "pattern", "x", written_out, [Example(inputs)], [candidate(fused_like, "fused")]
    )
    every = adversaries.hard

    def only(example: Example, **options):
        return [(name, hard) for name, hard in every(example, **options) if name == "equal rows"]

    monkeypatch.setattr(adversaries, "hard", only)
    assert refusal(made) == ""


def test_what_the_original_gives_is_worked_out_once_for_all_candidates() -> None:
    calls = []

    def counted(module, x):
        calls.append(x.dtype)
        return planted.SlowNorm.forward(module, x)

    def calls_for(*candidates) -> int:
        made = site(*candidates)
        made.original = counted
        known = Known(made)
        calls.clear()
        assert [verify(made, c, known=known).refused for c in made.candidates] == [""] * len(candidates)
        return len(calls)

    alone = calls_for(planted.right)
    assert calls_for(planted.right, planted.right, planted.right) == alone


def test_a_candidate_is_asked_what_it_takes_under_the_calls_own_autocast_and_grad_mode() -> None:
    # GIVEN a kernel that casts two dtypes to one under autocast, and takes them nowhere else
    def mixed(example: Example) -> list[str]:
        on = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
        return [] if on and not torch.is_grad_enabled() else ["dtypes differ outside autocast"]

    made = site(candidate(planted.right, unsupported=mixed))
    assert refusal(made) == "dtypes differ outside autocast"
    made.examples[0] = Example(made.examples[0].args, autocast=torch.bfloat16, grad=False)
    assert refusal(made, adversarial=False) == ""
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


def _rounded(x: Tensor, factor: float) -> Tensor:
    """The mean of x, of which 16 bits are left after it was multiplied; its gradient is exact."""
    return x.mean() + ((x * factor).bfloat16().float() / factor - x).detach().mean()


@pytest.mark.parametrize(
    ("off", "right"), [(lambda x: 0.0, True), (lambda x: 0.02, False)], ids=["as rounded", "wrong"]
)
def test_a_number_that_the_original_happens_to_get_right_is_held_to_what_it_usually_gets(off, right) -> None:
    # GIVEN inputs that the original's rounding leaves as they are, and a candidate that rounds elsewhere
    x = torch.randn(64, generator=torch.Generator().manual_seed(3)).bfloat16().float().requires_grad_()
    made = Site(
        "loss", ["here"], "pattern", "mean", lambda x: _rounded(x, 1.0), [Example((x,))],
        [Candidate("other", lambda x: _rounded(x, 3.0) + off(x), "bundled")],
    )  # fmt: skip
    # WHEN it is verified
    trial = verify(made, made.candidates[0], adversarial=False)
    # THEN it may be off as the original is on inputs like these, and no more
    assert (trial.refused == "") is right
    assert trial.refused == "" or "output 0: largest error" in trial.refused


def test_many_numbers_are_held_to_the_originals_error_on_these_inputs() -> None:
    def rounded(x: Tensor, factor: float) -> Tensor:
        return x + ((x * factor).bfloat16().float() / factor - x).detach()

    x = torch.randn(64, generator=torch.Generator().manual_seed(3)).bfloat16().float().requires_grad_()
    made = Site(
        "loss", ["here"], "pattern", "identity", lambda x: rounded(x, 1.0), [Example((x,))],
        [Candidate("other", lambda x: rounded(x, 3.0), "bundled")],
    )  # fmt: skip
    assert "output 0: largest error" in verify(made, made.candidates[0], adversarial=False).refused


class _SlightlyMore(torch.autograd.Function):
    """Passes a value on; its gradient is off by what three units in the last place of bfloat16 may be."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy * (1 + 3 * 2**-8)


@pytest.mark.parametrize(
    ("autocast", "right"), [(torch.bfloat16, True), (None, False)], ids=["16-bit products", "fp32 products"]
)
def test_gradients_of_16_bit_products_have_16_bits_though_they_are_cast_to_fp32(autocast, right) -> None:
    # GIVEN an input in fp32 that is multiplied in another dtype or its own, which its gradient has then too
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(32, 32, generator=generator) for _ in range(2))
    example = Example((x.requires_grad_(), w), autocast=autocast)
    made = Site(
        "attention", ["here"], "pattern", "x @ w", lambda x, w: (x @ w).float(), [example],
        [Candidate("other", lambda x, w: (_SlightlyMore.apply(x) @ w).float(), "bundled")],
    )  # fmt: skip
    # THEN a gradient is held to that dtype's last places
    refused = verify(made, made.candidates[0], adversarial=False).refused
    assert (refused == "") is right
    assert right or "gradient of input 0" in refused


def test_a_gradient_that_no_16_bit_product_gave_keeps_the_bits_of_fp32() -> None:
    # GIVEN a product in 16 bits, and beside it a bias whose gradient is summed in fp32
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(32, 32, generator=generator) for _ in range(2))
    bias = torch.randn(32, generator=generator).requires_grad_()
    example = Example((x.requires_grad_(), w, bias), autocast=torch.bfloat16)
    made = Site(
        "attention", ["here"], "pattern", "x @ w + bias", lambda x, w, b: (x @ w).float() + b, [example],
        [Candidate("other", lambda x, w, b: (x @ w).float() + _SlightlyMore.apply(b), "bundled")],
    )  # fmt: skip
    assert "gradient of input 2" in verify(made, made.candidates[0], adversarial=False).refused


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v


def _without_hidden_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    hidden = (mask < -1e30).all(-1, keepdim=True)
    return _attended(q, k, v, mask).masked_fill(hidden.expand(*q.shape[:-1], 1), 0.0)


@pytest.mark.parametrize(
    ("rows", "steady", "refused"), [(6, (), True), (6, (3,), False), (1, (), False)], ids=str
)
def test_a_row_that_sees_no_key_in_another_batch_is_tried(rows, steady, refused) -> None:
    # GIVEN a mask from the batch that hides some keys, and all of them from no query
    q, k, v = (torch.randn(1, 2, 6, 8).requires_grad_() for _ in range(3))
    mask = torch.zeros(1, 1, rows, 6)
    mask[..., 4:] = torch.finfo(torch.float32).min
    example = Example((q, k, v, mask))
    made = Site(
        "attention", ["here"], "pattern", "softmax(q @ k.T + mask) @ v", _attended, [example],
        [Candidate("other", _without_hidden_rows, "bundled")], steady=steady,
    )  # fmt: skip
    why = verify(made, made.candidates[0]).refused
    assert why.startswith("with a row that sees no key") is refused, why
    assert refused or not why
