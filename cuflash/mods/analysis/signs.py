"""Distances whose sign is known: under a causal mask no key that is seen stands behind the query's position."""

from __future__ import annotations

from functools import lru_cache

from ..graph.affine import linear
from ..graph.graph import Node, post_order, variable
from ..graph.simplify import build, rebuilt

_DISTANCE = {"k_idx": 1, "q_idx": -1, "seqlen_k": -1, "seqlen_q": 1}  # of the key behind the query's position


@lru_cache(maxsize=64)
def of_causal_pairs(root: Node) -> Node:
    """An expression with the same values wherever k_idx is at most q_idx + seqlen_k - seqlen_q.

    why: a sum that depends linearly on the key takes an instruction less for each score than an absolute value.
    """
    new: dict[Node, Node] = {}
    for each in post_order([root]):
        arguments = [new[argument] for argument in each.arguments]
        sign = _sign(each.arguments[0]) if each.op == "absolute" else 0
        if sign:
            new[each] = arguments[0] if sign > 0 else build("negative", arguments[0])
        else:
            new[each] = rebuilt(each, arguments)
    return new[root]


def _sign(x: Node) -> int:
    """1 where a number is known not to be negative, -1 where it is known not to be positive, else 0."""
    if x.op == "cast":
        x = x.arguments[0]
    if not x.type.is_integer:
        return 0
    form = linear(x)
    factor = form.coefficients.get(variable("k_idx"), 0)
    if form.coefficients != {variable(name): factor * sign for name, sign in _DISTANCE.items()}:
        return 0
    return -1 if factor > 0 >= form.constant else 1 if factor < 0 <= form.constant else 0
