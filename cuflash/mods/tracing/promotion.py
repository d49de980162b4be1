"""Type promotion of the numbers of a function as in NumPy, except that indices beside float32 are float32.

A number of Python is float32 beside float32, and float64 beside integers. A float64 of NumPy makes both float64.
"""

from __future__ import annotations

import math

from ..graph.extents import has, is_float32, is_wide, needs_digits
from ..graph.graph import Node
from ..graph.operations import COMPARISONS, Type
from ..graph.simplify import build, cast, constant, number_in


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
