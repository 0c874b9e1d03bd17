"""A module whose class is exchanged stays what it is to everyone else."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from advisor.kernels._device import UnsupportedError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from advisor.swap import modules
from advisor.swap.find import ModuleFinder
from advisor.swap.journal import Journal
from advisor.swap.modules import MARK, class_change, swapped_class, verified_keys
from advisor.swap.site import Example, Outcome
from advisor.swap.tensors import stand_in
from advisor.swap.warn import SwapWarning
from tests.swap import planted
from tests.swap.networks import LlamaNorm, Net
from tests.swap.planted import candidate

SIZE = 16


class Called:
    """A right candidate that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        self.count += 1
        eps = module.variance_epsilon
        return nn.functional.rms_norm(x, (x.shape[-1],), module.weight, eps)


def swapped(journal: Journal, module: nn.Module, call, example: Example | None = None) -> nn.Module:
    x = torch.randn(3, SIZE, requires_grad=True)
    example = example or Example((stand_in(module), x))
    made = swapped_class(type(module), candidate(call, "planted"), verified_keys([example]))
    journal.make(class_change("norm", module, made))
    return module


@pytest.fixture
def journal():
    with Journal() as made:
        yield made


def grad_input(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_the_candidate_is_called_and_restoring_brings_the_original_back(journal) -> None:
    module, called = LlamaNorm(SIZE), Called()
    swapped(journal, module, called)
    module(grad_input(3, SIZE))
    assert called.count == 1
    assert isinstance(module, LlamaNorm)
    assert type(module).__name__ == "LlamaNorm"
    journal.restore()
    assert type(module) is LlamaNorm
    module(grad_input(3, SIZE))
    assert called.count == 1


def test_the_state_dict_and_what_the_optimizer_holds_stay_the_same(journal) -> None:
    module = LlamaNorm(SIZE)
    before, weight, attributes = module.state_dict(), module.weight, dict(vars(module))
    swapped(journal, module, Called())
    assert module.state_dict().keys() == before.keys()
    assert module.weight is weight
    assert vars(module) == attributes
    assert repr(module) == "LlamaNorm()"


def test_a_deep_copy_runs_the_original_on_its_own_weights(journal) -> None:
    # GIVEN an EMA copy of a swapped module
    module, called = LlamaNorm(SIZE), Called()
    swapped(journal, module, called)
    ema = copy.deepcopy(module)
    # WHEN the copy's weight changes
    with torch.no_grad():
        ema.weight.fill_(3.0)
    # THEN it counts in the copy and not in the module
    x = grad_input(3, SIZE)
    assert type(ema) is LlamaNorm
    torch.testing.assert_close(ema(x), 3 * module(x))
    assert called.count == 1


def test_averaged_models_follow_a_swapped_one(journal) -> None:
    module = LlamaNorm(SIZE)
    swapped(journal, module, Called())
    ema = torch.optim.swa_utils.AveragedModel(module)
    with torch.no_grad():
        module.weight.fill_(2.0)
    ema.update_parameters(module)
    assert torch.equal(ema.module.weight, torch.full((SIZE,), 2.0))


@pytest.mark.parametrize("through", ["pickle", "torch.save"])
def test_a_pickled_model_loads_as_one_of_the_original_class(journal, through) -> None:
    module = LlamaNorm(SIZE)
    with torch.no_grad():
        module.weight.normal_()
    swapped(journal, module, Called())
    if through == "pickle":
        loaded = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert type(loaded) is LlamaNorm
    assert torch.equal(loaded.weight, module.weight)
    assert hasattr(type(module), MARK)


def test_a_class_with_its_own_state_is_pickled_by_its_own_rules(journal) -> None:
    module = Stateful(SIZE)
    swapped(journal, module, Called(), Example((stand_in(module), grad_input(3, SIZE))))
    assert pickle.loads(pickle.dumps(module)).restored


class Stateful(LlamaNorm):
    def __getstate__(self):
        return {**self.__dict__, "saved": True}

    def __setstate__(self, state):
        self.restored = state.pop("saved")
        super().__setstate__(state)


def test_hooks_fire_as_before(journal) -> None:
    module, seen = LlamaNorm(SIZE), []
    module.register_forward_pre_hook(lambda m, args: seen.append("before"))
    swapped(journal, module, Called())
    module.register_forward_hook(lambda m, args, out: seen.append("after"))
    module.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    module(grad_input(3, SIZE)).sum().backward()
    assert seen == ["before", "after", "backward"]


def test_tied_weights_stay_tied_and_collect_both_gradients(journal) -> None:
    a, b = LlamaNorm(SIZE), LlamaNorm(SIZE)
    b.weight = a.weight
    x = grad_input(3, SIZE)
    b(a(x)).sum().backward()
    expected = a.weight.grad.clone()
    a.weight.grad = None
    swapped(journal, a, Called())
    swapped(journal, b, Called())
    b(a(x)).sum().backward()
    torch.testing.assert_close(a.weight.grad, expected)
    assert len(list(nn.ModuleList([a, b]).parameters())) == 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_runs_the_candidate_in_both_passes(journal, use_reentrant) -> None:
    module, called = LlamaNorm(SIZE), Called()
    x = grad_input(3, SIZE)
    module(x).square().sum().backward()
    expected = x.grad.clone(), module.weight.grad.clone()
    x.grad = module.weight.grad = None
    swapped(journal, module, called)
    checkpoint(module, x, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close((x.grad, module.weight.grad), expected)
    assert called.count == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.eval()(grad_input(3, SIZE)),
        lambda m: m.double()(grad_input(3, SIZE).double()),
        lambda m: m(grad_input(3, SIZE)[0]),
        lambda m: torch.func.vmap(m)(grad_input(2, 3, SIZE)),
        lambda m: torch.jit.trace(m, grad_input(3, SIZE), check_trace=False),
    ],
    ids=["eval", "float64", "other rank", "vmap", "trace"],
)
def test_calls_unlike_those_that_were_proven_go_to_the_original(journal, call) -> None:
    module, called = LlamaNorm(SIZE), Called()
    swapped(journal, module, called)
    call(module)
    assert called.count == 0


@pytest.mark.parametrize(
    "transform",
    [
        lambda m, x: torch.func.vmap(m)(x[None]),
        lambda m, x: torch.func.jvp(m, (x,), (x,)),
        lambda m, x: torch.func.grad(lambda y: m(y).sum())(x),
    ],
    ids=["vmap", "jvp", "grad"],
)
def test_within_function_transforms_the_original_runs(journal, transform) -> None:
    module, called = LlamaNorm(SIZE).requires_grad_(False), Called()
    swapped(journal, module, called, Example((stand_in(module), torch.randn(3, SIZE))))
    transform(module, torch.randn(3, SIZE))
    assert called.count == 0
    module(torch.randn(3, SIZE))
    assert called.count == 1


def test_a_call_under_autocast_is_another_than_one_outside(journal) -> None:
    module, called = LlamaNorm(SIZE), Called()
    swapped(journal, module, called)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(grad_input(3, SIZE))
    assert called.count == 0


def test_other_batch_sizes_go_to_the_candidate(journal) -> None:
    module, called = LlamaNorm(SIZE), Called()
    swapped(journal, module, called)
    module(grad_input(7, SIZE))
    with torch.no_grad():
        module(grad_input(2, SIZE))
    assert called.count == 2


def test_a_kernel_that_cannot_serve_in_the_loop_is_given_up_with_a_warning(journal) -> None:
    module = LlamaNorm(SIZE)
    x = grad_input(3, SIZE)
    expected = module(x)

    tried: list[int] = []

    def unsupported(module: nn.Module, x: Tensor) -> Tensor:
        tried.append(1)
        raise UnsupportedError("rows of odd length")

    swapped(journal, module, unsupported)
    with pytest.warns(SwapWarning, match="planted is no longer used, it raised UnsupportedError: rows"):
        assert torch.equal(module(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(module(x), expected)
    assert tried == [1]


@pytest.mark.parametrize(
    ("call", "error"), [(planted.out_of_memory, torch.OutOfMemoryError), (planted.raising, RuntimeError)]
)
def test_other_exceptions_are_the_loops_own_affair(journal, call, error) -> None:
    module = LlamaNorm(SIZE)
    swapped(journal, module, call)
    with pytest.raises(error):
        module(grad_input(3, SIZE))


def test_a_class_that_was_put_on_top_of_ours_stays_when_ours_goes(journal) -> None:
    # GIVEN a wrapper that subclasses the live class, as fully_shard and parametrize do
    module, called = LlamaNorm(SIZE), Called()
    swapped(journal, module, called)

    class Sharded:
        sharded = True

    module.__class__ = type("ShardedNorm", (Sharded, type(module)), {})
    module(grad_input(3, SIZE))
    assert called.count == 1
    # WHEN all is taken back
    journal.restore()
    # THEN the wrapper is left, on the original
    assert type(module).__name__ == "ShardedNorm"
    assert type(module).__mro__[2] is LlamaNorm
    module(grad_input(3, SIZE))
    assert called.count == 1


def test_parametrizing_a_swapped_module_and_restoring_leaves_it_parametrized(journal) -> None:
    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    module = LlamaNorm(SIZE)
    swapped(journal, module, Called())
    nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    x = grad_input(3, SIZE)
    swapped_result = module(x)
    journal.restore()
    assert nn.utils.parametrize.is_parametrized(module)
    torch.testing.assert_close(module(x), swapped_result)


def test_compiling_around_swapped_modules_calls_the_candidate(journal) -> None:
    net, called = Net(1), Called()
    x = grad_input(3, SIZE)
    expected = net(x)
    swapped(journal, net.norm, called, Example((stand_in(net.norm), grad_input(3, SIZE))))
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()
    assert called.count == 1


def test_a_swapped_module_does_not_ask_what_older_dynamos_always_affirm() -> None:
    # Dynamo up to torch 2.11 folds it to True in all that it traces, so that no candidate would be called.
    assert "is_exporting" not in modules._traced.__code__.co_names


class Guarded(LlamaNorm):
    """Sets nothing once it is built, and makes its own copies."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.__dict__["built"] = True

    def __setattr__(self, name: str, value: object) -> None:
        if "built" in self.__dict__:
            raise AttributeError(name)
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: object) -> "Guarded":
        made = type(self)(SIZE)
        made.load_state_dict(self.state_dict())
        return made


def test_a_class_with_ways_of_its_own_to_be_set_and_copied_is_swapped_and_restored(journal) -> None:
    module, called = Guarded(SIZE), Called()
    swapped(journal, module, called)
    module(grad_input(3, SIZE))
    assert called.count == 1
    assert type(copy.deepcopy(module)) is Guarded
    assert type(pickle.loads(pickle.dumps(module))) is Guarded
    journal.restore()
    assert type(module) is Guarded


def test_what_was_swapped_by_someone_else_meanwhile_is_not_swapped_again(journal) -> None:
    # GIVEN two who looked at the same module before either changed it
    module = LlamaNorm(SIZE)
    finders = [ModuleFinder(module, ["norm"]) for _ in range(2)]
    made = []
    for finder in finders:
        with finder.watch():
            module(grad_input(3, SIZE))
        (found,) = finder.sites()
        chosen = candidate(Called(), "planted")
        made.append([Outcome(found, chosen, "")])
    for finder, outcomes in zip(finders, made, strict=True):
        for change in finder.changes(outcomes):
            journal.make(change)
    assert len(journal) == 1
    journal.restore()
    assert type(module) is LlamaNorm
