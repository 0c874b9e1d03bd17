"""Of a module that is replaced as a whole and what it called, one choice stands."""

import pytest
import torch
from torch import nn

from advisor.swap.covers import settled
from advisor.swap.find import ModuleFinder
from advisor.swap.site import Candidate, Outcome, Site, Trial


def outcome(where: list[str], saved_ns: float, covers: tuple[str, ...] = (), calls: int = 2) -> Outcome:
    candidate = Candidate("fast", lambda: None, "bundled")
    site = Site("activation", where, "module", where[0], lambda: None, [], [candidate], calls)
    site.covers = list(covers)
    return Outcome(site, candidate, "faster", [Trial("fast", time_ns=10.0, original_ns=10.0 + saved_ns)])


def chosen(*outcomes: Outcome) -> list[bool]:
    return [o.chosen is not None for o in settled(outcomes)]


def test_what_a_larger_site_covers_is_not_chosen_besides() -> None:
    outer, inner = outcome(["a.mlp"], 30.0, ("a.mlp.1",)), outcome(["a.mlp.1"], 20.0)
    after = settled([inner, outer])
    assert [o.chosen is not None for o in after] == [False, True]
    assert after[0].reason == "within a.mlp, which is replaced as a whole"


def test_what_is_within_is_chosen_where_it_saves_more() -> None:
    assert chosen(outcome(["a.mlp"], 30.0, ("a.mlp.1",)), outcome(["a.mlp.1"], 40.0)) == [False, True]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_of_three_within_one_another_the_order_does_not_tell(order) -> None:
    three = [
        outcome(["o"], 10.0, ("o.m", "o.m.i")),
        outcome(["o.m"], 7.0, ("o.m.i",)),
        outcome(["o.m.i"], 6.0),
    ]
    after = settled([three[i] for i in order])
    assert {o.site.where[0] for o in after if o.chosen} == {"o"}


@pytest.mark.parametrize("where", [["a.mlp.3"], ["a.mlp.1", "b.act"]])
def test_what_is_called_elsewhere_too_stays(where: list[str]) -> None:
    assert chosen(outcome(["a.mlp"], 30.0, ("a.mlp.1",)), outcome(where, 20.0)) == [True, True]


def test_the_activations_of_pairs_are_covered_in_every_place() -> None:
    # GIVEN two sequences of a linear layer with its activation, and a lone activation in each
    def sequence() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.GELU())

    model = nn.Sequential(sequence(), sequence())
    finder = ModuleFinder(model, ["activation"])
    with finder.watch():
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    sites = {site.what: site for site in finder.sites()}
    # THEN the first is no longer called where the sequence is replaced, the lone one is
    assert sites["Sequential of Linear and gelu"].covers == ["0.1", "1.1"]
