"""Of a module that is replaced as a whole and what it called, one choice stands."""

import pytest
import torch
from torch import nn

from advisor.swap.covers import settled
from advisor.swap.find import ModuleFinder
from advisor.swap.rewrite.wrap import StepRewrite
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


def part(saved_ns: float, *within: str) -> Outcome:
    found = outcome(["train.py:12 (a.norm)"], saved_ns)
    found.site.mechanism, found.site.within = "pattern", list(within)
    return found


@pytest.mark.parametrize(("saves", "stands"), [(70.0, "pattern"), (50.0, "modules")])
def test_a_pattern_stands_where_it_saves_more_than_the_modules_it_reaches_into(saves, stands) -> None:
    # GIVEN sequences that are replaced with their activations, with which a pattern begins
    one, other = (outcome([p], 30.0, (f"{p}.1",)) for p in ("a.mlp", "b.mlp"))
    found = part(saves, "a.mlp.1", "b.mlp.1", "a.mlp.2", "b.mlp.2")
    elsewhere = outcome(["c.mlp"], 10.0, ("c.mlp.1",))
    # WHEN together they save 60 ns
    after = settled([one, found, other, elsewhere])
    # THEN either all of them stand, or the pattern does
    assert [o.chosen is not None for o in after] == {
        "pattern": [False, True, False, True],
        "modules": [True, False, True, True],
    }[stands]
    assert (
        after[0 if stands == "pattern" else 1].reason
        == {
            "pattern": "what it calls is part of train.py:12 (a.norm), which saves more",
            "modules": "part of it is in a.mlp, which is replaced as a whole",
        }[stands]
    )


def test_a_pattern_tells_of_the_modules_it_reaches_into_as_sequences_of_what_they_cover() -> None:
    # GIVEN chains whose activation is covered by a sequence, and part of a pattern with the norm
    class Chains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[1](self.parts[0](x))

    model = Chains()
    x = torch.randn(4, 8, requires_grad=True)
    finder = ModuleFinder(model, ["activation"])
    with finder.watch():
        model(x).sum().backward()
    sequences = next(site for site in finder.sites() if site.what == "Sequential of Linear and gelu")
    # WHEN its graph is looked at
    rewrite = StepRewrite(model, "forward")
    assert rewrite.install() == ""
    with rewrite.collecting():
        model(x)
    pattern = next(site for site in rewrite.sites() if site.what == "LayerNorm(gelu(linear(x)))")
    rewrite.close()
    # THEN both have the same names for these modules
    assert sequences.covers == ["parts.0.1", "parts.1.1"]
    assert pattern.within == [f"parts.{i}.{k}" for i in range(2) for k in range(3)]


def test_a_module_that_is_part_of_a_pattern_is_not_chosen_besides() -> None:
    # GIVEN activations, each by itself and in its sequence, and a pattern that begins with them
    alone, sequences = outcome(["a.1", "b.1"], 50.0), outcome(["a", "b"], 60.0, ("a.1", "b.1"))
    # WHEN neither that of itself is as much as the pattern, though both together would be
    assert chosen(alone, sequences, part(70.0, "a.1", "a.2", "b.1", "b.2")) == [False, False, True]
    # THEN where the sequences save more, they alone stand, and the pattern tells of them
    after = settled([alone, sequences, part(55.0, "a.1", "a.2", "b.1", "b.2")])
    assert [o.chosen is not None for o in after] == [False, True, False]
    assert after[2].reason == "part of it is in a, which is replaced as a whole"
    lone, pattern = settled([alone, part(55.0, "a.1", "a.2", "b.1", "b.2")])
    assert lone.reason == "it is part of train.py:12 (a.norm), which saves more"
    assert pattern.chosen is not None


def test_patterns_that_save_most_together_stand() -> None:
    # GIVEN sequences that two patterns reach into, of which neither saves as much by itself
    sequences = outcome(["a", "b"], 60.0, ("a.1", "b.1"))
    assert chosen(sequences, part(40.0, "a.1"), part(30.0, "b.1")) == [False, True, True]
    assert chosen(sequences, part(40.0, "a.1"), part(10.0, "b.1")) == [True, False, False]
    # THEN one that is no better for the others gives way alone
    other = outcome(["c"], 60.0, ("c.1",))
    assert chosen(sequences, other, part(70.0, "a.1"), part(10.0, "b.1", "c.1")) == [False, True, True, False]


def test_what_a_sequence_covered_in_places_that_are_not_left_to_it_counts_no_more() -> None:
    # GIVEN a sequence of two places, of which the second is a pattern's
    sequence = outcome(["a"], 60.0, ("a.1", "b.1"))
    assert chosen(sequence, part(10.0, "b.1", "b.2"), outcome(["b.1"], 5.0)) == [True, True, False]
    assert chosen(sequence, part(10.0, "b.1", "b.2")) == [True, True]
