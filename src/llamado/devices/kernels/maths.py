"""Elementary functions of the SIMD language, the same for one lane and for eight.

`exp` reduces by ln 2 in two parts and evaluates the degree-6 polynomial of Cephes' `expf` (relative error below 2e-7),
`exp64` sums the Taylor series in double; `sincos` reduces by π/2 in two parts and sums the Taylor series, in double.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llamado.devices.simd import Code, Value
from llamado.ggml.ops import GluOp, Op, UnaryOp

Function = Callable[[Code, Value], Value]

_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_SIN = (-1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6)
_TERMS = 13
_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
_ERFC = (
    *(-3.144020e-5, 3.0880249e-4, -1.032402530e-3, -5.369321192e-4, 1.958395931e-2),
    *(-1.029196129e-1, -6.365977335e-1, -1.128380251),
)
_COS = (1 / 479001600, -1 / 3628800, 1 / 40320, -1 / 720, 1 / 24, -1 / 2)


def exp(c: Code, x: Value) -> Value:
    """eˣ for f32; 0 below −87.3, and e⁸⁸ above 88."""
    t = x.type
    bounded = c.max(c.min(x, 88.0), -87.3)
    n = c.round(bounded * 1.44269504088896341)
    r = c.fma(n, c.const(t, -0.693359375), bounded)
    r = c.fma(n, c.const(t, 2.12194440e-4), r)
    p = c.const(t, _EXP[0])
    for coefficient in _EXP[1:]:
        p = c.fma(p, r, c.const(t, coefficient))
    y = c.fma(p, r * r, r) + 1.0
    whole = t._replace(elem="i32")
    power = ((n.to(whole) + 127) << 23).bits(t)
    return c.select(x < -87.3, c.const(t, 0.0), y * power)


def exp64(c: Code, x: Value) -> Value:
    """eˣ for f64, x ≤ 0: error below one unit in the last place; 0 below −708."""
    t = x.type
    bounded = c.max(x, -708.0)
    n = c.round(bounded * 1.44269504088896341)
    r = c.fma(n, c.const(t, -6.93147180369123816490e-01), bounded)
    r = c.fma(n, c.const(t, -1.90821492927058770002e-10), r)
    p = c.const(t, 1 / math.factorial(_TERMS))
    for term in range(_TERMS - 1, 1, -1):
        p = c.fma(p, r, c.const(t, 1 / math.factorial(term)))
    y = c.fma(p, r * r, r) + 1.0
    power = ((n.cast("i64") + 1023) << 52).bits(t)
    return c.select(x < -708.0, c.const(t, 0.0), y * power)


def sigmoid(c: Code, x: Value) -> Value:
    return c.const(x.type, 1.0) / (exp(c, -x) + 1.0)


def silu(c: Code, x: Value) -> Value:
    return x / (exp(c, -x) + 1.0)


def tanh(c: Code, x: Value) -> Value:
    """1 − 2 / (e²ˣ + 1)."""
    return c.const(x.type, 1.0) - c.const(x.type, 2.0) / (exp(c, x * 2.0) + 1.0)


def gelu(c: Code, x: Value) -> Value:
    """The tanh form: x/2 · (1 + tanh(√(2/π) · x · (1 + 0.044715 x²))), written as x · sigmoid(2 · …)."""
    inner = x * 0.79788456080286535588 * c.fma(x * x, c.const(x.type, 0.044715), c.const(x.type, 1.0))
    return x * sigmoid(c, inner * 2.0)


def gelu_quick(c: Code, x: Value) -> Value:
    return x * sigmoid(c, x * 1.702)


def gelu_erf(c: Code, x: Value) -> Value:
    """x times the normal distribution function, ½ · erfc(−x / √2).

    The logarithm of erfc is a polynomial, fitted so that the error of erfc is below 2e-8, and falls without end.
    """
    t = x.type
    at = c.abs(x) * 0.70710678118654752440
    p = c.const(t, _ERFC[0])
    for coefficient in _ERFC[1:]:
        p = c.fma(p, at, c.const(t, coefficient))
    beyond = exp(c, p * at) * 0.5
    return x * c.select(x < 0.0, beyond, c.const(t, 1.0) - beyond)


def hardsigmoid(c: Code, x: Value) -> Value:
    """A line from 0 at −3 to 1 at 3."""
    return c.max(c.min((x + 3.0) * (1 / 6), 1.0), 0.0)


def relu(c: Code, x: Value) -> Value:
    return c.max(x, 0.0)


def sincos(c: Code, x: Value) -> tuple[Value, Value]:
    """sin x and cos x for f64, |x| ≤ 1e6: absolute error below 1e-10."""
    t = x.type
    k = c.round(x * 0.63661977236758134308)
    r = c.fma(k, c.const(t, -1.57079632673412561417), x)
    r = c.fma(k, c.const(t, -6.07710050650619224932e-11), r)
    square = r * r
    s = c.const(t, _SIN[0])
    for coefficient in _SIN[1:]:
        s = c.fma(s, square, c.const(t, coefficient))
    s = c.fma(s * square, r, r)
    v = c.const(t, _COS[0])
    for coefficient in _COS[1:]:
        v = c.fma(v, square, c.const(t, coefficient))
    v = c.fma(v, square, c.const(t, 1.0))
    quadrant = k.to(t._replace(elem="i64"))
    odd = (quadrant & 1).equals(1)
    sine, cosine = c.select(odd, v, s), c.select(odd, s, v)
    sine = c.select((quadrant & 2).equals(2), -sine, sine)
    cosine = c.select(((quadrant + 1) & 2).equals(2), -cosine, cosine)
    return sine, cosine


def log(c: Code, x: Value) -> Value:
    """ln x for f32: the exponent times ln 2 and a polynomial of the mantissa (Cephes' `logf`); −inf at 0, NaN below."""
    t, whole = x.type, x.type._replace(elem="i32")
    tiny = x < 1.17549435e-38
    scaled = c.select(tiny, x * 8388608.0, x)
    bits = scaled.bits(whole)
    exponent = ((bits >> 23) - 126).to(t) - c.select(tiny, c.const(t, 23.0), c.const(t, 0.0))
    m = ((bits & 0x007FFFFF) | 0x3F000000).bits(t)  # ½ … 1
    low = m < 0.70710678118654752440
    exponent = exponent - c.select(low, c.const(t, 1.0), c.const(t, 0.0))
    m = c.select(low, m + m, m) - 1.0
    square = m * m
    p = c.const(t, _LOG[0])
    for coefficient in _LOG[1:]:
        p = c.fma(p, m, c.const(t, coefficient))
    y = c.fma(exponent, c.const(t, -2.12194440e-4), p * m * square)
    y = m + (y - square * 0.5)
    y = c.fma(exponent, c.const(t, 0.693359375), y)
    y = c.select(x < float("inf"), y, x)
    y = c.select(x.equals(0.0), c.const(t, float("-inf")), y)
    return c.select(x < 0.0, c.const(t, float("nan")), y)


def softplus(c: Code, x: Value) -> Value:
    """ln(1 + eˣ); x itself above 20 (ggml_compute_softplus_f32)."""
    return c.select(x > 20.0, x, log(c, exp(c, x) + 1.0))


def _trigonometric(c: Code, x: Value, which: int) -> Value:
    wide = x.type._replace(elem="f64")
    return sincos(c, x.to(wide))[which].to(x.type)


def ceil(c: Code, x: Value) -> Value:
    return -c.floor(-x)


def trunc(c: Code, x: Value) -> Value:
    """Round towards zero."""
    return c.select(x < 0.0, ceil(c, x), c.floor(x))


def rounded(c: Code, x: Value) -> Value:
    """Round to the nearest integer, halves away from zero (roundf)."""
    whole, one, none = trunc(c, x), c.const(x.type, 1.0), c.const(x.type, 0.0)
    rest = x - whole
    return whole + c.select(rest >= 0.5, one, none) - c.select(rest <= -0.5, one, none)


UNARY: dict[UnaryOp, Function] = {
    UnaryOp.RELU: relu,
    UnaryOp.SILU: silu,
    UnaryOp.GELU: gelu,
    UnaryOp.GELU_QUICK: gelu_quick,
    UnaryOp.GELU_ERF: gelu_erf,
    UnaryOp.HARDSIGMOID: hardsigmoid,
    UnaryOp.HARDSWISH: lambda c, x: x * hardsigmoid(c, x),
    UnaryOp.TANH: tanh,
    UnaryOp.SIGMOID: sigmoid,
    UnaryOp.EXP: exp,
    UnaryOp.SOFTPLUS: softplus,
    UnaryOp.NEG: lambda c, x: -x,
    UnaryOp.SGN: lambda c, x: c.select(
        x > 0.0, c.const(x.type, 1.0), c.select(x < 0.0, c.const(x.type, -1.0), c.const(x.type, 0.0))
    ),
    UnaryOp.ABS: lambda c, x: c.abs(x),
    UnaryOp.STEP: lambda c, x: c.select(x > 0.0, c.const(x.type, 1.0), c.const(x.type, 0.0)),
    UnaryOp.FLOOR: lambda c, x: c.floor(x),
    UnaryOp.CEIL: ceil,
    UnaryOp.ROUND: rounded,
    UnaryOp.TRUNC: trunc,
}

UNARY_OPS: dict[Op, Function] = {
    Op.SQR: lambda c, x: x * x,
    Op.SQRT: lambda c, x: c.sqrt(x),
    Op.LOG: log,
    Op.SIN: lambda c, x: _trigonometric(c, x, 0),
    Op.COS: lambda c, x: _trigonometric(c, x, 1),
}
"""Operations that are functions of one number."""

FUNCTIONS = {op.name: function for op, function in (*UNARY.items(), *UNARY_OPS.items())}

GATE: dict[GluOp, Function] = {
    GluOp.REGLU: relu,
    GluOp.GEGLU: gelu,
    GluOp.SWIGLU: silu,
    GluOp.GEGLU_QUICK: gelu_quick,
    GluOp.GEGLU_ERF: gelu_erf,
}
