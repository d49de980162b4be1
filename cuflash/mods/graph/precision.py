"""Decides which floats are float64: those that decide a mask or an index, where a captured value has so many digits.

A comparison, a rounding, a remainder and a cast to integers take float64 if a captured float64 or a wide integer is a
part of what they read. So does the difference of two captured float64, as of points in time. All other floats are
float32, as scores are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .extents import is_wide
from .graph import Node, post_order
from .operations import COMPARISONS, DIVISIONS, ROUNDING, Type
from .simplify import build, cast, constant, load, rebuilt

# Operations of floats that turn a small difference into a large one.
SHARP = {*COMPARISONS, *ROUNDING, *DIVISIONS, "sign"}


class _Forms(NamedTuple):
    """A node in both precisions, which are one where it is no float64.

    is_wide: float32 may lose digits of a captured value in it. has_wide, has_short: a captured float64, or a float32,
    is a part of it.
    """

    short: Node
    long: Node
    is_wide: bool = False
    has_wide: bool = False
    has_short: bool = False


def settled(roots: Iterable[Node]) -> list[Node]:
    """Returns expressions whose floats are float32 but for those that decide; a root itself is float32."""
    roots = list(roots)
    order = post_order(roots)
    if all(each.type != Type.FLOAT64 for each in order):
        return roots
    forms: dict[Node, _Forms] = {}
    for each in order:
        forms[each] = _forms(each, [forms[argument] for argument in each.arguments])
    return [forms[root].short for root in roots]


def has_digits(root: Node) -> bool:
    """True if a float is float64 where it decides something."""
    forms: dict[Node, _Forms] = {}
    for each in post_order([root]):
        forms[each] = _forms(each, [forms[argument] for argument in each.arguments])
    return forms[root].is_wide


def _forms(x: Node, parts: list[_Forms]) -> _Forms:
    if x.type != Type.FLOAT64:
        takes_long = x.op in SHARP or x.op == "cast"
        is_long = takes_long and not x.type.is_float and any(part.is_wide for part in parts)
        if x.op == "cast" and x.type.is_float:
            return _Forms(short := cast(parts[0].short, x.type), short, has_short=True)
        node = rebuilt(x, [part.long if is_long else part.short for part in parts])
        return _Forms(node, node, has_short=x.type.is_float)
    if x.op == "load":
        indices = [part.short for part in parts]
        return _Forms(load(x.value, Type.FLOAT32, indices), load(x.value, x.type, indices), True, True)
    if x.op == "constant":
        return _Forms(constant(x.value, Type.FLOAT32), x)
    if x.op == "cast":
        (argument,) = parts
        is_short = x.arguments[0].type.is_float
        short, long = (cast(argument.short, type) for type in (Type.FLOAT32, Type.FLOAT64))
        return _Forms(short, long, is_wide(argument.short), False, is_short)
    return _of_operation(x, parts)


def _of_operation(x: Node, parts: list[_Forms]) -> _Forms:
    values = parts[1:] if x.op == "where" else parts
    long = build(x.op, *(part.long for part in parts))
    wide, has_wide, has_short = (any(getattr(part, name) for part in values) for name in _Forms._fields[2:])
    is_difference = (
        x.op == "subtract"
        and has_wide
        and not has_short
        and all(part.has_wide or argument.op == "constant" for part, argument in zip(parts, x.arguments, strict=True))
    )
    if is_difference or (wide and x.op in SHARP):
        short = cast(long, Type.FLOAT32)
    else:
        short = build(x.op, *(part.short for part in parts))
    return _Forms(short, long, wide, has_wide, has_short)
