"""A live step under the rewriter: the object stays what it is, faults do no harm, undoing is whole."""

import copy
import dataclasses
import io
import logging
import pickle
import warnings

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from advisor.kernels._device import UnsupportedError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from advisor.swap.rewrite import traced
from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.site import Outcome
from tests.swap.alone import alone
from tests.swap.rewrite.models import GPT, T, V, batch
from tests.swap.rewrite.test_models import decided, trains_alike


class Net(nn.Module):
    """Explicit attention; importable, so that it can be pickled."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, q, k, v):
        return (q @ k.mT * 0.5).softmax(-1) @ v * self.scale


def qkv(batch=2):
    return [torch.randn(batch, 2, 8, 4) for _ in range(3)]


def installed(module=None, method="forward", **settings):
    module = module or Net()
    rewrite = StepRewrite(module, method, **settings)
    assert rewrite.install() == ""
    return module, rewrite


def test_the_object_stays_the_same_and_looks_the_same():
    net = Net()
    parameter, before = net.scale, dict(net.__dict__)
    module, _ = installed(net)

    assert module is net
    assert isinstance(net, Net)
    assert type(net).__name__ == "Net"
    assert type(net).__module__ == Net.__module__
    assert net.scale is parameter
    assert list(net.state_dict()) == ["scale"]
    assert net.__dict__ == before
    assert repr(net) == "Net()"


def test_restoring_gives_the_class_back_and_leaves_nothing():
    net, rewrite = installed()
    x = qkv()
    decided(rewrite, lambda: net(*x))
    rewrite.close()

    assert type(net) is Net
    assert "forward" not in net.__dict__
    assert not rewrite.installed
    # Once more is no fault.
    rewrite.restore()


def test_copies_and_pickles_have_the_original_class_and_work():
    net, rewrite = installed()
    x = qkv()
    expected = net(*x)

    for twin in (
        copy.deepcopy(net),
        copy.copy(net),
        pickle.loads(pickle.dumps(net)),
        torch.load(_saved(net), weights_only=False),
    ):
        assert type(twin) is Net
        torch.testing.assert_close(twin(*x), expected)
    assert rewrite.installed


def _saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return file


def test_a_deepcopy_of_the_modules_own_gives_the_original_class():
    class Own(Net):
        def __deepcopy__(self, memo):
            twin = type(self).__new__(type(self))
            twin.__dict__.update(self.__dict__)
            return twin

    net, _ = installed(Own())

    assert type(copy.deepcopy(net)) is Own


def test_no_subclass_hook_of_the_users_runs():
    names = []

    class Registered(Net):
        def __init_subclass__(cls, **kwargs):
            names.append(cls.__name__)

    installed(Registered())

    assert names == []


def test_hooks_run_as_before():
    net, _rewrite = installed()
    calls = []
    net.register_forward_hook(lambda *_: calls.append("after"))
    net.register_forward_pre_hook(lambda *_: calls.append("before"))
    net(*qkv())

    assert calls == ["before", "after"]


def test_toggling_off_leaves_no_trace_of_dynamo():
    net, rewrite = installed()
    x = qkv()
    net(*x)
    calls = rewrite.rewriter.calls
    rewrite.toggle(False)
    net(*x)

    assert type(net) is Net
    assert rewrite.rewriter.calls == calls
    rewrite.toggle(True)
    net(*x)
    assert rewrite.rewriter.calls == calls + 1
    assert len(rewrite.rewriter.graphs) == 1


def test_a_step_set_on_the_object_is_left_alone():
    net = Net()
    net.forward = lambda q, k, v: q
    rewrite = StepRewrite(net, "forward")

    assert "set on the object" in rewrite.install()
    assert type(net) is Net


def test_a_step_that_is_no_method_is_left_alone():
    class Static(nn.Module):
        @staticmethod
        def forward(x):
            return x

        step = 3

    assert "no plain method" in StepRewrite(Static(), "step").install()


def test_what_the_user_compiles_is_left_alone_unless_it_is_handed_on():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.compile(Net(), backend="eager")

        def forward(self, *x):
            return self.inner(*x)

    assert "inner is compiled already" in StepRewrite(Outer(), "forward").install()
    outer = Outer()
    x = qkv()
    expected = outer(*x)
    rewrite = StepRewrite(outer, "forward", inner="eager")
    assert rewrite.install() == ""
    assert decided(rewrite, lambda: outer(*x)) == {"attention": 1}
    torch.testing.assert_close(outer(*x), expected)


def test_an_error_of_the_users_goes_through_and_the_next_step_runs():
    class Picky(Net):
        def forward(self, q, k, v, fail=False):
            y = super().forward(q, k, v)
            if fail:
                raise KeyError("mine")
            return y

    net, _rewrite = installed(Picky())
    x = qkv()
    net(*x)
    with pytest.raises(KeyError, match="mine"):
        net(*x, fail=True)
    assert net(*x).shape == x[0].shape


def test_an_error_while_the_step_runs_is_the_users_own():
    net, _rewrite = installed()
    q, k, v = qkv()
    net(q, k, v)
    with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError)):
        net(q, k[..., :3], v)
    assert net(q, k, v).shape == q.shape


def test_a_fault_of_ours_leaves_the_step_as_it_is(monkeypatch):
    def broken(_facts):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(traced, "find", broken)
    net, rewrite = installed()
    x = qkv()
    with pytest.warns(UserWarning, match="left as it is.*planted"):
        got = net(*x)

    assert type(net) is Net
    assert "planted" in rewrite.failure
    torch.testing.assert_close(got, net(*x))


def test_a_step_that_is_marked_as_not_to_be_traced_is_not():
    class Marked(Net):
        @torch._dynamo.disable
        def forward(self, q, k, v):
            return super().forward(q, k, v)

    net = Marked()

    assert "not to be traced" in StepRewrite(net, "forward").install()
    assert type(net) is Marked


def test_a_step_in_which_nothing_can_be_traced_is_restored():
    @torch._dynamo.disable
    def hidden(q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    class Hidden(Net):
        def forward(self, q, k, v):
            return hidden(q, k, v)

    net, rewrite = installed(Hidden())
    x = qkv()
    with pytest.warns(UserWarning, match="left as it is"):
        got = net(*x)

    torch.testing.assert_close(got, hidden(*x))
    assert type(net) is Hidden
    assert "nothing in the step" in rewrite.failure


def test_a_step_whose_sizes_keep_changing_is_given_up_and_restored():
    net, rewrite = installed(max_recompiles=2, dynamic=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for size in range(1, 8):
            x = qkv(size)
            got = net(*x)
            torch.testing.assert_close(got, Net.forward(net, *x))

    assert type(net) is Net
    assert "keep changing" in rewrite.failure
    assert sum("left as it is" in str(w.message) for w in seen) == 1


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_giving_up_is_none(monkeypatch, capsys):
    def broken(_facts):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(traced, "find", broken)
    net, _ = installed()
    net(*qkv())
    assert type(net) is Net
    assert "the step is left as it is" in capsys.readouterr().err


def test_what_dynamo_advises_to_those_who_compile_is_not_shown(monkeypatch):
    class Reads(Net):
        def forward(self, q, k, v):
            return super().forward(q, k, v) * float(q.abs().sum().item() > -1)

    class Shown(logging.Handler):
        def emit(self, record):
            seen.append(record.getMessage())

    monkeypatch.delenv("TORCH_LOGS", raising=False)
    seen, handler, log = [], Shown(), logging.getLogger("torch._dynamo")
    log.addHandler(handler)
    try:
        torch._dynamo.reset()
        installed(Reads())[0](*qkv())
        assert seen == []
        # A user's own call of the compiler is told as ever.
        torch.compile(Reads(), backend="eager")(*qkv())
        log.warning("planted")
        assert "planted" in seen
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize("of_all", [False, True])
def test_a_hook_that_comes_later_is_called(of_all):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Net()

        def forward(self, q, k, v):
            return self.inner(q, k, v)

    net, _ = installed(Outer())
    x = qkv()
    before = net(*x)

    def doubled(module, args, out):
        return 2 * out if module is net.inner else None

    register = nn.modules.module.register_module_forward_hook if of_all else net.inner.register_forward_hook
    handle = register(doubled)
    try:
        torch.testing.assert_close(net(*x), 2 * before)
    finally:
        handle.remove()
    torch.testing.assert_close(net(*x), before)


def test_a_number_that_changes_with_each_step_is_traced_a_few_times_at_most():
    # GIVEN a step that looks at its index, and counts itself
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.seen = 0

        def forward(self, q, k, v, index=0):
            self.seen += 1
            y = super().forward(q, k, v)
            return y * 1.5 if index % 3 == 0 else y

    net, rewrite = installed(Counting())
    for index in range(12):
        x = qkv()
        torch.testing.assert_close(net(*x, index), Net.forward(net, *x) * (1.5 if index % 3 == 0 else 1.0))

    assert not rewrite.failure
    assert len(rewrite.rewriter.graphs) <= 4
    assert net.seen == 12


def test_batches_of_all_sizes_share_a_graph_and_its_decisions():
    net, rewrite = installed()
    x = qkv(2)
    decided(rewrite, lambda: net(*x))
    for size in range(3, 12):
        x = qkv(size)
        torch.testing.assert_close(net(*x), Net.forward(net, *x))

    assert not rewrite.failure
    assert len(rewrite.rewriter.graphs) == 2
    assert [len(g.chosen()) for g in rewrite.rewriter.graphs] == [1, 1]


def test_a_step_that_takes_gradients_of_gradients_is_left_alone():
    class Penalised(Net):
        def forward(self, q, k, v):
            y = super().forward(q, k, v)
            (g,) = torch.autograd.grad(y.sum(), q, create_graph=True)
            return y + g

    net = Penalised()

    assert "Penalised.forward takes gradients of gradients" in StepRewrite(net, "forward").install()
    assert type(net) is Penalised


def test_a_kernel_that_refuses_in_the_loop_leaves_it_to_the_original():
    net, rewrite = installed()
    x = qkv()
    with rewrite.collecting():
        net(*x)
    (site,) = rewrite.sites()
    refusing = dataclasses.replace(site.candidates[0], name="torch SDPA")

    # GIVEN a candidate that serves while it is tried and refuses later
    found = rewrite.rewriter.graphs[0].levels[0].found[0]
    assert rewrite.decide([Outcome(site, refusing, "")]) == 1

    def refuse(*_args):
        raise UnsupportedError("planted")

    planted = [dataclasses.replace(c, call=refuse) for c in found.match.candidates]
    object.__setattr__(found.match, "candidates", tuple(planted))
    with pytest.warns(UserWarning, match="planted"):
        got = net(*x)

    torch.testing.assert_close(got, Net.forward(net, *x))
    assert type(net) is Net


def test_dynamos_settings_stay_the_users():
    def shown():
        return {k: getattr(torch._dynamo.config, k) for k in ("suppress_errors", "recompile_limit")}

    before = shown()
    net, _ = installed()
    net(*qkv())

    assert shown() == before


def test_a_step_is_not_taken_into_a_compilation_of_the_users():
    net, _rewrite = installed()
    x = qkv()
    expected = Net.forward(net, *x)

    torch.testing.assert_close(torch.compile(net, backend="eager")(*x), expected)


def test_flex_attention_is_left_to_a_compiler():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    class Flex(nn.Module):
        def forward(self, q, k, v):
            return flex.flex_attention(q, k, v) * 1.0 + 1.0

    net, rewrite = installed(Flex())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net(*[torch.randn(1, 1, 128, 16) for _ in range(3)])

    assert "flex_attention" in rewrite.failure
    assert type(net) is Flex


def test_training_and_evaluation_each_have_their_graph():
    class Dropping(Net):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, q, k, v):
            return self.drop((q @ k.mT).softmax(-1)) @ v

    net, rewrite = installed(Dropping())
    x = qkv()
    decided(rewrite, lambda: net(*x))
    net.eval()
    got = net(*x)
    rewrite.toggle(False)

    torch.testing.assert_close(got, net(*x))
    assert len(rewrite.rewriter.graphs) == 2


def data():
    tokens = torch.randint(0, V, (8, T))
    return DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=2)


def trainer(path, **settings):
    return pl.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=path,
        enable_model_summary=False, **settings,
    )  # fmt: skip


def test_a_trainer_trains_and_checkpoints_a_rewritten_step(tmp_path):
    # GIVEN two equal models, one of them rewritten
    plain, swapped = GPT(1), GPT(1)
    swapped.load_state_dict(plain.state_dict())
    rewrite = StepRewrite(swapped)
    assert rewrite.install() == ""
    tokens = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert decided(rewrite, lambda: swapped.training_step(tokens, 0))["attention"] == 1
    loader = data()

    # WHEN both are trained
    for name, model in (("plain", plain), ("swapped", swapped)):
        torch.manual_seed(0)
        run = trainer(tmp_path / name, enable_checkpointing=False)
        run.fit(model, loader)
        run.save_checkpoint(tmp_path / f"{name}.ckpt")

    # THEN they learn the same, and each one's checkpoint loads into the other
    for (name, a), b in zip(plain.state_dict().items(), swapped.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5, msg=name)
    saved = torch.load(tmp_path / "swapped.ckpt", weights_only=False)["state_dict"]
    plain.load_state_dict(saved)
    assert all(torch.equal(plain.state_dict()[k], v) for k, v in swapped.state_dict().items())
    swapped.load_state_dict(torch.load(tmp_path / "plain.ckpt", weights_only=False)["state_dict"])
    assert rewrite.installed
    rewrite.restore()
    assert type(swapped) is GPT


def test_a_step_inside_ddp_and_ddp_around_a_step():
    with alone():
        net, rewrite = installed()
        x = qkv()
        wrapped = nn.parallel.DistributedDataParallel(net)
        assert decided(rewrite, lambda: wrapped(*x)) == {"attention": 1}
        wrapped(*x).sum().backward()
        ours = net.scale.grad.clone()
        rewrite.restore()
        net.scale.grad = None
        wrapped(*x).sum().backward()
        torch.testing.assert_close(ours, net.scale.grad)


def test_a_class_that_fsdp_has_exchanged_already_is_subclassed_in_turn():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    with alone():

        class Step(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.linear = Net(), nn.Linear(4, 4)

            def forward(self, q, k, v):
                return F.gelu(self.linear(self.net(q, k, v))).sum()

        net = Step()
        fsdp.fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        live, x = type(net), qkv()
        expected = net(*x).detach()
        _, rewrite = installed(net)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = net(*x)
            got.backward()
        torch.testing.assert_close(got.detach(), expected)
        rewrite.restore()
        assert type(net) is live


def test_a_gpt_is_explained():
    model = GPT(1)
    rewrite = StepRewrite(model)
    rewrite.install()
    with rewrite.collecting():
        model.training_step(batch(), 0)
    text = rewrite.explain()

    assert "softmax(scale * q @ k.T, causal) @ v: to be decided" in text
    assert "(h.0.attn)" in text
    decided(rewrite, lambda: model.training_step(batch(), 0))
    assert "torch SDPA" in rewrite.explain()
    tokens = batch()
    trains_alike(model, rewrite, lambda: model.training_step(tokens, 0))
