"""A warning for functions that are traced again and again because a number that they refer to changes."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

from ...locks import Lock
from ..graph.graph import Graph, post_order

MOST = 8  # different numbers before the warning
MAX_FORMS = 32  # of graphs of one code that are told apart
_ALL = "all"  # in place of the forms of code that was warned of

# By code, and by the form of a graph without its numbers, the digests of the graphs that were made.
_found: WeakKeyDictionary[Any, dict[int, set[str]] | str] = WeakKeyDictionary()
_lock = Lock()


def warn_of_numbers(code: Any, described: str, graph: Graph) -> None:
    """Notes a new graph of a function with this code, and warns once if many differ in nothing but numbers.

    code: the code object, or the class of a callable object. described: what the warning calls the function.
    """
    with _lock:
        forms = _found.setdefault(code, {})
        if isinstance(forms, str):
            return
        if len(forms) >= MAX_FORMS:
            forms.clear()
        digests = forms.setdefault(_form(graph), set())
        digests.add(graph.digest)
        if len(digests) < MOST:
            return
        _found[code] = _ALL
    warnings.warn(
        f"{described} was traced with {MOST} different numbers, and each compiles kernels of its own on a GPU. Refer "
        "to a number that changes as an array without axes, or write x[0] for an array x of one element: each call "
        "reads its value, and nothing is compiled anew.",
        RuntimeWarning,
        stacklevel=3,
    )


def _form(graph: Graph) -> int:
    """What a graph is without its numbers."""
    order = post_order([graph.root])
    places = {each: place for place, each in enumerate(order)}
    nodes = [
        (each.op, each.type, None if each.op == "constant" else each.value, *[places[x] for x in each.arguments])
        for each in order
    ]
    return hash((tuple(nodes), tuple((each.dtype, len(each.shape)) for each in graph.arrays)))
