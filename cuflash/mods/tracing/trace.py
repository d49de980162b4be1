"""Traces a user function: calls it with traced values, whose result is the expression graph."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ...errors import ProblemError
from ...locks import Lock
from ...units import kind_of
from ..analysis.intervals import band
from ..graph.graph import MASK_ARGUMENTS, SCORE_ARGUMENTS, CapturedArray, Graph, Node, digest, post_order, variable
from ..graph.operations import SHORT_FLOATS, Type
from ..graph.precision import settled
from ..graph.simplify import cast, load, rebuilt, transform
from .branches import trace_branches
from .capture import Capture
from .operand import as_node
from .tracers import Traced, TracedScalar, dtypes

# The two kinds of functions: their arguments, and the type of their results.
SIGNATURES = {"score_mod": (SCORE_ARGUMENTS, Type.FLOAT32), "mask_mod": (MASK_ARGUMENTS, Type.BOOL)}
MAX_TRACES = 256  # keys in the cache
MAX_TRACES_OF_CODE = 8  # traces in the cache of functions with one code
MAX_NUMBERS = 8  # different numbers before the warning
MAX_FORMS = 32  # graphs of one code that differ in more than numbers


class _Trace(NamedTuple):
    """The trace of a function. `arrays` returns the arrays of another function, or None if its graph differs.

    kinds: dtype, shape and type of each array, as in `CapturedArray`.
    """

    arrays: Callable[[Any], tuple[Any, ...] | None]
    kinds: tuple[tuple[str, tuple[int, ...], Type], ...]
    root: Node
    digest: str

    def graph(self, function: Any) -> Graph | None:
        """Returns this graph with the arrays of a function; None if the graph of the function differs."""
        if (arrays := self.arrays(function)) is None:
            return None
        captured = [CapturedArray(array, *kind) for array, kind in zip(arrays, self.kinds, strict=True)]
        return Graph(self.root, tuple(captured), self.digest)


_traces: OrderedDict[tuple[str, int], list[_Trace]] = OrderedDict()
# Digests of graphs, by code and by the form of a graph without its numbers; None after the warning.
_digests: WeakKeyDictionary[Any, dict[int, set[str]] | None] = WeakKeyDictionary()
_lock = Lock()


def trace(function: Callable[..., Any], kind: str) -> Graph:
    """Returns the graph of a score_mod or a mask_mod. A cached trace is matched in microseconds.

    The graph has the arrays that the function refers to now, and each call reads their values. Numbers, lists and
    attributes are read anew, too, and change the graph when they change. Results of library functions without traced
    arguments, such as random numbers, stay fixed from the first trace.
    """
    if not callable(function) or isinstance(function, type):
        what = f"the class {function.__name__}" if isinstance(function, type) else kind_of(function)
        raise ProblemError(f"{kind} is {what}; it must be a function {_signature(kind)}")
    key = kind, id(_code_of(function))
    for entry in _traces.get(key, ()):
        if (graph := entry.graph(function)) is not None:
            return graph
    graph, capture = _traced(function, kind)
    if kind == "score_mod" or band(graph.root) is None:  # a window is no part of a kernel
        warn_if_recompiling(_code_of(function), f"{kind} {name_of(function)}", graph)
    if not capture.guards.is_complete:
        return graph
    kinds = tuple((each.dtype, each.shape, each.type) for each in graph.arrays)
    arrays = capture.guards.function([capture.read_of(each) for each in graph.arrays])
    with _lock:
        _traces[key] = [_Trace(arrays, kinds, graph.root, graph.digest), *_traces.get(key, [])][:MAX_TRACES_OF_CODE]
        _traces.move_to_end(key)
        while len(_traces) > MAX_TRACES:
            _traces.popitem(last=False)
    return graph


def warn_if_recompiling(code: Any, name: str, graph: Graph) -> None:
    """Records a new graph of a function, and warns once if many graphs of its code differ only in numbers.

    code: the code object, or the class of a callable object. name: of the function in the warning.
    """
    with _lock:
        forms = _digests.setdefault(code, {})
        if forms is None:
            return
        if len(forms) >= MAX_FORMS:
            forms.clear()
        digests = forms.setdefault(_form(graph), set())
        digests.add(graph.digest)
        if len(digests) < MAX_NUMBERS:
            return
        _digests[code] = None
    warnings.warn(
        f"{name} was traced with {MAX_NUMBERS} different numbers, and each compiles kernels of its own on a GPU. Refer "
        "to a number that changes as an array without axes, or write x[0] for an array x of one element: each call "
        "reads its value, and nothing is compiled anew.",
        RuntimeWarning,
        stacklevel=3,
    )


def _form(graph: Graph) -> int:
    """Returns a hash of a graph without its numbers."""
    order = post_order([graph.root])
    indices = {each: index for index, each in enumerate(order)}
    nodes = [
        (each.op, each.type, None if each.op == "constant" else each.value, *[indices[x] for x in each.arguments])
        for each in order
    ]
    return hash((tuple(nodes), tuple((each.dtype, len(each.shape)) for each in graph.arrays)))


def _signature(kind: str) -> str:
    return f"of ({', '.join(SIGNATURES[kind][0])})"


def _code_of(function: Any) -> Any:
    """Returns the code of a function, or the class of another object: the key of its traces."""
    while isinstance(function, (types.MethodType, functools.partial)):
        function = function.__func__ if isinstance(function, types.MethodType) else function.func
    return function.__code__ if isinstance(function, types.FunctionType) else type(function)


def name_of(function: Any) -> str:
    """Returns the name of a function and the line on which it begins."""
    code = _code_of(function)
    if not isinstance(code, types.CodeType):
        return repr(function)
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _traced(function: Any, kind: str) -> tuple[Graph, Capture]:
    _check_arity(function, kind)
    names, _ = SIGNATURES[kind]
    capture = Capture(function)
    arguments = [TracedScalar(variable(name)) for name in names]
    token = dtypes.set(capture.dtypes())
    try:
        root = trace_branches(lambda: _result(capture.function(*arguments), function, kind))
    except ProblemError:
        raise
    except Exception as error:
        error.add_note(f"This was raised while cuflash traced the {kind} {name_of(function)}, as if for one score.")
        raise
    finally:
        dtypes.reset(token)
    return graph_of(root, capture.arrays, kind, name_of(function)), capture


def _check_arity(function: Any, kind: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*SIGNATURES[kind][0])
    except TypeError as error:
        raise ProblemError(
            f"{kind} must be a function {_signature(kind)}, but {name_of(function)} takes {signature}: {error}"
        ) from None


def _result(value: Any, function: Any, kind: str) -> Node:
    is_whole = isinstance(value, Traced) and value.shape not in ((), (1,))
    if is_whole or value is None or isinstance(value, str | tuple | list | dict):
        what = "a whole array" if is_whole else kind_of(value)
        raise ProblemError(f"{kind} {name_of(function)} returned {what}; it must return one value")
    return as_node(value)


def graph_of(root: Node, arrays: list[CapturedArray], kind: str, name: str) -> Graph:
    """Returns the graph of a function's result, with the arrays that the result loads from. name: for errors.

    A score may be any number, but a mask must be a condition.
    """
    if (root.type == Type.BOOL) != (kind == "mask_mod"):
        rule = "bool; compare it with something" if kind == "mask_mod" else "a number; conditions belong to mask_mod"
        raise ProblemError(f"{kind} {name} returned a value of type {root.type.name.lower()}; it must return {rule}")
    (root,) = settled([cast(root, SIGNATURES[kind][1])])
    numbers = list(dict.fromkeys(each.value for each in post_order([root]) if each.op == "load"))
    indices = {number: index for index, number in enumerate(numbers)}

    def renumbered(x: Node, arguments: list[Node]) -> Node:
        if x.op in SHORT_FLOATS and arguments[0].op == "load":
            number = numbers[arguments[0].value]
            return arguments[0] if x.op == f"as_{arrays[number].dtype}" else rebuilt(x, arguments)
        return load(indices[x.value], x.type, arguments, x.extent) if x.op == "load" else rebuilt(x, arguments)

    (root,) = transform([root], renumbered)
    captured = tuple(arrays[number] for number in numbers)
    return Graph(root, captured, digest([root], captured))
