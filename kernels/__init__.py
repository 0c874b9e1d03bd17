"""Bundled Triton kernels: forward and backward as PyTorch operators, references, drop-in modules.

Installed as `advisor.kernels`; knows nothing of the rest of the package. Importing it loads neither torch nor
Triton; naming one of its members does. See ``docs/kernels.md``.
"""

import importlib
from typing import Any

#: The module that holds each public name. A function named as its module (`softmax.softmax`) is not here: the
#: package's attribute of that name is the module.
_HOME: dict[str, str] = {
    "FlashAttention": "attention",
    "FusedLayerNorm": "norm",
    "RMSNorm": "norm",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "add_layer_norm": "add_norm",
    "add_rms_norm": "add_norm",
    "dropout_add": "add_norm",
    "BiasActivationLayerNorm": "bias_act_norm",
    "GeGLU": "activations",
    "SwiGLU": "activations",
    "bias_activation": "activations",
    "bias_gelu": "activations",
    "gated_activation": "activations",
    "gated_activation_packed": "activations",
    "geglu": "activations",
    "relu_squared": "activations",
    "swiglu": "activations",
    "CrossEntropyLoss": "cross_entropy",
    "LinearCrossEntropy": "linear_cross_entropy",
    "log_softmax": "softmax",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
