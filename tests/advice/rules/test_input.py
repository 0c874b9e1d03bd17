"""Batches that come late, and copies to the device."""

from __future__ import annotations

import pytest

from advisor.advice.advise import saving_of
from advisor.advice.loop import Loop
from advisor.advice.replay import Replay
from advisor.roofline.analysis import analyse_timeline
from tests.advice.rules.steps import Step, applies, audit, loop_of, saving, training
from tests.trace.builder import Builder

FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
FROM_WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
BATCH = 8_000_000


def fetching(iterator: str, fetch_us: float):
    def script(step: Step) -> None:
        step.range(iterator, 0, fetch_us)
        step.op("aten::stack", 1, fetch_us / 2)
        training(step, at=fetch_us + 20)

    return script


# dataloader


def test_a_loader_in_the_training_process_that_takes_most_of_the_step_is_given_workers():
    # GIVEN 16 ms of fetch before 1 ms of work
    loop = loop_of(
        fetching(FETCH, 16_000),
        step_us=17_000,
        loader={"num_workers": 0, "batch_size": 32, "pin_memory": False},
    )

    (found,) = audit("input.dataloader", loop)

    # THEN the fix names what is and what should be
    assert "num_workers=8,   # was 0" in found.fix
    assert "pin_memory=True,   # was False" in found.fix
    assert "persistent_workers=True,\n" in found.fix
    assert "batch_size=32" in found.fix
    assert "training process makes each batch" in found.title
    # AND eight workers deliver every 2.1 ms
    assert saving(found, loop).likely_ns == pytest.approx(17_000 - 1.05 * 16_000 / 8, rel=0.02)
    assert saving(found, loop).low_ns > 10_000
    assert any("aten::stack: 50%" in line for line in found.evidence)


def test_settings_that_stay_are_not_commented():
    loader = {"num_workers": 0, "pin_memory": True, "persistent_workers": False, "prefetch_factor": None}
    (found,) = audit("input.dataloader", loop_of(fetching(FETCH, 16_000), step_us=17_000, loader=loader))

    assert "pin_memory=True,\n" in found.fix
    assert "persistent_workers=True,   # was False" in found.fix
    assert "prefetch_factor=4,   # was None" in found.fix


def test_a_loader_that_takes_a_hundredth_of_the_step_is_left_alone():
    assert audit("input.dataloader", loop_of(fetching(FETCH, 150), step_us=17_000)) == []


def test_a_loop_that_fetches_nothing_has_no_loader_to_speak_of():
    assert not applies("input.dataloader", loop_of(training))


def test_workers_that_are_behind_are_doubled_where_their_number_is_not_known():
    loop = loop_of(fetching(FROM_WORKERS, 9_000), step_us=10_000)

    (found,) = audit("input.dataloader", loop)

    assert "num_workers=2 * num_workers" in found.fix
    assert "how many workers" in found.note
    assert saving(found, loop).likely_ns == pytest.approx(10_000 - 1.05 * 5_000, rel=0.05)


def test_workers_that_are_behind_are_told_how_many_would_keep_up():
    loop = loop_of(fetching(FROM_WORKERS, 5_000), step_us=10_000, loader={"num_workers": 4})

    (found,) = audit("input.dataloader", loop)

    # THEN four workers take 40 ms for a batch each, and the rest of the step is some 5 ms
    assert "num_workers=10,   # was 4" in found.fix


def test_workers_that_are_behind_are_told_though_the_capture_lives_from_their_queue():
    # GIVEN 600 operators of 8 µs, and steps that take twice as long without the profiler as in the capture
    def script(step: Step) -> None:
        step.range(FROM_WORKERS, 0, 100)
        host_us = training(step, at=120)
        for number in range(600):
            step.op("aten::view", host_us + 8 * number, 8)

    builder = Builder()
    for number in range(4):
        builder.step(number, 10_000 + 5_100 * number, 5_100)
        script(Step(builder, 10_000 + 5_100 * number, number))
    builder.context(loader={"num_workers": 2})
    analysis = analyse_timeline(builder.join(), baseline_step_ms=10.0)
    loop = Loop(analysis, Replay(analysis))
    (found,) = audit("input.dataloader", loop)

    assert "its workers do not keep up" in found.title
    assert any("no fetch takes more than 100 µs" in line for line in found.evidence)
    # THEN two workers take 20 ms for a batch each, and the rest of a step some 2 ms
    assert "num_workers=10" in found.fix
    assert saving(found, loop).likely_ns > 5_000


def test_taking_a_ready_batch_from_workers_is_no_waiting():
    assert audit("input.dataloader", loop_of(fetching(FROM_WORKERS, 300), step_us=10_000)) == []


def test_a_batch_of_a_hundred_megabytes_is_limited_by_the_thread_that_moves_it():
    def script(step: Step) -> None:
        step.range(FETCH, 0, 16_000)
        step.copy_in(16_010, nbytes=100_000_000, dur=2_000, pinned=True)
        training(step, at=16_100)

    (found,) = audit("input.dataloader", loop_of(script, step_us=20_000))

    assert any("send fewer bytes" in line for line in found.evidence)


# pageable copies


def copying(*, pinned: bool, dur: float, call_us: float, wait_us: float = 0):
    def script(step: Step) -> None:
        step.op("aten::to", 0, call_us + wait_us + 20)
        step.copy_in(2, nbytes=BATCH, dur=dur, pinned=pinned)
        if wait_us:
            step.call("cudaStreamSynchronize", call_us + 4.5, wait_us)
        training(step, at=call_us + wait_us + 30)

    return script


def test_a_batch_from_pageable_memory_is_told_what_the_link_would_do():
    # GIVEN 8 MB in 1.6 ms, 5 GB/s, with the host standing in the call
    loop = loop_of(copying(pinned=False, dur=1_600, call_us=1_600), step_us=2_500)

    (found,) = audit("input.pageable_copy", loop)

    assert "pageable" in found.title
    assert "5.00 GB/s" in found.title
    assert "pin_memory=True" in found.fix
    # THEN 8 MB at 82 % of 63 GB/s take 157 µs
    retimed = found.edits[0]
    assert float(retimed.dur_ns.likely[0]) == pytest.approx(8e6 / (0.82 * 63.015e9) * 1e9 + 2_000, rel=0.01)
    # AND the host's 1.6 ms go
    assert saving(found, loop).likely_ns == pytest.approx(1_450, rel=0.15)


def test_a_batch_from_pinned_memory_without_a_wait_is_as_it_should_be():
    assert (
        audit("input.pageable_copy", loop_of(copying(pinned=True, dur=160, call_us=5), step_us=2_500)) == []
    )


def test_a_wait_for_a_pinned_copy_is_told_too():
    loop = loop_of(copying(pinned=True, dur=160, call_us=5, wait_us=700), step_us=2_500)

    (found,) = audit("input.pageable_copy", loop)

    assert "blocking" in found.title


def test_a_small_pageable_copy_is_left_alone():
    def script(step: Step) -> None:
        step.copy_in(0, nbytes=40_000, dur=300)
        training(step, at=320)

    assert audit("input.pageable_copy", loop_of(script)) == []


def test_pinning_in_the_training_process_is_charged_to_its_fetch():
    def script(step: Step) -> None:
        step.range(FETCH, 0, 500)
        copying(pinned=False, dur=1_600, call_us=1_600)(_later(step, 520))

    (found,) = audit("input.pageable_copy", loop_of(script, step_us=3_000))

    pinning = found.edits[-1]
    assert float(pinning.host_ns.likely) == pytest.approx(500_000 + BATCH / 25e9 * 1e9, rel=0.01)


# made on the host


def test_a_small_tensor_sent_within_the_step_is_to_be_made_on_the_device():
    def script(step: Step) -> None:
        # 120 µs of launches, 300 µs of kernels, and then a copy that waits for them
        step.copy_in(0, nbytes=BATCH, dur=1, pinned=True)
        host_us = training(step, at=20, kernel_us=50)
        step.op("aten::to", host_us, step.free_at() - host_us + 20)
        step.copy_in(host_us + 1, nbytes=800, dur=1)
        training(step, at=step.free_at() + 20, kernel_us=50)

    loop = loop_of(script, step_us=680)
    (found,) = audit("input.made_on_host", loop)

    assert found.title.startswith("1 small tensor a step")
    assert any("aten::to of 800 B" in line for line in found.evidence)
    assert "device=self.device" in found.fix
    # THEN the host is ahead again, and the device waits no more for the second half's first launch
    assert 15 < saving(found, loop).likely_ns < 70


def test_a_small_tensor_that_comes_with_the_batch_is_left_alone():
    def script(step: Step) -> None:
        step.copy_in(0, nbytes=800, dur=300)
        training(step, at=320)

    assert audit("input.made_on_host", loop_of(script)) == []


def _later(step: Step, us: float) -> Step:
    later = Step(step.builder, step.start + us, step.number)
    later._correlation = step._correlation + 50_000
    return later


def test_workers_that_are_late_now_and_then_are_told_without_a_saving_for_the_typical_step():
    # GIVEN eight steps of which the third waits for all workers at once
    builder, at = Builder(), 10_000.0
    for number in range(8):
        late = 9_000 if number == 3 else 100
        builder.step(number, at, late + 900)
        fetching(FROM_WORKERS, late)(Step(builder, at, number))
        at += late + 900
    analysis = analyse_timeline(builder.join(), baseline_step_ms=1.0)
    (found,) = audit("input.dataloader", Loop(analysis, Replay(analysis)))

    assert found.title.startswith("1 fetch of 7 waits for the workers, up to 9.00 ms")
    assert found.edits == []
    assert "typical" in found.note


def test_pinning_beside_late_workers_does_not_make_them_faster():
    def script(step: Step) -> None:
        step.range(FROM_WORKERS, 0, 5_000)
        copying(pinned=False, dur=1_600, call_us=1_600)(_later(step, 5_010))

    loop = loop_of(script, step_us=8_000, loader={"num_workers": 2})
    (found,) = audit("input.pageable_copy", loop)

    # THEN the step is the workers' 8 ms, whatever the copy takes
    assert saving(found, loop).likely_ns < 0.05 * 8_000


def test_workers_and_pinning_together_save_no_less_than_workers_alone():
    def script(step: Step) -> None:
        step.range(FETCH, 0, 16_000)
        copying(pinned=False, dur=1_600, call_us=1_600)(_later(step, 16_010))

    loop = loop_of(script, step_us=19_000, loader={"num_workers": 0})
    (workers,), (pinned,) = audit("input.dataloader", loop), audit("input.pageable_copy", loop)

    alone = saving_of(workers.edits, loop.replay).likely_ns
    for edits in ([*workers.edits, *pinned.edits], [*pinned.edits, *workers.edits]):
        assert saving_of(edits, loop.replay).likely_ns >= 0.999 * alone
