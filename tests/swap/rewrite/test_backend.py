"""The backend: what runs is what would have run, decisions hold, proofs lapse, checkpoints recompute."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.site import Outcome
from tests.swap.rewrite.models import GPT, batch
from tests.swap.rewrite.test_models import decided, gradients, trains_alike


class Block(nn.Module):
    """Attention with a mask in a buffer, as a module's forward."""

    def __init__(self, tokens=8, dim=8):
        super().__init__()
        self.proj = nn.Linear(dim, 3 * dim)
        self.register_buffer("mask", torch.tril(torch.ones(tokens, tokens)))

    def forward(self, x):
        q, k, v = self.proj(x).unsqueeze(1).chunk(3, -1)
        t = x.shape[1]
        p = (q @ k.mT * 0.3).masked_fill(self.mask[:t, :t] == 0, float("-inf")).softmax(-1)
        return (p @ v).view(x.shape)


def under(module, method="forward", **settings):
    rewrite = StepRewrite(module, method, **settings)
    assert rewrite.install() == ""
    return rewrite


def bits(module, call):
    loss, grads = gradients(module, call, seed=3)
    return [loss, *grads.values(), torch.get_rng_state()]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_unrewritten_step_is_the_eager_one_to_the_bit(checkpointed):
    # GIVEN dropout, whose masks would show any number drawn more or less
    model, data = GPT(dropout=0.2, checkpointed=checkpointed), batch()

    def call():
        return model.training_step(data, 0)

    eager = bits(model, call)
    rewrite = under(model, "training_step")

    # WHEN it runs through the backend, as it is and while collecting
    traced = bits(model, call)
    with rewrite.collecting():
        collected = bits(model, call)

    # THEN losses, gradients and the generator's state agree
    assert all(map(torch.equal, traced, eager))
    assert all(map(torch.equal, collected, eager))
    assert rewrite.rewriter.graphs
    assert not rewrite.failure


def test_several_steps_of_training_agree_to_the_bit():
    def losses(swapped):
        torch.manual_seed(0)
        model = GPT(dropout=0.1)
        rewrite = under(model, "training_step") if swapped else None
        optimizer, out = model.configure_optimizers(), []
        for _ in range(3):
            loss = model.training_step(batch(), 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        assert rewrite is None or rewrite.rewriter.calls == 3
        return out

    assert losses(True) == losses(False)


def test_only_the_graph_of_the_step_is_read():
    model = GPT()
    rewrite = under(model, "training_step")
    model.training_step(batch(), 0)

    assert len(rewrite.rewriter.graphs) == 1


class _Count(TorchDispatchMode):
    def __init__(self, op):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


def recomputed(loss):
    with _Count(torch.ops.aten._softmax.default) as count:
        loss.backward()
    return count.count


def test_checkpointed_parts_are_computed_again_in_the_backward():
    model, data = GPT(checkpointed=True), batch()
    eager = recomputed(model.training_step(data, 0))
    under(model, "training_step")

    assert recomputed(model.training_step(data, 0)) == eager == 1


def test_sites_within_checkpointed_parts_are_replaced_there():
    model, data = GPT(checkpointed=True), batch()
    rewrite = under(model, "training_step")

    chosen = decided(rewrite, lambda: model.training_step(data, 0))

    assert chosen["attention"] == 1
    assert recomputed(model.training_step(data, 0)) == 0
    trains_alike(model, rewrite, lambda: model.training_step(data, 0))


def test_dropout_within_a_rewritten_checkpoint_is_drawn_alike_twice():
    # GIVEN the same model with and without checkpoints, both rewritten
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = GPT(dropout=0.2, checkpointed=checkpointed)
        data = batch()
        rewrite = under(model, "training_step")
        chosen = decided(rewrite, lambda m=model, d=data: m.training_step(d, 0))
        assert chosen["attention"] == 1
        found.append(gradients(model, lambda m=model, d=data: m.training_step(d, 0), seed=5))

    # THEN the recomputed masks are those of the forward: gradients agree
    (loss, grads), (again, others) = found
    torch.testing.assert_close(loss, again)
    for name in grads:
        torch.testing.assert_close(grads[name], others[name], rtol=1e-4, atol=1e-6)


def test_decisions_hold_for_a_batch_of_another_size():
    model = GPT()
    rewrite = under(model, "training_step")
    decided(rewrite, lambda: model.training_step(batch(2), 0))

    other = batch(3)
    model.training_step(other, 0)

    assert len(rewrite.rewriter.graphs) == 2
    assert [len(g.chosen()) for g in rewrite.rewriter.graphs] == [2, 2]
    assert rewrite.sites() == []
    trains_alike(model, rewrite, lambda: model.training_step(other, 0))


def test_sites_of_several_sizes_in_one_step_are_decided_each_for_itself():
    # GIVEN the same formula at two sizes
    class Two(nn.Module):
        def forward(self, q, k, v):
            whole = (q @ k.mT).softmax(-1) @ v
            q, k, v = (x[:, :, ::2].contiguous() for x in (q, k, v))
            return whole.sum() + ((q @ k.mT).softmax(-1) @ v).sum()

    model, x = Two(), [torch.randn(1, 2, 8, 4) for _ in range(3)]
    rewrite = under(model)
    with rewrite.collecting():
        model(*x)
    sites = sorted(rewrite.sites(), key=lambda s: s.examples[0].args[0].shape[2])
    assert [s.examples[0].args[0].shape[2] for s in sites] == [4, 8]

    # WHEN one is decided before the other
    rewrite.decide([Outcome(sites[1], sites[1].candidates[1], "")])

    # THEN the other waits, and may be refused
    (left,) = rewrite.sites()
    assert left.examples[0].args[0].shape[2] == 4
    assert rewrite.rewriter.active() == 1
    assert rewrite.decide([Outcome(left, None, "")]) == 1


def test_decisions_carry_over_to_another_process_by_key():
    # GIVEN what one process decided, and another that traced the same step without deciding
    model, data = GPT(), batch()
    first = under(model, "training_step")
    with first.collecting():
        model.training_step(data, 0)
    sites = first.sites()
    keys = {first.rewriter.key(s): s.candidates[-1].name for s in sites}
    first.decide([Outcome(s, s.candidates[-1], "") for s in sites])
    other_model = GPT()
    other = under(other_model, "training_step")
    with other.collecting():
        other_model.training_step(data, 0)

    # WHEN the keys are compared
    mine = {other.rewriter.key(s): s for s in other.sites()}

    # THEN they are the same, and so is what gets replaced
    assert mine.keys() == keys.keys()
    chosen = [Outcome(s, next(c for c in s.candidates if c.name == keys[k]), "") for k, s in mine.items()]
    assert other.decide(chosen) == first.rewriter.active() > 0


def test_a_refused_site_uncovers_the_smaller_one_within_at_once():
    # GIVEN one step
    model, data = GPT(1), batch()
    rewrite = under(model, "training_step")
    with rewrite.collecting():
        model.training_step(data, 0)
    first = rewrite.sites()

    # WHEN everything is refused
    rewrite.decide([Outcome(s, None, "no gain") for s in first])
    second = rewrite.sites()

    # THEN what lay within is there to be decided, without another step
    assert "cross_entropy(head(x), target)" in {s.what for s in first}
    assert "cross_entropy(logits, target)" in {s.what for s in second} - {s.what for s in first}
    assert all(s.examples for s in second)
    assert rewrite.rewriter.active() == 0


def test_a_place_that_a_larger_match_has_taken_is_none_of_the_smaller_site():
    # GIVEN three products with an activation, behind one of which is no norm
    class Chains(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.acts = nn.ModuleList(nn.GELU() for _ in range(3))
            self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8), nn.Identity()])

        def forward(self, x):
            for part, act, norm in zip(self.parts, self.acts, self.norms, strict=True):
                x = norm(act(part(x)))
            return x

    model = Chains()
    rewrite = under(model)
    with rewrite.collecting():
        model(torch.randn(2, 4, 8, requires_grad=True))
    (chain, alone) = sorted(rewrite.sites(), key=lambda site: -len(site.where))
    assert (chain.what, len(chain.where), chain.calls_per_step) == ("LayerNorm(gelu(linear(x)))", 2, 2)
    # THEN the activation has the place that is left
    assert (alone.what, len(alone.where), alone.calls_per_step) == ("gelu(linear(x))", 1, 1)
    # AND all of them once what is larger has been refused
    while larger := [site for site in rewrite.sites() if "LayerNorm" in site.what]:
        rewrite.decide([Outcome(site, None, "no gain") for site in larger])
    (whole,) = [site for site in rewrite.sites() if site.what == "gelu(linear(x))"]
    assert (len(whole.where), whole.calls_per_step) == (3, 3)


def test_what_lies_within_leaves_room_for_the_larger_ones():
    def kept(memory_bytes):
        model, data = GPT(1), batch()
        rewrite = under(model, "training_step", memory_bytes=memory_bytes)
        with rewrite.collecting():
            model.training_step(data, 0)
        outer = rewrite.sites()
        rewrite.decide([Outcome(s, None, "no gain") for s in outer])
        return outer, rewrite.sites()

    # GIVEN as much room as the larger ones take and not a byte more
    outer, within = kept(1 << 20)
    tensors = {a.data_ptr(): a for s in outer for a in s.examples[0].args}.values()
    again, inner = kept(sum(span_bytes(a) for a in tensors))

    assert len(again) == len(outer)
    assert len(inner) < len(within)


def span_bytes(t):
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def test_equal_layers_are_copied_once():
    model, data = GPT(layers=3), batch()
    rewrite = under(model, "training_step")
    with rewrite.collecting():
        model.training_step(data, 0)

    (site,) = [s for s in rewrite.sites() if s.kind == "attention"]
    assert site.calls_per_step == 3
    assert len(site.examples) == 1


def test_a_mask_that_changes_is_noticed():
    # GIVEN a step whose mask was proven causal, and rewritten so
    model, x = Block(), torch.randn(2, 8, 8)
    rewrite = under(model)
    assert decided(rewrite, lambda: model(x)) == {"attention": 1}
    causal = model(x)

    # WHEN the buffer is written to
    model.mask.fill_(1.0)
    with torch.no_grad():
        seen = model(x)

    # THEN the step does what the code says
    rewrite.toggle(False)
    torch.testing.assert_close(seen, model(x))
    assert not torch.allclose(seen, causal)


def test_a_mask_that_is_exchanged_is_noticed():
    model, x = Block(), torch.randn(2, 8, 8)
    rewrite = under(model)
    decided(rewrite, lambda: model(x))

    model.mask = torch.ones(8, 8)
    seen = model(x)

    rewrite.toggle(False)
    torch.testing.assert_close(seen, model(x))


def test_a_result_is_laid_out_for_a_view_behind_it():
    # Block views the attention's result: with queries' strides that would fail.
    class Heads(nn.Module):
        def forward(self, q, k, v):
            q, k, v = (z.view(2, 8, 2, 4).transpose(1, 2) for z in (q, k, v))
            return ((q @ k.mT).softmax(-1) @ v).view(4, 8, 4)

    model, x = Heads(), [torch.randn(2, 8, 8) for _ in range(3)]
    expected = model(*x)
    rewrite = under(model)

    assert decided(rewrite, lambda: model(*x), "bundled") == {"attention": 1}
    torch.testing.assert_close(model(*x), expected)


def test_a_step_with_graph_breaks_is_rewritten_in_parts():
    class Broken(nn.Module):
        def forward(self, q, k, v, w):
            y = (q @ k.mT).softmax(-1) @ v
            torch._dynamo.graph_break()
            return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    model, x = Broken(), [torch.randn(2, 2, 8, 4) for _ in range(3)]
    w = torch.randn(4)
    expected = model(*x, w)
    rewrite = under(model)

    assert decided(rewrite, lambda: model(*x, w)) == {"attention": 1, "norm": 1}
    torch.testing.assert_close(model(*x, w), expected)


def test_examples_stay_within_their_memory():
    model = GPT()
    rewrite = under(model, "training_step", memory_bytes=10_000)
    with rewrite.collecting():
        model.training_step(batch(), 0)

    sizes = [sum(a.numel() * a.element_size() for a in s.examples[0].args) for s in rewrite.sites()]
    assert 0 < sum(sizes) <= 10_000
    assert any("no room" in r.why for r in rewrite.refusals)


def test_examples_are_copies_that_want_what_the_originals_want():
    model, data = GPT(1), batch()
    rewrite = under(model, "training_step")
    with rewrite.collecting():
        model.training_step(data, 0)
    (site,) = [s for s in rewrite.sites() if s.kind == "attention"]

    # q, k, v, and the buffer that the original reads
    q, _, v, mask = site.examples[0].args
    assert q.requires_grad
    assert q.is_leaf
    assert q.stride() == v.stride() != q.contiguous().stride()
    assert not mask.requires_grad
    assert mask.data_ptr() != model.h[0].attn.bias.data_ptr()
    assert site.original(*site.examples[0].args).shape == q.shape


def test_a_candidate_of_a_site_takes_what_the_original_takes():
    model, data = GPT(1), batch()
    rewrite = under(model, "training_step")
    with rewrite.collecting():
        model.training_step(data, 0)

    for site in rewrite.sites():
        args = site.examples[0].args
        expected = site.original(*args)
        for candidate in site.candidates:
            assert not candidate.unsupported(site.examples[0])
            got = candidate.call(*args)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class Normed(nn.Module):
    """A written-out norm, and a loss."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return (y * y.detach().cos()).sum()


def test_the_rewritten_graph_is_handed_on_to_another_backend():
    # GIVEN a user who compiles anyway, here with AOTAutograd alone
    model, x = Normed(), torch.randn(4, 8)
    expected = gradients(model, lambda: model(x))
    rewrite = under(model, inner="aot_eager")

    assert decided(rewrite, lambda: model(x), "bundled") == {"norm": 1}
    loss, grads = gradients(model, lambda: model(x))

    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(grads["weight"], expected[1]["weight"])


def test_a_mask_that_changes_is_noticed_before_another_backends_code_too():
    model, x = Block(), torch.randn(2, 8, 8)
    rewrite = under(model, inner="aot_eager")
    assert decided(rewrite, lambda: model(x)) == {"attention": 1}
    causal = model(x)

    model.mask.fill_(1.0)
    seen = model(x)

    rewrite.toggle(False)
    torch.testing.assert_close(seen, model(x))
    assert not torch.allclose(seen, causal)


def test_the_other_backend_sees_the_replacements():
    seen = []

    def recorder(gm, inputs):
        seen.append([getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes])
        return gm.forward

    model, x = Normed(), torch.randn(4, 8)
    rewrite = under(model, inner=recorder)
    decided(rewrite, lambda: model(x), "bundled")
    model(x)

    assert "rsqrt" in seen[0]
    assert "_norm" in seen[-1]
    assert "rsqrt" not in seen[-1]


def test_sizes_that_vary_are_symbols_and_match_all_the_same():
    class Plain(nn.Module):
        def forward(self, q, k, v, w):
            y = (q @ k.mT * 0.5).softmax(-1) @ v
            return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    def args(tokens):
        return *(torch.randn(2, 2, tokens, 4) for _ in range(3)), torch.ones(4)

    model = Plain()
    rewrite = under(model, dynamic=True)
    sizes = args(8)
    assert decided(rewrite, lambda: model(*sizes))["attention"] == 1
    for tokens in (5, 11):
        other = args(tokens)
        got = model(*other)
        rewrite.toggle(False)
        torch.testing.assert_close(got, model(*other))
        rewrite.toggle(True)
    assert len(rewrite.rewriter.graphs) == 1


def test_a_mask_of_varying_size_is_not_taken_for_causal():
    class Masked(nn.Module):
        def forward(self, q, k, v):
            t = q.shape[2]
            seen = torch.ones(t, t).tril()
            return (q @ k.mT).masked_fill(seen == 0, float("-inf")).softmax(-1) @ v

    model = Masked()
    rewrite = under(model, dynamic=True)
    x = [torch.randn(2, 2, 6, 4) for _ in range(3)]
    with rewrite.collecting():
        model(*x)

    assert all("causal" not in s.what for s in rewrite.sites())


def test_user_code_that_writes_in_place_is_carried_out_once():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x, b):
            self.steps += 1
            return F.gelu(x + b).relu_().sum()

    model = Counting()
    rewrite = under(model)
    decided(rewrite, lambda: model(torch.randn(3, 8), torch.randn(8)), "bundled")
    before = model.steps.item()
    model(torch.randn(3, 8), torch.randn(8))

    assert model.steps.item() == before + 1


def test_a_function_with_a_backward_of_its_own_keeps_it():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, g):
            return g * 2.0

    class Custom(Normed):
        def forward(self, x):
            return super().forward(Doubled.apply(x * self.weight))

    model, x = Custom(), torch.randn(4, 8)
    expected = gradients(model, lambda: model(x))
    rewrite = under(model)

    assert decided(rewrite, lambda: model(x)) == {"norm": 1}
    loss, grads = gradients(model, lambda: model(x))
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(grads["weight"], expected[1]["weight"])


def test_reentrant_checkpoints_stay_what_they_are():
    class Reentrant(Normed):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x * self.weight, use_reentrant=True)

    model, x = Reentrant(), torch.randn(4, 8)
    expected = gradients(model, lambda: model(x))
    rewrite = under(model)
    decided(rewrite, lambda: model(x))
    loss, grads = gradients(model, lambda: model(x))

    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(grads["weight"], expected[1]["weight"])


def test_a_step_that_calls_backward_itself():
    # As manual optimization does.
    class Manual(Normed):
        def forward(self, x):
            loss = super().forward(x)
            loss.backward()
            return loss.detach()

    model, x = Manual(), torch.randn(4, 8)
    model(x)
    expected = model.weight.grad.clone()
    rewrite = under(model)
    assert decided(rewrite, lambda: model(x)) == {"norm": 1}
    model.weight.grad = None
    model(x)

    torch.testing.assert_close(model.weight.grad, expected)
