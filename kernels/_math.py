"""Functions of one fp32 block, for use inside kernels.

The activations go by name, as a constexpr string: ``none``, ``relu``, ``relu_squared``, ``silu``, ``gelu``
(exact, by erf) and ``gelu_tanh``. With s = sigmoid(2u) and u = sqrt(2/pi) (x + 0.044715 x^3), the tanh form
of GELU is x s, since (1 + tanh u) / 2 = sigmoid(2u): no tanh, and no cancellation for negative x.

The exact form needs the normal distribution P. For z >= 0, P(-z) exp(z^2 / 2) is smooth and falls slowly, so
a polynomial of degree 7 in t = 1 / (1 + 0.33 z) without constant term, fitted by reweighted least squares,
gives P within 2.3e-8, below the rounding of 1 + erf in fp32, and within 6e-5 of itself far down the tail,
where 1 + erf has nothing left. It takes half of erf's instructions, and exp(-z^2 / 2) serves the derivative
too.
"""

import torch

from ._triton import INTERPRETED, libdevice, tl, triton

#: Division costs a range check and three multiplications beside the reciprocal itself, which is what there is
#: to gain in kernels that wait for instructions; only NVIDIA's assembly can be asked for it alone.
_HAS_PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)

ACTIVATIONS = ("none", "relu", "relu_squared", "silu", "gelu", "gelu_tanh")


@triton.jit
def reciprocal(x):
    """1 / x within an ulp; of what is infinite or beyond 2^126 it is 0."""
    if _HAS_PTX:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def exp(x, EXACT: tl.constexpr):
    """e^x. Where EXACT, as PyTorch's own kernels have it; else off by the rounding of x log2(e) besides."""
    if not EXACT:
        y = tl.exp2(x * 1.4426950408889634)
    elif _HAS_PTX:
        y = libdevice.exp(x)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def exp_beside(x, peak_2):
    """e^x over 2^peak_2, in two instructions: for shares of a sum, whose terms have the same peak."""
    return tl.exp2(tl.fma(x, 1.4426950408889634, -peak_2))


@triton.jit
def sigmoid_of_2(x):
    """1 / (1 + 2^-x), without overflow to NaN: sigmoid where log2(e) is already in x."""
    return reciprocal(1.0 + tl.exp2(-x))


@triton.jit
def sigmoid_with_slope_of_2(x, EXACT: tl.constexpr):
    """s = 1 / (1 + 2^-x), and s (1 - s): where not EXACT as s - s^2, which cancels where s is near 1."""
    if EXACT:
        # Bounded, lest the slope be infinity times 0.
        e = tl.exp2(tl.minimum(-x, 126.0))
        s = reciprocal(1.0 + e)
        slope = e * s * s
    else:
        s = sigmoid_of_2(x)
        slope = s - s * s
    return s, slope


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow to NaN."""
    return sigmoid_of_2(x * 1.4426950408889634)


@triton.jit
def tanh(x):
    """Accurate to a few ulp everywhere: a series near 0, where 1 - exp(-2 |x|) cancels."""
    x2 = x * x
    near = x * (
        1.0 + x2 * (-0.33333333333 + x2 * (0.13333333333 + x2 * (-0.05396825397 + x2 * 0.02186948854)))
    )
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = (1.0 - e) * reciprocal(1.0 + e)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def normal(x):
    """Cumulative distribution of the standard normal at x, and exp(-x^2 / 2)."""
    bell = tl.exp2(-0.7213475204444817 * x * x)
    t = reciprocal(1.0 + 0.33 * tl.abs(x))
    series = 0.04334142657017652 * t - 0.2107683231186936
    series = series * t + 0.3132749305222397
    series = series * t - 0.07204014682268142
    series = series * t + 0.17186594285752543
    series = series * t + 0.12199605597782276
    series = series * t + 0.1323300912504872
    below = bell * (series * t)
    return tl.where(x < 0.0, below, 1.0 - below), bell


@triton.jit
def activation(x, NAME: tl.constexpr):
    """The activation `NAME` of x."""
    if NAME == "relu":
        # Written so that NaN stays NaN.
        y = tl.where(x <= 0.0, 0.0, x)
    elif NAME == "relu_squared":
        y = tl.where(x <= 0.0, 0.0, x * x)
    elif NAME == "silu":
        y = x * sigmoid(x)
    elif NAME == "gelu":
        below, _ = normal(x)
        y = x * below
    elif NAME == "gelu_tanh":
        y = x * sigmoid_of_2(x * (2.302208198144325 + 0.1029432395800235 * (x * x)))
    else:
        y = x
    return y


@triton.jit
def activation_gradient(x, NAME: tl.constexpr, EXACT: tl.constexpr):
    """The derivative of the activation `NAME` at x; EXACT is for results in fp32."""
    if NAME == "relu":
        g = tl.where(x <= 0.0, 0.0, 1.0)
    elif NAME == "relu_squared":
        g = tl.where(x <= 0.0, 0.0, 2.0 * x)
    elif NAME == "silu":
        s, slope = sigmoid_with_slope_of_2(x * 1.4426950408889634, EXACT)
        g = s + x * slope
    elif NAME == "gelu":
        below, bell = normal(x)
        g = below + x * 0.3989422804014327 * bell
    elif NAME == "gelu_tanh":
        s, slope = sigmoid_with_slope_of_2(x * (2.302208198144325 + 0.1029432395800235 * (x * x)), EXACT)
        g = s + x * slope * (1.5957691216057308 + 0.21406444881780073 * (x * x))
    else:
        g = tl.full(x.shape, 1.0, tl.float32)
    return g
