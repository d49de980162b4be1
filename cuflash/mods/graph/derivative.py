"""Derivatives of expression graphs, as expressions again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from .graph import Node, post_order
from .operations import SHORT_FLOATS, Type
from .precision import settled
from .simplify import build, cast, constant, has_inverse


class _Adjoint(NamedTuple):
    """The derivative of the root by a node: `value` where all conditions in `guard` hold, and zero elsewhere.

    The guard is separate, because `value` may be infinite where a condition is false, and zero times infinity is NaN.
    """

    guard: frozenset[Node]
    value: Node


def differentiate(root: Node, seed: Node | None = None) -> dict[Node, Node]:
    """Returns the derivatives of a node by the score and by every float that is loaded below it, times `seed`.

    The keys are the nodes of the score and of the loads. At a corner of a function the derivative equals PyTorch's and
    JAX's. Equal arguments of minimum and maximum get half each, and the absolute value has 0 at 0. Rounding,
    comparisons and integers are flat. The branch that `where` does not select adds nothing, even if its derivative is
    not finite.
    """
    order = post_order([root])
    live = _live(order)
    adjoints: dict[Node, _Adjoint] = {}
    if root in live:
        adjoints[root] = _Adjoint(frozenset(), constant(1.0) if seed is None else cast(seed, Type.FLOAT32))
    for each in reversed(order):
        if each not in adjoints:
            continue
        for place, argument in enumerate(each.arguments):
            if argument in live:
                part = _part(each, place, adjoints[each])
                adjoints[argument] = _sum(adjoints[argument], part) if argument in adjoints else part
    keys = [each for each in order if _is_key(each)]
    return dict(zip(keys, settled([_closed(adjoints.get(each)) for each in keys], are_settled=True), strict=True))


def _is_key(node: Node) -> bool:
    return node.type.is_float and node.op in ("input", "load")


def _live(order: list[Node]) -> set[Node]:
    """Returns the nodes that change with the score or with a loaded float."""
    live: set[Node] = set()
    for each in order:
        is_smooth = each.type.is_float and each.op in _SMOOTH
        if _is_key(each) or (is_smooth and any(argument in live for argument in each.arguments)):
            live.add(each)
    return live


def _part(node: Node, place: int, adjoint: _Adjoint) -> _Adjoint:
    """Returns the contribution of a node's adjoint to the argument with index `place`."""
    guard, value = adjoint
    if node.op == "where":
        condition = node.arguments[0]
        return _Adjoint(guard | {condition if place == 1 else build("logical_not", condition)}, value)
    if node.op in _EXTREMES:
        x, other = node.arguments[place], node.arguments[1 - place]
        is_extreme = build("less_equal", *((x, other) if node.op in ("minimum", "fmin") else (other, x)))
        half = build("multiply", value, constant(0.5))
        return _Adjoint(guard | {is_extreme}, build("where", build("equal", x, other), half, value))
    if node.op in _SLOPES:
        return _Adjoint(guard, build("multiply", value, _SLOPES[node.op](node)))
    return _Adjoint(guard, _PARTS[node.op][place](node, value))


def _sum(x: _Adjoint, y: _Adjoint) -> _Adjoint:
    common = x.guard & y.guard
    one, other = _all(x.guard - common), _all(y.guard - common)
    if other is build("logical_not", one):
        return _Adjoint(common, build("where", one, x.value, y.value))
    zero = constant(0.0)
    total = build("add", build("where", one, x.value, zero), build("where", other, y.value, zero))
    either = build("bitwise_or", one, other)
    return _Adjoint(common if either.op == "constant" else common | {either}, total)


def _all(conditions: frozenset[Node]) -> Node:
    """Returns the node that is True if all conditions hold."""
    result = constant(True)
    # Sorted, because a set has no order and the code must be the same in every process.
    for each in sorted(conditions, key=lambda condition: condition.digest):
        result = build("bitwise_and", result, each)
    return result


def _closed(adjoint: _Adjoint | None) -> Node:
    """Returns the derivative of an adjoint."""
    if adjoint is None:
        return constant(0.0)  # all operations between the root and the node are flat
    return build("where", _all(adjoint.guard), adjoint.value, constant(0.0))


def _negative(x: Node) -> Node:
    return build("negative", x)


def _times(x: Node, y: Node | float) -> Node:
    """Returns a product whose constants are folded into one factor; constants of successive adjoints often cancel."""
    factor = y if isinstance(y, Node) else constant(y)
    if x.op == "constant":
        x, factor = factor, x
    if x.op == "multiply" and x.arguments[1].op == factor.op == "constant":
        return _times(x.arguments[0], build("multiply", x.arguments[1], factor))
    return build("multiply", x, factor)


def _divided(x: Node, y: Node) -> Node:
    """Returns a quotient, as a product if the divisor has an inverse: a product need not be rounded like a quotient."""
    return _times(x, build("divide", constant(1.0), y)) if has_inverse(y) else build("divide", x, y)


def _inverse(x: Node) -> Node:
    return build("divide", constant(1.0), x)


def _erf_slope(node: Node) -> Node:
    x = node.arguments[0]
    return _times(build("exp", _negative(_times(x, x))), 2 / math.sqrt(math.pi))


# Derivatives of functions of one argument, by the value of the function where this is shorter.
_SLOPES: dict[str, Callable[[Node], Node]] = {
    "exp": lambda node: node,
    "exp2": lambda node: _times(node, math.log(2)),
    "expm1": lambda node: build("add", node, constant(1.0)),
    "log": lambda node: _inverse(node.arguments[0]),
    "log2": lambda node: build("divide", constant(1 / math.log(2)), node.arguments[0]),
    "log10": lambda node: build("divide", constant(1 / math.log(10)), node.arguments[0]),
    "log1p": lambda node: _inverse(build("add", node.arguments[0], constant(1.0))),
    "sqrt": lambda node: build("divide", constant(0.5), node),
    "rsqrt": lambda node: _times(_times(node, _times(node, node)), -0.5),
    "tanh": lambda node: build("subtract", constant(1.0), _times(node, node)),
    "sin": lambda node: build("cos", node.arguments[0]),
    "cos": lambda node: _negative(build("sin", node.arguments[0])),
    "erf": _erf_slope,
    "absolute": lambda node: build("sign", node.arguments[0]),
}


def _same(node: Node, adjoint: Node) -> Node:
    return adjoint


def _opposite(node: Node, adjoint: Node) -> Node:
    return _negative(adjoint)


def _divisor_part(node: Node, adjoint: Node) -> Node:
    return _negative(build("divide", _times(adjoint, node), node.arguments[1]))


def _base_part(node: Node, adjoint: Node) -> Node:
    base, exponent = node.arguments
    slope = _times(exponent, build("power", base, build("subtract", exponent, constant(1.0))))
    # Any base to the power of 0 is 1, but base ** -1 may be infinite.
    is_flat = build("equal", exponent, constant(0.0))
    return _times(adjoint, build("where", is_flat, constant(0.0), slope))


def _exponent_part(node: Node, adjoint: Node) -> Node:
    base, exponent = node.arguments
    zero = constant(0.0)
    # A power of 0 stays 0 when its positive exponent changes, but log(0) is infinite.
    is_flat = build("bitwise_and", build("equal", base, zero), build("less_equal", zero, exponent))
    return _times(adjoint, build("where", is_flat, zero, _times(node, build("log", base))))


def _modulus_part(divide: str) -> Callable[[Node, Node], Node]:
    def part(node: Node, adjoint: Node) -> Node:
        return _negative(_times(adjoint, build(divide, *node.arguments)))

    return part


# Adjoints of the arguments of other operations, as functions of the node and its adjoint.
_PARTS: dict[str, tuple[Callable[[Node, Node], Node], ...]] = {
    # Between floats, as other casts are not live. The rounding to 16 bits passes its derivative on.
    **dict.fromkeys(("cast", *SHORT_FLOATS), (_same,)),
    "negative": (_opposite,),
    "add": (_same, _same),
    "subtract": (_same, _opposite),
    "multiply": (
        lambda node, adjoint: _times(adjoint, node.arguments[1]),
        lambda node, adjoint: _times(adjoint, node.arguments[0]),
    ),
    "divide": (lambda node, adjoint: _divided(adjoint, node.arguments[1]), _divisor_part),
    "power": (_base_part, _exponent_part),
    "remainder": (_same, _modulus_part("floor_divide")),
    "truncated_remainder": (_same, _modulus_part("truncated_divide")),
}
_EXTREMES = ("minimum", "maximum", "fmin", "fmax")
# Operations that are not flat.
_SMOOTH = {*_SLOPES, *_PARTS, *_EXTREMES, "where"}
