"""Argument positions in the tables, against the schemas of the installed PyTorch."""

import pytest

from advisor.roofline.costs import attention_layouts, convolution, op_cost
from tests.roofline.costs.calls import BF16, FP32, call

torch = pytest.importorskip("torch")


def _arguments(name):
    operator = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if not name.startswith("aten::") or operator is None:
        pytest.skip("not in this PyTorch")
    return [argument.name for argument in operator.default._schema.arguments]


@pytest.mark.parametrize("name", [*attention_layouts.FORWARD, *attention_layouts.BACKWARD])
def test_attention_reads_the_mask_flag_the_bias_and_the_lengths_where_they_are(name):
    layout = (attention_layouts.FORWARD | attention_layouts.BACKWARD)[name]
    arguments = _arguments(name)
    assert arguments[layout.causal] in ("is_causal", "custom_mask_type")
    assert layout.bias is None or arguments[layout.bias] in ("bias", "attn_bias", "attn_mask")
    assert layout.cumulative is None or arguments[layout.cumulative] in ("cum_seq_q", "cu_seqlens_q")
    assert layout.longest is None or arguments[layout.longest] in ("max_q", "max_seqlen_q")
    assert all(arguments[at].startswith("window_size") for at in layout.windows)
    assert ("out" in arguments) == (name in attention_layouts.BACKWARD)


@pytest.mark.parametrize("name", convolution._FORWARD)
def test_convolution_reads_its_settings_where_they_are(name):
    arguments = _arguments(name)
    expected = ("stride", "padding", "dilation", "groups", "transposed")
    for position, argument in zip(convolution._FORWARD[name], expected, strict=True):
        assert position is None or arguments[position] == argument


def test_a_total_in_a_named_dtype_is_no_sum_over_that_dimension():
    assert _arguments("aten::sum") == ["self", "dtype"]
    total = op_cost(call("aten::sum", ((4, 8, 2, 2), BF16), "1"))
    assert total.bytes_written == 1  # ScalarType 1 is int8


def test_miopens_rnn_has_no_buffer_and_no_projection():
    arguments = _arguments("aten::miopen_rnn")
    values = {"mode": "2", "hidden_size": "2", "num_layers": "1", "bidirectional": "True"}
    recorded = [((7, 5, 16), FP32), *(values.get(argument, "0") for argument in arguments[1:14])]
    found = op_cost(call("aten::miopen_rnn", *recorded))
    assert found.bytes_written == 7 * 5 * 2 * 2 * 4
