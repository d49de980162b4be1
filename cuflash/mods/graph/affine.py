"""Sums of multiples of integer expressions, as nodes."""

from __future__ import annotations

from .graph import Node
from .linear import LinearForm
from .operations import Type
from .simplify import build, cast, constant


def from_linear(form: LinearForm) -> Node:
    """Returns the node of a linear form: positive parts come first, so that q - k stays a subtraction.

    Equal forms give the same node in every process. It is int64 where int32 may not hold the sum.
    """
    # Sorted by digest, because the order of a form's parts depends on the process.
    parts = sorted(form.coefficients.items(), key=lambda item: (item[1] < 0, item[0].digest))
    if form.constant != 0 or not parts:
        place = sum(factor > 0 for _, factor in parts) if form.constant >= 0 else len(parts)
        parts.insert(place, (constant(abs(form.constant)), -1 if form.constant < 0 else 1))
    type = _type_of_sum(parts)
    terms = [build("multiply", cast(atom, type), constant(abs(factor), type)) for atom, factor in parts]
    total = terms[0] if parts[0][1] > 0 else build("negative", terms[0])
    for term, (_, factor) in zip(terms[1:], parts[1:], strict=True):
        total = build("subtract" if factor < 0 else "add", total, term)
    return total


def _type_of_sum(parts: list[tuple[Node, int]]) -> Type:
    """Returns the smallest integer type in which no partial sum of the parts wraps."""
    least = greatest = 0
    limits = Type.INT32.limits
    for atom, factor in parts:
        products = [abs(factor) * end for end in atom.bounds]
        changes = products if factor > 0 else [-end for end in reversed(products)]
        least, greatest = least + changes[0], greatest + changes[1]
        if atom.type == Type.INT64 or min(products[0], least) < limits[0] or max(products[1], greatest) > limits[1]:
            return Type.INT64
    return Type.INT32
