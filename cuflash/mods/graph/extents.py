"""Exact ranges of integer results, which decide the types of integers so that no int32 wraps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .graph import INDEX_OFFSETS, MAX_INDEX, Node, Range
from .linear import LinearForm, linear
from .operations import COMPARISONS, Function, Type

# Operations whose result may lie outside of the type of the arguments.
GROWING = {"add", "subtract", "multiply", "negative", "absolute", "left_shift", "floor_divide", "truncated_divide"}
MOST_BITS = 63
_LENGTH_OF = {"q_idx": "seqlen_q", "k_idx": "seqlen_k"}  # every index is below its length
_GREATEST = Type.INT32.limits[1]
WHOLE_FLOATS = 2**24  # up to it float32 holds every integer


def extent_of(op: str, args: list[Node]) -> Range:
    """Returns the exact range of an operation of integers or bools, without the limits of a type."""
    if op in COMPARISONS or op in ("logical_not", "alike"):
        return 0, 1
    if (range := range_of_index(op, args)) is not None:
        return range
    ends = [each.ends for each in args]
    extent = _of_one(op, *ends[0]) if len(args) == 1 else _of_two(op, *ends[-2:])
    has_length = any(not each.inputs.isdisjoint(_LENGTH_OF.values()) for each in args)
    if op in ("add", "subtract") and has_length and args[0].type == Type.INT32 and not is_inside(extent, Type.INT32):
        x, y = map(linear, args)
        least, greatest = _bounds(x + y if op == "add" else x - y)
        return max(least, extent[0]), min(greatest, extent[1])
    return extent


def range_of_index(op: str, args: list[Node]) -> Range | None:
    """Returns the range of an index plus its offset, which is that of the index: calls limit the sum. Else None."""
    if op == "add" and args[0].op == args[1].op == "input":
        for index, offset in (args, args[::-1]):
            if offset.value in INDEX_OFFSETS and index.value not in INDEX_OFFSETS:
                return index.bounds
    return None


def _bounds(form: LinearForm) -> Range:
    """Returns the range of a linear form in which every index is below its length."""
    names = {atom.value: atom for atom in form.coefficients if atom.op == "input"}
    rest, least, greatest = dict(form.coefficients), form.constant, form.constant
    for index, length in ((names.get(x), names.get(y)) for x, y in _LENGTH_OF.items()):
        if index is not None and length is not None and rest[index] * rest[length] < 0:
            size = min(abs(rest[index]), abs(rest[length]))
            factor = size if rest[index] > 0 else -size
            rest[index], rest[length] = rest[index] - factor, rest[length] + factor
            ends = -MAX_INDEX * factor, -factor
            least, greatest = least + min(ends), greatest + max(ends)
    for atom, factor in rest.items():
        ends = factor * atom.ends[0], factor * atom.ends[1]
        least, greatest = least + min(ends), greatest + max(ends)
    return least, greatest


def _of_one(op: str, least: int, greatest: int) -> Range:
    if op == "negative":
        return -greatest, -least
    if op == "invert":
        return -1 - greatest, -1 - least
    assert op == "absolute", op
    nearest = 0 if least <= 0 <= greatest else min(abs(least), abs(greatest))
    return nearest, max(abs(least), abs(greatest))


def _of_two(op: str, x: Range, y: Range) -> Range:
    """Returns the range of a result from two arguments' ranges; for `where` these are the ranges of the values."""
    if op in _CORNERS:
        return _corners(_CORNERS[op], x, y)
    if op == "where":
        return min(x[0], y[0]), max(x[1], y[1])
    if op in ("left_shift", "right_shift"):
        return _of_shift(op, x, y)
    if op.startswith("bitwise"):
        return _of_bits(op, x, y)
    return _of_division(op, x, y)


def _of_shift(op: str, x: Range, y: Range) -> Range:
    # Counts are clamped to 64, so that no huge left shift is computed here.
    counts = min(max(y[0], 0), MOST_BITS + 1), min(y[1], MOST_BITS + 1)
    if y[0] < 0:
        counts = 0, MOST_BITS + 1  # a negative number of bits counts as more than 63
    if op == "right_shift":
        return _corners(lambda a, b: a >> b, x, counts)
    least, greatest = _corners(lambda a, b: a << b, x, counts)
    return min(least, 0), max(greatest, 0)


def _of_bits(op: str, x: Range, y: Range) -> Range:
    if op == "bitwise_and" and (x[0] >= 0 or y[0] >= 0):
        return 0, min(ends[1] for ends in (x, y) if ends[0] >= 0)
    most = 2 ** max(end.bit_length() for end in (*x, *y))
    return (0 if x[0] >= 0 and y[0] >= 0 else -most), most - 1


def _of_division(op: str, x: Range, y: Range) -> Range:
    most, largest = max(map(abs, x)), max(map(abs, y))
    if op == "floor_divide" and (y[0] > 0 or y[1] < 0):
        return _corners(lambda a, b: a // b, x, y)
    if op in ("floor_divide", "truncated_divide"):
        if y[0] > 0:
            return min(-(-x[0] // y[0]), 0), max(x[1] // y[0], 0)
        return -most, most
    if op == "remainder":
        if x[0] >= 0 and x[1] < y[0]:
            return x
        return min(y[0] + 1, 0), max(y[1] - 1, 0)
    assert op == "truncated_remainder", op
    size = min(most, max(largest - 1, 0))
    return (0 if x[0] >= 0 else -size), (0 if x[1] <= 0 else size)


def _corners(function: Function, x: Range, y: Range) -> Range:
    values = [function(a, b) for a in x for b in y]
    return min(values), max(values)


# Operations that are monotone in each argument.
_CORNERS: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "minimum": min,
    "maximum": max,
    "fmin": min,
    "fmax": max,
}


def is_inside(extent: Range, type: Type) -> bool:
    """True if an integer type holds a range."""
    return type.limits[0] <= extent[0] and extent[1] <= type.limits[1]


def leaves_int64(op: str, args: list[Node]) -> bool:
    """True if an integer result may lie outside of int64.

    False if an operand depends on captured integers of 32 or 64 bits, or on floats cast to integers. Their values are
    unknown: small ones are summed correctly, and sums beyond 2^63 wrap, as int64 does in NumPy and PyTorch.
    """
    if op not in GROWING or any(not each.type.is_integer and each.type != Type.BOOL for each in args):
        return False
    if is_inside(extent_of(op, args), Type.INT64) or has(args, _is_unbounded):
        return False
    # Captured numbers of bits are unknown, too: even integers of 8 bits hold numbers that are too large.
    return op != "left_shift" or not has(args[1:], lambda x: x.op == "load")


def _is_unbounded(x: Node) -> bool:
    is_loaded = x.op == "load" or (x.op == "cast" and x.arguments[0].type.is_float)
    # A float that is small or NaN becomes a small integer or the least one.
    return is_loaded and not x.type.is_float and (x.ends[1] >= _GREATEST or x.ends[0] < -_GREATEST)


def is_wide(x: Node) -> bool:
    """True if a value depends on captured integers and float32 may not hold all of its values, and for uint64.

    Indices and lengths alone are not wide, as in PyTorch.
    """
    if x.type == Type.UINT64:
        return True
    if not x.type.is_integer or max(map(abs, x.ends)) <= WHOLE_FLOATS:
        return False
    return has([x], lambda each: each.op == "load")


def is_large(x: Node) -> bool:
    """True if an integer may exceed int32 or contains a constant of at least 2^24, as flat indices do."""
    if not x.type.is_integer:
        return False
    return not is_inside(x.ends, Type.INT32) or has([x], _is_large_constant)


def _is_large_constant(x: Node) -> bool:
    return x.op == "constant" and abs(x.value) >= WHOLE_FLOATS


def needs_digits(value: float) -> bool:
    """True if float32 does not hold a number, or does not hold every integer up to it."""
    return math.isfinite(value) and (abs(value) >= WHOLE_FLOATS or not is_float32(value))


def is_float32(value: float) -> bool:
    """True if float32 holds a number."""
    with np.errstate(over="ignore"):
        return value != value or float(np.float32(value)) == value


def has(roots: list[Node], matches: Callable[[Node], bool]) -> bool:
    """True if a node at or below the roots matches.

    The search stops at the first match: a sum of many terms searches once per term, and often matches at once.
    """
    visited, stack = set(roots), list(roots)
    while stack:
        x = stack.pop()
        if matches(x):
            return True
        stack += [each for each in x.arguments if each not in visited]
        visited.update(x.arguments)
    return False
