"""Bounds of absolute values, and signs, valid for all scores, indices and captured arrays."""

from __future__ import annotations

import math
from functools import lru_cache

from ..graph.graph import Node, post_order, variable
from ..graph.linear import linear
from ..graph.simplify import build, cast, is_exponential, rebuilt, transform

_UNIT = ("tanh", "erf", "sign")  # absolute value at most 1
_SELECTIONS = ("minimum", "maximum", "fmin", "fmax", "where")  # the result is one of the last two arguments
_ISOMETRIES = ("negative", "absolute", "cast")  # keep the absolute value
_PASS_NAN_ON = (*_UNIT, *_SELECTIONS, *_ISOMETRIES, "exp", "exp2")  # and create no NaN
_DISTANCE = {"k_idx": 1, "q_idx": -1, "seqlen_k": -1, "seqlen_q": 1}  # from the query's position to the key


def abs_bound(root: Node) -> float:
    """Returns a bound of the absolute value of a node; inf if it has none, or if the value may be NaN.

    Scores may be infinite but are assumed not to be NaN: a product that is NaN makes its row NaN anyway.
    """
    bounds: dict[Node, float] = {}
    may_be_nan: dict[Node, bool] = {}
    for x in post_order([root]):
        parts = [bounds[argument] for argument in x.arguments]
        may_be_nan[x] = _makes_nan(x, parts) or any(may_be_nan[argument] for argument in x.arguments)
        bounds[x] = math.inf if may_be_nan[x] else _bound(x, parts)
    return bounds[root]


def _bound(x: Node, parts: list[float]) -> float:
    """Returns the bound of a value that is not NaN, from the bounds of its arguments."""
    if not x.type.is_float:
        return float(max(map(abs, x.bounds)))
    if x.op == "constant":
        return float(abs(x.value))
    if x.op in _UNIT:
        return 1.0
    if x.op in _ISOMETRIES:
        return parts[0]
    if x.op in _SELECTIONS:
        return max(parts[-2:])
    if x.op in ("add", "subtract"):
        return sum(parts)
    return math.prod(parts) if x.op == "multiply" and math.inf not in parts else math.inf


def _makes_nan(x: Node, parts: list[float]) -> bool:
    """True if a value may be NaN while none of its arguments is NaN."""
    if not x.type.is_float or x.op == "input" or x.op in _PASS_NAN_ON or is_exponential(x):
        return False
    if x.op == "constant":
        return math.isnan(x.value)
    if x.op in ("add", "subtract"):
        return min(parts) == math.inf
    if x.op == "multiply":
        return math.inf in parts and not any(map(_is_plain_factor, x.arguments))
    return x.op != "divide" or not _is_plain_factor(x.arguments[1])


def _is_plain_factor(x: Node) -> bool:
    """True if a product with this factor is NaN only where the other factor is."""
    is_scale = x.op == "input" and x.value == "softmax_scale"
    return is_scale or (x.op == "constant" and math.isfinite(x.value) and x.value != 0)


@lru_cache(maxsize=64)
def assume_causal(root: Node) -> Node:
    """Returns an expression with equal values wherever k_idx is at most q_idx + seqlen_k - seqlen_q.

    A sum that depends linearly on the key takes one instruction less per score than an absolute value.
    """
    return transform([root], _without_absolute)[0]


def _without_absolute(x: Node, arguments: list[Node]) -> Node:
    sign = sign_of(x.arguments[0]) if x.op == "absolute" else 0
    if sign == 0:
        return rebuilt(x, arguments)
    number = arguments[0]
    if number.op == "cast" and sign < 0:
        # The integer is negated, because -0.0 is not 0.
        return cast(build("negative", number.arguments[0]), number.type)
    return number if sign > 0 else build("negative", number)


def sign_of(x: Node) -> int:
    """Returns 1 if a number is never negative under a causal mask, -1 if it is never positive, else 0."""
    if x.op == "cast":
        x = x.arguments[0]
    if not x.type.is_integer:
        return 0
    form = linear(x)
    factor = form.coefficients.get(variable("k_idx"), 0)
    if form.coefficients != {variable(name): factor * sign for name, sign in _DISTANCE.items()}:
        return 0
    return -1 if factor > 0 >= form.constant else 1 if factor < 0 <= form.constant else 0
