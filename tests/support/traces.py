"""Comparison of traced functions with the functions called on plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from expressions import points

from cuflash.mods.graph.graph import Graph
from cuflash.mods.tracing.trace import trace
from cuflash.reference.evaluate import evaluate

COUNT = 40
POINTS = points(COUNT)
_INTEGERS = ("b", "h", "q_idx", "k_idx")


def host(array: Any) -> Any:
    """Returns a captured array in NumPy."""
    if hasattr(array, "detach"):
        array = array.detach().float() if "bfloat16" in str(array.dtype) else array.detach()
    return np.asarray(array)


def values_of(graph: Graph, float_type: type[np.floating[Any]] = np.float64) -> Any:
    """Returns the values of a graph at all points."""
    arrays = [host(each.array) for each in graph.arrays]
    return np.broadcast_to(evaluate([graph.root], POINTS, arrays, float_type)[0], COUNT)


def called(function: Callable[..., Any], kind: str, number: Callable[[Any], Any] = int) -> Any:
    """Returns a function's results at all points. number: converts an index, perhaps to a library's scalar."""
    values = []
    for i in range(COUNT):
        indices = [number(int(POINTS[name][i])) for name in _INTEGERS]
        scores = [POINTS["score"][i]] if kind == "score_mod" else []
        values.append(function(*scores, *indices))
    return np.array([np.asarray(host(each)) for each in values])


def check(function: Callable[..., Any], kind: str, number: Callable[[Any], Any] = int) -> Graph:
    """Traces a function, compares the graph's values with the function's, and returns the graph."""
    graph = trace(function, kind)
    expected = called(function, kind, number)
    if kind == "mask_mod":
        np.testing.assert_array_equal(values_of(graph), expected)
    else:
        np.testing.assert_allclose(values_of(graph), expected.astype(np.float64), rtol=1e-5, atol=1e-5)
    return graph
