"""Prediction loops that decode token after token."""

from __future__ import annotations

import numpy as np
import pytest

from tests.advice.rules.steps import Step, applies, audit, loop_of, saving, training

HIDDEN, VOCABULARY = 4096, 8192


def decoding(*, rows: int | list[int] = 1, dtype: str = "c10::BFloat16", layers: int = 4, us: float = 20):
    """Products with square weights and then a head, for as many tokens as there are numbers of rows."""

    def script(step: Step) -> None:
        at = 0.0
        for m in [rows] if isinstance(rows, int) else rows:
            for _ in range(layers):
                step.run(
                    "aten::mm", at, on_device=0, dur=us * max(1, m / 16), kernel="gemv",
                    dims=[[m, HIDDEN], [HIDDEN, HIDDEN]], dtype=dtype,
                )  # fmt: skip
                at += 12
            step.run(
                "aten::mm", at, on_device=0, dur=us * max(1, m / 16), kernel="gemv",
                dims=[[m, HIDDEN], [HIDDEN, VOCABULARY]], dtype=dtype,
            )  # fmt: skip
            at += 12
        step.wait(at + 5)

    return script


def test_decoding_with_sixteen_bit_weights_is_told_of_fewer_bits():
    # GIVEN four products with 33.6 MB of weights each and a head of 67.1, 20 µs a product
    loop = loop_of(decoding(), step_us=120)

    (found,) = audit("generation.quantise", loop)

    assert "201 MB of bf16 weights a token, at 2.01 TB/s" in found.title
    assert "Int8WeightOnlyConfig" in found.fix
    # THEN 3.35 TB/s over 201 MB are some 17 thousand tokens a second
    assert any("16,640 tokens/s" in line for line in found.evidence)
    told = saving(found, loop)
    assert told.low_ns == pytest.approx(25, abs=5)
    assert told.high_ns == pytest.approx(50, abs=5)


def test_eight_bit_weights_are_left_as_they_are():
    assert audit("generation.quantise", loop_of(decoding(dtype="signed char"), step_us=100)) == []


def test_products_of_many_rows_are_not_decoding():
    loop = loop_of(decoding(rows=256), step_us=1_400)

    assert audit("generation.quantise", loop) == []
    assert audit("generation.batching", loop) == []


def test_training_is_not_decoding():
    for rule in ("quantise", "batching", "kv_cache"):
        assert not applies(f"generation.{rule}", loop_of(training))


def test_one_sequence_at_a_time_is_told_to_share_the_weights():
    (found,) = audit("generation.batching", loop_of(decoding(), step_us=100, loader={"batch_size": 1}))

    assert "with 1 row a product" in found.title
    assert "was 1" in found.fix
    assert found.edits == []


def test_eight_sequences_share_them_already():
    assert audit("generation.batching", loop_of(decoding(rows=8), step_us=100)) == []


def test_rows_that_grow_token_by_token_show_that_there_is_no_cache():
    loop = loop_of(decoding(rows=[61, 62, 63, 64], us=30), step_us=2_000)

    (found,) = audit("generation.kv_cache", loop)

    assert "61 to 64 rows" in found.title
    # THEN a product is down to reading 33.6 MB at 60 % of 3.35 TB/s, and its launch
    alone = HIDDEN * HIDDEN * 2 / (0.6 * 3.35e12) * 1e9 + 3_000
    assert float(np.min(found.edits[0].dur_ns.likely)) == pytest.approx(alone)
    assert saving(found, loop).likely_ns > 1_000


def test_rows_that_stay_the_same_show_a_cache():
    assert audit("generation.kv_cache", loop_of(decoding(rows=[64, 64, 64, 64], us=30), step_us=2_000)) == []


def test_batches_of_any_length_are_not_taken_for_a_growing_sequence():
    assert audit("generation.kv_cache", loop_of(decoding(rows=[60, 71, 64, 90], us=30), step_us=2_400)) == []
