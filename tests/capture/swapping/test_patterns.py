"""Patterns of a live `training_step`: rewritten, compared, put back; with the user's own compiler too."""

from __future__ import annotations

import json
import math
import pickle
import warnings

import pytest
import torch
from torch import nn

from advisor import TrainingAdvisor
from advisor.capture.notify import AdvisorWarning
from advisor.capture.swapping import engine as swapping_engine
from advisor.capture.swapping import run as swapping
from advisor.capture.swapping import steps as swapping_steps
from advisor.capture.swapping.engine import ALLOW_CPU
from advisor.capture.swapping.patterns import uncovered
from advisor.swap import decide
from advisor.swap.rewrite import attend
from advisor.swap.rewrite.record import Recorded, Unrecordable
from advisor.swap.rewrite.replay import Replayer
from advisor.swap.rewrite.traced import Traced
from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.site import Site, Trial
from tests.capture.tiny import make_trainer, rows
from tests.swap.rewrite.recorder import OnCpu

from .planted import be_sure

BATCHES = 44
HEADS, WIDTH, TOKENS = 2, 32, 16


class Attention(nn.Module):
    """Causal, with the scores written out."""

    heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch = x.shape[0]
        q, k, v = (
            part.view(batch, TOKENS, self.heads, WIDTH // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // self.heads)
        mask = torch.tril(torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device))
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, TOKENS, WIDTH))


def make_model(light):
    class Tiny(light.LightningModule):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(1, WIDTH)
            self.attention = nn.ModuleList(Attention() for _ in range(2))
            self.head = nn.Linear(WIDTH, 2)

        def training_step(self, batch, batch_idx):
            x = self.embed(batch[0].repeat(1, TOKENS // 8).unsqueeze(-1))
            for attention in self.attention:
                x = x + attention(x)
            loss = nn.functional.cross_entropy(self.head(x.mean(1)), batch[1])
            if self._compiler_ctx is None:  # compiled as a whole, Lightning cannot log with every torch
                self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    light.seed_everything(3, verbose=False)
    return Tiny()


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(swapping_steps, "MOST", 5)
    monkeypatch.setenv(ALLOW_CPU, "1")
    be_sure(monkeypatch)
    # What stands in is PyTorch's attention, refused on a CPU for another layout; the proof has its own tests.
    monkeypatch.setattr(
        decide, "verify", lambda _, c, **__: Trial(c.name, refused="" if c.source == "torch" else "planted")
    )


@pytest.fixture
def edited(monkeypatch):
    """Counts the graphs that were rewritten."""
    made = []
    original = Traced._edited

    def counted(self, chosen):
        made.append([candidate.name for _, _, candidate in chosen])
        return original(self, chosen)

    monkeypatch.setattr(Traced, "_edited", counted)
    return made


def advisor(**options):
    return TrainingAdvisor(**{"stages": ("validate",), "warmup_steps": 3, "swap": ["attention"], **options})


def ours(seen):
    """What the user was warned of by us."""
    lines = [str(warning.message) for warning in seen]
    return [line for line in lines if "advisor" in line or "The step" in line]


def result(folder):
    (path,) = folder.rglob("swaps.json")
    return json.loads(path.read_text())


def test_explicit_attention_is_rewritten_in_the_live_step_and_put_back(pl, tmp_path, edited):
    plain = make_model(pl)
    make_trainer(pl, tmp_path).fit(plain, rows(BATCHES))
    model = make_model(pl)
    base, within = type(model), []

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == BATCHES - 3:
                within.append(type(pl_module) is not base)
                trainer.save_checkpoint(tmp_path / "live.ckpt")

    make_trainer(pl, tmp_path, advisor(), Saves()).fit(model, rows(BATCHES))

    # THEN the step ran through a graph with another attention, and is the user's own again
    found = result(tmp_path)
    assert found["kept"] is True, found
    (site,) = found["sites"]
    assert site["kind"] == "attention"
    assert site["mechanism"] == "pattern"
    assert site["calls_per_step"] == 2
    assert edited
    assert within == [True]
    assert type(model) is base
    assert "training_step" not in vars(model)
    # AND training went the same way, and what was saved meanwhile is a plain model's
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-5)
    saved = torch.load(tmp_path / "live.ckpt", weights_only=False)
    assert list(saved["state_dict"]) == list(plain.state_dict())
    make_model(pl).load_state_dict(saved["state_dict"])


def test_with_the_watched_step_alone_training_is_the_same_to_the_bit(pl, tmp_path, monkeypatch):
    # GIVEN patterns that are found, and no candidate that is taken
    plain = make_model(pl)
    make_trainer(pl, tmp_path).fit(plain, rows(BATCHES))
    monkeypatch.setattr(decide, "slower", lambda *_: "slower: planted")
    model = make_model(pl)

    make_trainer(pl, tmp_path, advisor()).fit(model, rows(BATCHES))

    assert "none of 1 site" in result(tmp_path)["verdict"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_rewritten_step_is_replayed_and_trains_the_same_way(pl, tmp_path, monkeypatch):
    # GIVEN something that records on the CPU as CUDA graphs are recorded
    made = []
    monkeypatch.setattr(swapping_engine, "RECORDABLE", ("cpu",))
    monkeypatch.setattr(swapping_engine, "CudaRecorder", lambda *_, **__: made.append(OnCpu()) or made[-1])
    plain = make_model(pl)
    make_trainer(pl, tmp_path).fit(plain, rows(BATCHES))
    model = make_model(pl)

    make_trainer(pl, tmp_path, advisor()).fit(model, rows(BATCHES))

    found = result(tmp_path)
    assert found["kept"] is True, found
    assert "training_step: what is swapped is replayed as a CUDA graph" in found["remarks"]
    # Two blocks of five and the batches around them, but for those that were recorded and proven.
    assert made[0].replays > 14
    assert made[0].closed
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-5)


def recording(made):
    """What stands in for the recorder of a GPU, and is noted."""

    def recorder(*_, adds_up, **__):
        made.append(OnCpu(adds_up=adds_up))
        return made[-1]

    return recorder


@pytest.mark.parametrize("every", [2, 3])
def test_a_step_is_replayed_and_its_gradients_added_up_over_batches(pl, tmp_path, monkeypatch, every):
    # GIVEN a loop that accumulates gradients, and a watch on when a replay is checked
    made, timed, checked = [], [False], []
    monkeypatch.setattr(swapping_engine, "RECORDABLE", ("cpu",))
    monkeypatch.setattr(swapping_engine, "CudaRecorder", recording(made))
    time, prove = swapping_engine.Engine.time, Replayer._prove
    monkeypatch.setattr(swapping_engine.Engine, "time", lambda self, on: timed.append(on) or time(self, on))
    monkeypatch.setattr(Replayer, "_prove", lambda self, *a: checked.append(timed[-1]) or prove(self, *a))
    plain, model = make_model(pl), make_model(pl)
    batches = every * BATCHES + 1  # the last cycle is not a whole one
    make_trainer(pl, tmp_path, accumulate_grad_batches=every).fit(plain, rows(batches))

    make_trainer(pl, tmp_path, advisor(), accumulate_grad_batches=every).fit(model, rows(batches))

    found = result(tmp_path)
    assert found["kept"] is True, found
    assert "training_step: what is swapped is replayed as a CUDA graph" in found["remarks"]
    assert made[0].adds_up()
    assert made[0].replays > 20 * every
    # THEN no replay was checked while steps were timed, and training went the same way
    assert len(checked) >= 5
    assert not any(checked)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.parametrize("every", [1, 2])
def test_two_processes_of_ddp_replay_and_train_as_unswapped(pl, tmp_path, monkeypatch, every):
    # GIVEN two forked processes that record as CUDA graphs are recorded
    monkeypatch.setattr(swapping, "MEETING", 8)
    monkeypatch.setattr(swapping_engine, "RECORDABLE", ("cpu",))
    made = []
    monkeypatch.setattr(swapping_engine, "CudaRecorder", recording(made))

    class Notes(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            replays = [recorder.replays for recorder in made]
            (tmp_path / f"replays{trainer.global_rank}").write_text(json.dumps(replays))
            trainer.save_checkpoint(tmp_path / f"{'swapped' if made else 'plain'}.ckpt")

    for callbacks in ([], [advisor()]):
        options = {"devices": 2, "strategy": "ddp_fork", "accumulate_grad_batches": every}
        trainer = make_trainer(pl, tmp_path, *callbacks, Notes(), **options)
        trainer.fit(make_model(pl), rows(2 * (every * BATCHES + 8)))

    # THEN both replayed as often, and the parameters are those of the unswapped run
    replays = [json.loads((tmp_path / f"replays{rank}").read_text()) for rank in (0, 1)]
    assert replays[0] == replays[1]
    assert replays[0][0] > 14 * every
    found = json.loads((tmp_path / "advisor" / "swaps.json").read_text())
    assert found["kept"] is True, found
    plain, swapped = (torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in ("plain", "swapped"))
    for name, value in swapped["state_dict"].items():
        torch.testing.assert_close(value, plain["state_dict"][name], rtol=1e-3, atol=1e-5)


def test_a_replay_that_turns_wrong_after_the_verdict_is_put_back_and_told(pl, tmp_path, monkeypatch):
    # GIVEN a recording whose gradients are off from its 20th replay on, once the verdict has been given
    class Turning(OnCpu):
        def record(self, forward, backward, replaced_bytes=0):
            kept = super().record(forward, backward, replaced_bytes)

            def again():
                kept.backward()
                if self.replays > 20:
                    [g.mul_(2.0) for g in kept.gradients if g is not None]

            return Recorded(kept.outputs, kept.gradients, kept.forward, again)

    monkeypatch.setattr(swapping_engine, "RECORDABLE", ("cpu",))
    monkeypatch.setattr(swapping_engine, "CudaRecorder", lambda *_, **__: Turning())
    model = make_model(pl)
    with pytest.warns(AdvisorWarning) as seen:
        make_trainer(pl, tmp_path, advisor()).fit(model, rows(120))
    found = result(tmp_path)
    (line,) = ours(seen)
    assert "training_step runs as it is written, since a check found" in line
    assert "everything is put back. ADVISOR_SWAP_REPLAY=0" in line
    assert found["kept"] is False
    assert "taken back later, since a check found what it computes to be something else" in found["verdict"]
    assert not hasattr(type(model), "_advisor_base")


def test_a_step_that_cannot_be_recorded_is_swapped_unreplayed_and_says_so(pl, tmp_path, monkeypatch):
    class Broken(OnCpu):
        def rehearse(self, run):
            raise Unrecordable("the host waits for the device within it")

    monkeypatch.setattr(swapping_engine, "RECORDABLE", ("cpu",))
    monkeypatch.setattr(swapping_engine, "CudaRecorder", lambda *_, **__: Broken())
    make_trainer(pl, tmp_path, advisor()).fit(make_model(pl), rows(BATCHES))
    found = result(tmp_path)
    assert found["kept"] is True, found
    assert any("not replayed as a CUDA graph: the host waits" in remark for remark in found["remarks"])


def test_with_replay_switched_off_nothing_is_recorded(pl, tmp_path, monkeypatch):
    monkeypatch.setattr(swapping_engine, "RECORDABLE", ("cpu",))
    monkeypatch.setattr(swapping_engine, "CudaRecorder", lambda *_, **__: pytest.fail("recorded"))
    monkeypatch.setenv("ADVISOR_SWAP_REPLAY", "0")
    make_trainer(pl, tmp_path, advisor()).fit(make_model(pl), rows(BATCHES))
    assert result(tmp_path)["kept"] is True


def test_a_step_that_is_traced_anew_each_time_loses_its_patterns_and_keeps_the_rest(pl, tmp_path):
    # GIVEN a step that appends to a list of the module's
    model = make_model(pl)
    model.outputs = []
    step = type(model).training_step

    def training_step(self, batch, batch_idx):
        loss = step(self, batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    type(model).training_step = training_step
    # Lightning's own would cut the step in two, of which the second alone is traced again and again.
    type(model).log = lambda self, *_, **__: None
    type(model).configure_optimizers = lambda self: torch.optim.AdamW(self.parameters(), foreach=False)
    with pytest.warns(AdvisorWarning) as seen:
        make_trainer(pl, tmp_path, advisor(swap=["attention", "optimizer"])).fit(model, rows(90))
    (line,) = ours(seen)
    assert "keep changing; what else was swapped is compared anew. What differs" in line
    found = result(tmp_path)
    assert found["kept"] is True, found
    chosen = {site["kind"]: site["chosen"] for site in found["sites"]}
    assert chosen == {"attention": None, "optimizer": "torch.optim.AdamW(fused=True)"}
    (reason,) = [site["reason"] for site in found["sites"] if site["kind"] == "attention"]
    assert "keep changing" in reason


def test_where_nothing_else_was_swapped_there_is_one_warning_too(pl, tmp_path, monkeypatch):
    # GIVEN a step of which every trace is one too many
    monkeypatch.setitem(StepRewrite.__init__.__kwdefaults__, "max_recompiles", 1)
    model = make_model(pl)
    model.scale = 1.0
    step = type(model).training_step
    type(model).training_step = lambda self, batch, i: step(self, batch, i) * self.scale
    type(model).log = lambda self, *_, **__: None
    type(model).on_train_batch_start = lambda self, batch, i: setattr(self, "scale", 1.0 + (i > 12))
    with pytest.warns(AdvisorWarning) as seen:
        make_trainer(pl, tmp_path, advisor()).fit(model, rows(BATCHES))
    (line,) = ours(seen)
    assert "training_step runs as it is written, since traced 1 times over" in line
    assert "everything is put back" in line
    assert result(tmp_path)["verdict"].startswith("nothing was swapped: traced 1 times over")


def test_a_step_that_cannot_be_read_is_one_warning_and_no_error(pl, tmp_path, monkeypatch):
    # GIVEN warnings that are errors, and a graph that cannot be read
    def fails(*_):
        raise ValueError("planted")

    monkeypatch.setattr(Traced, "_level", fails)
    warned = []
    monkeypatch.setattr(swapping.notify, "warn", warned.append)
    model, plain = make_model(pl), make_model(pl)
    make_trainer(pl, tmp_path).fit(plain, rows(BATCHES))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*left as it is.*")
        make_trainer(pl, tmp_path, advisor()).fit(model, rows(BATCHES))
    (line,) = warned
    assert "could not be read: ValueError: planted; modules and optimizers are looked at" in line
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_kept_model_can_be_pickled_as_a_plain_one(pl, tmp_path):
    model = make_model(pl)
    make_trainer(pl, tmp_path, advisor(swap_keep=True)).fit(model, rows(BATCHES))

    assert result(tmp_path)["kept"] is True
    reduced = model.__reduce_ex__(4)
    assert (
        pickle.loads(pickle.dumps(model.attention)).state_dict().keys() == model.attention.state_dict().keys()
    )
    assert type(model) not in reduced[1]


def test_a_step_that_moves_the_optimizer_itself_is_not_rewritten(pl, tmp_path):
    model = make_model(pl)
    model.automatic_optimization = False
    step = type(model).training_step

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(step(self, batch, batch_idx))
        optimizer.step()

    type(model).training_step = training_step
    make_trainer(pl, tmp_path, advisor()).fit(model, rows(BATCHES))

    found = result(tmp_path)
    assert found["kept"] is False
    assert any("steps the optimizer itself" in remark for remark in found["remarks"])


def test_a_compiled_step_is_handed_on_rewritten(pl, tmp_path, edited):
    # GIVEN a LightningModule that the user compiles
    compiled = torch.compile(make_model(pl), backend="eager")
    model = compiled._orig_mod

    make_trainer(pl, tmp_path, advisor()).fit(compiled, rows(BATCHES))

    # THEN the user's compiler got the graph with another attention in it, and has its own back
    found = result(tmp_path)
    assert found["kept"] is True, found
    assert edited
    assert model._compiler_ctx is not None
    assert "training_step" in vars(model)


def test_one_process_may_fit_as_often_as_it_likes(pl, tmp_path, monkeypatch):
    # GIVEN Dynamo, which counts how often it has traced a piece of code
    monkeypatch.setitem(StepRewrite.__init__.__kwdefaults__, "max_recompiles", 2)
    kind = type(make_model(pl))
    for fold in range(3):
        # WHEN one class is trained anew several times, each time traced once
        model = kind()
        make_trainer(pl, tmp_path, advisor(dirpath=tmp_path / str(fold))).fit(model, rows(BATCHES))
    # THEN swap does in the last run what it did in the first
    assert [result(tmp_path / str(fold))["kept"] for fold in range(3)] == [True, True, True]


@pytest.fixture
def compared_twice(monkeypatch):
    """Has the first comparison end in an objection, and what is named left out of the second."""

    def leave_out(chosen):
        whys = ["whole steps gain nothing: planted", ""]
        monkeypatch.setattr(swapping, "objection", lambda *_: whys.pop(0))
        monkeypatch.setattr(swapping, "less", lambda parts, _steps: [p for p in parts if chosen(p)])

    return leave_out


def test_without_the_rewritten_graph_the_rest_is_compared_anew_and_kept(
    pl, tmp_path, monkeypatch, compared_twice
):
    # GIVEN a step that is replayed, and an optimizer
    made, within = [], []
    monkeypatch.setattr(swapping_engine, "RECORDABLE", ("cpu",))
    monkeypatch.setattr(swapping_engine, "CudaRecorder", lambda *_, **__: made.append(OnCpu()) or made[-1])
    compared_twice(lambda part: part.mechanism == "pattern")
    plain, model = make_model(pl), make_model(pl)
    make_trainer(pl, tmp_path).fit(plain, rows(2 * BATCHES))
    base = type(model)

    class Seen(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            fused = trainer.optimizers[0].param_groups[0].get("fused")
            within.append((type(pl_module) is base, bool(fused), bool(made) and made[0].closed))

    make_trainer(pl, tmp_path, advisor(swap=["attention", "optimizer"]), Seen()).fit(model, rows(2 * BATCHES))

    # THEN both were in force once, the optimizer alone was kept, and what was recorded was let go of at once
    assert (False, True, False) in within
    assert within[-1] == (True, True, True)
    found = result(tmp_path)
    assert found["kept"] is True, found
    assert {site["kind"]: bool(site["chosen"]) for site in found["sites"]} == {
        "attention": False,
        "optimizer": True,
    }
    assert not any("CUDA graph" in remark for remark in found["remarks"]), found["remarks"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_one_of_two_patterns_is_left_out_and_the_other_kept(pl, tmp_path, edited, compared_twice):
    # GIVEN attention of two sizes
    def model_of_two():
        model = make_model(pl)
        model.attention[1].heads = 2 * HEADS
        return model

    compared_twice(lambda part: part.where[0].endswith("(attention.1)"))
    plain, model = model_of_two(), model_of_two()
    make_trainer(pl, tmp_path).fit(plain, rows(2 * BATCHES))
    make_trainer(pl, tmp_path, advisor()).fit(model, rows(2 * BATCHES))

    assert [len(names) for names in edited] == [2, 1]
    found = result(tmp_path)
    assert found["kept"] is True, found
    assert sorted(bool(site["chosen"]) for site in found["sites"]) == [False, True]
    assert found["verdict"].startswith("1 of 2 sites swapped")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-5)


class _MoreGradient(torch.autograd.Function):
    """Whose gradient is three times what it must be."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return 3.0 * dy


def two_of_which_one_is_wrong(light, monkeypatch, wrong=lambda calls: True):
    """A model with attention of two sizes; what stands in for the second has a wrong gradient."""
    model, right, calls = make_model(light), attend._sdpa, []
    model.attention[1].heads = 2 * HEADS

    def planted(q, k, v, **settings):
        y = right(q, k, v, **settings)
        calls.append(1)
        return _MoreGradient.apply(y) if q.shape[1] == 2 * HEADS and wrong(len(calls)) else y

    monkeypatch.setattr(attend, "_sdpa", planted)
    return model


@pytest.mark.parametrize("replayed", [False, True])
def test_what_is_wrong_in_the_whole_step_alone_is_left_out_and_the_rest_compared_anew(
    pl, tmp_path, monkeypatch, edited, capsys, replayed
):
    # GIVEN two sites, of which one has a wrong gradient that its own trial did not show
    monkeypatch.setattr(swapping_engine, "RECORDABLE", ("cpu",) if replayed else ())
    monkeypatch.setattr(swapping_engine, "CudaRecorder", lambda *_, **__: OnCpu())
    plain = make_model(pl)
    plain.attention[1].heads = 2 * HEADS
    make_trainer(pl, tmp_path).fit(plain, rows(2 * BATCHES))
    model = two_of_which_one_is_wrong(pl, monkeypatch)

    make_trainer(pl, tmp_path, advisor()).fit(model, rows(2 * BATCHES))

    # THEN that one is left out, and it says why
    found = result(tmp_path)
    assert found["kept"] is True, found
    assert found["verdict"].startswith("1 of 2 sites swapped")
    chosen, left = sorted(found["sites"], key=lambda site: site["chosen"] is None)
    assert chosen["where"][0].endswith("(attention.0)")
    assert left["where"][0].endswith("(attention.1)")
    why = "in the whole step, with nothing else replaced in it, its gradients are not the same (off by"
    assert f"by itself, not kept: {why}" in left["reason"]
    assert any(f"left out, since {why}" in remark for remark in found["remarks"])
    assert "comparing anew without it" in capsys.readouterr().err
    # AND no step was trained with it, nor any other way than the plain one
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-5)
    # Both, each alone, and what is kept.
    assert [len(names) for names in edited][:3] == [2, 1, 1]


def test_after_the_verdict_a_part_at_fault_takes_everything_back(pl, tmp_path, monkeypatch):
    # GIVEN a gradient that is wrong from some call after the verdict on
    calls = 2 * 60
    model = two_of_which_one_is_wrong(pl, monkeypatch, lambda n: n > calls)

    with pytest.warns(AdvisorWarning) as seen:
        make_trainer(pl, tmp_path, advisor()).fit(model, rows(160))

    found = result(tmp_path)
    assert len(ours(seen)) == 1
    assert found["kept"] is False, found
    assert "taken back later, since in the whole step, with nothing else replaced in it" in found["verdict"]
    assert not hasattr(type(model), "_advisor_base")


@pytest.mark.parametrize(
    ("kind", "left"), [("activation", ["a.mlp", "c.mlp"]), ("norm", ["a.mlp", "b.mlp", "c.mlp"])]
)
def test_a_sequence_is_left_to_the_graph_where_a_pattern_of_its_kind_reaches_into_it(kind, left):
    def site(kind, where, mechanism, **lists):
        return Site(kind, where, mechanism, kind, lambda: None, [], [], len(where), **lists)

    where = ["a.mlp", "b.mlp", "c.mlp"]
    sequences = site(
        "activation", list(where), "module", places=list(where), covers=[f"{path}.1" for path in where]
    )
    pattern = site(kind, ["net.py:3 (b.norm)"], "pattern", within=["b.mlp.1", "b.norm"])
    found = uncovered(sequences, [pattern])
    assert (found.where, found.places, found.calls_per_step) == (left, left, len(left))
    alone = site("activation", ["b.mlp"], "module", covers=["b.mlp.1"])
    assert (uncovered(alone, [pattern]) is None) is (kind == "activation")
