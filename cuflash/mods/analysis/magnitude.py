"""How large a value can be, whatever scores, indices and captured arrays are."""

from __future__ import annotations

import math

from ..graph.graph import Node, post_order
from ..graph.operations import Type

_AT_MOST_ONE = ("tanh", "erf", "sign")
_OF_EITHER = ("minimum", "maximum", "fmin", "fmax", "where")
_SAME = ("negative", "absolute", "cast")
_PASS_NAN_ON = (*_AT_MOST_ONE, *_OF_EITHER, *_SAME, "exp", "exp2")  # and make none


def magnitude(root: Node) -> float:
    """A bound of the absolute value of a node; inf where none is known, or where the value may be NaN.

    Scores themselves may be infinite, but are not taken for NaN: a product that is NaN is that of its row anyway.
    """
    known: dict[Node, float] = {}
    may_be_nan: dict[Node, bool] = {}
    for x in post_order([root]):
        bounds = [known[argument] for argument in x.arguments]
        may_be_nan[x] = _makes_nan(x, bounds) or any(may_be_nan[argument] for argument in x.arguments)
        known[x] = math.inf if may_be_nan[x] else _magnitude(x, bounds)
    return known[root]


def _magnitude(x: Node, bounds: list[float]) -> float:
    """The bound of a value that is not NaN, from those of its arguments."""
    if x.type != Type.FLOAT32:
        return float(max(map(abs, x.bounds))) if x.type.is_integer else 1.0
    if x.op == "constant":
        return float(abs(x.value))
    if x.op in _AT_MOST_ONE:
        return 1.0
    if x.op in _SAME:
        return bounds[0]
    if x.op in _OF_EITHER:
        return max(bounds[-2:])
    if x.op in ("add", "subtract"):
        return sum(bounds)
    if x.op == "multiply":
        return math.inf if math.inf in bounds else bounds[0] * bounds[1]
    return math.inf


def _makes_nan(x: Node, bounds: list[float]) -> bool:
    """Whether a value may be NaN though none of its arguments is."""
    if x.type != Type.FLOAT32 or x.op == "input" or x.op in _PASS_NAN_ON:
        return False
    if x.op == "constant":
        return math.isnan(x.value)
    if x.op in ("add", "subtract"):
        return min(bounds) == math.inf
    if x.op == "multiply":
        return math.inf in bounds and not any(map(_is_plain_factor, x.arguments))
    if x.op == "divide":
        return not _is_plain_factor(x.arguments[1])
    return True


def _is_plain_factor(x: Node) -> bool:
    """Whether a factor makes NaN of nothing else."""
    is_scale = x.op == "input" and x.value == "softmax_scale"
    return is_scale or (x.op == "constant" and math.isfinite(x.value) and x.value != 0)
