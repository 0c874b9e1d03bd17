"""`advisor.swap(model, inputs)`: one call, a handle, a context manager, a table."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn

import advisor
from advisor.swap.find import Skipped
from advisor.swap.kinds import norm as norm_kind
from advisor.swap.modules import MARK
from advisor.swap.site import Candidate, Outcome, Site, Trial
from advisor.swap.table import places, table
from tests.swap.networks import LlamaNorm
from tests.swap.planted import ToldClock, candidate

SIZE = 16


def fast(module: nn.Module, x: Tensor) -> Tensor:
    return LlamaNorm.forward(module, x)


@pytest.fixture(autouse=True)
def _planted(monkeypatch):
    monkeypatch.setattr(norm_kind, "_bundled", lambda *_: candidate(fast, "planted"))
    monkeypatch.setattr(norm_kind, "_torchs", lambda *_: None)
    told = ToldClock({"original": 90e3, "planted": 50e3})
    monkeypatch.setattr("advisor.swap.measure.clock_for", lambda devices: told)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), LlamaNorm(SIZE), nn.Dropout(0.5))


def is_swapped(net: nn.Module) -> bool:
    return any(hasattr(type(m), MARK) for m in net.modules())


def test_the_package_itself_is_called_and_gives_a_handle() -> None:
    net = model()
    done = advisor.swap(net, torch.randn(8, SIZE), "norm", allow_cpu=True)
    assert [o.chosen.name for o in done.outcomes] == ["planted"]
    assert is_swapped(net)
    assert "norm 2 (LlamaNorm) -> planted" in str(done)
    done.restore()
    done.restore()
    assert not is_swapped(net)


@pytest.mark.parametrize("error", [None, KeyError("x"), KeyboardInterrupt()])
def test_as_a_context_manager_it_restores_at_the_end_whatever_ends_it(error) -> None:
    net = model()

    def within() -> None:
        with advisor.swap(net, torch.randn(8, SIZE), "norm", allow_cpu=True) as done:
            assert is_swapped(net)
            assert done.outcomes
            if error is not None:
                raise error

    if error is None:
        within()
    else:
        with pytest.raises(type(error)):
            within()
    assert not is_swapped(net)


def test_nothing_but_the_class_of_a_module_changes() -> None:
    # GIVEN a model with running statistics, gradients and dropout
    net = model()
    net(torch.randn(8, SIZE)).sum().backward()
    x = torch.randn(8, SIZE)
    kept = [t.clone() for t in net.state_dict().values()]
    grads = [p.grad.clone() for p in net.parameters()]
    rng = torch.get_rng_state()
    # WHEN it is swapped
    advisor.swap(net, x, "norm", allow_cpu=True)
    # THEN they are what they were
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), kept, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaNorm(SIZE)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.norm(x) * scale


@pytest.mark.parametrize(
    "inputs", [torch.randn(8, SIZE), (torch.randn(8, SIZE), 2.0), {"x": torch.randn(8, SIZE), "scale": 2.0}]
)
def test_inputs_are_one_argument_several_or_keywords(inputs) -> None:
    net = Keywords()
    with advisor.swap(net, inputs, "norm", allow_cpu=True):
        assert is_swapped(net)


def test_a_loss_is_called_on_the_result_and_looked_at_if_it_is_a_module() -> None:
    seen: list[torch.Size] = []

    def loss(result: Tensor) -> Tensor:
        seen.append(result.shape)
        return result.sum()

    advisor.swap(model(), torch.randn(8, SIZE), "norm", loss, allow_cpu=True)
    assert seen == [torch.Size([8, SIZE])]
    done = advisor.swap(nn.Linear(SIZE, SIZE), torch.randn(8, SIZE), "norm", LlamaNorm(SIZE), allow_cpu=True)
    assert [o.site.where for o in done.outcomes] == [["loss"]]


def test_without_a_gpu_it_says_so_in_one_line_and_changes_nothing(capsys) -> None:
    net = model()
    done = advisor.swap(net, torch.randn(8, SIZE))
    assert not is_swapped(net)
    line = "nothing can be swapped here: the model is not on a GPU"
    assert capsys.readouterr().err == f"advisor: {line}\n"
    assert str(done) == line


def test_without_triton_it_says_so_in_one_line(monkeypatch) -> None:
    import advisor.swap.session as session

    monkeypatch.setattr(session, "lacking", lambda: "Triton is not installed here")
    done = advisor.swap(model(), torch.randn(8, SIZE))
    assert str(done) == "nothing can be swapped here: Triton is not installed here"


def test_what_the_model_raises_is_the_callers_and_leaves_no_hook() -> None:
    net = model()
    with pytest.raises(RuntimeError):
        advisor.swap(net, torch.randn(8, SIZE + 1), "norm", allow_cpu=True)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_naming_the_package_loads_no_torch() -> None:
    code = "import sys, advisor; advisor.swap; print('torch' in sys.modules, callable(advisor.swap))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False True"


def outcome(chosen: bool, **trial: float) -> Outcome:
    made = Candidate("k", fast, "bundled")
    site = Site("norm", ["a", "b", "c"], "module", "LlamaNorm", fast, [], [made])
    reason = "2.00 times as fast" if chosen else "slower"
    return Outcome(site, made if chosen else None, reason, [Trial("k", **trial)])


def test_the_table_has_what_was_kept_what_was_left_and_what_was_passed_over() -> None:
    figures = {
        "time_ns": 5e3,
        "original_ns": 1e4,
        "error": 1e-7,
        "eager_error": 2e-7,
        "memory_bytes": 2**20,
        "original_memory_bytes": 2**21,
    }
    made = [outcome(False), outcome(True, **figures)]
    assert table(made, [Skipped("", "Net", "is compiled")]).splitlines() == [
        "swapped: 3 places",
        "  norm a, b and 1 more (LlamaNorm) -> k: 2.00 times as fast "
        "(10.0 -> 5.0 µs; error 1.0e-07, before 2.0e-07; 2.0 -> 1.0 MiB)",
        "left as it is:",
        "  norm a, b and 1 more (LlamaNorm): slower",
        "passed over:",
        "  the model (Net): is compiled",
    ]
    assert table([]) == "swapped: nothing"


def test_what_is_not_known_is_not_in_the_table() -> None:
    assert "MiB" not in table([outcome(True, time_ns=5e3, original_ns=1e4)])
    assert "µs" not in table([outcome(True, memory_bytes=1, original_memory_bytes=2)])


def test_many_places_are_counted() -> None:
    assert places(["a"]) == "a"
    assert places([f"h.{i}" for i in range(12)]) == "h.0, h.1 and 10 more"


class Counting(nn.Module):
    """Replaces a buffer at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaNorm(SIZE)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.norm(x)


def test_a_buffer_that_a_call_replaces_is_put_back_as_the_same_object() -> None:
    net = Counting()
    calls = net.calls
    with advisor.swap(net, torch.randn(8, SIZE), "norm", allow_cpu=True):
        assert net.calls is calls
        assert calls == 0


def test_a_backward_that_is_still_to_come_is_as_ever() -> None:
    net, x = model(), torch.randn(8, SIZE)
    loss = net(x).sum()
    advisor.swap(net, x, "norm", allow_cpu=True)
    loss.backward()
    assert all(p.grad is not None for p in net.parameters())


def test_layers_that_their_first_call_makes_are_left_alone_and_the_others_swapped() -> None:
    net = nn.Sequential(nn.LazyLinear(SIZE), nn.LazyBatchNorm1d(), LlamaNorm(SIZE))
    with advisor.swap(net, torch.randn(8, SIZE), "auto", allow_cpu=True) as done:
        assert [hasattr(type(m), MARK) for m in net] == [False, False, True]
        assert all("first call" in skip.reason for skip in done.skipped)


def test_scripted_layers_are_left_alone_and_the_others_swapped() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.GELU()))
    net = nn.Sequential(scripted, LlamaNorm(SIZE))
    with advisor.swap(net, torch.randn(8, SIZE), "auto", allow_cpu=True) as done:
        assert hasattr(type(net[1]), MARK)
        assert {skip.reason for skip in done.skipped} == {"is scripted"}


def test_no_copy_of_a_model_is_kept_and_nothing_holds_it_after_restoring() -> None:
    net = model()
    done = advisor.swap(net, torch.randn(8, SIZE), "norm", allow_cpu=True)
    assert [o.site.examples for o in done.outcomes] == [[]]
    done.restore()
    gone = weakref.ref(net)
    del net, done
    gc.collect()
    assert gone() is None
