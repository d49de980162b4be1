"""What the gradient of a captured array consists of: a term for each place where scores load from it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from ..errors import UnsupportedError
from ..mods.graph.affine import linear
from ..mods.graph.derivative import differentiate
from ..mods.graph.graph import Node
from ..problem.mod_spec import BIAS_AXES, ModSpec

MAX_AXES = 8  # of an array whose gradient is wanted: the arrays of `ModGradientParams` in kernels_cu/common/params.cuh


class Term(NamedTuple):
    """The gradient of scores by one load, and the load's indices: the name of one of BIAS_AXES, a constant, or None.

    None stands for what is to be computed for each score.
    """

    load: Node
    derivative: Node
    axes: tuple[str | int | None, ...]


@lru_cache(maxsize=64)
def terms_of(mod_spec: ModSpec) -> dict[int, tuple[Term, ...]]:
    """The terms of each array that has some, by its number in `mod_spec.arrays`."""
    terms: dict[int, tuple[Term, ...]] = {}
    for load, derivative in ({} if mod_spec.score is None else differentiate(mod_spec.score)).items():
        is_flat = derivative.op == "constant" and derivative.value == 0
        if load.op == "load" and not is_flat:
            term = Term(load, derivative, tuple(map(_axis, load.arguments)))
            terms[load.value] = (*terms.get(load.value, ()), term)
    return terms


def _axis(index: Node) -> str | int | None:
    form = linear(index)
    if not form.coefficients:
        return form.constant
    ((atom, factor), *more) = form.coefficients.items()
    is_plain = form.constant == 0 and factor == 1 and not more and atom.op == "input"
    return atom.value if is_plain and atom.value in BIAS_AXES else None


def is_affine(index: Node) -> bool:
    """Whether an index is a sum of multiples of b, h, q_idx, k_idx and the lengths."""
    return all(atom.op == "input" for atom in linear(index).coefficients)


class Sums(NamedTuple):
    """How a term is summed.

    separate_axes: the axes of BIAS_AXES that index the array, so that each index has a sum. gathered_axes: the
    axes of the array whose index is computed for each score; sums are then separate by sequence and head at most.
    firsts, counts: the indices of each axis that have sums. names: the axis of BIAS_AXES that an axis follows, or None.
    """

    separate_axes: tuple[str, ...]
    gathered_axes: tuple[int, ...]
    firsts: tuple[int, ...]
    counts: tuple[int, ...]
    names: tuple[str | None, ...]


def sums_of(term: Term, shape: tuple[int, ...], lengths: Mapping[str, int]) -> Sums:
    """How a term is summed for an array of this shape, where BIAS_AXES have these lengths."""
    if len(shape) > MAX_AXES:
        raise UnsupportedError(f"the gradient of an array of {len(shape)} axes; up to {MAX_AXES} are supported")
    names: list[str | None] = []
    for axis, extent in zip(term.axes, shape, strict=True):
        # why not of a shorter axis: its last element is then that of several indices.
        is_separate = isinstance(axis, str) and extent >= lengths[axis] and axis not in names
        names.append(axis if isinstance(axis, str) and is_separate else None)
    gathered_axes = [
        axis_index
        for axis_index, name in enumerate(names)
        if name is None and not isinstance(term.axes[axis_index], int)
    ]
    if gathered_axes:
        names = [name if name in ("b", "h") else None for name in names]
        gathered_axes = [
            axis_index
            for axis_index, name in enumerate(names)
            if name is None and not isinstance(term.axes[axis_index], int)
        ]
    firsts, counts = [], []
    for axis_index, (axis, name, extent) in enumerate(zip(term.axes, names, shape, strict=True)):
        is_fixed = isinstance(axis, int) and axis_index not in gathered_axes
        firsts.append(_clamped(axis, extent) if isinstance(axis, int) and is_fixed else 0)
        counts.append(1 if is_fixed else extent if name is None else lengths[name])
    separate_axes = tuple(name for name in BIAS_AXES if name in names)
    return Sums(separate_axes, tuple(gathered_axes), tuple(firsts), tuple(counts), tuple(names))


def _clamped(index: int, extent: int) -> int:
    return min(max(index + extent if index < 0 else index, 0), extent - 1)
