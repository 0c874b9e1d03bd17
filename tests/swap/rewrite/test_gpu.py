"""On a GPU, where kernels are compiled: whole models under bf16 autocast, generators, checkpoints."""

import pytest
import torch

from advisor.swap.decide import Terms, decide
from advisor.swap.rewrite.wrap import StepRewrite
from tests.swap.rewrite.models import GPT, BertBlock, C, Llama, T, batch
from tests.swap.rewrite.test_models import decided, gradients

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


def on_gpu(*tensors):
    return tuple(t.cuda() for t in tensors)


def under_autocast(call):
    def run():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return call()

    return run


def models():
    tokens = on_gpu(*batch())
    gpt, llama, bert = GPT(2).cuda(), Llama(2).cuda(), BertBlock().cuda()
    x, mask = torch.randn(2, T, C, device="cuda"), torch.ones(2, T, dtype=torch.long, device="cuda")
    return {
        "gpt": (gpt, "training_step", lambda: gpt.training_step(tokens, 0), 2),
        "llama": (llama, "forward", lambda: llama(*tokens), 2),
        "bert": (bert, "forward", lambda: bert(x, mask), 1),
    }


@pytest.mark.parametrize("source", ["torch", "bundled"])
@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_a_model_under_bf16_autocast_keeps_its_gradients(name, source):
    # GIVEN a model, its gradients in fp32, and eager's own under autocast
    module, method, call, layers = models()[name]
    _, exact = gradients(module, call)
    _, eager = gradients(module, under_autocast(call))
    rewrite = StepRewrite(module, method)
    assert rewrite.install() == ""

    # WHEN every site is replaced
    assert decided(rewrite, under_autocast(call), source)["attention"] == layers
    _, ours = gradients(module, under_autocast(call))

    # THEN no gradient is further from the exact one than three times eager's distance and some roundings
    for key, truth in exact.items():
        floor = 2**-7 * truth.abs().max()
        allowed = 3 * (eager[key] - truth).abs().max() + floor
        assert (ours[key] - truth).abs().max() <= allowed, key


@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_unrewritten_step_with_dropout_is_the_eager_one_to_the_bit(checkpointed):
    module, tokens = GPT(2, dropout=0.2, checkpointed=checkpointed).cuda(), on_gpu(*batch())
    call = under_autocast(lambda: module.training_step(tokens, 0))
    with torch.random.fork_rng():
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            loss, grads = gradients(module, call)
            rewrite = StepRewrite(module)
            assert rewrite.install() == ""
            again, others = gradients(module, call)
        finally:
            torch.use_deterministic_algorithms(False)
    assert torch.equal(loss, again)
    assert all(torch.equal(grads[k], others[k]) for k in grads)


def test_sites_are_decided_by_proof_and_time():
    module, tokens = GPT(2).cuda(), on_gpu(*batch())
    call = under_autocast(lambda: module.training_step(tokens, 0))
    rewrite = StepRewrite(module)
    assert rewrite.install() == ""
    with rewrite.collecting():
        call()
    outcomes = decide(rewrite.sites(), Terms(budget_s=30.0))

    # Sizes are tiny, so a gain is not asserted: that no candidate is wrong is.
    wrong = [t.refused for o in outcomes for t in o.trials if "rms error" in t.refused]
    assert not wrong
    rewrite.decide(outcomes)
    call().backward()
