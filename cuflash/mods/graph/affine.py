"""Integer expressions as a constant plus multiples of other expressions, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .graph import Node, Range, post_order
from .operations import Type
from .simplify import build, cast, constant


@dataclass(frozen=True, slots=True)
class LinearForm:
    """`constant` plus the sum of coefficient × atom. An atom is a node that is no sum; no coefficient is zero."""

    constant: int
    coefficients: Mapping[Node, int]

    def __add__(self, other: LinearForm | int) -> LinearForm:
        if isinstance(other, int):
            return LinearForm(self.constant + other, self.coefficients)
        total = dict(self.coefficients)
        for atom, coefficient in other.coefficients.items():
            total[atom] = total.get(atom, 0) + coefficient
        return _without_zeros(self.constant + other.constant, total)

    def __sub__(self, other: LinearForm | int) -> LinearForm:
        return self + other * -1

    def __mul__(self, factor: int) -> LinearForm:
        return _without_zeros(self.constant * factor, {atom: n * factor for atom, n in self.coefficients.items()})

    @property
    def bounds(self) -> Range:
        """The range of the value, from the ranges of the atoms."""
        least = greatest = self.constant
        for atom, coefficient in self.coefficients.items():
            ends = [coefficient * end for end in atom.bounds]
            least, greatest = least + min(ends), greatest + max(ends)
        return least, greatest


def _without_zeros(constant: int, coefficients: Mapping[Node, int]) -> LinearForm:
    return LinearForm(constant, {atom: coefficient for atom, coefficient in coefficients.items() if coefficient})


def linear(root: Node) -> LinearForm:
    """Returns the linear form of an integer node. It has the value of the node where no sum below it wraps."""
    constant, coefficients = 0, {root: 1}
    # why from the root down: a node with many users is then taken apart once.
    for each in reversed(post_order([root])):
        parts = _parts(each) if each in coefficients else None
        if parts is None:
            continue
        factor = coefficients.pop(each)
        constant += factor * parts[0]
        for argument, coefficient in parts[1]:
            coefficients[argument] = coefficients.get(argument, 0) + factor * coefficient
    least, greatest = root.type.limits
    if not all(least <= number <= greatest for number in (constant, *coefficients.values())):
        return LinearForm(0, {root: 1})  # why: a sum with such a factor wraps
    return _without_zeros(constant, coefficients)


def _parts(node: Node) -> tuple[int, list[tuple[Node, int]]] | None:
    """Returns the constant and the arguments with their factors whose sum is the node; None for an atom."""
    if node.op == "constant":
        return node.value, []
    arguments = node.arguments
    if node.op == "cast":
        return (0, [(arguments[0], 1)]) if _keeps_value(node) else None
    if node.op in ("add", "subtract"):
        return 0, [(arguments[0], 1), (arguments[1], 1 if node.op == "add" else -1)]
    if node.op in ("negative", "invert"):
        return (-1 if node.op == "invert" else 0), [(arguments[0], -1)]
    if node.op == "multiply" and arguments[1].op == "constant":
        return 0, [(arguments[0], arguments[1].value)]
    if node.op == "left_shift" and arguments[1].op == "constant" and 0 <= arguments[1].value < 31:
        return 0, [(arguments[0], 2 ** arguments[1].value)]
    return None


def _keeps_value(node: Node) -> bool:
    """True if a cast is of an integer to a type that holds it."""
    integer = node.arguments[0]
    least, greatest = node.type.limits
    return integer.type.is_integer and least <= integer.bounds[0] and integer.bounds[1] <= greatest


def from_linear(form: LinearForm) -> Node:
    """Returns the node of a linear form: positive parts come first, so that q - k stays a subtraction.

    Equal forms give the same node in every process. It is int64 where int32 may not hold the sum.
    """
    # why by digest: the order of a form's parts depends on the process.
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
    """Returns the smaller type in which nothing wraps when the parts are added one after the other."""
    least = greatest = 0
    limits = Type.INT32.limits
    for atom, factor in parts:
        products = [abs(factor) * end for end in atom.bounds]
        changes = products if factor > 0 else [-end for end in reversed(products)]
        least, greatest = least + changes[0], greatest + changes[1]
        if atom.type == Type.INT64 or min(products[0], least) < limits[0] or max(products[1], greatest) > limits[1]:
            return Type.INT64
    return Type.INT32
