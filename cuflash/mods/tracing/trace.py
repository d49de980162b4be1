"""A function of the user as an expression graph: it is called with traced values, and what it returns is the graph."""

from __future__ import annotations

import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from ...errors import ProblemError
from ...locks import Lock
from ..analysis.intervals import band
from ..graph.graph import MASK_ARGUMENTS, SCORE_ARGUMENTS, CapturedArray, Graph, Node, digest, post_order, variable
from ..graph.operations import Type
from ..graph.simplify import cast, load, rebuilt
from .branches import all_paths
from .capture import Capture
from .numbers_that_change import warn_of_numbers
from .operand import as_node
from .tracers import Traced, TracedScalar, dtypes

# The two kinds of functions: their arguments, and the type of their results.
KINDS = {"score_mod": (SCORE_ARGUMENTS, Type.FLOAT32), "mask_mod": (MASK_ARGUMENTS, Type.BOOL)}
MAX_TRACES = 256  # that are kept
MAX_OF_CODE = 8  # of those, of functions with the same code


class _Trace(NamedTuple):
    """A function that was traced: `arrays` finds the arrays of another one, or None if that has another graph.

    kinds: dtype, shape and type of each array, as `CapturedArray` has them.
    """

    arrays: Callable[[Any], tuple[Any, ...] | None]
    kinds: tuple[tuple[str, tuple[int, ...], Type], ...]
    root: Node
    digest: str

    def graph(self, function: Any) -> Graph | None:
        """The graph of a function, with its own arrays, if it is this one."""
        if (found := self.arrays(function)) is None:
            return None
        arrays = [CapturedArray(array, *kind) for array, kind in zip(found, self.kinds, strict=True)]
        return Graph(self.root, tuple(arrays), self.digest)


_traces: OrderedDict[tuple[str, int], list[_Trace]] = OrderedDict()
_lock = Lock()


def trace(function: Callable[..., Any], kind: str) -> Graph:
    """The graph of a score_mod or a mask_mod. A function that was traced before is recognised in microseconds.

    Its arrays are those that it refers to now, and each call reads their values. Numbers, lists and attributes that it
    refers to are read anew, too, and change the graph when they change; what it gets by calling functions of libraries
    without traced values, such as random numbers, stays as it was when the function was traced.
    """
    if not callable(function) or isinstance(function, type):
        given = f"the class {function.__name__}" if isinstance(function, type) else f"a {type(function).__name__}"
        raise ProblemError(f"{kind} is {given}; it must be a function {_signature(kind)}")
    key = kind, id(_code_of(function))
    for known in _traces.get(key, ()):
        if (graph := known.graph(function)) is not None:
            return graph
    graph, capture = _traced(function, kind)
    if kind == "score_mod" or band(graph.root) is None:  # why: a mask that is a window is no part of a kernel
        warn_of_numbers(_code_of(function), f"{kind} {_name_of(function)}", graph)
    if not capture.guards.is_complete:
        return graph
    kinds = tuple((each.dtype, each.shape, each.type) for each in graph.arrays)
    arrays = capture.guards.function([capture.read_of(each) for each in graph.arrays])
    made = _Trace(arrays, kinds, graph.root, graph.digest)
    with _lock:
        _traces[key] = [made, *_traces.get(key, [])][:MAX_OF_CODE]
        _traces.move_to_end(key)
        while len(_traces) > MAX_TRACES:
            _traces.popitem(last=False)
    return graph


def _signature(kind: str) -> str:
    return f"of ({', '.join(KINDS[kind][0])})"


def _code_of(function: Any) -> Any:
    """The code behind a function, by which its traces are found; of other objects, their class."""
    while isinstance(function, (types.MethodType, functools.partial)):
        function = function.__func__ if isinstance(function, types.MethodType) else function.func
    return function.__code__ if isinstance(function, types.FunctionType) else type(function)


def _name_of(function: Any) -> str:
    code = _code_of(function)
    if not isinstance(code, types.CodeType):
        return repr(function)
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _traced(function: Any, kind: str) -> tuple[Graph, Capture]:
    _check_arity(function, kind)
    names, _ = KINDS[kind]
    capture = Capture(function)
    arguments = [TracedScalar(variable(name)) for name in names]
    token = dtypes.set(capture.dtypes())
    try:
        root = all_paths(lambda: _result(capture.function(*arguments), function, kind))
    except ProblemError:
        raise
    except Exception as error:
        error.add_note(f"This was raised while cuflash traced the {kind} {_name_of(function)}, as if for one score.")
        raise
    finally:
        dtypes.reset(token)
    return graph_of(root, capture.arrays, kind, _name_of(function)), capture


def _check_arity(function: Any, kind: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions written in C nobody knows
        return
    try:
        signature.bind(*KINDS[kind][0])
    except TypeError as error:
        raise ProblemError(
            f"{kind} must be a function {_signature(kind)}, but {_name_of(function)} takes {signature}: {error}"
        ) from None


def _result(value: Any, function: Any, kind: str) -> Node:
    is_whole = isinstance(value, Traced) and value.shape not in ((), (1,))
    if is_whole or value is None or isinstance(value, str | tuple | list | dict):
        given = "a whole array" if is_whole else f"a {type(value).__name__}"
        raise ProblemError(f"{kind} {_name_of(function)} returned {given}; it must return one value")
    return as_node(value)


def graph_of(root: Node, arrays: list[CapturedArray], kind: str, name: str) -> Graph:
    """The graph of a result of a function that is called `name` in errors, with the arrays that it still loads from.

    A score may be any number, but a mask must be a condition.
    """
    if (root.type == Type.BOOL) != (kind == "mask_mod"):
        given = root.type.name.lower()
        wanted = "bool; compare it with something" if kind == "mask_mod" else "a number; conditions belong to mask_mod"
        raise ProblemError(f"{kind} {name} returned a value of type {given}; it must return {wanted}")
    root, used = _of_used_arrays(cast(root, KINDS[kind][1]), arrays)
    return Graph(root, tuple(used), digest([root], used))


def _of_used_arrays(root: Node, arrays: list[CapturedArray]) -> tuple[Node, list[CapturedArray]]:
    """The graph without the arrays that nothing is loaded from any more, and those that are left."""
    order = post_order([root])
    used = list(dict.fromkeys(each.value for each in order if each.op == "load"))
    places = {number: place for place, number in enumerate(used)}
    new: dict[Node, Node] = {}
    for each in order:
        arguments = [new[argument] for argument in each.arguments]
        new[each] = load(places[each.value], each.type, arguments) if each.op == "load" else rebuilt(each, arguments)
    return new[root], [arrays[number] for number in used]
