"""RMSNorm and LayerNorm written out, and sums, dropout, biases and activations before a norm.

Taken, with RMSNorm and LayerNorm as `norms` has them:

    norm            a norm from elementary operations
    add_norm        s = a + b or s = dropout(a) + b, and norm(s); s may be used elsewhere, as a residual is
    bias_act_norm   LayerNorm(f(x + b)) with f of GELU, SiLU, ReLU or none, the bias or f perhaps missing
    linear_act_norm LayerNorm(f(x W^T + b)): the product without its bias, and the rest in one kernel
    dropout_add     dropout(a) + b, without a norm

Not taken: what `norms` names as no norm; a sum that broadcasts; a sum that is changed in place later; an
activation or a biased value that is used elsewhere too; dropout after the sum or before the bias; a bias
inside a linear layer with no activation behind it, which the matrix product adds for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from advisor.kernels.add_norm import add_layer_norm, add_rms_norm, dropout_add
from advisor.kernels.bias_act_norm import bias_act_norm
from advisor.kernels.bias_act_norm import unsupported_reasons as act_reasons
from advisor.kernels.norm import layer_norm, rms_norm, unsupported_reasons
from advisor.swap.rewrite.candidates import bundled, in_dtype, of_torch
from advisor.swap.rewrite.facts import Facts
from advisor.swap.rewrite.match import Match, dropped_share, pattern
from advisor.swap.rewrite.norms import Norm, norms
from advisor.swap.rewrite.ops import read
from advisor.swap.rewrite.parts import activation, is_float, is_row_vector, terms, uncast, with_bias
from advisor.swap.site import Candidate

_NORM = "from advisor.kernels.norm import {name}\ny = {name}(x, x.shape[-1:], weight, {rest})"


@pattern("norm", rank=40)
def find_norms(facts: Facts) -> Iterator[Match]:
    """Every norm that is written out."""
    for norm in norms(facts):
        if norm.written_out and _vectors_fit(norm, facts):
            settings = _settings(norm, facts)
            yield Match(
                "norm", "norm", norm.what, (norm.x, *_vectors(norm)), (norm.out,), settings,
                tuple(_norm_candidates(settings)),
            )  # fmt: skip


@pattern("add_norm", rank=20)
def find_sums(facts: Facts) -> Iterator[Match]:
    """Every sum that a norm follows."""
    for norm in norms(facts):
        pair = terms(uncast(norm.x))
        total = uncast(norm.x)
        if pair is None or not _vectors_fit(norm, facts) or norm.eps < 0:
            continue
        if facts.shape(pair[0]) != facts.shape(pair[1]) or not is_float(*pair):
            continue
        x, residual, p = _dropped(pair)
        settings = {**_settings(norm, facts), "p": p, "sum_dtype": facts.dtype(total)}
        what = f"{'dropout(x)' if p else 'x'} + residual, {norm.what}"
        yield Match(
            "add_norm", "norm", what, (x, residual, *_vectors(norm)), (norm.out, total), settings,
            tuple(_sum_candidates(settings, norm.written_out)), random=p > 0.0,
        )  # fmt: skip


@pattern("linear_act_norm", rank=14)
def find_activated_products(facts: Facts) -> Iterator[Match]:
    """Every LayerNorm of an activation of a linear layer with a bias."""
    for norm in norms(facts):
        found = None if norm.rms or not _vectors_fit(norm, facts) else activation(uncast(norm.x), facts)
        layer = read(found.x) if found is not None else None
        if found is None or layer is None or layer.op != "linear" or layer["bias"] is None:
            continue
        if not is_float(layer.input, found.x):
            continue
        settings = {**_settings(norm, facts), "name": found.name, "has_bias": True}
        call = (
            "from advisor.kernels.bias_act_norm import bias_act_norm\n"
            f'y = bias_act_norm(F.linear(x, linear.weight), linear.bias, "{found.name}", weight, shift, '
            f"eps={norm.eps:g})"
        )
        inputs = (layer.input, layer["weight"], layer["bias"], *_vectors(norm))
        what = f"LayerNorm({found.name}(linear(x)))"
        yield Match(
            "linear_act_norm", "activation", what, inputs, (norm.out,), settings,
            (bundled("bias_act_norm", _linear_act_norm, _product_reasons, call, **settings),),
        )  # fmt: skip


@pattern("bias_act_norm", rank=15)
def find_activated(facts: Facts) -> Iterator[Match]:
    """Every LayerNorm of an activation or of a sum with a bias."""
    for norm in norms(facts):
        if norm.rms or not _vectors_fit(norm, facts):
            continue
        inner = uncast(norm.x)
        found = activation(inner, facts)
        biased, bias = with_bias(found.x if found is not None else inner, facts)
        if (found is None and bias is None) or not is_float(biased):
            continue
        settings = {
            **_settings(norm, facts),
            "name": found.name if found else "none",
            "has_bias": bias is not None,
        }
        inputs = (biased, *(() if bias is None else (bias,)), *_vectors(norm))
        f = found.name if found else ""
        what = f"LayerNorm({f}({'x + bias' if bias is not None else 'x'}))"
        yield Match(
            "bias_act_norm", "activation", what, inputs, (norm.out,), settings,
            tuple(_activated_candidates(settings)),
        )  # fmt: skip


@pattern("dropout_add", rank=50)
def find_dropped_sums(facts: Facts) -> Iterator[Match]:
    """Every sum of a tensor with one that drops out."""
    for node in facts.nodes:
        pair = terms(node)
        if pair is None or facts.shape(pair[0]) != facts.shape(pair[1]) or not is_float(*pair):
            continue
        x, residual, p = _dropped(pair)
        if not p:
            continue
        settings = {"p": p, "dtype": facts.dtype(node)}
        call = (
            "from advisor.kernels.add_norm import dropout_add\ny = dropout_add(x, residual, p, self.training)"
        )
        yield Match(
            "dropout_add", "norm", "dropout(x) + residual", (x, residual), (node,), settings,
            (bundled("dropout_add", _dropout_add, _pair_reasons, call, **settings),), random=True,
        )  # fmt: skip


def _dropped(pair: tuple[Node, Node]) -> tuple[Node, Node, float]:
    """(x, residual, p) of ``dropout(x, p) + residual``; p is 0 where nothing drops out alone."""
    for x, residual in (pair, pair[::-1]):
        p, call = dropped_share(x), read(x)
        if p and call is not None and len(x.users) == 1:
            return call.input, residual, p
    return *pair, 0.0


def _vectors(norm: Norm) -> tuple[Node, ...]:
    return tuple(v for v in (norm.weight, norm.bias) if v is not None)


def _vectors_fit(norm: Norm, facts: Facts) -> bool:
    return all(is_row_vector(v, norm.x, facts) for v in _vectors(norm))


def _settings(norm: Norm, facts: Facts) -> dict[str, Any]:
    return {
        "rms": norm.rms,
        "eps": norm.eps,
        "offset": norm.offset,
        "casting": norm.casting,
        "weighted": norm.weight is not None,
        "biased": norm.bias is not None,
        "dtype": facts.dtype(norm.out),
    }


def _named(vectors: Sequence[Tensor], weighted: bool, biased: bool) -> tuple[Tensor | None, Tensor | None]:
    left = list(vectors)
    weight = left.pop(0) if weighted else None
    return weight, left.pop(0) if biased else None


def _norm_candidates(settings: dict[str, Any]) -> Iterator[Candidate]:
    eps = f"eps={settings['eps']:g}"
    if settings["rms"]:
        rest = eps + (f", offset={settings['offset']:g}" if settings["offset"] else "")
        rest += ', casting="llama"' if settings["casting"] == "llama" else ""
        yield bundled("rms_norm", _norm, _norm_reasons, _NORM.format(name="rms_norm", rest=rest), **settings)
        weight = f"{settings['offset']:g} + weight" if settings["offset"] else "weight"
        theirs = f"y = torch.nn.functional.rms_norm(x, x.shape[-1:], {weight}, {settings['eps']:g})"
        yield of_torch("F.rms_norm", _torch_norm, theirs, **settings)
    else:
        yield bundled(
            "layer_norm",
            _norm,
            _norm_reasons,
            _NORM.format(name="layer_norm", rest=f"bias, {eps}"),
            **settings,
        )
        theirs = f"y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, {settings['eps']:g})"
        yield of_torch("F.layer_norm", _torch_norm, theirs, **settings)


def _norm(
    x: Tensor, *vectors: Tensor, rms: bool, eps: float, offset: float, casting: str, weighted: bool,
    biased: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    weight, bias = _named(vectors, weighted, biased)
    if rms:
        return rms_norm(x, x.shape[-1:], weight, eps, offset=offset, casting=casting, out_dtype=dtype)
    if weight is not None and offset:
        weight = weight + offset
    return layer_norm(x, x.shape[-1:], weight, bias, eps, out_dtype=dtype)


def _norm_reasons(x: Tensor, *vectors: Tensor, dtype: torch.dtype, **_: Any) -> Sequence[str]:
    return [*unsupported_reasons(x, *vectors), *_result_reasons(dtype)]


def _result_reasons(*dtypes: torch.dtype) -> list[str]:
    taken = (torch.float32, torch.float16, torch.bfloat16)
    return [f"a result of {dtype}" for dtype in dtypes if dtype not in taken]


def _torch_norm(
    x: Tensor, *vectors: Tensor, rms: bool, eps: float, offset: float, casting: str, weighted: bool,
    biased: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    weight, bias = _named(vectors, weighted, biased)
    if weight is not None and offset:
        weight = weight + offset
    # What is wider than its input must not be rounded to that first.
    x = x.to(dtype) if dtype.itemsize > x.dtype.itemsize else x
    if rms:
        return in_dtype(F.rms_norm(x, x.shape[-1:], weight, eps), dtype)
    return in_dtype(F.layer_norm(x, x.shape[-1:], weight, bias, eps), dtype)


def _sum_candidates(settings: dict[str, Any], written_out: bool) -> Iterator[Candidate]:
    name = "add_rms_norm" if settings["rms"] else "add_layer_norm"
    drop = f", p={settings['p']:g}, training=self.training" if settings["p"] else ""
    bias = "" if settings["rms"] else ", bias"
    call = (
        f"from advisor.kernels.add_norm import {name}\n"
        f"y, x = {name}(x, residual, x.shape[-1:], weight{bias}, eps={settings['eps']:g}{drop})"
    )
    yield bundled(name, _add_norm, _sum_reasons, call, **settings)
    if written_out and not settings["p"]:
        function = "rms_norm" if settings["rms"] else "layer_norm"
        theirs = f"x = x + residual\ny = torch.nn.functional.{function}(x, x.shape[-1:], weight{bias})"
        yield of_torch(f"F.{function} of the sum", _torch_add_norm, theirs, **settings)


def _add_norm(
    x: Tensor, residual: Tensor, *vectors: Tensor, rms: bool, eps: float, offset: float, casting: str,
    weighted: bool, biased: bool, dtype: torch.dtype, p: float, sum_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weight, bias = _named(vectors, weighted, biased)
    if rms:
        y, total = add_rms_norm(
            x, residual, x.shape[-1:], weight, eps, offset=offset, casting=casting, p=p, out_dtype=dtype
        )
    else:
        if weight is not None and offset:
            weight = weight + offset
        y, total = add_layer_norm(x, residual, x.shape[-1:], weight, bias, eps, p=p, out_dtype=dtype)
    return y, in_dtype(total, sum_dtype)


def _sum_reasons(
    x: Tensor, residual: Tensor, *vectors: Tensor, dtype: torch.dtype, **_: Any
) -> Sequence[str]:
    return [*_pair_reasons(x, residual), *unsupported_reasons(x, *vectors), *_result_reasons(dtype)]


def _torch_add_norm(
    x: Tensor, residual: Tensor, *vectors: Tensor, p: float, sum_dtype: torch.dtype, **settings: Any
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch_norm(total, *vectors, **settings), in_dtype(total, sum_dtype)


def _activated_candidates(settings: dict[str, Any]) -> Iterator[Candidate]:
    bias = "bias" if settings["has_bias"] else "None"
    call = (
        "from advisor.kernels.bias_act_norm import bias_act_norm\n"
        f'y = bias_act_norm(x, {bias}, "{settings["name"]}", weight, shift, eps={settings["eps"]:g})'
    )
    yield bundled("bias_act_norm", _bias_act_norm, _activated_reasons, call, **settings)


def _bias_act_norm(
    x: Tensor, *vectors: Tensor, name: str, has_bias: bool, weighted: bool, biased: bool, eps: float,
    dtype: torch.dtype, offset: float, **_: Any,
) -> Tensor:  # fmt: skip
    bias = vectors[0] if has_bias else None
    weight, shift = _named(vectors[int(has_bias) :], weighted, biased)
    if weight is not None and offset:
        weight = weight + offset
    return bias_act_norm(x, bias, name, weight, shift, eps, out_dtype=dtype)


def _linear_act_norm(x: Tensor, weight: Tensor, bias: Tensor, *vectors: Tensor, **settings: Any) -> Tensor:
    product = F.linear(x, weight)
    return _bias_act_norm(product, bias.to(product.dtype), *vectors, **settings)


def _product_reasons(
    x: Tensor, _weight: Tensor, bias: Tensor, *vectors: Tensor, dtype: torch.dtype, **_: Any
) -> Sequence[str]:
    # Of the product only the dtype is known, which is one that x or autocast has.
    return [*unsupported_reasons(x), *act_reasons(bias, bias, *vectors), *_result_reasons(dtype)]


def _activated_reasons(x: Tensor, *vectors: Tensor, dtype: torch.dtype, **_: Any) -> Sequence[str]:
    return [*act_reasons(x, *vectors), *_result_reasons(dtype)]


def _dropout_add(x: Tensor, residual: Tensor, *, p: float, dtype: torch.dtype) -> Tensor:
    return in_dtype(dropout_add(x, residual, p), dtype)


def _pair_reasons(x: Tensor, residual: Tensor, **_: Any) -> Sequence[str]:
    return unsupported_reasons(x, None, None, residual)
