"""Integer expressions as a constant plus multiples of other expressions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .graph import Node, Range, post_order


@dataclass(frozen=True, slots=True)
class LinearForm:
    """`constant` plus the sum of coefficient × atom. An atom is a node that is no sum; coefficients are nonzero."""

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
    # From the root down, so that a node with many users is expanded once.
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
        return LinearForm(0, {root: 1})  # a sum with such a factor wraps
    return _without_zeros(constant, coefficients)


def _parts(node: Node) -> tuple[int, list[tuple[Node, int]]] | None:
    """Returns a constant and pairs (argument, factor) whose sum is the node; None for an atom."""
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
    """True if a cast is from an integer to a type that holds all of its values."""
    integer = node.arguments[0]
    least, greatest = node.type.limits
    return integer.type.is_integer and least <= integer.bounds[0] and integer.bounds[1] <= greatest
