"""Builds nodes: assigns types, folds constants, and simplifies results that the ranges of integers decide.

Types are bool < int32 < int64 < uint64 < float32 < float64. Integers that int32 may not hold are int64, and int64 wraps
as in C. An integer that may wrap has the whole type as its range. `precision` decides which floats stay float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import ProblemError
from . import operations
from .extents import GROWING, extent_of, is_inside, range_of_index
from .float_ranges import rounded_range
from .graph import Node, Range, node, post_order
from .operations import (
    BITS,
    BOOL_FORMS,
    COMMUTATIVE,
    COMPARISONS,
    FLOATING,
    NUMPY,
    ROUNDING,
    SHORT_FLOATS,
    Type,
    common_type,
    converted,
)

BOOL, INT32, INT64, FLOAT32, UINT64, FLOAT64 = Type
_AS_INT64 = "make an int64 array of it before the call, or bound the value first, as by & or %"
# Operations that take bools; for all others, bools become integers.
_TAKE_BOOLS = {*COMPARISONS, "bitwise_and", "bitwise_or", "bitwise_xor", "logical_not", "alike"}


def constant(value: Any, type: Type | None = None) -> Node:
    """Returns the node of a number. Without a type, floats are float32, and integers int32 where it holds them."""
    if type is None:
        type = _type_of_number(value)
    if type.is_float:
        with np.errstate(over="ignore"):
            return node("constant", type, value=float(type.numpy(value)))
    value = bool(value) if type == BOOL else int(value)
    return node("constant", type, value=value, range=(int(value), int(value)))


def _type_of_number(value: Any) -> Type:
    if isinstance(value, bool | np.bool_):
        return BOOL
    if isinstance(value, float | np.floating):
        return FLOAT32
    number = int(value)
    return next((type for type in (INT32, INT64) if is_inside((number, number), type)), UINT64)


def cast(x: Node, type: Type) -> Node:
    """Returns x as a node of another type. Floats become integers towards zero, and True unless they are zero."""
    if x.type == type:
        return x
    if x.op == "constant":
        with np.errstate(all="ignore"):
            return constant(converted(x.type.numpy(x.value), type.numpy), type)
    if type == BOOL:
        return build("not_equal", x, constant(0, x.type))
    range = extent = None
    if not type.is_float and x.range is not None and x.extent is not None:
        range = x.range if is_inside(x.range, type) else None
        extent = x.extent if is_inside(x.extent, type) else None
    elif x.type.is_float and not type.is_float:
        extent = rounded_range(x, type)
    return node("cast", type, [x], range=range, extent=extent)


def number_of_numpy(value: float) -> Node:
    """Returns a float64 number of NumPy, which promotes a float32 beside it; a `constant` promotes nothing."""
    return node("cast", FLOAT64, [constant(value, FLOAT64)])


def number_in(x: Node) -> float | None:
    """Returns the value of a float that is a number of Python or NumPy, else None."""
    x = x.arguments[0] if x.op == "cast" else x
    return x.value if x.op == "constant" and x.type.is_float else None


def build(op: str, *arguments: Node, grows: bool = True) -> Node:
    """Returns the node of an operation of `operations.NUMPY`, or a simpler node with the same value.

    grows: True if int32 results that may not fit become int64; else the result has the type of the arguments.
    """
    args = list(arguments)
    if op in ROUNDING and not args[0].type.is_float:
        return args[0]
    if op in COMPARISONS and any(each.type == UINT64 for each in args) and (result := _of_signs(op, *args)):
        return result
    op, args, type, result_type = _typed(op, args)
    extent = None
    if type != BOOL and not result_type.is_float:
        extent = extent_of(op, args)
        if grows and type == INT32 and op in GROWING and not is_inside(extent, INT32):
            args, type, result_type = [cast(each, INT64) for each in args], INT64, INT64
        extent = extent if is_inside(extent, result_type) else None
    if all(each.op == "constant" for each in args):
        with np.errstate(all="ignore"):
            return constant(NUMPY[op](*(each.type.numpy(each.value) for each in args)), result_type)
    if op in COMMUTATIVE:
        args.sort(key=lambda each: (each.op == "constant", each.digest))
    simpler = _simplified(op, args, type) or (_decided(op, *args) if not type.is_float and len(args) == 2 else None)
    return simpler or node(op, result_type, args, range=_range(op, result_type, args), extent=extent)


def _float_type(args: Iterable[Node]) -> Type:
    """Returns float64 if an argument is float64, else float32."""
    return FLOAT64 if any(each.type == FLOAT64 for each in args) else FLOAT32


def _typed(op: str, args: list[Node]) -> tuple[str, list[Node], Type, Type]:
    """Returns the operation, its arguments after casts, their type, and the type of the result."""
    if op in SHORT_FLOATS:
        return op, [args[0] if args[0].type == FLOAT64 else cast(args[0], FLOAT32)], FLOAT32, FLOAT32
    if op in FLOATING or op in ROUNDING:
        type = _float_type(args)
        return op, [cast(each, type) for each in args], type, type
    if op == "logical_not":
        return op, [cast(args[0], BOOL)], BOOL, BOOL
    values = args[1:] if op == "where" else args
    type = common_type(each.type for each in values)
    if type.is_float:
        type = _float_type(values)
    elif type == UINT64:
        values, type = _unsigned(op, values)
        args = [*args[:1], *values] if op == "where" else values
    if op == "where":
        condition, x, y = args
        return op, [cast(condition, BOOL), cast(x, type), cast(y, type)], type, type
    if type == BOOL:
        if op in ("negative", "subtract"):
            raise ProblemError(f"{op} of bool has no meaning; write ~ or ^")
        op = BOOL_FORMS.get(op, op)
        if op not in _TAKE_BOOLS:
            type = INT32
    if op in BITS and type.is_float:
        raise ProblemError(f"{op} of a float has no meaning; it takes integers and bool")
    return op, [cast(each, type) for each in args], type, BOOL if op in COMPARISONS else type


# Operations of unsigned integers whose results never exceed 64 bits.
_UNSIGNED = {*(BITS.keys() - {"left_shift"}), "minimum", "maximum", "fmin", "fmax", "absolute", "where"} | {
    *("floor_divide", "remainder", "truncated_divide", "truncated_remainder"),
    *COMPARISONS,
    "alike",
}


def _unsigned(op: str, args: list[Node]) -> tuple[list[Node], Type]:
    """Casts arguments, some of them uint64, to int64 if it holds them, else to uint64. Returns them and the type."""
    if all(x.type != UINT64 or is_inside(x.ends, INT64) for x in args):
        args = [cast(x, INT64) if x.type == UINT64 else x for x in args]
        return args, common_type(x.type for x in args)
    is_signed = any(x.ends[0] < 0 for x in (args[:1] if op == "right_shift" else args))
    large = next((x.value for x in args if x.op == "constant" and x.type == UINT64), None)
    if large is not None and (is_signed or op not in _UNSIGNED):
        raise ProblemError(f"{op} with {large}; integers are int64, up to {2**63 - 1}: write a smaller one, or a float")
    if op not in _UNSIGNED:
        raise ProblemError(f"{op} of uint64, which may leave its 64 bits; {_AS_INT64}")
    if is_signed:
        raise ProblemError(f"{op} of uint64 and of an integer that may be negative; {_AS_INT64}")
    return [cast(x, UINT64) for x in args], UINT64


def _of_signs(op: str, x: Node, y: Node) -> Node | None:
    """Returns a comparison of uint64 with an integer that may be negative; None for other arguments."""
    signed = y if x.type == UINT64 else x
    if not signed.type.is_integer or signed.ends[0] >= 0:
        return None
    is_negative = build("less", signed, constant(0))
    compared = build(op, *(each if each.type == UINT64 else cast(each, UINT64) for each in (x, y)))
    # A negative number is less than any uint64, and not equal to it.
    if op == "not_equal" or (op in ("less", "less_equal") and signed is x):
        return build("bitwise_or", is_negative, compared)
    return build("bitwise_and", build("logical_not", is_negative), compared)


def _is(x: Node, value: float) -> bool:
    """True if x is this constant; -0.0 is not 0."""
    return x.op == "constant" and x.value == value and not (value == 0 and math.copysign(1, x.value) < 0)


def _simplified(op: str, args: list[Node], type: Type) -> Node | None:
    """Returns a simpler node by rules of algebra that hold for all values of the type, else None."""
    if op == "where":
        return _simplified_where(*args)
    if len(args) == 1:
        return _simplified_unary(op, args[0], type)
    x, y = args
    is_exact = not type.is_float
    # A sum x + 0.0 stays, because it turns -0.0 into 0.0.
    if op in ("add", "subtract", "bitwise_or", "bitwise_xor", "left_shift", "right_shift") and is_exact and _is(y, 0):
        return x
    if (op == "subtract" and _is(y, 0.0)) or (op in ("multiply", "divide") and _is(y, 1)):
        return x
    if op in ("floor_divide", "truncated_divide") and is_exact and _is(y, 1):
        return x
    if op in ("multiply", "bitwise_and") and is_exact and _is(y, 0):
        return y
    if op in ("subtract", "bitwise_xor") and is_exact and x is y:
        return constant(0, type)
    if op in ("minimum", "maximum", "fmin", "fmax", "bitwise_and", "bitwise_or") and x is y:
        return x
    if type == BOOL and y.op == "constant":
        return _simplified_bool(op, x, y)
    if op == "divide" and y.op == "constant" and _is_power_of_two(y.value):
        return build("multiply", x, constant(1 / y.value))
    return _simplified_power(x, y) if op == "power" else None


def _simplified_where(condition: Node, x: Node, y: Node) -> Node | None:
    if condition.op == "constant":
        return x if condition.value else y
    if x is y:
        return x
    if condition.op == "logical_not":
        return build("where", condition.arguments[0], y, x)
    return _simplified_choice(condition, x, y) if x.type == BOOL else None


def _simplified_choice(condition: Node, x: Node, y: Node) -> Node | None:
    """Returns a choice between conditions as logic, else None. `condition` itself is True as x and False as y."""
    if x is condition or (x.op == "constant" and x.value):
        return build("bitwise_or", condition, y)
    if y is condition or (y.op == "constant" and not y.value):
        return build("bitwise_and", condition, x)
    if x.op == "constant":
        return build("bitwise_and", build("logical_not", condition), y)
    return build("bitwise_or", build("logical_not", condition), x) if y.op == "constant" else None


def _simplified_unary(op: str, x: Node, type: Type) -> Node | None:
    arguments = x.arguments
    if op in ("logical_not", "negative", "invert") and x.op == op:
        return arguments[0]
    if op in SHORT_FLOATS and x.op == op:
        return x
    if op == "absolute" and not type.is_float and x.bounds[0] >= 0:
        return x
    if op == "negative" and not type.is_float and x.op == "subtract":
        return build("subtract", arguments[1], arguments[0])
    if op != "logical_not" or x.op not in COMPARISONS:
        return None
    if x.op in ("equal", "not_equal"):
        return build("not_equal" if x.op == "equal" else "equal", *arguments)
    if arguments[0].type.is_float:
        return None  # both comparisons with NaN are false
    return build("less_equal" if x.op == "less" else "less", arguments[1], arguments[0])


def _simplified_bool(op: str, x: Node, y: Node) -> Node | None:
    """Returns an operation of a condition and a constant as a simpler node, else None."""
    if op == "bitwise_and":
        return x if y.value else y
    if op == "bitwise_or":
        return y if y.value else x
    if op in ("bitwise_xor", "not_equal"):
        return build("logical_not", x) if y.value else x
    if op == "equal":
        return x if y.value else build("logical_not", x)
    return None


def _is_power_of_two(value: float) -> bool:
    return math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5 and 2.0**-100 < abs(value) < 2.0**100


def _simplified_power(x: Node, y: Node) -> Node | None:
    # As in PyTorch, x ** 0.5 is sqrt(x): NaN for -inf.
    if y.op == "constant" and y.value in (2.0, 3.0):
        square = build("multiply", x, x)
        return square if y.value == 2.0 else build("multiply", square, x)
    if y.op == "constant" and y.value in (0.5, -0.5):
        return build("sqrt" if y.value > 0 else "rsqrt", x)
    if x.op == "constant" and x.value == 1:
        return x
    # The product is exact for a power of two. For other bases, it is not: 10.0 ** 3 would not be 1000.
    if x.op == "constant" and x.value > 0 and _is_power_of_two(x.value):
        return build("exp2", build("multiply", y, constant(math.log2(x.value), x.type)))
    return None


def is_exponential(x: Node) -> bool:
    """True for a power of a positive constant."""
    base = x.arguments[0] if x.op == "power" else x
    return base is not x and base.op == "constant" and 0 < base.value < math.inf


def _decided(op: str, x: Node, y: Node) -> Node | None:
    """Returns a result that the ranges of two integers decide, such as q_idx >= 0, else None."""
    (least_x, greatest_x), (least_y, greatest_y) = x.bounds, y.bounds
    if op == "less" and (greatest_x < least_y or least_x >= greatest_y or x is y):
        return constant(greatest_x < least_y)
    if op == "less_equal" and (greatest_x <= least_y or least_x > greatest_y or x is y):
        return constant(greatest_x <= least_y or x is y)
    if op in ("equal", "not_equal") and (greatest_x < least_y or least_x > greatest_y or x is y):
        return constant((op == "equal") == (x is y))
    if op in ("maximum", "fmax"):
        return x if least_x >= greatest_y else y if least_y >= greatest_x else None
    if op in ("minimum", "fmin"):
        return x if greatest_x <= least_y else y if greatest_y <= least_x else None
    return None


def _contains(outer: Range, inner: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _range(op: str, type: Type, args: list[Node]) -> Range | None:
    """Returns the range of an integer result; None, the whole type, if it may wrap or has no rule."""
    if type.is_float or any(each.range is None for each in args):
        return None
    if (result := range_of_index(op, args)) is not None:
        return result
    result = _unary_range(op, *args[0].bounds) if len(args) == 1 else _binary_range(op, *(x.bounds for x in args[-2:]))
    return result if result is not None and _contains(type.limits, result) else None


def _unary_range(op: str, least: int, greatest: int) -> Range | None:
    if op == "negative":
        return -greatest, -least
    if op == "absolute":
        nearest = 0 if least <= 0 <= greatest else min(abs(least), abs(greatest))
        return nearest, max(abs(least), abs(greatest))
    return None


def _binary_range(op: str, x: Range, y: Range) -> Range | None:
    """Returns the range of a result from the ranges of two arguments; for `where` these are the values."""
    is_positive = y[0] > 0
    if op == "add":
        return x[0] + y[0], x[1] + y[1]
    if op == "subtract":
        return x[0] - y[1], x[1] - y[0]
    if op in ("minimum", "fmin"):
        return min(x[0], y[0]), min(x[1], y[1])
    if op in ("maximum", "fmax"):
        return max(x[0], y[0]), max(x[1], y[1])
    if op == "where":
        return min(x[0], y[0]), max(x[1], y[1])
    if op == "multiply":
        return _extremes(lambda a, b: a * b, x, y)
    if is_positive and (op == "floor_divide" or (op == "truncated_divide" and x[0] >= 0)):
        return _extremes(lambda a, b: a // b, x, y)
    if is_positive and (op == "remainder" or (op == "truncated_remainder" and x[0] >= 0)):
        return x if x[0] >= 0 and x[1] < y[0] else (0, y[1] - 1)
    if op == "right_shift" and y[0] >= 0 and y[1] < 32:
        return _extremes(lambda a, b: a >> b, x, y)
    if op == "bitwise_and" and (x[0] >= 0 or y[0] >= 0):
        return 0, min(bound[1] for bound in (x, y) if bound[0] >= 0)
    return None


def _extremes(function: operations.Function, x: Range, y: Range) -> Range:
    values = [function(a, b) for a in x for b in y]
    return min(values), max(values)


def load(number: int, type: Type, indices: list[Node], extent: Range | None = None) -> Node:
    """Returns an element of a captured array. Negative indices count from the end, and other indices are clamped.

    extent: the range of the array's integers, if it is narrower than the range of the type.
    """
    return node("load", type, indices, number, extent=extent)


def rebuilt(x: Node, arguments: list[Node]) -> Node:
    """Rebuilds a node with new arguments of the same types."""
    if x.op in ("input", "constant"):
        return x
    if x.op == "load":
        return load(x.value, x.type, arguments, x.extent)
    return cast(arguments[0], x.type) if x.op == "cast" else build(x.op, *arguments, grows=False)


def transform(roots: Sequence[Node], rule: Callable[[Node, list[Node]], Node]) -> list[Node]:
    """Rebuilds expressions from their leaves on. rule: returns the new node of a node and its new arguments."""
    new: dict[Node, Node] = {}
    for x in post_order(roots):
        new[x] = rule(x, [new[argument] for argument in x.arguments])
    return [new[root] for root in roots]


@lru_cache(maxsize=64)
def pick_form(root: Node, keys_as_rows: bool) -> Node:
    """Returns an expression with one form of each equivalent condition: by queries, or by keys if keys are rows."""

    def form(x: Node, arguments: list[Node]) -> Node:
        return arguments[keys_as_rows] if x.op == "alike" else rebuilt(x, arguments)

    return transform([root], form)[0]


def has_inverse(x: Node) -> bool:
    """True if x is a constant whose inverse, like itself, is a normal float32 with all of its digits."""
    return x.op == "constant" and 2.0**-126 <= abs(x.value) <= 2.0**126
