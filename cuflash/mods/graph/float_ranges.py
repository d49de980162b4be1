"""Ranges of floats that become integers, such as rounded quotients and logarithms of distances."""

from __future__ import annotations

import math
from collections.abc import Callable

from .graph import Node, Range, post_order
from .operations import Type

_FloatRange = tuple[float, float]
_ALL = (-math.inf, math.inf)
ROOM = 1e-5  # relative margin for rounding errors


def rounded_range(root: Node, type: Type) -> Range:
    """Returns the range of a float after a cast to an integer type, within the limits of the type."""
    ranges: dict[Node, _FloatRange] = {}
    for x in post_order([root]):
        if x.type.is_float:
            ranges[x] = _range(x, [ranges.get(argument, _ALL) for argument in x.arguments])
    (low, high), limits = ranges[root], type.limits
    if not math.isfinite(low) or not math.isfinite(high):
        return limits
    # The range contains 0, because a float32 NaN becomes 0 as int32.
    least, greatest = min(math.floor(low - ROOM * abs(low)), 0), max(math.ceil(high + ROOM * abs(high)), 0)
    return max(least, limits[0]), min(greatest, limits[1])


def _range(x: Node, parts: list[_FloatRange]) -> _FloatRange:
    if x.op == "constant":
        return x.value, x.value
    if x.op == "cast":
        return (
            parts[0] if x.arguments[0].type.is_float else (float(x.arguments[0].ends[0]), float(x.arguments[0].ends[1]))
        )
    if x.op in ("tanh", "sin", "cos", "erf", "sign"):
        return -1.0, 1.0
    if x.op in ("floor", "ceil", "trunc", "round"):
        return parts[0][0] - 1, parts[0][1] + 1
    if x.op == "where":
        return min(part[0] for part in parts[1:]), max(part[1] for part in parts[1:])
    if x.op in ("minimum", "fmin"):
        return min(part[0] for part in parts), min(part[1] for part in parts)
    if x.op in ("maximum", "fmax"):
        return max(part[0] for part in parts), max(part[1] for part in parts)
    if x.op == "absolute":
        return 0.0, max(map(abs, parts[0]))
    if x.op in _RISING and parts[0][0] > 0:
        return _RISING[x.op](parts[0][0]), _RISING[x.op](parts[0][1])
    if x.op in _CORNERS and all(math.isfinite(end) for part in parts for end in part):
        if x.op == "divide" and parts[1][0] <= 0 <= parts[1][1]:
            return _ALL
        values = [_CORNERS[x.op](*pair) for pair in ((a, b) for a in parts[0] for b in parts[-1])]
        return min(values), max(values)
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
