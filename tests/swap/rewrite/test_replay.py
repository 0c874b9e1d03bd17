"""A call is recorded, proven and replayed; whatever is not like it runs as it is."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advisor.swap.rewrite.record import Recorded, Unrecordable
from advisor.swap.rewrite.replay import Replayer, drawn_on_cpu
from tests.swap.alone import alone
from tests.swap.rewrite.recorder import OnCpu, write


class Loop:
    """Two layers; called with their parameters as a traced step is."""

    def __init__(self, recorder: OnCpu | None = None, call: Any = None, replay: bool = True) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.recorder = recorder or OnCpu()
        self.call = call or self.plain
        self.step_call = Replayer(self.call, self.recorder) if replay else self.call
        self.losses: list[float] = []

    @staticmethod
    def plain(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ w1.t() + b1).tanh() @ w2.t() + b2
        loss = y.square().mean()
        return loss, y.argmax(-1)

    def forward(self, i: int, size: int = 5) -> Tensor:
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(i))
        return self.step_call(*self.net.parameters(), x)[0]

    def step(self, i: int, set_to_none: bool = True, size: int = 5) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        loss = self.forward(i, size)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


class Called(nn.Module):
    """A loop's forward, for what wraps modules."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.net, self._forward = loop.net, loop.forward

    def forward(self, i: int) -> Tensor:
        return self._forward(i)


def plain(steps: int, **options: Any) -> Loop:
    loop = Loop(replay=False)
    for i in range(steps):
        loop.step(i, **options)
    return loop


def same(a: Loop, b: Loop) -> bool:
    pairs = zip(a.net.parameters(), b.net.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs) and a.losses == b.losses


def test_the_fourth_step_and_those_after_it_are_replayed_and_train_as_ever() -> None:
    loop = Loop()
    for i in range(8):
        loop.step(i)
    assert loop.step_call.refused == ""
    # One to prove it, five of the loop, before two of which it is checked again.
    assert loop.recorder.replays == 8
    assert same(loop, plain(8))


def test_results_that_are_kept_are_not_written_over_by_later_steps() -> None:
    loop = Loop()
    losses = []
    for i in range(8):
        loop.optimizer.zero_grad()
        losses.append(loop.forward(i))
        losses[-1].backward()
        loop.optimizer.step()
    assert [loss.item() for loss in losses] == plain(8).losses


@pytest.mark.parametrize("every", [2, 3])
def test_gradients_that_are_still_there_are_added_to(every: int) -> None:
    def train(loop: Loop) -> Loop:
        for i in range(12):
            loop.forward(i).backward()
            if i % every == every - 1:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return loop

    assert same(train(Loop()), train(Loop(replay=False)))


def test_gradients_that_are_set_to_nought_are_so() -> None:
    loop = Loop()
    for i in range(8):
        loop.step(i, set_to_none=False)
    assert same(loop, plain(8, set_to_none=False))


def test_a_call_between_another_and_its_backward_runs_as_it_is() -> None:
    def train(loop: Loop) -> Loop:
        for i in range(9):
            loop.optimizer.zero_grad()
            first, second = loop.forward(i), loop.forward(100 + i)
            first.backward()
            second.backward()
            loop.optimizer.step()
            loop.losses += [first.item(), second.item()]
        return loop

    loop = train(Loop())
    assert same(loop, train(Loop(replay=False)))
    assert 0 < loop.recorder.replays < 12


def test_a_call_whose_backward_never_comes_does_not_stop_the_next() -> None:
    loop = Loop()
    for i in range(5):
        loop.step(i)
    before = loop.recorder.replays
    assert before == 5  # two of the loop, one to prove it, two checks
    loop.forward(5)
    loop.step(6)
    assert loop.recorder.replays == before + 2


def test_another_size_runs_as_it_is() -> None:
    def train(loop: Loop) -> Loop:
        for i in range(10):
            loop.step(i, size=3 if i in (4, 9) else 5)
        return loop

    loop = train(Loop())
    assert same(loop, train(Loop(replay=False)))
    assert loop.recorder.replays == 8


def test_a_parameter_with_other_memory_is_not_replayed_with_its_old_values() -> None:
    def train(loop: Loop) -> Loop:
        for i in range(8):
            if i == 5:
                loop.net[0].weight.data = loop.net[0].weight.data * 2
            loop.step(i)
        return loop

    assert same(train(Loop()), train(Loop(replay=False)))


def test_without_gradients_it_runs_as_it_is() -> None:
    loop = Loop()
    for i in range(5):
        loop.step(i)
    before = loop.recorder.replays
    with torch.no_grad():
        loop.forward(1)
    assert loop.recorder.replays == before


def remembering(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> tuple[Tensor]:
    x.add_(1.0)
    return (Loop.plain(w1, b1, w2, b2, x)[0],)


class Counting(Loop):
    """Whose call keeps statistics, and a count that the loss hangs on."""

    def __init__(self, recorder: OnCpu | None = None, replay: bool = True) -> None:
        self.mean, self.count = torch.zeros(4), torch.zeros((), dtype=torch.long)
        super().__init__(recorder, self.counting, replay)

    @staticmethod
    def counting(
        w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor, mean: Tensor, count: Tensor
    ) -> Any:
        count.add_(1)
        mean.mul_(0.9).add_(0.1 * x.mean(0))
        return Loop.plain(w1, b1, w2, b2, x + mean / count)

    def forward(self, i: int, size: int = 5) -> Tensor:
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(i))
        return self.step_call(*self.net.parameters(), x, self.mean, self.count)[0]


def test_statistics_are_written_once_a_step_and_as_ever() -> None:
    def train(loop: Loop) -> Loop:
        if isinstance(loop.step_call, Replayer):
            loop.step_call = Replayer(loop.call, loop.recorder, loop.call)  # held against the original, too
        for i in range(30):
            loop.step(i)
        return loop

    loop, expected = train(Counting()), train(Counting(replay=False))
    assert loop.step_call.refused == ""
    assert (
        loop.recorder.replays == 27 + 1 + 4
    )  # of the loop, the proof, and the checks before 1, 2, 13 and 25
    assert same(loop, expected)
    assert torch.equal(loop.mean, expected.mean)
    assert torch.equal(loop.count, torch.tensor(30))


@pytest.mark.parametrize(
    ("name", "words"), [("mean", "written values are not"), ("count", "not write the same")]
)
def test_a_recording_that_writes_something_else_is_dropped(name: str, words: str) -> None:
    class Forgetting(OnCpu):
        def record(self, forward, backward, replaced_bytes=0) -> Recorded:
            kept = super().record(forward, backward, replaced_bytes)

            def again() -> None:
                before = getattr(loop, name).clone()
                kept.forward()
                getattr(loop, name).copy_(before)

            return Recorded(kept.outputs, kept.gradients, again, kept.backward)

    loop, expected = Counting(Forgetting()), Counting(replay=False)
    for i in range(6):
        loop.step(i)
        expected.step(i)
    assert words in loop.step_call.refused
    assert same(loop, expected)
    assert torch.equal(loop.mean, expected.mean)


def test_a_call_that_writes_to_a_parameter_runs_as_it_is() -> None:
    def call(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            b2.mul_(0.5)
        return Loop.plain(w1, b1, w2, b2, x)

    loop, expected = Loop(call=call), Loop(call=call, replay=False)
    for i in range(6):
        loop.step(i)
        expected.step(i)
    assert loop.step_call.refused == "it writes to what it differentiates"
    assert same(loop, expected)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (remembering, "it writes to what it is given"),
        (lambda *a: (Loop.plain(*a)[0], a[0]), "it gives back what it is given"),
        (lambda *a: (Loop.plain(*a)[0], 3), "it gives something else than tensors"),
        (lambda *a: (Loop.plain(*a)[0].detach(),), "nothing of it is differentiated"),
    ],
)
def test_what_cannot_be_recorded_runs_as_it_is_and_says_why(call: Any, words: str) -> None:
    loop = Loop(call=call)
    for i in range(6):
        loss = loop.forward(i)
        if loss.requires_grad:
            loss.backward()
    assert words in loop.step_call.refused
    assert loop.recorder.replays == 0


def test_a_fault_while_recording_leaves_the_step_as_it_is() -> None:
    class Broken(OnCpu):
        def record(self, forward, backward, replaced_bytes=0) -> Recorded:
            raise Unrecordable("the host waits for the device within it")

    loop = Loop(Broken())
    for i in range(6):
        loop.step(i)
    assert loop.step_call.refused == "the host waits for the device within it"
    assert same(loop, plain(6))


def test_a_recording_that_gives_something_else_is_dropped() -> None:
    loop = Loop(OnCpu(spoil=0.1))
    for i in range(6):
        loop.step(i)
    assert "its gradients are not the same" in loop.step_call.refused
    assert same(loop, plain(6))


def test_a_value_that_was_read_while_recording_is_found_out_on_the_next_batch() -> None:
    # GIVEN a recording whose loss is always that of the batch it was made of
    class Fixed(OnCpu):
        def record(self, forward, backward, replaced_bytes=0) -> Recorded:
            kept = super().record(forward, backward, replaced_bytes)
            first = [o if o is None else o.clone() for o in kept.outputs]

            def again() -> None:
                kept.forward()
                write(kept.outputs, first)

            return Recorded(kept.outputs, kept.gradients, again, kept.backward)

    loop = Loop(Fixed())
    for i in range(6):
        loop.step(i)
    assert "its outputs are not the same" in loop.step_call.refused
    assert same(loop, plain(6))


def test_steps_unlike_the_recorded_one_again_and_again_end_the_recording() -> None:
    loop = Loop()
    for i in range(5):
        loop.step(i)
    for i in range(50):
        loop.step(i, size=3)
    assert "from call to call" in loop.step_call.refused


def test_a_hook_of_a_parameter_runs_once_a_step() -> None:
    calls = []
    loop = Loop()
    loop.net[0].weight.register_hook(lambda g: calls.append(1) or g)
    for i in range(8):
        loop.step(i)
    assert len(calls) == 8


class _Product(torch.autograd.Function):
    """Whose backward multiplies in float32, where autocast is not in force."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g.float() @ w, g.float().t() @ x


def test_the_backward_is_recorded_outside_autocast_where_the_loop_runs_it() -> None:
    def call(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> tuple[Tensor]:
        return ((_Product.apply((_Product.apply(x, w1) + b1).tanh(), w2) + b2).square().mean(),)

    def train(loop: Loop) -> Loop:
        for i in range(8):
            loop.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loop.forward(i)
            loss.backward()
            loop.optimizer.step()
            loop.losses.append(loss.item())
        return loop

    loop = train(Loop(call=call))
    assert loop.step_call.refused == ""
    assert same(loop, train(Loop(call=call, replay=False)))


@pytest.mark.parametrize(
    ("draw", "drawn"),
    [
        (lambda x: x * torch.rand(()), True),
        (lambda x: nn.functional.dropout(x), True),
        (lambda x: x * torch.empty(3).normal_(), True),
        (lambda x: x * torch.ones(()), False),
    ],
)
def test_numbers_drawn_on_the_host_are_seen_in_the_graph(draw: Any, drawn: bool) -> None:
    seen = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(drawn_on_cpu(node) for node in gm.graph.nodes)
        return gm.forward

    torch.compile(draw, backend=backend)(torch.ones(3))
    assert any(seen) == drawn


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_in_place_of_which_the_recordings_will_be_are_not_counted_as_memory(set_to_none) -> None:
    class Noting(OnCpu):
        def record(self, forward, backward, replaced_bytes=0) -> Recorded:
            self.replaced_bytes = replaced_bytes
            return super().record(forward, backward, replaced_bytes)

    # GIVEN a loop whose gradients are gone, or still there, when a step is recorded
    loop = Loop(Noting())
    for i in range(3):
        loop.step(i, set_to_none)
    parameters = sum(p.numel() * p.element_size() for p in loop.net.parameters())
    assert loop.recorder.replaced_bytes == (0 if set_to_none else parameters)


def test_gradients_of_the_step_before_may_be_let_go_of_between_forward_and_backward() -> None:
    def train(loop: Loop) -> Loop:
        for i in range(12):
            loss = loop.forward(i)
            loop.optimizer.zero_grad()
            loss.backward()
            loop.optimizer.step()
            loop.losses.append(loss.item())
        return loop

    loop = train(Loop())
    assert same(loop, train(Loop(replay=False)))
    # Seen twice, it is relied on: gradients are the recording's memory, not copies.
    recording = loop.step_call._recording
    assert recording._relied_on
    assert loop.net[0].weight.grad.data_ptr() == recording._gradients[0].data_ptr()


def test_a_loop_that_keeps_gradients_after_it_let_go_of_them_is_an_error_and_not_a_wrong_gradient() -> None:
    loop = Loop()
    for i in range(8):
        loss = loop.forward(i)
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
    with pytest.raises(RuntimeError, match="has written over gradients that parameters still have"):
        loop.forward(9).backward()


@pytest.mark.parametrize("adds_up", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("every", [2, 3, 4])
def test_gradients_of_several_batches_are_added_up_where_the_first_is_let_go_of_in_mid_step(
    adds_up: bool, set_to_none: bool, every: int
) -> None:
    # GIVEN a loop that lets go of gradients between forward and backward, once in a while, as Lightning does
    def train(loop: Loop) -> Loop:
        for i in range(40):
            loss = loop.forward(i)
            if i % every == 0:
                loop.optimizer.zero_grad(set_to_none)
            (loss / every).backward()
            if i % every == every - 1:
                loop.optimizer.step()
            loop.losses.append(loss.item())
        return loop

    loop = train(Loop(OnCpu(adds_up=adds_up)))
    assert loop.step_call.refused == ""
    assert loop.recorder.replays > 37
    assert same(loop, train(Loop(replay=False)))


def test_a_loop_that_begins_to_add_up_later_is_no_error_where_that_is_known() -> None:
    begun = False

    def train(loop: Loop) -> Loop:
        for i in range(24):
            nonlocal begun
            begun = i >= 12
            loss = loop.forward(i)
            if i < 12 or i % 3 == 0:
                loop.optimizer.zero_grad()
            loss.backward()
            if i < 12 or i % 3 == 2:
                loop.optimizer.step()
            loop.losses.append(loss.item())
        return loop

    loop = train(Loop(OnCpu(adds_up=lambda: begun)))
    assert loop.recorder.replays > 20
    assert same(loop, train(Loop(replay=False)))


def test_a_parameter_without_a_gradient_takes_the_recordings_and_one_that_has_adds_without_a_copy() -> None:
    loop = Loop()
    for i in range(6):
        loop.step(i)
    recording = loop.step_call._recording
    first, *others = loop.net.parameters()
    loop.optimizer.zero_grad()
    first.grad = torch.zeros_like(first)
    loop.forward(7).backward()
    assert first.grad.data_ptr() != recording._gradients[0].data_ptr()
    assert [p.grad.data_ptr() for p in others] == [g.data_ptr() for g in recording._gradients[1:4]]
    assert torch.equal(first.grad, recording._gradients[0])


@pytest.mark.parametrize("together", [True, False])
def test_a_step_with_two_backwards_is_not_recorded(together: bool) -> None:
    def two(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = Loop.plain(w1, b1, w2, b2, x)[0]
        return loss, 2 * loss

    def train(loop: Loop) -> Loop:
        for i in range(6):
            loop.optimizer.zero_grad()
            losses = loop.step_call(*loop.net.parameters(), torch.full((5, 4), float(i)))
            if together:
                torch.autograd.backward(losses)
            else:
                for loss in losses:
                    loss.backward(retain_graph=True)
            loop.optimizer.step()
            loop.losses.append(losses[0].item())
        return loop

    replayed = Loop(call=two)
    assert same(train(replayed), train(Loop(call=two, replay=False)))
    assert replayed.step_call.refused == ("" if together else "more than one backward goes through it")


def test_a_step_whose_anomalies_are_looked_for_is_not_recorded() -> None:
    loop = Loop()
    with torch.autograd.detect_anomaly(check_nan=False):
        for i in range(5):
            loop.step(i)
    assert loop.step_call.refused == "anomalies are looked for in its backward"
    assert same(loop, plain(5))


def test_nothing_leads_to_a_parameter_that_gets_no_gradient() -> None:
    # GIVEN a call that is given a weight, and does not use it
    def call(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> tuple[Tensor]:
        return ((x @ w1.t() + b1).tanh().square().mean() + b2.detach().sum(),)

    loop, fired = Loop(call=call), []
    for p in loop.net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: fired.append(tuple(p.shape)))
    for i in range(6):
        loop.step(i)
    assert loop.recorder.replays
    assert set(fired) == {(8, 4), (8,)}
    nodes, known = [loop.forward(7).grad_fn], set()
    while nodes:
        node = nodes.pop()
        if getattr(node, "variable", None) is not None:
            known.add(tuple(node.variable.shape))
        nodes += [after for after, _ in node.next_functions if after is not None]
    assert known == {(8, 4), (8,)}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("views", [True, False])
def test_gradients_that_are_views_of_buckets_stay_beside_the_recordings(views, set_to_none) -> None:
    class Noting(OnCpu):
        def record(self, forward, backward, replaced_bytes=0) -> Recorded:
            self.replaced_bytes = replaced_bytes
            return super().record(forward, backward, replaced_bytes)

    loop = Loop(Noting())
    with alone():
        ddp = nn.parallel.DistributedDataParallel(Called(loop), gradient_as_bucket_view=views)
        for i in range(3):
            loss = ddp(i)
            loop.optimizer.zero_grad(set_to_none)
            loss.backward()
            loop.optimizer.step()
    parameters = sum(p.numel() * p.element_size() for p in loop.net.parameters())
    assert loop.recorder.replaced_bytes == (0 if views else parameters)


class Drifting(OnCpu):
    """Right at first, and further off from replay to replay, as with parameters of the time of recording."""

    def record(self, forward, backward, replaced_bytes=0) -> Recorded:
        kept = super().record(forward, backward, replaced_bytes)

        def again() -> None:
            kept.backward()
            for g in kept.gradients:
                if g is not None:
                    g.mul_(1 + 4e-3 * self.replays)

        return Recorded(kept.outputs, kept.gradients, kept.forward, again)


def test_a_recording_that_drifts_is_found_and_told_and_the_step_runs_as_it_is() -> None:
    loop, told = Loop(Drifting()), []
    loop.step_call._at_fault = told.append
    for i in range(40):
        loop.step(i)
    assert told == [f"after 12 replays: {loop.step_call.refused}"]
    assert "its gradients are not the same" in loop.step_call.refused


def test_a_check_that_is_due_while_steps_are_timed_is_put_off() -> None:
    loop, may = Loop(Drifting()), [True]
    loop.step_call = Replayer(loop.call, loop.recorder, None, (told := []).append, lambda: may[0])
    for i in range(60):
        may[0] = i < 10 or i >= 50
        loop.step(i)
    assert told == [f"after 47 replays: {loop.step_call.refused}"]


def test_a_first_call_for_whose_copies_memory_is_short_runs_as_it_is(monkeypatch) -> None:
    def full(*_: Any) -> bool:
        raise torch.OutOfMemoryError("no room to compare")

    monkeypatch.setattr("advisor.swap.rewrite.written.same_values", full)
    loop, expected = Loop(), plain(6)
    for i in range(6):
        loop.step(i)
    assert "no memory" in loop.step_call.refused
    assert loop.losses == expected.losses


def test_a_check_for_which_memory_is_short_is_left_out_and_the_step_replayed_on() -> None:
    short = [False]

    def call(*args: Tensor) -> tuple[Tensor, Tensor]:
        if short[0]:
            raise torch.OutOfMemoryError("no room for another step")
        return Loop.plain(*args)

    class Apart(OnCpu):
        def record(self, forward: Any, backward: Any, replaced_bytes: int = 0) -> Recorded:
            found = super().record(forward, backward, replaced_bytes)

            def forward_alone() -> None:  # what is recorded does not call anything
                was, short[0] = short[0], False
                found.forward()
                short[0] = was

            return Recorded(found.outputs, found.gradients, forward_alone, found.backward)

    loop, expected = Loop(Apart(), call), plain(20)
    for i in range(20):
        short[0] = i >= 6  # from then on, before the 13th replay too
        loop.step(i)
    assert not loop.step_call.refused
    assert loop.losses == expected.losses


@pytest.mark.parametrize(("off", "found"), [(1e-3, False), (0.5, True)])
def test_what_was_replaced_is_held_against_the_original_as_a_whole(off: float, found: bool) -> None:
    # GIVEN a call that is, or is not, what the original does but for rounding
    def other(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, best = Loop.plain(w1, b1, w2, b2, x)
        return loss * (1 + off), best

    told: list[str] = []
    loop = Loop(call=other)
    loop.step_call = Replayer(other, loop.recorder, Loop.plain, told.append)
    for i in range(8):
        loop.step(i)
    assert bool(told) is found
    assert (loop.recorder.replays == 0) is found
    assert not found or "with what was replaced in it" in told[0]


def test_a_parameter_that_the_call_holds_and_is_not_given_is_not_left_without_a_gradient() -> None:
    own = nn.Parameter(torch.ones(3))

    def call(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> tuple[Tensor]:
        return (((x @ w1.t() + b1).tanh() @ w2.t() + b2) @ own).square().mean().reshape(1).sum(), None

    loop = Loop(call=call)
    for i in range(6):
        loop.step(i)
    assert "it differentiates a tensor of shape (3,) that it is not given" in loop.step_call.refused
    assert own.grad is not None


def test_memory_that_a_recording_took_is_given_back_once_that_was_given_up(monkeypatch) -> None:
    class TooLarge(OnCpu):
        def record(self, forward: Any, backward: Any, replaced_bytes: int = 0) -> Recorded:
            found = super().record(forward, backward)  # held by this frame, and that by what is raised
            made.append(weakref.ref(found.gradients[0]))
            raise Unrecordable("it is too large")

    made: list[Any] = []
    # GIVEN what takes note of whether the recording is still held when memory is given back
    alive: list[bool] = []
    monkeypatch.setattr(
        "advisor.swap.rewrite.replay.give_back", lambda args: alive.extend(ref() is not None for ref in made)
    )
    loop = Loop(TooLarge())
    for i in range(4):
        loop.step(i)
    assert loop.step_call.refused == "it is too large"
    assert alive == [False]


def test_memory_is_given_back_after_each_check_and_at_no_other_step(monkeypatch) -> None:
    given: list[int] = []
    loop = Loop()
    monkeypatch.setattr("advisor.swap.rewrite.replay.give_back", lambda args: given.append(len(loop.losses)))
    for i in range(20):
        loop.step(i)
    # THEN it was after recording, the first proof, and before the replays 1, 2 and 13
    assert given == [1, 2, 3, 4, 15]


def test_what_was_made_in_inference_mode_is_taken_as_ever() -> None:
    # GIVEN a table that a validation has made, which eager only adds
    with torch.inference_mode():
        table = torch.arange(3.0)

    def call(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor, table: Tensor) -> tuple[Tensor]:
        return ((x @ w1.t() + b1).tanh() @ w2.t() + b2 + table).square().mean(), None

    loop, expected = Loop(call=call), Loop(call=call, replay=False)
    for each in (loop, expected):
        for i in range(8):
            each.optimizer.zero_grad()
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i))
            loss = each.step_call(*each.net.parameters(), x, table)[0]
            loss.backward(retain_graph=i == 7)
            if i == 7:
                loss.backward()
            each.optimizer.step()
            each.losses.append(loss.item())
    assert loop.recorder.replays > 3
    assert same(loop, expected)


@pytest.mark.parametrize(
    "odd", [torch.eye(4).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
)
def test_what_cannot_be_compared_with_itself_raises_nothing(odd: Tensor) -> None:
    def call(*args: Tensor) -> tuple[Tensor, ...]:
        return Loop.plain(*args[:5])[0], args[5] * 2

    loop, expected = Loop(call=call), plain(4)
    for i in range(4):
        loop.optimizer.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i))
        loss = loop.step_call(*loop.net.parameters(), x, odd)[0]
        loss.backward()
        loop.optimizer.step()
        loop.losses.append(loss.item())
    assert loop.step_call.refused
    assert same(loop, expected)
