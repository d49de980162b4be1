"""Type promotion of the numbers of a function as in NumPy, except that indices beside float32 are float32.

A number of Python is float32 beside float32, and float64 beside integers. A float64 of NumPy makes both float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph.extents import has, is_float32, is_wide, needs_digits
from ..graph.graph import Node, node, post_order
from ..graph.operations import COMPARISONS, SHORT_FLOATS, Type
from ..graph.simplify import build, cast, constant, number_in

# Operations that keep the dtype of 16 bits of their arguments.
_KEEPING = ("negative", "absolute", "minimum", "maximum", "fmin", "fmax", "where")


def promoted(op: str, nodes: list[Node]) -> list[Node]:
    """Returns the arguments of an operation of floats, or of an operation that turns integers into floats."""
    start = 1 if op == "where" else 0
    values = [cast(each, Type.FLOAT64) if is_wide(each) else each for each in nodes[start:]]
    if any(each.type == Type.FLOAT32 and each.op != "constant" for each in values):
        values = [cast(each, Type.FLOAT32) if _is_narrow(op, each) else each for each in values]
    else:
        values = [cast(each, Type.FLOAT64) for each in values]
    return [*nodes[:start], *values]


def _is_narrow(op: str, x: Node) -> bool:
    """True if a float64 widens no float32: it has only indices and Python numbers, or float32 compares it exactly."""
    if x.type != Type.FLOAT64:
        return False
    number = number_in(x)
    is_same = op in COMPARISONS and number is not None and is_float32(number)
    return is_same or not has([x], _widens)


def _widens(x: Node) -> bool:
    return x.type == Type.FLOAT64 and (
        x.op == "load" or (x.op == "cast" and (x.arguments[0].type.is_float or is_wide(x.arguments[0])))
    )


def short_float(x: Node) -> str | None:
    """Returns the operation of `SHORT_FLOATS` by which a float has 16 bits in the user's library, else None."""
    if x.op not in _KEEPING:
        return x.op if x.op in SHORT_FLOATS else None
    roundings: dict[Node, str | None] = {}
    for each in post_order([x]):
        parts = {roundings[argument] for argument in each.arguments[1 if each.op == "where" else 0 :]}
        rounding = parts.pop() if each.op in _KEEPING and len(parts) == 1 else None
        roundings[each] = each.op if each.op in SHORT_FLOATS else rounding
    return roundings[x]


def widened(x: Node) -> Node:
    """Returns a float of 16 bits as one that the user's code cast to float32; other nodes unchanged.

    The product with 1 is removed when the trace ends.
    """
    return x if short_float(x) is None else node("multiply", Type.FLOAT32, [x, constant(1.0)])


def with_short_numbers(values: Sequence[Any], nodes: list[Node]) -> list[Node]:
    """Returns the sides of a comparison. Beside a float of 16 bits, a number of Python is rounded to 16 bits, too.

    A number beyond the greatest float of 16 bits stays.
    """
    for place, (value, other) in enumerate(zip(values, reversed(nodes), strict=True)):
        is_weak = isinstance(value, bool | int | float) and not isinstance(value, np.generic)
        if is_weak and math.isfinite(value) and (rounding := short_float(other)) is not None:
            rounded = build(rounding, constant(float(value), Type.FLOAT64))
            return [rounded if i == place and math.isfinite(rounded.value) else x for i, x in enumerate(nodes)]
    return nodes


def of_whole_number(op: str, x: Node, y: Node) -> Node | None:
    """Returns a comparison of an integer with a float number by integers; None if float32 is exact."""
    integer, number = (y, number_in(x)) if y.type.is_integer or y.type == Type.UINT64 else (x, number_in(y))
    if integer.type.is_float or integer.op == "constant" or number is None or not math.isfinite(number):
        return None
    if not (needs_digits(number) or is_wide(integer)):
        return None
    is_below = integer is x
    takes_ceiling = (op == "less") == is_below
    whole = math.ceil(number) if takes_ceiling else math.floor(number)
    if op in ("equal", "not_equal") and whole != number:
        return constant(op == "not_equal")
    if not -(2**63) <= whole < 2**64:
        return constant(op == "not_equal" if op in ("equal", "not_equal") else (number > 0) == is_below)
    return build(op, *((integer, constant(whole)) if is_below else (constant(whole), integer)))
