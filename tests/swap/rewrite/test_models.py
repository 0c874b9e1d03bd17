"""Whole models: what is found in them, and that a rewritten step trains as the original does."""

import collections

import pytest
import torch

from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.site import Outcome
from tests.swap.rewrite.models import GPT, BertBlock, C, Llama, T, ViTBlock, batch


def decided(rewrite, call, source="torch"):
    """Collect and choose, for each site, the first candidate of a source, until no site is left."""
    for _ in range(6):
        with rewrite.collecting():
            call()
        sites = rewrite.sites()
        if not sites:
            break
        rewrite.decide([Outcome(s, _first(s, source), "") for s in sites])
    return collections.Counter(f.match.pattern for g in rewrite.rewriter.graphs for _, f, _ in g.chosen())


def _first(site, source):
    return next(
        (c for c in site.candidates if c.source == source and not c.unsupported(site.examples[0])), None
    )


def gradients(module, call, seed=0):
    module.zero_grad()
    torch.manual_seed(seed)
    out = call()
    out = out if out.dim() == 0 else out.square().mean()
    out.backward()
    return out.detach(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def trains_alike(module, rewrite, call):
    loss, grads = gradients(module, call)
    rewrite.toggle(False)
    expected, wanted = gradients(module, call)
    rewrite.toggle(True)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(
            grad, wanted[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("source", ["torch", "bundled"])
def test_a_gpt_in_lightning(source):
    # GIVEN the whole training step, its loss and its logging within
    model, data = GPT(), batch()
    rewrite = StepRewrite(model)
    assert rewrite.install() == ""

    def call():
        return model.training_step(data, 0)

    # WHEN every site gets a candidate of a source
    chosen = decided(rewrite, call, source)

    # THEN the layer is rewritten, and the gradients stay what they were
    expected = {"attention": 1, "linear_act": 1}
    if source == "bundled":
        expected |= {"add_norm": 2, "linear_cross_entropy": 1}
    assert chosen == expected
    trains_alike(model, rewrite, call)


@pytest.mark.parametrize("source", ["torch", "bundled"])
def test_a_llama(source):
    model, (tokens, labels) = Llama(), batch()
    rewrite = StepRewrite(model, "forward")
    assert rewrite.install() == ""

    chosen = decided(rewrite, lambda: model(tokens, labels), source)

    if source == "bundled":
        assert chosen == {
            "attention": 1, "rope": 1, "gate": 1, "add_norm": 2, "norm": 1, "linear_cross_entropy": 1,
        }  # fmt: skip
    else:
        assert chosen == {"attention": 1, "add_norm": 2, "norm": 1}
    trains_alike(model, rewrite, lambda: model(tokens, labels))


def test_a_llamas_attention_is_causal_and_grouped():
    model, (tokens, labels) = Llama(1), batch()
    rewrite = StepRewrite(model, "forward")
    rewrite.install()
    with rewrite.collecting():
        model(tokens, labels)

    (site,) = [s for s in rewrite.sites() if s.kind == "attention"]

    assert "causal" in site.what
    assert "2 queries a key head" in site.what
    assert site.examples[0].args[1].shape == (2, 2, T, C // 4)


def test_a_vit_block():
    model, x = ViTBlock(), torch.randn(2, T, C)
    rewrite = StepRewrite(model, "forward")
    rewrite.install()

    assert decided(rewrite, lambda: model(x), "bundled")["attention"] == 1
    trains_alike(model, rewrite, lambda: model(x))


def test_a_bert_block_with_padding():
    model, x = BertBlock(), torch.randn(2, T, C)
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, 5:] = 0
    rewrite = StepRewrite(model, "forward")
    rewrite.install()

    chosen = decided(rewrite, lambda: model(x, mask), "bundled")

    assert chosen == {"attention": 1, "add_norm": 2, "linear_act": 1}
    trains_alike(model, rewrite, lambda: model(x, mask))


def test_a_bert_blocks_dropout_goes_into_its_kernels():
    model, x = BertBlock(0.25), torch.randn(2, T, C)
    rewrite = StepRewrite(model, "forward")
    rewrite.install()
    with rewrite.collecting():
        model(x, torch.ones(2, T, dtype=torch.long))

    whats = {s.what for s in rewrite.sites()}

    assert "dropout(softmax(scale * q @ k.T, added mask)) @ v" in whats
    assert "dropout(x) + residual, LayerNorm" in whats
    assert all(s.examples[0].rng for s in rewrite.sites() if "dropout" in s.what)


def test_equal_layers_are_one_site():
    model, data = GPT(layers=3), batch()
    rewrite = StepRewrite(model)
    rewrite.install()
    with rewrite.collecting():
        model.training_step(data, 0)

    (site,) = [s for s in rewrite.sites() if s.kind == "attention"]

    assert site.calls_per_step == 3
    assert [w.partition(" ")[2] for w in site.where] == [f"(h.{i}.attn)" for i in range(3)]
    assert all(w.startswith("models.py:") for w in site.where)


def test_under_autocast_the_loss_stays_within_its_noise():
    model, data = GPT(), batch()
    rewrite = StepRewrite(model)
    rewrite.install()

    def call():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.training_step(data, 0)

    assert decided(rewrite, call, "torch")["attention"] == 1
    loss, _ = gradients(model, call)
    rewrite.toggle(False)
    eager, _ = gradients(model, call)
    exact, _ = gradients(model, lambda: model.training_step(data, 0))
    assert abs(loss - exact) <= 2 * abs(eager - exact) + 0.01
