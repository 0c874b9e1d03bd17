"""The loss over a large vocabulary, and losses that are none."""

from tests.advice.rules.models import BF16, FP32, ask, likely_ms, op

TOKENS = 8192


def cast(shape, target, source, us):
    kernels = [("unrolled_elementwise_kernel", us)]
    copy = op("aten::copy_", (shape, shape, []), dtypes=[target, source, "Scalar"], kernels=kernels)
    back = op("aten::copy_", (shape, shape, []), dtypes=[source, target, "Scalar"], kernels=kernels)
    return op("aten::to", (shape, []), dtypes=[source, "Scalar"], inside=[copy], gradient=[back])


def cross_entropy(
    classes: int, us: float, dtype: str, *, forward="cunn_SoftMaxForward", backward="cunn_SoftMaxBackward"
):
    shape = [TOKENS, classes]
    inner = op("aten::_log_softmax", (shape, [], []), dtype=dtype, kernels=[(forward, us)])
    kernels = [(backward, us)]
    back = op("aten::_log_softmax_backward_data", (shape, shape), dtype=dtype, kernels=kernels)
    return op("aten::cross_entropy_loss", (shape, [TOKENS]), dtype=dtype, inside=[inner], gradient=[back])


def head(classes: int):
    return op("aten::mm", ([TOKENS, 768], [768, classes]), kernels=[("nvjet_sm90_tst_192x192_64x4", 870)])


def test_fp32_copy_of_logits_before_the_loss_is_found():
    shape = [TOKENS, 50304]
    said = ask(
        "loss.fp32_logits", head(50304), cast(shape, FP32, BF16, 1170), cross_entropy(50304, 1500, FP32)
    )
    (advice,) = said.advice
    assert "1.65 GB of memory" in advice.finding.title
    # Two casts of 1.17 ms go, and 58 % of 3 ms.
    assert 3.9 < likely_ms(said) < 4.2


def test_under_autocast_the_casts_stay_and_only_the_softmax_gets_faster():
    model = [head(50304), cast([TOKENS, 50304], FP32, BF16, 1170), cross_entropy(50304, 1500, FP32)]
    said = ask("loss.fp32_logits", *model, precision="bf16-mixed")
    assert 1.6 < likely_ms(said) < 1.9
    # AND weights that are bf16 themselves need none
    assert likely_ms(ask("loss.fp32_logits", *model, precision="bf16-true")) > 3.9


def test_a_softmax_that_holds_its_rows_in_registers_gains_little_in_16_bits():
    model = [
        head(8192),
        cast([TOKENS, 8192], FP32, BF16, 200),
        cross_entropy(8192, 250, FP32, forward="cunn_SoftMaxForwardReg", backward="cunn_SoftMaxBackwardSmem"),
    ]
    # Two casts of 200 µs go, 30 of 250 µs forward and 125 backward.
    assert 0.5 < likely_ms(ask("loss.fp32_logits", *model)) < 0.6


def test_logits_that_come_in_fp32_are_passed():
    assert ask("loss.fp32_logits", head(50304), cross_entropy(50304, 1500, FP32)).passed == [
        "loss.fp32_logits"
    ]


def test_large_vocabulary_passes_its_logits_through_memory_too_often():
    # GIVEN 3 ms where torch.compile would take 1.4
    said = ask("loss.cross_entropy", head(50304), cross_entropy(50304, 1500, BF16))
    assert 1.3 < likely_ms(said) < 1.9
    assert said.advice[0].finding.swap == "loss"


def test_fused_loss_is_passed():
    said = ask("loss.cross_entropy", head(50304), cross_entropy(50304, 200, BF16))
    assert said.passed == ["loss.cross_entropy"]


def test_few_classes_are_no_large_vocabulary():
    said = ask("loss.cross_entropy", head(1000), cross_entropy(1000, 300, BF16))
    assert said.not_applicable == ["loss.cross_entropy"]
