"""What a kernel is, by its name: its part in the operator, and the pipe it computes on.

The names are those of cuBLAS (nvjet, xmma, cutlass), cuDNN, ATen, FlashAttention, CUB, NCCL, and on AMD of
Tensile (``Cijk_``), MIOpen, Composable Kernel, AOTriton and RCCL.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

_TRANSFER = re.compile(r"^(mem(cpy|set)\b|hipmemcpy|copybuffer|fillbuffer)", re.I)

#: What kernels' names hold, as regular expressions; the first role that is found wins.
_WORDS = {
    "collective": r"^(void\s)?(nccl|rccl|msccl) cross_device_reduce (one|two)_shot_all_reduce "
    r"multimem_all_",
    "sum_partials": r"splitk.?reduce split_?k_kernel reduce_?split_?k splitk?_reduce _postgsu "
    r"gemmk1_splitk execute_split_k splitkv_combine reduce_wgrad wrw_reduce nchw_reduction",
    "workspace": r"init_device_workspace compute\w*offsets initialize_workspace",
    "clear": r"scalepackedtensor scaletensor",
    "winograd_data": r"winograd(forward|wgrad|bwd)(data|delta)",
    "winograd_filter": r"winograd(forward|wgrad|bwd)filter generatewinogradtiles",
    "winograd_output": r"winograd(forward|wgrad|bwd)output",
    "layout": r"nchwtonhwc nhwctonchw nchw2nhwc nhwc2nchw batched_transpose transpose_readwrite "
    r"tensor_?transform permute_ transpose_n krsctocrsk op_tensor_kernel subtensorop tensor_reorder im2col "
    r"im2d2col col2im col2im2d optensor cast_?tensor",
    "attention_delta": r"dot_do_o bwd_?preprocess ograd_?dot_?o compute_delta",
    "attention_convert": r"convert_?dq bwdpostprocess bwd_convert postprocess.*dq",
    "attention_dkdv": r"bwd_kernel_dk_dv bwd_dkdv",
    "attention_dq": r"bwd_kernel_dq\b bwd_kernel_dq_db bwd_dq\b",
    "attention_backward": r"flash_bwd fmha_cutlassB fmha_?bwd sdpa.*bprop bwd_kernel_fuse flashattnbwd "
    r"attention.*backward",
    "attention": r"flash_fwd fmha sdpa.*fprop ^attn_fwd flashattnfwd flash:: flash_attn _sdpa_ attention",
    "wgrad": r"wgrad grad_weight_kernel backward_filter bwd_?weight bwd_?wrw _wrw convwrw wrw_",
    "dgrad": r"dgrad bwd_?data backward_data conv_depthwise[23]d_backward_kernel igemm_bwd convbwd "
    r"conv.*_bwd",
    "convolution": r"fprop implicit_convolve conv_depthwise convolve winograd igemm_fwd miopen.*conv "
    r"conv[23]d convfwd grouped_conv device_conv scudnn s\d+cudnn cudnn::cnn ::conv conv_",
    "gemm": r"gemm nvjet ^cijk_ gemv cutlass.*tensorop cutlass_\d+_ wmma_ dot_kernel ampere_.*_\d+x\d+ "
    r"kernel2< matmul triton_tem_ ^bmm_",
    "sort": r"radix_?sort merge_?sort bitonicsort segmented_sort sortkv devicemerge blocksort",
    "scan": r"devicescan scan_by_key scan_innermost scan_outer devicecompact lookback_scan ::scan",
    "reduce": r"reduce_kernel devicereduce reduce_",
    "elementwise": r"elementwise multi_tensor_apply",
}
_MATRIX = frozenset({
    "gemm", "convolution", "dgrad", "wgrad", "attention", "attention_backward", "attention_dkdv",
    "attention_dq",
})  # fmt: skip
_FAMILY_OF_ROLE = {
    "collective": "communication", "gemm": "matmul", "sum_partials": "matmul",
    "convolution": "convolution", "dgrad": "convolution", "winograd_data": "convolution",
    "winograd_filter": "convolution", "winograd_output": "convolution", "clear": "memory",
    "wgrad": "convolution", "layout": "copy", "attention": "attention", "attention_backward": "attention",
    "attention_dkdv": "attention", "attention_dq": "attention", "attention_delta": "attention",
    "attention_convert": "attention", "sort": "sort", "scan": "reduction", "reduce": "reduction",
}  # fmt: skip
_FAMILIES = (
    ("compiled", r"^triton_|triton_(poi|red|per|tem)_"),
    ("optimizer", r"adam|sgd|multi_tensor_apply|lpnorm"),
    ("norm", r"layer_?norm|batch_?norm|group_?norm|rms_?norm|bn_(fw|bw)"),
    ("softmax", r"softmax"),
    ("loss", r"nll_loss|cross_entropy|ctc_loss|mse_|bce_"),
    ("dropout", r"dropout"),
    ("pooling", r"pool|upsample"),
    ("embedding", r"embedding"),
    ("indexing", r"gather|scatter|index"),
    ("random", r"distribution|random|philox"),
    ("fft", r"fft"),
    ("rnn", r"lstm|gru_|rnn"),
    ("copy", r"catarray|copy_kernel|fillfunctor"),
    ("pointwise", r"elementwise"),
)
#: First letter of the type triple in cuBLAS' nvjet kernels, that of A: ``tst`` is bf16 in, fp32 sum, bf16
#: out.
_NVJET_PIPE = {
    "t": "tensor_bf16", "h": "tensor_fp16", "s": "tensor_tf32", "d": "tensor_fp64", "i": "tensor_int8",
    "q": "tensor_fp8", "o": "tensor_fp8", "r": "tensor_fp8",
}  # fmt: skip
_FP8 = re.compile(r"e4m3|e5m2", re.I)
_NVJET = re.compile(r"nvjet_(?:sm\d+_)?([a-z]+)_")
_NO_TENSOR_CORE = re.compile(
    r"simt|sgemm|_ffma|gemv|gemmsn|dot_kernel|conv_depthwise|scudnn|reduce_1block", re.I
)
_TF32 = re.compile(r"tf32|xf32|s1688(?!.*(?:bf16|f16))|s1684|_sss_|_xb_", re.I)


@functools.cache
def _compiled_roles() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Compiled on first use: importing the package has to be cheap."""
    return tuple((name, re.compile("|".join(words.split()), re.I)) for name, words in _WORDS.items())


@functools.lru_cache(maxsize=8192)
def role(kernel: str) -> str:
    """The part that a kernel plays, such as ``gemm``, ``dgrad``, ``layout``; ``"other"`` if none is told."""
    return next((name for name, pattern in _compiled_roles() if pattern.search(kernel)), "other")


@functools.lru_cache(maxsize=8192)
def bare_operator(kernel: str) -> str:
    """The name under which a kernel outside any operator has a formula, or empty."""
    found = _BARE.search(kernel)
    return f"multi_tensor_apply::{found[1]}" if found else ""


def is_transfer(kernel: str) -> bool:
    """Whether a launch is a memory copy or a memset, done by a copy engine or a driver's kernel."""
    return _TRANSFER.match(kernel) is not None


def is_matrix(kernel: str) -> bool:
    """Whether a kernel multiplies matrices: a GEMM, a convolution, or attention."""
    return role(kernel) in _MATRIX


@functools.lru_cache(maxsize=8192)
def family(kernel: str) -> str:
    """The family of work that a kernel's name alone tells, ``"other"`` if none."""
    for label, pattern in _FAMILIES:
        if re.search(pattern, kernel, re.I) and role(kernel) not in ("gemm", "collective"):
            return label
    return _FAMILY_OF_ROLE.get(role(kernel), "compiled" if "triton_" in kernel else "other")


def matrix_pipe(
    kernel: str, dtype: str, settings: Mapping[str, object], setting: str = "allow_tf32_matmul"
) -> str:
    """The pipe that a matrix kernel computes on.

    Args:
        kernel: its name, or ``""`` for an ideal kernel.
        dtype: of the operands.
        settings: of the capture; decides about TF32 where the name does not.
        setting: the one that allows TF32: ``allow_tf32_matmul`` or ``allow_tf32_cudnn``.
    """
    named = _NVJET.search(kernel)
    if named:
        return _NVJET_PIPE.get(named[1][0], "vector_fp32")
    if _FP8.search(kernel):
        return "tensor_fp8"
    if dtype == "fp64":
        return "tensor_fp64" if re.search(r"884|tensorop|dmma", kernel) else "vector_fp64"
    if dtype in ("fp32", "complex64"):
        if _TF32.search(kernel):
            return "tensor_tf32"
        is_named = bool(_NO_TENSOR_CORE.search(kernel) or re.search(r"f32f32_f32f32|Cijk", kernel))
        return "tensor_tf32" if settings.get(setting) is True and not is_named else "vector_fp32"
    if dtype in ("bf16", "fp16"):
        if _NO_TENSOR_CORE.search(kernel):
            return "vector_fp32"
        return f"tensor_{dtype}"
    if dtype in ("fp8", "fp4", "int8"):
        return f"tensor_{dtype}"
    return "tensor_int8" if dtype == "uint8" else "vector_fp64" if dtype == "complex128" else "none"


_C_TYPE = r"(c10::BFloat16|c10::Half|__half|float|double|long|int|bool|signed char|unsigned char)\b"
_ELEMENT = (re.compile(r"OpaqueType<(\d+)"), re.compile(rf"(?:<|, |\(){_C_TYPE}"))
#: Of Apex' kernels, which are launched outside any operator, the functor tells what they do.
_BARE = re.compile(r"multi_tensor_apply_kernel<.*?\b(\w+Functor)\b")
#: ``multi_tensor_apply`` names the scalars' type before its functor's, which is the tensors'.
_FUNCTOR = re.compile(rf"multi_tensor_apply.*?(?:Functor|Copy)<{_C_TYPE}")
_COLLECTIVE_DTYPE = re.compile(r"_(f16|bf16|f32|f64|f8e4m3|f8e5m2|i8|u8|i32|u32|i64|u64)(?:_|\b|\()", re.I)
_BY_WIDTH = {1: "uint8", 2: "fp16", 4: "fp32", 8: "int64", 16: "complex128"}
_BY_C_NAME = {
    "c10::BFloat16": "bf16", "c10::Half": "fp16", "__half": "fp16", "float": "fp32", "double": "fp64",
    "long": "int64", "int": "int32", "bool": "bool", "signed char": "int8", "unsigned char": "uint8",
}  # fmt: skip
_BY_NCCL_NAME = {
    "f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64", "f8e4m3": "fp8", "f8e5m2": "fp8",
    "i8": "int8", "u8": "uint8", "i32": "int32", "u32": "int32", "i64": "int64", "u64": "int64",
}  # fmt: skip


@functools.lru_cache(maxsize=8192)
def element_dtype(kernel: str) -> str:
    """The element type in a kernel's template arguments, ``"unknown"`` if there is none.

    Copying kernels only know a width (``OpaqueType<2>``): then some type of that width.
    """
    if role(kernel) == "collective":
        found = _COLLECTIVE_DTYPE.search(kernel)
        return _BY_NCCL_NAME[found[1].lower()] if found else "unknown"
    functor = _FUNCTOR.search(kernel)
    if functor:
        return _BY_C_NAME[functor[1]]
    width = _ELEMENT[0].search(kernel)
    if width:
        return _BY_WIDTH.get(int(width[1]), "unknown")
    named = _ELEMENT[1].search(kernel)
    return _BY_C_NAME[named[1]] if named else "unknown"
