"""Evaluation of expression graphs on NumPy arrays: it defines the results of traced functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..mods.graph.graph import Node, post_order
from ..mods.graph.operations import NUMPY, Type, converted
from ..mods.graph.simplify import pick_form


def evaluate(
    roots: Sequence[Node],
    inputs: Mapping[str, Any],
    arrays: Sequence[Any],
    float_type: type[np.floating[Any]] = np.float32,
) -> list[Any]:
    """Returns the values of nodes, as NumPy arrays or scalars.

    inputs: the values of inputs by name, which are broadcast together. arrays: the captured arrays, as NumPy arrays.
    float_type: the type that computes float32 nodes; float64 shows the error of rounding.
    """
    values: dict[Node, Any] = {}
    roots = [pick_form(root, keys_as_rows=False) for root in roots]
    with np.errstate(all="ignore"):
        for each in post_order(roots):
            below = [values[argument] for argument in each.arguments]
            kind: Any = float_type if each.type == Type.FLOAT32 else each.type.numpy
            if each.op == "constant":
                value: Any = kind(each.value)
            elif each.op == "input":
                value = np.asarray(inputs[each.value])
            elif each.op == "cast":
                value = below[0]
            elif each.op == "load":
                value = _load(arrays[each.value], below)
            else:
                value = NUMPY[each.op](*below)
            values[each] = converted(value, kind)
    return [values[root] for root in roots]


def _load(array: Any, indices: list[Any]) -> Any:
    """Returns elements of an array. Negative indices count from the end; then all are clamped into the axis."""
    if 0 in array.shape:
        return np.zeros((), array.dtype)
    return array[tuple(place_of(i, length) for i, length in zip(indices, array.shape, strict=True))]


def place_of(index: Any, length: int) -> Any:
    """Returns the position on an axis from which a load with this index reads."""
    return np.clip(np.where(index < 0, index + length, index), 0, max(length - 1, 0))
