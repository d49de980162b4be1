"""Mods in XLA's programs: as a part of a call's attribute, and under vmap.

The attribute holds whole expressions, because programs outlive the process: in compilation caches and exports.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from ...mods.graph.graph import Node, post_order, variable
from ...mods.graph.simplify import build, constant, rebuilt, transform
from ...problem.mod_spec import ModSpec, substituted
from ...problem.operands import MOD_KINDS, SINKS, Operand


class Functions:
    """The mods of a call, hashable and equal by digest, with a short repr."""

    __slots__ = ("__weakref__", "mod_spec")

    def __init__(self, mod_spec: ModSpec) -> None:
        self.mod_spec = mod_spec

    @classmethod
    def from_spec(cls, mod_spec: ModSpec) -> Functions:
        """Returns the interned instance for a spec."""
        functions = _functions_by_digest.get(mod_spec.digest)
        if functions is None:
            functions = _functions_by_digest.setdefault(mod_spec.digest, cls(mod_spec))
        return functions

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Functions) and other.mod_spec.digest == self.mod_spec.digest

    def __hash__(self) -> int:
        return hash(self.mod_spec.digest)

    def __repr__(self) -> str:
        mod_spec = self.mod_spec
        parts = {"score": mod_spec.score, "mask": mod_spec.mask, "sinks": mod_spec.has_sinks, "dropout": mod_spec.drops}
        return f"<mods {', '.join(name for name, part in parts.items() if part not in (None, False))}>"

    def encoded(self) -> list[Any]:
        """Returns the spec as lists of numbers and strings."""
        return self.mod_spec.encoded()

    @classmethod
    def decoded(cls, encoded: list[Any]) -> Functions:
        """Returns the functions of an encoded spec."""
        *_, digest, _ = encoded
        return _functions_by_digest.get(digest) or cls.from_spec(ModSpec.decoded(encoded))


# Weak values: functions live as long as the programs that hold them.
_functions_by_digest: weakref.WeakValueDictionary[str, Functions] = weakref.WeakValueDictionary()


def is_mod_operand(operand: Operand) -> bool:
    """True if an operand of an op, or the array whose gradient it is, belongs to mods."""
    return operand.dtype in MOD_KINDS or operand.name == SINKS.name


def differentiable(mod_spec: ModSpec) -> tuple[int, ...]:
    """Returns the numbers of the arrays that may have gradients. Sinks have the number after the last array."""
    loads = [] if mod_spec.score is None else [each for each in post_order([mod_spec.score]) if each.op == "load"]
    numbers = {each.value for each in loads if mod_spec.arrays[each.value].type.is_float}
    return *sorted(numbers), *([len(mod_spec.arrays)] if mod_spec.has_sinks else [])


def folded(
    names: tuple[str, ...],
    functions: Functions,
    axis: str,
    length: int,
    size: int,
    is_outer: bool,
    apart: frozenset[str],
) -> tuple[tuple[str, ...], Functions]:
    """Returns operand names and functions after vmap, with axis "b" or "h" `size` times as long.

    length: the axis before. is_outer: the new axis is the outer one. apart: the arrays that differ along the new axis,
    which is then their first axis.
    """
    mod_spec, whole = functions.mod_spec, variable(axis)
    if not apart and not any(root is not None and axis in root.inputs for root in (mod_spec.score, mod_spec.mask)):
        return names, functions
    by = constant(length if is_outer else size)
    divided, rest = build("floor_divide", whole, by), build("remainder", whole, by)
    place, inner = (divided, rest) if is_outer else (rest, divided)
    numbers = frozenset(number for number, each in enumerate(mod_spec.arrays) if each.name in apart)
    score, mask = (
        None if root is None else _with_place(substituted(root, {whole: inner}), numbers, place)
        for root in (mod_spec.score, mod_spec.mask)
    )
    # A bias becomes a captured array: its first two axes no longer match the call's.
    kinds = tuple(
        each._replace(name=f"captured{number}", rank=each.rank + (number in numbers))
        for number, each in enumerate(mod_spec.arrays)
    )
    new = {before.name: after.name for before, after in zip(mod_spec.arrays, kinds, strict=True)}
    digest = f"{mod_spec.digest} of {axis} {length} x {size} {is_outer} {sorted(numbers)}"
    folded_spec = replace(mod_spec, score=score, mask=mask, arrays=kinds, digest=digest)
    return tuple(new.get(name, name) for name in names), Functions.from_spec(folded_spec)


def _with_place(root: Node, numbers: frozenset[int], place: Node) -> Node:
    """Returns the expression with one more first axis, at index `place`, in the arrays of these numbers."""

    def rule(x: Node, arguments: list[Node]) -> Node:
        return rebuilt(x, [place, *arguments] if x.op == "load" and x.value in numbers else arguments)

    (new_root,) = transform([root], rule)
    return new_root
