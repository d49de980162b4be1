"""Ranges of floats that become integers, such as rounded quotients and logarithms of distances."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .graph import Node, Range, post_order
from .operations import ROUNDING, SHORT_FLOATS, Type

ROOM = 1e-5  # relative margin for rounding errors
_SHORT = 65504.0  # the greatest float16
_HALF_STEP = 2.0**-25  # the largest error of a float16 below its normal numbers; that of a bfloat16 is smaller
_LEAST_NORMAL, _GREATEST = 2.0**-126, float(np.finfo(np.float32).max)


class _Span(NamedTuple):
    """The range of the values that are not NaN. may_be_nan: True if a value may be NaN."""

    low: float
    high: float
    may_be_nan: bool

    @property
    def is_finite(self) -> bool:
        return self.low >= -_GREATEST and self.high <= _GREATEST


_ALL = _Span(-math.inf, math.inf, may_be_nan=True)


def rounded_range(root: Node, type: Type) -> Range:
    """Returns the range of a float after a cast to an integer type, within the limits of the type."""
    span = _span(root)
    least, greatest = _rounded(span, type)
    if not span.may_be_nan:
        return least, greatest
    # As in `operations.converted`, only a float32 NaN that becomes an int32 is 0.
    if type == Type.INT32 and root.type == Type.FLOAT32:
        return min(least, 0), max(greatest, 0)
    of_nan = 2**63 if type == Type.UINT64 else type.limits[0]
    return min(least, of_nan), max(greatest, of_nan)


def is_rounded_to_int32(root: Node) -> bool:
    """True if int32 holds every value of a float, other than NaN, after a cast to integers."""
    span = _span(root)
    return _rounded(span, Type.INT64) == _rounded(span, Type.INT32)


def _rounded(span: _Span, type: Type) -> Range:
    if not span.is_finite:
        return type.limits
    (low, high, _), (least, greatest) = span, type.limits
    # The range contains 0, because a float64 that becomes float32 may be NaN, which is 0 as int32.
    ends = min(math.floor(low - ROOM * abs(low)), 0), max(math.ceil(high + ROOM * abs(high)), 0)
    return max(ends[0], least), min(ends[1], greatest)


def _span(root: Node) -> _Span:
    spans: dict[Node, _Span] = {}
    for x in post_order([root]):
        if x.type.is_float:
            spans[x] = _span_of(x, [spans.get(argument, _ALL) for argument in x.arguments])
    return spans[root]


def _widened(low: float, high: float, may_be_nan: bool, share: float = 2.0**-22, step: float = 0.0) -> _Span:
    """Returns a range with room for a rounding error, which a later difference or quotient may make large.

    share, step: the largest errors of normal numbers, relative to them, and of smaller ones.
    """
    return _Span(low - abs(low) * share - step, high + abs(high) * share + step, may_be_nan)


def _span_of(x: Node, parts: list[_Span]) -> _Span:
    if x.op == "constant":
        return _ALL if math.isnan(x.value) else _Span(x.value, x.value, may_be_nan=False)
    if x.op == "cast":
        source = x.arguments[0]
        if source.type.is_float:
            return parts[0]
        low, high = map(float, source.ends)
        is_exact = max(-low, high) <= 2.0**24
        return _Span(low, high, may_be_nan=False) if is_exact else _widened(low, high, may_be_nan=False)
    parts = parts[1:] if x.op == "where" else parts
    may_be_nan = (all if x.op in ("fmin", "fmax") else any)(part.may_be_nan for part in parts)
    lows, highs = [part.low for part in parts], [part.high for part in parts]
    if x.op in ("tanh", "erf", "sign"):
        return _Span(-1.0, 1.0, may_be_nan)
    if x.op in ("sin", "cos"):
        return _Span(-1.0, 1.0, may_be_nan or not parts[0].is_finite)
    if x.op in ROUNDING:
        return _Span(lows[0] - 1, highs[0] + 1, may_be_nan)
    if x.op in SHORT_FLOATS:
        if not -_SHORT < lows[0] <= highs[0] < _SHORT:
            return _Span(-math.inf, math.inf, may_be_nan)
        return _widened(lows[0], highs[0], may_be_nan, 2.0**-7, _HALF_STEP)
    if x.op == "where":
        return _Span(min(lows), max(highs), may_be_nan)
    if x.op in ("minimum", "fmin", "maximum", "fmax"):
        choose = min if x.op in ("minimum", "fmin") else max
        # Where one argument of fmin is NaN, the other is the result.
        alone = [parts[1 - place] for place in (0, 1) if x.op.startswith("f") and parts[place].may_be_nan]
        low, high = choose(lows), choose(highs)
        return _Span(min([low, *(each.low for each in alone)]), max([high, *(each.high for each in alone)]), may_be_nan)
    if x.op == "absolute":
        return _Span(0.0, max(map(abs, parts[0][:2])), may_be_nan)
    if x.op in _RISING and lows[0] >= _LEAST_NORMAL:
        return _Span(_RISING[x.op](lows[0]), _RISING[x.op](highs[0]), may_be_nan)
    if x.op in _CORNERS and all(part.is_finite for part in parts):
        # float32 may round a smaller divisor to 0.
        if x.op == "divide" and lows[1] < _LEAST_NORMAL and highs[1] > -_LEAST_NORMAL:
            return _ALL
        values = [_CORNERS[x.op](a, b) for a in parts[0][:2] for b in parts[-1][:2]]
        return _widened(min(values), max(values), may_be_nan)
    return _ALL


_RISING: dict[str, Callable[[float], float]] = {
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sqrt": math.sqrt,
}
_CORNERS: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "negative": lambda a, _: -a,
}
