"""A loop with swap in it: faster where proven, and else the same to the bit, whatever goes wrong."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from advisor.errors import UsageError
from advisor.swap import find_swaps
from advisor.swap.kinds import norm as norm_kind
from advisor.swap.modules import MARK
from advisor.swap.session import Swapper
from advisor.swap.site import Candidate
from advisor.swap.warn import SwapWarning
from tests.swap import planted
from tests.swap.alone import alone
from tests.swap.networks import LlamaMLP, LlamaNorm, Net
from tests.swap.planted import ToldClock, candidate, terms

SIZE = 16
FAVOURED = {"original": 90e3, "planted": 50e3, "torch.nn.functional.rms_norm": 80e3}


def same_norm(module: nn.Module, x: Tensor) -> Tensor:
    """The original's arithmetic, so that the loop goes on to the bit."""
    return LlamaNorm.forward(module, x)


@pytest.fixture
def plant(monkeypatch):
    """Puts a candidate into the place of the bundled kernel for norms."""

    def put(call, **options) -> Candidate:
        made = candidate(call, "planted", **options)
        monkeypatch.setattr(norm_kind, "_bundled", lambda *_: made)
        monkeypatch.setattr(norm_kind, "_torchs", lambda *_: None)
        return made

    return put


class Loop:
    """A training loop with dropout, momentum and a schedule."""

    def __init__(self, wrap=lambda net: net) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(Net(), nn.Dropout(0.1))
        self.model = wrap(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.losses: list[float] = []
        self.final: list[Tensor] = []

    def step(self, micro: int = 1) -> None:
        self.optimizer.zero_grad()
        for _ in range(micro):
            loss = self.model(torch.randn(4, SIZE)).square().mean()
            loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(float(loss.detach()))

    def state(self) -> list[Tensor]:
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        return [*self.net.state_dict().values(), *moments, torch.get_rng_state()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def swapped_norms(net: nn.Module) -> list[str]:
    return [name for name, m in net.named_modules() if hasattr(type(m), MARK)]


def run(loop: Loop, told=None, **options) -> Swapper:
    """A step that is watched, the decision, and a step after it."""
    swapper = Swapper(loop.model, kinds="norm", terms=told or terms(FAVOURED), allow_cpu=True, **options)
    with swapper.watch():
        loop.step()
    swapper.decide()
    swapper.apply()
    loop.step()
    return swapper


def reference(steps: int = 2, **options) -> Loop:
    """The same loop without swap; to be run first, since all loops draw on the same random numbers."""
    loop = Loop(**options)
    for _ in range(steps):
        loop.step()
    loop.final = [t.clone() for t in loop.state()]
    return loop


def test_what_wins_is_in_force_until_it_is_restored(plant) -> None:
    calls: list[int] = []

    def counted(module: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        return same_norm(module, x)

    plant(counted)
    loop = Loop()
    swapper = run(loop)
    # THEN all three norms are one or two sites of one kind, and called
    assert swapped_norms(loop.net) == ["0.blocks.0.norm", "0.blocks.1.norm", "0.norm"]
    assert sum(len(o.site.where) for o in swapper.applied) == 3
    before = len(calls)
    loop.step()
    assert len(calls) == before + 3
    swapper.restore()
    swapper.restore()
    loop.step()
    assert len(calls) == before + 3
    assert swapped_norms(loop.net) == []
    assert all(type(m).__module__ != "advisor.swap.modules" for m in loop.net.modules())


def test_trying_and_swapping_changes_nothing_else_in_the_loop(plant) -> None:
    plant(same_norm)
    expected = reference()
    loop = Loop()
    run(loop)
    assert same(loop.state(), expected.final)
    assert loop.losses == expected.losses


BAD = [
    (planted.wrong_value, "output 0"),
    (planted.wrong_gradient, "gradient of"),
    (planted.not_a_number, "not finite where eager is"),
    (planted.raising, "raises RuntimeError: no kernel image"),
    (planted.out_of_memory, "ran out of memory"),
    (planted.writes_input, "writes to its input"),
    (planted.writes_weight, "writes to its weight"),
    (planted.nondeterministic, "two runs differ"),
    (planted.leaves_grad_mode_off, "half-way"),
]


class _AsLayerNorm(nn.Module):
    """Lets the planted norms, which are LayerNorms, stand where an RMSNorm is: only their fault differs."""

    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        original = planted.right
        planted.right = same_norm
        try:
            return self.call(module, x)
        finally:
            planted.right = original


@pytest.mark.parametrize(("call", "words"), BAD, ids=[call.__name__ for call, _ in BAD])
def test_a_bad_kernel_is_refused_and_named_and_the_loop_goes_on_to_the_bit(plant, call, words) -> None:
    plant(_AsLayerNorm(call))
    expected = reference()
    loop = Loop()
    swapper = run(loop)
    assert swapper.applied == []
    assert swapper.outcomes
    assert all(words in o.reason for o in swapper.outcomes)
    assert "planted" in str([t.candidate for o in swapper.outcomes for t in o.trials])
    assert swapped_norms(loop.net) == []
    assert same(loop.state(), expected.final)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (terms({"original": 50e3, "planted": 70e3}), "slower"),
        (terms(FAVOURED, {f"{i}": size for i, size in enumerate([2**20, 2**24] * 3)}), "more memory"),
    ],
)
def test_a_slow_or_fat_kernel_is_refused_and_the_loop_goes_on_to_the_bit(plant, told, words) -> None:
    plant(same_norm)
    expected = reference()
    loop = Loop()
    swapper = run(loop, told)
    assert swapper.applied == []
    assert all(words in o.reason for o in swapper.outcomes)
    assert same(loop.state(), expected.final)


def test_an_interruption_in_the_middle_leaves_the_model_as_it_was(plant) -> None:
    def interrupted(module: nn.Module, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    plant(interrupted)
    expected = reference()
    loop = Loop()
    swapper = Swapper(loop.model, kinds="norm", allow_cpu=True)
    with swapper.watch():
        loop.step()
    with pytest.raises(KeyboardInterrupt):
        swapper.decide()
    loop.step()
    assert swapped_norms(loop.net) == []
    assert same(loop.state(), expected.final)


def test_what_the_step_itself_raises_goes_through_and_no_hook_stays(plant) -> None:
    loop = Loop()
    swapper = Swapper(loop.model, kinds="norm", allow_cpu=True)

    def failing() -> None:
        with swapper.watch():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loop.net.modules())


def test_a_fault_of_swap_itself_is_a_warning_and_takes_everything_back(plant, monkeypatch) -> None:
    plant(same_norm)
    expected = reference()
    loop = Loop()
    swapper = Swapper(loop.model, kinds="norm", terms=terms(FAVOURED), allow_cpu=True)
    with swapper.watch():
        loop.step()
    swapper.decide()
    # GIVEN a change that fails after others were made
    finder = swapper._finders[0]
    changes = finder.changes(swapper.outcomes)

    def broken() -> None:
        raise RuntimeError("layout differs")

    monkeypatch.setattr(
        finder, "changes", lambda _: [*changes[:-1], type(changes[0])("last", broken, lambda: None)]
    )
    with pytest.warns(SwapWarning, match="could not be applied: RuntimeError: layout differs"):
        assert swapper.apply() == []
    assert swapped_norms(loop.net) == []
    loop.step()
    assert same(loop.state(), expected.final)


def test_toggling_brings_the_originals_back_for_a_while(plant) -> None:
    plant(same_norm)
    loop = Loop()
    swapper = run(loop)
    swapper.toggle(False)
    assert swapped_norms(loop.net) == []
    assert len(swapper.applied) > 0
    swapper.toggle(True)
    assert len(swapped_norms(loop.net)) == 3


def test_an_interruption_while_toggling_takes_everything_back(plant, monkeypatch) -> None:
    plant(same_norm)
    loop = Loop()
    swapper = run(loop)

    def interrupted(on: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(swapper.journal, "toggle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swapper.toggle(False)
    assert swapped_norms(loop.net) == []
    assert swapper.applied == []


def test_accumulated_gradients_are_those_of_the_original(plant) -> None:
    plant(same_norm)
    expected = reference()
    expected.step(micro=3)
    expected.final = [t.clone() for t in expected.state()]
    loop = Loop()
    run(loop)
    loop.step(micro=3)
    assert same(loop.state(), expected.final)


def test_in_eval_mode_the_original_runs(plant) -> None:
    # GIVEN a kernel that is right but for rounding
    def other_rounding(module: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.double(), (SIZE,), module.weight.double(), 1e-6).float()

    plant(other_rounding)
    loop = Loop()
    swapper = run(loop)
    assert swapper.applied
    x = torch.randn(64, SIZE)
    swapped = loop.net.eval()(x)
    swapper.restore()
    assert torch.equal(swapped, loop.net(x))


def test_a_checkpoint_of_a_swapped_run_goes_into_an_unswapped_one_and_back(plant) -> None:
    plant(same_norm)
    loop = Loop()
    run(loop)
    saved = copy.deepcopy(loop.net.state_dict())
    fresh = Loop()
    fresh.net.load_state_dict(saved)
    assert same(list(fresh.net.state_dict().values()), list(saved.values()))
    loop.net.load_state_dict(fresh.net.state_dict())
    assert same(list(loop.net.state_dict().values()), list(saved.values()))


def test_modules_that_the_user_compiles_are_passed_over_with_the_reason(plant) -> None:
    plant(same_norm)
    net = Net()
    net.blocks[0].compile(backend="eager")
    wrapped = nn.Sequential(net, torch.compile(LlamaNorm(5), backend="eager"))
    swapper = Swapper(wrapped, kinds="norm", allow_cpu=True)
    reasons = {s.where: s.reason for s in swapper.skipped}
    assert reasons == {
        "0.blocks.0.norm": "is compiled",
        "1": "is compiled",
        "1._orig_mod": "is compiled",
    } or (reasons == {"0.blocks.0.norm": "is compiled", "1._orig_mod": "is compiled"})


class Half(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / 2


def parametrized() -> nn.Module:
    return nn.utils.parametrize.register_parametrization(nn.LayerNorm(SIZE), "weight", Half())


def scripted() -> nn.Module:
    return torch.jit.script(nn.LayerNorm(SIZE))


def patched() -> nn.Module:
    module = LlamaNorm(SIZE)
    module.forward = lambda x: x
    return module


def quantized() -> nn.Module:
    module = LlamaNorm(SIZE)
    module.weight = nn.Parameter(torch.ones(SIZE, dtype=torch.int8), requires_grad=False)
    return module


def recomputed() -> nn.Module:
    module = LlamaNorm(SIZE)
    scale = nn.Parameter(torch.ones(SIZE))
    del module.weight
    module.weight = scale * 2
    module.scale = scale
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (parametrized, "is parametrized"),
        (scripted, "is scripted"),
        (patched, "its forward is patched on the instance"),
        (quantized, "is quantized: its weight is int8"),
        (recomputed, "its weight is computed from other parameters"),
    ],
)
def test_modules_that_are_more_than_their_class_are_passed_over(plant, make, reason) -> None:
    plant(same_norm)
    model = nn.Sequential(make(), nn.Linear(SIZE, SIZE))
    assert find_swaps(model, lambda: model(torch.randn(2, SIZE)), "norm", allow_cpu=True) == []
    swapper = Swapper(model, kinds="norm", allow_cpu=True)
    assert [s.reason for s in swapper.skipped if s.where == "0"] == [reason]


def test_a_subclass_with_another_forward_is_judged_by_what_it_computes(plant) -> None:
    class Doubled(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    plant(planted.right)
    model = nn.Sequential(Doubled(SIZE))
    swapper = Swapper(model, kinds="norm", allow_cpu=True)
    with swapper.watch():
        model(torch.randn(2, SIZE))
    assert swapper.decide() == []
    assert [s.reason for s in swapper.skipped] == ["computes neither LayerNorm nor RMSNorm"]


def test_modules_that_are_never_called_are_said_to_be(plant) -> None:
    plant(same_norm)
    model = nn.ModuleDict({"used": LlamaNorm(SIZE), "unused": LlamaNorm(SIZE)})
    swapper = Swapper(model, kinds="norm", allow_cpu=True)
    with swapper.watch():
        model["used"](torch.randn(2, SIZE))
    assert [s.where[0] for o in swapper.sites() for s in [o]] == ["used"]
    assert [(s.where, s.reason) for s in swapper.skipped] == [("unused", "was not called")]


def test_a_module_that_stands_in_two_places_is_swapped_once(plant) -> None:
    plant(same_norm)
    shared = LlamaNorm(SIZE)
    model = nn.Sequential(shared, nn.Linear(SIZE, SIZE), shared)
    swapper = Swapper(model, kinds="norm", terms=terms(FAVOURED), allow_cpu=True)
    with swapper.watch():
        model(torch.randn(2, SIZE)).sum().backward()
    (outcome,) = swapper.decide()
    assert outcome.site.where == ["0"]
    assert outcome.site.calls_per_step == 2
    swapper.apply()
    swapper.restore()
    assert type(shared) is LlamaNorm


def test_looking_for_sites_leaves_random_numbers_as_they_are(plant) -> None:
    plant(same_norm)
    model = nn.Sequential(LlamaNorm(SIZE), LlamaMLP(SIZE, 8))
    swapper = Swapper(model, kinds=["norm", "gate"], allow_cpu=True)
    with swapper.watch():
        model(torch.randn(2, SIZE))
    rng = torch.get_rng_state()
    assert len(swapper.sites()) == 2
    assert torch.equal(torch.get_rng_state(), rng)


def test_another_rank_follows_what_the_first_has_decided(plant) -> None:
    plant(same_norm)
    first, second = Loop(), Loop()
    leader = run(first)
    follower = Swapper(second.model, kinds="norm", allow_cpu=True)
    with follower.watch():
        second.step()
    follower.follow(leader.choices(), [o.site.where[0] for o in leader.outcomes])
    follower.apply()
    assert swapped_norms(second.net) == swapped_norms(first.net)


def test_a_choice_that_does_not_exist_here_is_a_warning(plant) -> None:
    plant(same_norm)
    loop = Loop()
    swapper = Swapper(loop.model, kinds="norm", allow_cpu=True)
    with swapper.watch():
        loop.step()
    with pytest.warns(SwapWarning, match="has no candidate other"):
        assert swapper.follow(["other"] * len(swapper.sites())) == []


def test_in_deterministic_mode_only_deterministic_kernels_are_taken(plant) -> None:
    plant(same_norm, deterministic=False)
    loop = Loop()
    torch.use_deterministic_algorithms(True)
    try:
        swapper = Swapper(loop.model, kinds="norm", allow_cpu=True)
        with swapper.watch():
            loop.step()
        outcomes = swapper.decide()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all("deterministic" in o.reason for o in outcomes)


def test_an_unknown_kind_is_an_error_of_the_user() -> None:
    with pytest.raises(UsageError, match="no kind 'norms'"):
        Swapper(Net(), kinds=["norms"])


def test_without_a_gpu_one_line_says_that_nothing_can_be_swapped() -> None:
    expected = reference()
    loop = Loop()
    swapper = Swapper(loop.model)
    with swapper.watch():
        loop.step()
    assert swapper.decide() == []
    assert swapper.apply() == []
    loop.step()
    assert str(swapper) == "nothing can be swapped here: the model is not on a GPU"
    assert same(loop.state(), expected.final)


@pytest.fixture
def single_process():
    with alone():
        yield


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
@pytest.mark.usefixtures("single_process")
def test_within_ddp_modules_are_swapped_and_gradients_reduced_as_before(plant) -> None:
    plant(same_norm)
    expected = reference(wrap=DistributedDataParallel)
    loop = Loop(DistributedDataParallel)
    swapper = run(loop)
    assert all(place.startswith("module.0.") for o in swapper.applied for place in o.site.where)
    assert len(swapped_norms(loop.net)) == 3
    assert same(loop.state(), expected.final)


def test_the_bundled_kernels_train_as_the_originals_do() -> None:
    # GIVEN a loop in which the bundled kernels are told to be fast
    class Favours(ToldClock):
        def times(self, calls, budget_s):
            return {n: [90e3 if n == "original" else 50e3 + len(n)] * 9 for n in calls}

    told = terms({}, min_gain=0.0)
    expected = reference(4)
    loop = Loop()
    swapper = Swapper(
        loop.model,
        kinds=["norm", "gate"],
        terms=type(told)(clock=Favours({}), budget_s=600.0),
        allow_cpu=True,
    )
    with swapper.watch():
        loop.step()
    swapper.decide()
    swapper.apply()
    for _ in range(3):
        loop.step()
    assert {o.chosen.source for o in swapper.applied} == {"bundled"}
    torch.testing.assert_close(loop.losses, expected.losses, rtol=1e-5, atol=1e-6)


def shard(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in net[0].blocks:
        fully_shard(block)
    fully_shard(net[0].norm)
    return fully_shard(net)


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("order", ["sharded, then swapped", "swapped, then sharded"])
def test_with_fully_shard_before_or_after_the_loop_goes_on_as_without_swap(plant, order) -> None:
    plant(same_norm)
    first = order.startswith("sharded")

    def losses(swapped: bool) -> list[float]:
        loop = Loop()
        if first:
            shard(loop.net)
            loop.optimizer = torch.optim.AdamW(loop.net.parameters(), lr=1e-2)
        swapper = Swapper(loop.net, kinds="norm", terms=terms(FAVOURED), allow_cpu=True)
        with swapper.watch():
            loop.step()
        if swapped:
            swapper.decide()
            swapper.apply()
            assert len(swapped_norms(loop.net)) == 3
        if not first:
            shard(loop.net)
            loop.optimizer = torch.optim.AdamW(loop.net.parameters(), lr=1e-2)
        loop.step()
        # WHEN all is restored, the sharded modules stay sharded
        swapper.restore()
        assert swapped_norms(loop.net) == []
        assert type(loop.net[0].norm).__name__ == "FSDPLlamaNorm"
        loop.step()
        return loop.losses

    assert losses(swapped=True) == losses(swapped=False)
