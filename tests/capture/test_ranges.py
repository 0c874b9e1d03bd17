from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from advisor.capture.ranges import MODULE_PREFIX, ModuleRanges, OpenRanges, Phases, clean_path, split_modules

HOOK_DICTS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Identity())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("mine")


def hook_state(model):
    return [{name: dict(getattr(module, name)) for name in HOOK_DICTS} for module in model.modules()]


def recorded(work):
    """Names of the module ranges in a profile of ``work``, in order of time, with start and end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    events = [e for e in profile.events() if e.name.startswith(MODULE_PREFIX)]
    return sorted((e.time_range.start, e.name.removeprefix(MODULE_PREFIX), e.time_range.end) for e in events)


@pytest.fixture
def marked():
    """Marks a model and yields the open ranges; the marks are removed afterwards."""
    ranges = OpenRanges()
    installed = []

    def mark(model):
        instrument = ModuleRanges(model, ranges)
        instrument.install()
        installed.append(instrument)
        return ranges

    yield mark
    for instrument in installed:
        instrument.remove()


def test_each_module_with_work_of_its_own_gets_a_range_under_its_path(marked):
    model = Net()
    marked(model)

    assert [name for _, name, _ in recorded(lambda: model(torch.ones(1, 4)))] == ["body.0", "body.1", "head"]


def test_removal_leaves_the_hook_dicts_as_they_were_with_the_users_hooks_in_them():
    # GIVEN a model with hooks of the user's own
    model = Net()
    model.head.register_forward_hook(lambda module, args, kwargs, output: None, with_kwargs=True)
    model.head.register_forward_pre_hook(lambda module, args: None)
    before = hook_state(model)
    keys = [set(vars(module)) for module in model.modules()]

    # WHEN it is marked, used, and unmarked
    instrument = ModuleRanges(model, OpenRanges())
    instrument.install()
    assert hook_state(model) != before
    model(torch.ones(1, 4))
    instrument.remove()
    instrument.remove()

    # THEN nothing has changed
    assert hook_state(model) == before
    assert [set(vars(module)) for module in model.modules()] == keys


def test_a_range_closes_when_a_forward_raises_and_the_users_error_is_untouched(marked):
    model = nn.Sequential(nn.Linear(4, 4), Raises())
    ranges = marked(model)

    with pytest.raises(ValueError, match="mine"):
        model(torch.ones(1, 4))

    assert ranges.stack == []


def test_recomputation_under_checkpointing_closes_its_ranges(marked):
    model = Net()
    ranges = marked(model)

    def work():
        checkpoint(model, torch.ones(1, 4, requires_grad=True), use_reentrant=False).sum().backward()

    found = [name for _, name, _ in recorded(work)]
    assert ranges.stack == []
    assert found[:3] == ["body.0", "body.1", "head"]
    assert "body.0" in found[3:]


def test_a_module_called_twice_and_a_shared_module_are_marked_each_time_under_the_first_path(marked):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x))

    model = Twice()
    marked(model)

    assert [name for _, name, _ in recorded(lambda: model(torch.ones(1, 4)))] == ["first", "first"]


def test_a_module_that_calls_itself_nests_its_ranges(marked):
    class Recursive(nn.Module):
        def forward(self, x, depth=2):
            return self(x + 1, depth - 1) if depth else x

    model = nn.ModuleDict({"loop": Recursive()})
    ranges = marked(model)

    found = recorded(lambda: model["loop"](torch.ones(1)))

    assert [name for _, name, _ in found] == ["loop"] * 3
    assert found[0][2] >= found[1][2] >= found[2][2]
    assert ranges.stack == []


def test_keyword_arguments_reach_the_forward(marked):
    class Keyword(nn.Module):
        def forward(self, x, *, scale):
            return x * scale

    model = nn.ModuleDict({"k": Keyword()})
    marked(model)

    assert model["k"](torch.ones(1), scale=3).item() == 3


def test_other_threads_have_ranges_of_their_own(marked):
    model = Net()
    ranges = marked(model)
    ranges.open("here")
    thread = threading.Thread(target=lambda: model(torch.ones(1, 4)))
    thread.start()
    thread.join()

    assert [name for name, _ in ranges.stack] == ["here"]
    ranges.drain()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_while_marked_carries_only_inert_hooks(marked, make):
    model = nn.Sequential(nn.Linear(4, 4))
    marked(model)
    twin = make(model)

    assert recorded(lambda: twin(torch.ones(1, 4))) == []
    assert torch.equal(twin(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_compiled_modules_and_what_lies_in_them_are_left_alone():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrapped = torch.compile(Net())
            self.in_place = Net()
            self.in_place.compile()
            self.script = torch.jit.script(nn.Linear(2, 2))
            self.plain = nn.Linear(2, 2)

    model = Outer()
    before = hook_state(model)
    eager, compiled = split_modules(model)
    instrument = ModuleRanges(model, OpenRanges())
    instrument.install()

    assert list(eager) == ["", "plain"]
    assert compiled == ["wrapped", "in_place", "script"]
    assert hook_state(model.wrapped._orig_mod) == hook_state(Net())
    instrument.remove()
    assert hook_state(model) == before


def test_a_compiled_function_over_marked_modules_is_not_compiled_anew():
    # GIVEN a function of the user's, compiled, that calls plain modules
    model = Net()
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(lambda x: model(x).sum(), backend=backend)
    step(torch.ones(1, 4))

    # WHEN the modules are marked and unmarked between calls
    instrument = ModuleRanges(model, OpenRanges())
    instrument.install()
    step(torch.ones(1, 4))
    instrument.remove()
    step(torch.ones(1, 4))

    # THEN it was compiled once
    assert len(compiles) == 1
    torch._dynamo.reset()


def test_paths_have_no_wrapper_components():
    assert clean_path("_fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.mlp._orig_mod") == (
        "blocks.0.mlp"
    )


def test_a_ddp_wrapper_adds_no_component(monkeypatch):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Wrapper)

    assert "head" in split_modules(Wrapper(Net()))[0]


def test_phases_do_nothing_until_switched_on_and_close_what_was_left_open_inside():
    ranges = OpenRanges()
    phases = Phases(ranges)
    phases.open("forward")
    assert ranges.stack == []

    phases.on = True
    phases.open("optimizer")
    ranges.open("advisor::module::left")
    phases.open("optimizer")
    assert [name for name, _ in ranges.stack] == ["advisor::phase::optimizer"]
    phases.close("backward")
    phases.close("optimizer")
    assert ranges.stack == []


def test_a_model_pickled_while_marked_loads_where_this_package_is_not_installed(marked):
    model = nn.Sequential(nn.Linear(4, 4))
    marked(model)
    assert b"advisor" not in pickle.dumps(model)


def test_a_marked_model_can_be_scripted_and_its_marks_go(marked):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    marked(model)
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(torch.ones(1, 4)), model(torch.ones(1, 4)))
    assert not model[0]._forward_hooks


def test_a_range_that_cannot_be_opened_or_closed_is_told_of_and_raises_nothing(monkeypatch):
    class Broken:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            if "open" in self.name:
                raise RuntimeError("no")

        def __exit__(self, *error):
            raise RuntimeError("no")

    told: list[Exception] = []
    ranges = OpenRanges(told.append)
    ranges.open("opens not", Broken)
    ranges.close("opens not")
    assert len(told) == 1
    ranges.open("a", Broken)
    ranges.close("a")
    assert len(told) == 2
    ranges.open("a", Broken)
    ranges.drain()
    assert ranges.stack == []
