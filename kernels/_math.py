"""Functions of one fp32 block, for use inside kernels.

The activations go by name, as a constexpr string: ``none``, ``relu``, ``relu_squared``, ``silu``, ``gelu``
(exact, by erf) and ``gelu_tanh``. With s = sigmoid(2u) and u = sqrt(2/pi) (x + 0.044715 x^3), the tanh form
of GELU is x s, since (1 + tanh u) / 2 = sigmoid(2u): no tanh, and no cancellation for negative x.

The exact form needs the normal distribution P. For z >= 0, P(-z) exp(z^2 / 2) is smooth and falls slowly, so
a polynomial of degree 7 in t = 1 / (1 + 0.33 z) without constant term, fitted by reweighted least squares,
gives P within 2.3e-8, below the rounding of 1 + erf in fp32, and within 6e-5 of itself far down the tail,
where 1 + erf has nothing left. It takes half of erf's instructions, and exp(-z^2 / 2) serves the derivative
too.

Where results are bfloat16, P may be rough: the sigmoid of an odd polynomial of degree 7, fitted by reweighted
least squares to P's logit, has P within 1.7e-3 of itself down to -5.5, where 1 + erf in fp32 is no number any
more, and x P within 1.3e-4: less than half a rounding, for half the instructions. Its slope is that of a
sigmoid, by another such polynomial: P + x P' within 3.3e-4, and within 4e-3 of itself down to -5.5, without
an exponential of its own.
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
def widened(x):
    """x in fp32: of bfloat16, one instruction an element, where the compiler takes one and a half."""
    if _HAS_PTX:
        if x.dtype == tl.bfloat16:
            y = tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.uint32,
                is_pure=True, pack=2,
            ).to(tl.float32, bitcast=True)  # fmt: skip
        else:
            y = x.to(tl.float32)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def widened_again(x):
    """As `widened`, and not the same to the compiler: between the two it holds x, and not x in fp32."""
    if _HAS_PTX:
        if x.dtype == tl.bfloat16:
            y = tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.uint32,
                is_pure=False, pack=2,
            ).to(tl.float32, bitcast=True)  # fmt: skip
        else:
            y = x.to(tl.float32)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def sum_as_eager(x, y):
    """x + y in fp32, after rounding to their dtype where that is one, as between eager PyTorch's operators.

    Two bfloat16 sums are one instruction, and the sum alone is widened.
    """
    if x.dtype != y.dtype or x.dtype == tl.float32:
        total = widened(x) + widened(y)
    elif _HAS_PTX and x.dtype == tl.bfloat16:
        one: tl.constexpr = "{.reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, $1, one, $2;}"
        total = widened(
            tl.inline_asm_elementwise(one, "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2)
        )
    else:
        total = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype).to(tl.float32)
    return total


@triton.jit
def at_once(x):
    """x, which the compiler must have computed here: it may not put that off until x is needed."""
    if _HAS_PTX:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


@triton.jit
def both_sums(a, b):
    """Of the rows of a and of b: threads wait for each other once for the two."""
    if _HAS_PTX:
        a, b = tl.reduce((a, b), 1, _add_both)
    else:
        a, b = tl.sum(a, axis=1), tl.sum(b, axis=1)
    return a, b


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


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
def x_sigmoid_with_slope_of_2(x, u, EXACT: tl.constexpr):
    """s = 1 / (1 + 2^-u), and x s (1 - s): where not EXACT by x s, known already; that cancels near s = 1."""
    if EXACT:
        # Bounded, lest the slope be infinity times 0.
        e = tl.exp2(tl.minimum(-u, 126.0))
        s = reciprocal(1.0 + e)
        slope = x * (e * s * s)
    else:
        s = sigmoid_of_2(u)
        slope = x * s - (x * s) * s
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
def normal_rough(x):
    """Cumulative distribution of the standard normal at x, for results in bfloat16."""
    x2 = x * x
    series = 1.2521020252440063e-05 * x2 - 0.0013996489701558357
    series = series * x2 + 0.10907386103011735
    series = series * x2 + 2.298811289004102
    return sigmoid_of_2(x * series)


@triton.jit
def normal_rough_with_slope(x):
    """`normal_rough`, and x times its slope, from that."""
    # Bounded, lest the slope be 0 times infinity.
    x2 = tl.minimum(x * x, 100.0)
    series = 1.2521020252440063e-05 * x2 - 0.0013996489701558357
    series = series * x2 + 0.10907386103011735
    series = series * x2 + 2.298811289004102
    below = sigmoid_of_2(x * series)
    rise = 5.6397255856936965e-05 * x2 - 0.004747410816583061
    rise = rise * x2 + 0.2264794688821521
    rise = rise * x2 + 1.592527484708992
    share = x * below
    return below, (share - share * below) * rise


@triton.jit
def activation(x, NAME: tl.constexpr, ROUGH: tl.constexpr = 0):
    """The activation `NAME` of x; ROUGH is for results in bfloat16: 2 as `normal_rough_with_slope` has it."""
    if NAME == "relu":
        # Written so that NaN stays NaN.
        y = tl.where(x <= 0.0, 0.0, x)
    elif NAME == "relu_squared":
        y = tl.where(x <= 0.0, 0.0, x * x)
    elif NAME == "silu":
        y = x * sigmoid(x)
    elif NAME == "gelu" and ROUGH == 2:
        below, _ = normal_rough_with_slope(x)
        y = x * below
    elif NAME == "gelu" and ROUGH:
        y = x * normal_rough(x)
    elif NAME == "gelu":
        below, _ = normal(x)
        y = x * below
    elif NAME == "gelu_tanh":
        y = x * sigmoid_of_2(x * (2.302208198144325 + 0.1029432395800235 * (x * x)))
    else:
        y = x
    return y


@triton.jit
def activation_gradient(x, NAME: tl.constexpr, EXACT: tl.constexpr, ROUGH: tl.constexpr = 0):
    """The derivative of the activation `NAME` at x; EXACT is for fp32, ROUGH as in `activation`."""
    if NAME == "relu":
        g = tl.where(x <= 0.0, 0.0, 1.0)
    elif NAME == "relu_squared":
        g = tl.where(x <= 0.0, 0.0, 2.0 * x)
    elif NAME == "silu":
        s, slope = x_sigmoid_with_slope_of_2(x, x * 1.4426950408889634, EXACT)
        g = s + slope
    elif NAME == "gelu" and ROUGH == 2:
        below, slope = normal_rough_with_slope(x)
        g = below + slope
    elif NAME == "gelu" and ROUGH:
        g = normal_rough(x) + x * (0.3989422804014327 * tl.exp2(-0.7213475204444817 * (x * x)))
    elif NAME == "gelu":
        below, bell = normal(x)
        g = below + x * 0.3989422804014327 * bell
    elif NAME == "gelu_tanh":
        u = x * (2.302208198144325 + 0.1029432395800235 * (x * x))
        s, slope = x_sigmoid_with_slope_of_2(x, u, EXACT)
        g = s + slope * (1.5957691216057308 + 0.21406444881780073 * (x * x))
    else:
        g = tl.full(x.shape, 1.0, tl.float32)
    return g
