"""Output gradients of cuDNN's attention: laid out in two ways, and the nearest that is right."""

import pytest

from advisor.advice.advise import advise
from advisor.advice.finding import Advised
from advisor.advice.rule import find_rule
from advisor.roofline.analysis import analyse_timeline
from tests.advice.rules.models import BF16, Op, ask, build, op
from tests.trace.builder import BACKWARD, MAIN

#: (batch, heads, tokens, head dimension), and strides with heads or with tokens outside of the other.
HEADS = [8, 12, 1024, 64]
HEADS_OUTSIDE, TOKENS_OUTSIDE = [786432, 65536, 64, 1], [786432, 64, 768, 1]
#: Out of one projection of queries, keys and values.
PROJECTED = [2359296, 64, 2304, 1]
BPROP = "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16"


def backward(
    gradient: list[int],
    *,
    heads=HEADS,
    queries=PROJECTED,
    out=TOKENS_OUTSIDE,
    dropout="0.",
    causal="True",
    mask=None,
    recorded=True,
    name="aten::_scaled_dot_product_cudnn_attention_backward",
) -> Op:
    nothing: list[int] = []
    lse = [*heads[:3], 1]
    dims = [heads] * 5 + [lse, nothing, nothing, mask or nothing, nothing, nothing, [], [], [], [], []]
    strides = [gradient, queries, queries, queries, out, [12288, 1024, 1, 1], *([nothing] * 10)]
    types = [BF16] * 5 + ["float", "long int", "long int", BF16 if mask else "", "", "", *["Scalar"] * 4, ""]
    if mask:
        strides[8] = [0, 0, mask[-1], 1]
    concrete = [""] * 11 + ["1024", "1024", dropout, causal, ""]
    inner = op("aten::_cudnn_attention_backward", dims, dtypes=types, kernels=[(BPROP, 147)])
    return op(
        name,
        dims,
        dtypes=types,
        strides=strides if recorded else [nothing] * 16,
        concrete=concrete if recorded else None,
        inside=[inner],
    )


def attention(gradient: list[int], **options) -> Op:
    kernels = [("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 47)]
    inner = op("aten::_scaled_dot_product_cudnn_attention", (HEADS,) * 3, kernels=kernels)
    gradients = [backward(gradient, **options)]
    return op("aten::scaled_dot_product_attention", (HEADS,) * 3, inside=[inner], gradient=gradients)


def test_gradients_in_two_layouts_for_one_plan_are_told_without_a_saving():
    # GIVEN three layers, whose backwards run last to first: the last two join their heads, the first does not
    said = ask(
        "attention.layouts", attention(HEADS_OUTSIDE), attention(TOKENS_OUTSIDE), attention(TOKENS_OUTSIDE)
    )

    # WHEN THEN the one that is not laid out as the first call's gradient is wrong
    (advice,) = said.advice
    assert advice.saving is None
    assert "in 2 layouts: wrong gradients likely from 1 of 3 calls a step" in advice.finding.title
    queries, right, wrong = advice.finding.evidence
    assert "[8, 12, 1024, 64] bf16" in queries
    assert right.startswith(f"2 calls a step with gradients of strides {TOKENS_OUTSIDE}: which the plan")
    assert wrong == f"1 call a step with gradients of strides {HEADS_OUTSIDE}: wrong"
    # AND the fix copies that one alone
    assert "lambda grad: grad.transpose(1, 2).contiguous().transpose(1, 2)" in advice.finding.fix
    assert "enable_cudnn_sdp(False)" in advice.finding.fix


def test_calls_before_the_odd_one_are_the_wrong_ones_if_it_came_first():
    said = ask(
        "attention.layouts", attention(HEADS_OUTSIDE), attention(HEADS_OUTSIDE), attention(TOKENS_OUTSIDE)
    )
    (advice,) = said.advice
    assert "from 2 of 3 calls" in advice.finding.title
    assert "lambda grad: grad.contiguous()" in advice.finding.fix


@pytest.mark.parametrize(
    ("torch", "confidence", "told"),
    [
        ("2.11.0+cu130", "modelled", "wrong gradients from 1 of 2"),
        ("2.14.1", "heuristic", "wrong gradients likely from 1 of 2"),
    ],
)
def test_it_is_sure_of_the_version_that_it_was_seen_in_alone(torch, confidence, told):
    model = attention(HEADS_OUTSIDE), attention(TOKENS_OUTSIDE)
    (advice,) = ask("attention.layouts", *model, versions={"torch": torch}).advice
    assert advice.finding.confidence == confidence
    assert told in advice.finding.title
    assert f"this trace is of torch {torch}" in advice.finding.note


def marked(*model: Op) -> Advised:
    """The rule on a loop whose capture marked each call as a module of its own."""
    built = build(*model)
    calls = [event for event in built.events if event["name"] == "aten::scaled_dot_product_attention"]
    for number, call in enumerate(calls):
        path = f"advisor::module::blocks.{number % len(model)}.attn"
        built.on(MAIN).range(path, call["ts"] - 0.1, call["dur"] + 0.2)
    return advise(analyse_timeline(built.join()), [find_rule("attention.layouts")])


def test_wrong_layers_are_named_by_their_numbers():
    said = marked(attention(HEADS_OUTSIDE), attention(TOKENS_OUTSIDE), attention(TOKENS_OUTSIDE))
    (advice,) = said.advice
    assert advice.finding.evidence[-1] == "wrong in blocks.0.attn"


def test_of_many_wrong_layers_the_first_are_named():
    (advice,) = marked(*[attention(HEADS_OUTSIDE)] * 11, attention(TOKENS_OUTSIDE)).advice
    assert advice.finding.evidence[-1].startswith("wrong in blocks.10.attn, blocks.9.attn, ")
    assert advice.finding.evidence[-1].endswith(" and 3 more")


def test_the_first_layout_may_lie_in_a_step_that_is_not_counted():
    # GIVEN a loop whose gradients lie one way in the first recorded step, and another in all others
    built = build(attention(HEADS_OUTSIDE), steps=5)
    backward = "aten::_scaled_dot_product_cudnn_attention_backward"
    first = next(event for event in built.events if event["name"] == backward)
    first["args"]["Input Strides"] = [TOKENS_OUTSIDE, *first["args"]["Input Strides"][1:]]
    (advice,) = advise(analyse_timeline(built.join()), [find_rule("attention.layouts")]).advice
    assert "from 1 of 1 call a step" in advice.finding.title
    assert advice.finding.evidence[1].startswith(f"0 calls a step with gradients of strides {TOKENS_OUTSIDE}")


def test_each_thread_keeps_plans_of_its_own():
    # GIVEN the one odd gradient of each step on a thread of its own, as that of another device has
    built = build(attention(HEADS_OUTSIDE), attention(TOKENS_OUTSIDE))
    on_host = [event for event in built.events if event["tid"] == BACKWARD]
    engine = [event for event in on_host if event["name"].startswith("autograd::engine::")]
    for outer in engine[1::2]:
        end = outer["ts"] + outer["dur"]
        for event in on_host:
            if outer["ts"] <= event["ts"] < end:
                event["tid"] = BACKWARD + 1
    assert advise(analyse_timeline(built.join()), [find_rule("attention.layouts")]).passed


def test_one_layout_passes():
    said = ask("attention.layouts", attention(TOKENS_OUTSIDE), attention(TOKENS_OUTSIDE))
    assert said.passed == ["attention.layouts"]


@pytest.mark.parametrize(
    "other",
    [
        {"heads": [4, 12, 1024, 64]},
        {"queries": HEADS_OUTSIDE},
        {"causal": "False"},
        {"dropout": "0.1"},
        {"mask": [8, 1, 1024, 1024]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_calls_that_differ_in_what_plans_are_kept_by_do_not_share_one(other):
    said = ask("attention.layouts", attention(HEADS_OUTSIDE, **other), attention(TOKENS_OUTSIDE))
    assert said.passed == ["attention.layouts"]


def test_a_gradient_that_is_expanded_is_copied_into_the_outputs_layout():
    # GIVEN the gradient of a sum, which has no strides at all
    expanded = attention([0, 0, 0, 0])
    assert ask("attention.layouts", expanded, attention(TOKENS_OUTSIDE)).passed == ["attention.layouts"]
    # AND it counts as laid out so
    assert len(ask("attention.layouts", expanded, attention(HEADS_OUTSIDE)).advice) == 1


def test_strides_of_a_dimension_of_one_element_do_not_count():
    one_sequence = [1, 12, 1024, 64]
    said = ask(
        "attention.layouts",
        attention([64, 64, 768, 1], heads=one_sequence),
        attention(TOKENS_OUTSIDE, heads=one_sequence),
    )
    assert said.passed == ["attention.layouts"]


def test_other_backends_are_right_with_any_layout():
    flash = "aten::_scaled_dot_product_flash_attention_backward"
    said = ask(
        "attention.layouts", attention(HEADS_OUTSIDE, name=flash), attention(TOKENS_OUTSIDE, name=flash)
    )
    assert said.not_applicable == ["attention.layouts"]


def test_without_strides_the_trace_does_not_tell():
    said = ask(
        "attention.layouts",
        attention(HEADS_OUTSIDE, recorded=False),
        attention(TOKENS_OUTSIDE, recorded=False),
    )
    assert said.not_applicable == ["attention.layouts"]


def test_a_loop_without_a_backward_is_not_spoken_of():
    inner = op("aten::_scaled_dot_product_cudnn_attention", (HEADS,) * 3, kernels=[("fprop", 47)])
    said = ask("attention.layouts", op("aten::scaled_dot_product_attention", (HEADS,) * 3, inside=[inner]))
    assert said.not_applicable == ["attention.layouts"]
