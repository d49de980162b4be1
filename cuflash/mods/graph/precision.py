"""Decides which floats are float64: floats that decide a mask or an index with more digits than float32 has.

A comparison, a rounding, a remainder and a cast to integers take float64 for some operands. These are a captured
float64, a captured integer that float32 may not hold, and a float64 number of NumPy. Indices beside a number that
float32 does not hold count, too. A sum of captured values is rounded once, because a score may depend on the difference
of two times. All other floats are float32, as scores are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .extents import is_large, is_wide, needs_digits
from .graph import Node, post_order
from .operations import COMPARISONS, DIVISIONS, FLOATING, ROUNDING, SHORT_FLOATS, Type
from .simplify import build, cast, constant, load, number_in, rebuilt

# Operations of floats that turn a small difference into a large one.
SHARP = {*COMPARISONS, *ROUNDING, *DIVISIONS, "sign"}
SUMS = ("add", "subtract", "negative")
# Transcendental functions, which float64 makes slow.
_CURVES = FLOATING.keys() - {"divide", "sign"}
# The rounding error of smaller constants in float32 is below 2^-14.
_LARGE = 2.0**10


class _Forms(NamedTuple):
    """A node in both precisions, which are equal unless the node is float64.

    is_wide: float32 may lose digits of a captured value, or of a value cast to float64. has_captured: the node contains
    such a captured value. has_digits: it contains a number of NumPy, a flat index, or a number that float32 does not
    hold. is_curve: it contains a transcendental function of indices. total, rest: the terms of a sum without the score
    and curves, and the other terms; None if there are none. terms: the number of captured values and large numbers in
    `total`.
    """

    short: Node
    long: Node
    is_wide: bool = False
    has_captured: bool = False
    has_digits: bool = False
    is_curve: bool = False
    total: Node | None = None
    rest: Node | None = None
    terms: int = 0


def settled(roots: Iterable[Node], are_settled: bool = False) -> list[Node]:
    """Returns expressions with float32 floats, and float64 only where it decides; a root itself is float32.

    are_settled: True if the expressions are computed from settled ones, so that their float64 constants decide.
    """
    roots = list(roots)
    order = post_order(roots)
    if all(each.type != Type.FLOAT64 for each in order):
        return roots
    forms = _all_forms(order, are_settled)
    return [forms[root].short for root in roots]


def has_digits(root: Node) -> bool:
    """True if a float has more digits than float32, as a captured float64 does."""
    return _all_forms(post_order([root]))[root].is_wide


def _all_forms(order: list[Node], are_settled: bool = False) -> dict[Node, _Forms]:
    forms: dict[Node, _Forms] = {}
    for each in order:
        parts = [forms[argument] for argument in each.arguments]
        forms[each] = _of_float64(each, parts, are_settled) if each.type == Type.FLOAT64 else _of_others(each, parts)
    return forms


def _is_long(parts: list[_Forms]) -> bool:
    """True if a decision about these values is made in float64."""
    if any(part.is_wide for part in parts):
        return True
    return any(part.has_digits for part in parts) and not any(part.is_curve for part in parts)


def _of_others(x: Node, parts: list[_Forms]) -> _Forms:
    if x.op == "cast" and x.type.is_float:
        return _Forms(short := cast(parts[0].short, x.type), short)
    if x.op in SHORT_FLOATS:  # a captured float64 is rounded once
        is_long = parts[0].has_captured and "score" not in x.inputs
    else:
        is_long = (x.op in SHARP or x.op == "cast") and not x.type.is_float and _is_long(parts)
    node = rebuilt(x, [part.long if is_long else part.short for part in parts])
    return _Forms(node, node)


def _of_float64(x: Node, parts: list[_Forms], is_settled: bool) -> _Forms:
    if x.op in SUMS:
        return _of_sum(x, parts)
    forms = _of_leaf(x, parts, is_settled) if x.op in ("load", "constant", "cast") else _of_operation(x, parts)
    if "score" in x.inputs or forms.is_curve:
        return forms._replace(rest=forms.short)
    number = number_in(x)
    is_large = abs(number) >= _LARGE if number is not None else any(part.terms for part in parts)
    counts = forms.has_captured or is_large
    return forms._replace(total=forms.long, terms=int(counts))


def _of_leaf(x: Node, parts: list[_Forms], is_settled: bool) -> _Forms:
    if x.op == "constant":
        return _Forms(constant(x.value, Type.FLOAT32), x, is_wide=is_settled, has_digits=needs_digits(x.value))
    if x.op == "load":
        short, long = (load(x.value, type, [part.short for part in parts]) for type in (Type.FLOAT32, x.type))
        return _Forms(short, long, is_wide=True, has_captured=True)
    source, (argument,) = x.arguments[0], parts
    short, long = cast(argument.short, Type.FLOAT32), cast(argument.long, x.type)
    is_captured, is_of_numpy = is_wide(argument.short), source.type == Type.FLOAT64
    return _Forms(short, long, is_captured or source.type == Type.FLOAT32, is_captured, is_of_numpy or is_large(source))


def _of_operation(x: Node, parts: list[_Forms]) -> _Forms:
    values = parts[1:] if x.op == "where" else parts
    is_long = x.op in SHARP and _is_long(values)
    long = build(x.op, *(part.long for part in parts))
    short = cast(long, Type.FLOAT32) if is_long else build(x.op, *(part.short for part in parts))
    wide, captured, digits, curve = (any(part[place] for part in values) for place in range(2, 6))
    return _Forms(short, long, wide, captured, digits, curve or (x.op in _CURVES and not wide))


def _of_sum(x: Node, parts: list[_Forms]) -> _Forms:
    forms = _of_operation(x, parts)
    total, rest = _joined(x.op, [part.total for part in parts]), _joined(x.op, [part.rest for part in parts])
    terms = sum(part.terms for part in parts)
    short = forms.short
    if forms.has_captured and total is not None and (rest is None or terms > 1):
        short = cast(total, Type.FLOAT32) if rest is None else build("add", rest, cast(total, Type.FLOAT32))
    return forms._replace(short=short, total=total, rest=rest, terms=terms)


def _joined(op: str, parts: list[Node | None]) -> Node | None:
    """Returns the sum of the parts that are not None."""
    if None not in parts:
        return build(op, *(part for part in parts if part is not None))
    one, other = parts if len(parts) == 2 else (None, None)
    return build("negative", other) if op == "subtract" and other is not None else one or other
