"""What the kinds offer for modules is right, and what they must not take they leave, with the reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.errors import UsageError
from advisor.swap.kinds.activation import activation, sequential
from advisor.swap.kinds.attention import attention
from advisor.swap.kinds.gate import gate, recognised
from advisor.swap.kinds.loss import loss
from advisor.swap.kinds.registry import Offer, chosen_kinds, kind, module_kinds
from advisor.swap.kinds.softmax import softmax
from advisor.swap.site import KINDS, Example, Site
from advisor.swap.tensors import stand_in
from advisor.swap.verify import verify
from tests.swap.networks import LlamaMLP, MetaMLP, PhiMLP


def refusals(offering, module: nn.Module, *args, hard: bool = False, **kwargs) -> dict[str, str]:
    """What becomes of each candidate on one call, and on hard values if `hard`."""
    twin = stand_in(module)
    offer = offering(twin, Example(args, kwargs))
    assert isinstance(offer, Offer), offer
    example = Example((twin, *args), kwargs)
    site = Site("gate", ["m"], "module", "m", type(module).forward, [example], offer.candidates)
    return {c.name: verify(site, c, adversarial=hard).refused for c in site.candidates}


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("module", [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU()])
def test_an_activation_is_done_by_the_bundled_kernel(module) -> None:
    assert refusals(activation, module, randn(3, 20), hard=True) == {"advisor.kernels.bias_activation": ""}


def test_linear_and_activation_in_a_sequence_share_a_kernel() -> None:
    module = nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8), nn.Dropout(0.0))
    assert refusals(sequential, module, randn(3, 8), hard=True) == {"advisor.kernels.bias_activation": ""}


def test_hooks_of_the_layers_in_a_sequence_are_called() -> None:
    module = nn.Sequential(nn.Linear(8, 20), nn.GELU())
    call = sequential(stand_in(module), Example((randn(3, 8),))).candidates[0].call
    seen: list[str] = []
    module[0].register_forward_hook(lambda *_: seen.append("linear"))
    module[1].register_forward_hook(lambda *_: seen.append("gelu"))
    x = randn(3, 8)
    assert torch.equal(call(module, x), F.gelu(F.linear(x, module[0].weight, module[0].bias)))
    assert seen == ["linear", "gelu"]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (LlamaMLP(8, 20), ("gate_proj", "up_proj", "down_proj", "silu", True)),
        (LlamaMLP(8, 20, nn.GELU()), ("gate_proj", "up_proj", "down_proj", "gelu", True)),
        (LlamaMLP(8, 20, nn.GELU("tanh")), ("gate_proj", "up_proj", "down_proj", "gelu_tanh", True)),
        (LlamaMLP(8, 8, nn.ReLU()), ("gate_proj", "up_proj", "down_proj", "relu", True)),
        (MetaMLP(8, 20), ("w1", "w3", "w2", "silu", True)),
        (PhiMLP(8, 20), ("gate_up_proj", "gate_up_proj", "down_proj", "gelu", True)),
        (PhiMLP(8, 20, False), ("gate_up_proj", "gate_up_proj", "down_proj", "gelu", False)),
    ],
)
def test_a_gated_mlp_is_recognised_whatever_its_layers_are_called(module, names) -> None:
    found = recognised(module, randn(2, 3, 8))
    assert found is not None
    assert (found.gate, found.up, found.down, found.activation, found.gate_first) == names


@pytest.mark.parametrize("module", [LlamaMLP(8, 20), MetaMLP(8, 20), PhiMLP(8, 20, False)])
def test_a_gated_mlp_is_done_by_the_bundled_kernel_between_its_own_layers(module) -> None:
    assert list(refusals(gate, module, randn(2, 3, 8), hard=True).values()) == [""]


class NormInside(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.layer_norm(x, x.shape[-1:]))


class DropoutInside(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.5))


class ResidualInside(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scaled(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 0.5)


class OtherGate(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("made", [NormInside, DropoutInside, ResidualInside, Scaled, OtherGate])
def test_near_misses_of_a_gated_mlp_are_left_alone(made) -> None:
    assert gate(made(8, 20), Example((randn(2, 3, 8),))) == "computes no gated MLP"


class Projections(nn.Module):
    """Attention's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj((q @ k.transpose(-2, -1)).softmax(-1) @ v)


def test_of_what_nobody_takes_for_a_gated_mlp_nothing_is_said() -> None:
    assert gate(Projections(), Example((randn(2, 3, 8),))) == ""


def test_layers_of_a_gated_mlp_are_called_with_their_hooks() -> None:
    module, seen = LlamaMLP(8, 20), []
    (found,) = gate(stand_in(module), Example((randn(3, 8),))).candidates
    module.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    found.call(module, randn(3, 8))
    assert seen == ["up"]


@pytest.mark.parametrize(("batch_first", "padded"), [(True, False), (False, True)])
def test_multihead_attention_without_weights_is_done_by_the_bundled_kernel(batch_first, padded) -> None:
    module = nn.MultiheadAttention(16, 2, batch_first=batch_first)
    x = randn(2, 6, 16) if batch_first else randn(6, 2, 16)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    options = {"key_padding_mask": padding if padded else None, "need_weights": False}
    options["hard"] = batch_first
    assert refusals(attention, module, x, x, x, **options)["advisor.kernels.attention"] == ""


def test_multihead_attention_takes_a_causal_mask_and_other_keys() -> None:
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    x, memory = randn(2, 6, 16), randn(2, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    options = {"attn_mask": mask, "need_weights": False, "is_causal": True}
    assert refusals(attention, module, x, x, x, **options)["advisor.kernels.attention"] == ""
    assert (
        refusals(attention, module, x, memory, memory, need_weights=False)["advisor.kernels.attention"] == ""
    )


def test_attention_with_weights_is_left_alone_and_the_way_out_is_said() -> None:
    x = randn(2, 6, 16)
    said = attention(nn.MultiheadAttention(16, 2), Example((x, x, x)))
    assert said == "returns its weights: call it with need_weights=False where they are not used"


@pytest.mark.parametrize("module", [nn.Softmax(-1), nn.LogSoftmax(dim=1)])
def test_softmax_over_the_last_dimension_is_done_by_the_bundled_kernel(module) -> None:
    assert list(refusals(softmax, module, randn(3, 20), hard=True).values()) == [""]


def test_softmax_over_another_dimension_is_left_alone() -> None:
    assert "dimension 0" in softmax(nn.Softmax(0), Example((randn(3, 4),)))


@pytest.mark.parametrize(
    "module",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="none"),
    ],
)
def test_cross_entropy_is_done_by_the_bundled_kernel(module) -> None:
    target = torch.tensor([0, 2, 6, 1])
    hard = module.reduction == "mean"
    assert refusals(loss, module, randn(4, 7), target, hard=hard) == {"advisor.kernels.cross_entropy": ""}
    assert refusals(loss, module, input=randn(4, 7), target=target) == {"advisor.kernels.cross_entropy": ""}


@pytest.mark.parametrize(
    ("module", "logits", "target", "words"),
    [
        (nn.CrossEntropyLoss(torch.ones(7)), randn(4, 7), torch.zeros(4, dtype=torch.long), "class weights"),
        (nn.CrossEntropyLoss(), randn(4, 7, 3), torch.zeros(4, 3, dtype=torch.long), "classes last"),
    ],
)
def test_losses_that_the_kernel_does_not_know_are_left_alone(module, logits, target, words) -> None:
    assert words in loss(module, Example((logits, target)))


def test_every_kind_that_is_asked_for_exists() -> None:
    assert chosen_kinds("auto") == KINDS
    assert chosen_kinds("norm") == ("norm",)
    assert chosen_kinds(["loss", "norm"]) == ("norm", "loss")
    with pytest.raises(UsageError, match="no kind 'norms'; give 'auto', or some of norm,"):
        chosen_kinds(["norms"])


def test_only_kinds_that_are_asked_for_look_at_modules() -> None:
    assert {found.kind for found in module_kinds(["norm", "loss"])} == {"norm", "loss"}


def test_registering_twice_or_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="registered already"):
        kind("norm", lambda m: False)(softmax)
    with pytest.raises(ValueError, match="one of norm"):
        kind("norms", lambda m: False)
