"""How large a value can be, whatever scores, indices and captured arrays are."""

from __future__ import annotations

import math

from .graph import Node, post_order
from .operations import Type

_AT_MOST_ONE = ("tanh", "erf", "sign")
_OF_EITHER = ("minimum", "maximum", "fmin", "fmax", "where")
_SAME = ("negative", "absolute", "cast")


def magnitude(root: Node) -> float:
    """A bound of the absolute value of a node that is not NaN; inf where none is known."""
    known: dict[Node, float] = {}
    for x in post_order([root]):
        known[x] = _magnitude(x, [known[argument] for argument in x.arguments])
    return known[root]


def _magnitude(x: Node, arguments: list[float]) -> float:
    if x.type != Type.FLOAT32:
        return float(max(map(abs, x.bounds))) if x.type.is_integer else 1.0
    if x.op == "constant":
        return math.inf if math.isnan(x.value) else abs(x.value)
    if x.op in _AT_MOST_ONE:
        return 1.0
    if x.op in _SAME:
        return arguments[0]
    if x.op in _OF_EITHER:
        return max(arguments[-2:])
    if x.op in ("add", "subtract"):
        return sum(arguments)
    if x.op == "multiply":
        return math.inf if math.inf in arguments else arguments[0] * arguments[1]
    return math.inf
