"""Optimizer steps of many kernels, and states off the device."""

from __future__ import annotations

import pytest

from tests.advice.rules.steps import Step, applies, audit, loop_of, saving, training

FOREACH = ("mul_", "lerp_", "mul_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_")
ADAMW = [{"class": "AdamW", "fused": None, "foreach": None}]


def stepping(
    *, ops: tuple[str, ...] = tuple(f"aten::_foreach_{name}" for name in FOREACH), us: float = 100, clip=()
):
    """A training step of short kernels, and then an optimizer step of these operators."""

    def script(step: Step) -> None:
        at = training(step)
        start = at
        for name in (*clip, *ops):
            step.run(name, at + 20, on_device=0, dur=us, kernel=f"{name}_kernel")
            at += 20
        step.range("Optimizer.step#AdamW.step", start, at - start + 30)
        step.wait(at + 40)

    return script


def millions(number: float) -> dict[str, object]:
    return {"parameters": [{"shape": [int(number * 1e6)], "dtype": "fp32", "count": 1}], "optimizers": ADAMW}


def test_a_foreach_adamw_is_told_the_time_of_its_bytes_moved_once():
    # GIVEN 10 M parameters: 280 MB in seven accesses, at 71 % of 3.35 TB/s
    loop = loop_of(stepping(), step_us=1_100, **millions(10))

    (found,) = audit("optimizer.fused", loop)

    fused_us = 280e6 / (0.71 * 3.35e12) * 1e6
    assert float(found.edits[0].dur_ns.likely) / 1e3 == pytest.approx(fused_us, rel=0.01)
    assert "AdamW optimizer steps by 8 foreach kernels, 800 µs" in found.title
    assert "fused=True" in found.fix
    assert "fused=None, foreach=None" in found.fix
    assert found.swap == "optimizer"
    # THEN seven of the eight kernels' time goes
    assert saving(found, loop).likely_ns == pytest.approx(800 - fused_us, abs=30)


def test_an_optimizer_that_is_fused_already_passes():
    ops = ("aten::_fused_adamw_",)
    assert audit("optimizer.fused", loop_of(stepping(ops=ops * 6), step_us=1_100, **millions(10))) == []
    context = millions(10) | {"optimizers": [{"class": "AdamW", "fused": True}]}
    assert audit("optimizer.fused", loop_of(stepping(), step_us=1_100, **context)) == []


def test_an_optimizer_without_a_fused_form_passes():
    context = millions(10) | {"optimizers": [{"class": "RMSprop", "fused": None}]}
    assert audit("optimizer.fused", loop_of(stepping(), step_us=1_100, **context)) == []


def test_two_optimizers_of_different_classes_are_not_guessed_at():
    context = millions(10) | {"optimizers": [{"class": "AdamW"}, {"class": "SGD"}]}
    assert audit("optimizer.fused", loop_of(stepping(), step_us=1_100, **context)) == []


def test_a_compiled_step_passes():
    def script(step: Step) -> None:
        at = training(step)
        for i in range(6):
            step.run("aten::compiled", at + 20 * i, on_device=0, dur=100, kernel="triton_poi_fused_1")
        step.range("Optimizer.step#AdamW.step", at, 150)

    assert audit("optimizer.fused", loop_of(script, step_us=1_100, **millions(10))) == []


def test_the_class_is_read_from_torchs_own_range_where_nothing_was_captured():
    (found,) = audit("optimizer.fused", loop_of(stepping(), step_us=1_100))

    assert found.title.startswith("AdamW")
    # THEN without sizes the time is that of 7 accesses in place of 20
    assert float(found.edits[0].dur_ns.likely) / 1e3 == pytest.approx(800 * 7 / 20, rel=0.01)
    assert any("not recorded" in line for line in found.evidence)


def test_sizes_come_from_the_gradients_that_autograd_accumulates():
    def script(step: Step) -> None:
        step.op("torch::autograd::AccumulateGrad", 130, 5, dims=[[1_000_000]])
        stepping()(step)

    (found,) = audit("optimizer.fused", loop_of(script, step_us=1_100))

    assert any("1.0 M parameters in 1 tensor: 28.0 MB" in line for line in found.evidence)


def test_clipping_gradients_is_no_part_of_the_step():
    clip = ("aten::_foreach_norm", "aten::clamp", "aten::_foreach_mul_")
    # Adam counts its steps before anything else, on the host
    loop = loop_of(stepping(clip=clip, ops=tuple(f"aten::_foreach_{n}" for n in FOREACH[1:])), step_us=1_300)

    (found,) = audit("optimizer.fused", loop)

    assert "by 7 foreach kernels" in found.title


def test_a_for_loop_of_many_small_tensors_saves_its_host_time():
    # GIVEN 60 tensors of 8 operators, each 30 µs of host time for 2 µs of work
    def script(step: Step) -> None:
        start = at = training(step)
        for _ in range(60):
            for name in FOREACH:
                step.run(f"aten::{name}", at, on_device=0, dur=2)
                at += 30
        step.range("Optimizer.step#AdamW.step", start, at - start)

    parameters = [{"shape": [1_000], "dtype": "fp32", "count": 60}]
    loop = loop_of(script, step_us=14_600, parameters=parameters, optimizers=ADAMW)
    (found,) = audit("optimizer.fused", loop)

    assert "480 for-loop kernels" in found.title
    # AND the title says so: 30 µs for each of the 480 but one
    assert found.title.endswith("and the host 14.4 ms less")
    assert saving(found, loop).likely_ns > 0.9 * 14_000


def test_a_loop_that_steps_nothing_has_no_optimizer_to_speak_of():
    assert not applies("optimizer.fused", loop_of(lambda step: training(step, forward=1)))


# offload


def moving(nbytes: int):
    def script(step: Step) -> None:
        at = training(step)
        step.range("Optimizer.step#AdamW.step", at, 200)
        step.run(
            "aten::copy_", at + 5, on_device=0, dur=100, kernel="Memcpy DtoH (Device -> Pinned)",
            cat="gpu_memcpy", bytes=nbytes, call="cudaMemcpyAsync",
        )  # fmt: skip

    return script


def test_states_that_travel_over_the_link_are_told_with_the_room_there_is():
    context = millions(1) | {
        "peak_memory_bytes": {"in_window": 10**9},
        "device": {"total_memory_bytes": 8 * 10**10},
    }
    (found,) = audit("optimizer.offload", loop_of(moving(5_000_000), **context))

    assert "5.00 MB a step" in found.title
    assert any("8.00 MB; peak memory is 1.00 GB of 80.0 GB" in line for line in found.evidence)
    assert found.confidence == "modelled"


def test_a_few_bytes_in_the_optimizer_phase_are_no_offload():
    assert audit("optimizer.offload", loop_of(moving(4_000), **millions(1))) == []


@pytest.mark.parametrize("wrong", [["AdamW"], {"is": "AdamW"}, 3])
def test_a_class_that_is_no_text_is_not_known(wrong):
    context = millions(10) | {"optimizers": [{"class": wrong}]}
    assert audit("optimizer.fused", loop_of(stepping(), step_us=1_100, **context)) == []


def test_what_a_for_loop_does_on_the_host_for_each_parameter_goes_with_it():
    # GIVEN 200 parameters, each with two kernels, its step count read on the host and Python in between
    def script(step: Step) -> None:
        at = training(step)
        start = at
        for _ in range(200):
            step.op("aten::item", at, 12)
            for name in ("aten::mul_", "aten::addcdiv_"):
                at += 24
                step.run(name, at, on_device=0, dur=2, kernel=name)
            at += 14
        step.range("Optimizer.step#AdamW.step", start, at - start)

    context = {"parameters": [{"shape": [1000], "dtype": "fp32", "count": 200}], "optimizers": ADAMW}
    loop = loop_of(script, step_us=12_600, **context)

    (found,) = audit("optimizer.fused", loop)

    # THEN what a fused step needs for 200 tensors is left of it, 0.12 ms and 1.5 µs for each
    left_us = 120 + 1.5 * 200
    assert saving(found, loop).likely_ns == pytest.approx(200 * 62 - left_us, rel=0.03)


def test_what_is_launched_between_two_optimizers_stays():
    def script(step: Step, launches: bool = True) -> None:
        at = training(step)
        start = at
        for i in range(8):
            step.run("aten::addcdiv_", at, on_device=0, dur=2, kernel="step")
            at += 20
            if i == 3:
                step.range("Optimizer.step#AdamW.step", start, at - start)
                if launches:
                    at = training(step, at=at, forward=40)
                start = at
        step.range("Optimizer.step#AdamW.step", start, at - start)

    loop = loop_of(script, step_us=2_200, **millions(0.01))
    (found,) = audit("optimizer.fused", loop)

    assert saving(found, loop).likely_ns < 8 * 20
