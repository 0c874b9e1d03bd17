"""What is known of a graph's nodes: where they ran, what they hang on, what transforms them."""

import torch
from torch import Tensor, nn
from torch.fx import Graph

from advisor.swap.rewrite.facts import hangs_on_data, module_path, transformed
from advisor.swap.rewrite.wrap import StepRewrite
from tests.swap.rewrite.support import traced


def test_a_module_seen_through_a_method_that_was_put_in_its_place_has_its_own_path() -> None:
    node = Graph().placeholder("x")
    for path in ("L['self'].n1", "L['self'].forward.__self__.n1"):
        node.meta["nn_module_stack"] = {"key": (path, nn.LayerNorm)}
        assert module_path(node) == "n1"


class Net(nn.Module):
    """A norm, and the gradient of a norm as a transform computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def training_step(self, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).sum()

        return (self.norm(x) * torch.func.grad(inner)(x)).sum() + torch.vmap(inner)(x).sum()


def test_what_runs_within_a_transform_is_left_alone_and_the_step_runs_as_ever() -> None:
    net, x = Net(), torch.randn(4, 8)
    expected = net.training_step(x)
    rewrite = StepRewrite(net)
    assert rewrite.install() == ""
    with rewrite.collecting():
        found = net.training_step(x)
    assert torch.equal(found, expected)
    assert [site for site in rewrite.sites() if site.kind == "norm"] == []
    rewrite.restore()


def test_the_nodes_of_a_transform_are_those_between_its_beginning_and_its_end() -> None:
    gm, _ = traced(lambda x: torch.vmap(lambda row: row.exp())(x).sin(), torch.randn(3, 4))
    within = {getattr(node.target, "__name__", str(node.target)) for node in transformed(gm.graph.nodes)}
    names = {str(node.target) for node in gm.graph.nodes} - {
        str(n.target) for n in transformed(gm.graph.nodes)
    }
    assert "exp" in within
    assert "sin" in names


def test_a_mask_of_sizes_alone_does_not_hang_on_data() -> None:
    def fn(x: Tensor, m: Tensor) -> Tensor:
        steady = torch.arange(x.shape[0])[:, None] >= torch.arange(x.shape[0])
        return torch.where(steady, x, 0.0) + m.float()

    gm, _ = traced(fn, torch.randn(4, 4), torch.ones(4, 4, dtype=torch.bool))
    found = {str(getattr(n.target, "__name__", n.target)): hangs_on_data(n) for n in gm.graph.nodes}
    assert found["ge"] is False
    assert found["where"] is True
    assert found["float"] is True
