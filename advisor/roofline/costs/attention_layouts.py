"""Where each attention operator keeps its arguments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Where an operator keeps its arguments.

    Attributes:
        heads_first: sizes are (batch, heads, tokens, dim), else (batch, tokens, heads, dim).
        causal: position of the flag, or of ``custom_mask_type``.
        cumulative: position of the cumulative lengths of packed sequences, the keys' after the queries'.
        longest: position of the length of the longest packed sequence, again followed by the keys'.
        bias: position of an additive mask, or None.
        windows: positions of a sliding window's sizes; -1 for none.
        elsewhere: positions of what keeps keys elsewhere than in the arguments, or fewer of them than there
            are: new keys, a page table, lengths in use; and of settings that are not modelled.
        first: position of q, or of the output's gradient.
        out: position of the output, in a backward operator.
    """

    heads_first: bool
    causal: int
    cumulative: int | None = None
    longest: int | None = None
    bias: int | None = None
    windows: tuple[int, ...] = ()
    elsewhere: tuple[int, ...] = ()
    first: int = 0
    out: int = 4


_EFFICIENT = Layout(False, 9, cumulative=4, longest=6, bias=3, elsewhere=(12, 13))
_EFFICIENT_BACKWARD = Layout(False, 14, cumulative=6, longest=8, bias=4, elsewhere=(18,), out=5)
#: flash-attn: ``flash_attn_interface.py``, ``hopper/flash_attn_interface.py``; xFormers:
#: ``csrc/attention/attention.cpp``, ``ops/fmha/flash.py``, ``flash3.py``.
FORWARD = {
    "aten::_scaled_dot_product_flash_attention": Layout(True, 4),
    "aten::_scaled_dot_product_efficient_attention": Layout(True, 6, bias=3),
    "aten::_scaled_dot_product_cudnn_attention": Layout(True, 6, bias=3),
    "aten::_scaled_dot_product_flash_attention_for_cpu": Layout(True, 4, bias=5),
    "aten::_scaled_dot_product_fused_attention_overrideable": Layout(True, 5, bias=3),
    "aten::_flash_attention_forward": Layout(
        False, 8, cumulative=3, longest=5, windows=(11, 12), elsewhere=(13,)
    ),
    "aten::_efficient_attention_forward": _EFFICIENT,
    "aten::_cudnn_attention_forward": Layout(True, 10, cumulative=4, bias=3),
    "flash_attn::_flash_attn_forward": Layout(False, 5, windows=(6, 7)),
    "flash_attn::_flash_attn_varlen_forward": Layout(
        False, 9, cumulative=3, longest=5, windows=(10, 11), elsewhere=(15, 16, 17)
    ),
    "flash_attn_3::fwd": Layout(
        False, 24, cumulative=7, longest=12, windows=(25, 26), elsewhere=(3, 10, 11, 14, 16)
    ),
    "xformers::efficient_attention_forward_cutlass": _EFFICIENT,
    "xformers::efficient_attention_forward_ck": Layout(False, 9, cumulative=4, bias=3, elsewhere=(11, 12)),
    "xformers_flash::flash_fwd": Layout(
        False, 10, cumulative=3, longest=6, windows=(11, 12), elsewhere=(5, 14)
    ),
    "xformers_flash3::flash_fwd": Layout(
        False, 11, cumulative=3, longest=7, windows=(17, 18), elsewhere=(5, 6, 15)
    ),
}
BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward": Layout(True, 11, cumulative=6),
    "aten::_scaled_dot_product_efficient_attention_backward": Layout(True, 11, bias=4, out=5),
    "aten::_scaled_dot_product_cudnn_attention_backward": Layout(True, 14, cumulative=9, bias=8),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": Layout(True, 7),
    "aten::_flash_attention_backward": Layout(False, 11, cumulative=6, longest=8, windows=(15, 16)),
    "aten::_efficient_attention_backward": _EFFICIENT_BACKWARD,
    "aten::_cudnn_attention_backward": Layout(True, 14, cumulative=9, bias=8),
    "flash_attn::_flash_attn_backward": Layout(False, 11, windows=(12, 13)),
    "flash_attn::_flash_attn_varlen_backward": Layout(False, 15, cumulative=9, longest=11, windows=(16, 17)),
    "flash_attn_3::bwd": Layout(False, 16, cumulative=9, longest=13, windows=(17, 18), elsewhere=(11, 12)),
    "xformers::efficient_attention_backward_cutlass": _EFFICIENT_BACKWARD,
    "xformers::efficient_attention_backward_ck": Layout(
        False, 15, cumulative=5, longest=7, bias=4, elsewhere=(9, 17), out=11
    ),
    "xformers_flash::flash_bwd": Layout(False, 13, cumulative=7, longest=9, windows=(14, 15), first=1, out=5),
    "xformers_flash3::flash_bwd": Layout(
        False, 12, cumulative=7, longest=9, windows=(13, 14), first=1, out=5
    ),
}
