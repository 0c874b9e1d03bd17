"""How many floating-point operations an elementary function counts for.

An addition, subtraction or multiplication is one, a fused multiply-add two. Comparing, selecting, negating
and moving are none: they use no floating-point adder or multiplier. The transcendental functions count what
PyTorch's fp32 kernels were seen to execute on an H200 (Nsight Compute's FFMA, FADD and FMUL per element,
rounded): ``sqrt`` 2 FFMA + 2 FMUL, a true division 5 FFMA, ``silu`` (exp, add, division) 10 FFMA + 1 FADD,
erf-``gelu`` 7 FFMA + 1 FADD + 4 FMUL, a two-pass softmax (two exp, a division, three additions) 14 FFMA + 5
FADD + 1 FMUL. ``log1p`` is what ``softplus`` (55) executes beyond its exponential.
"""

ADD = 1
MUL = 1
FMA = 2
DIV = 10
SQRT = 6
RSQRT = 6
EXP = 10
LOG = 10
LOG1P = 43
TRIG = 20
TANH = 15
SIGMOID = EXP + ADD + DIV
ERF = 14
POW = LOG + MUL + EXP
SILU = SIGMOID
GELU = ERF + 5
