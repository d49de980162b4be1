"""Reads jaxprs of scalars, the results of `jax.make_jaxpr`, as expression graphs, without an import of JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...errors import ProblemError
from ..graph.graph import Graph, Node, variable
from ..graph.simplify import build, constant
from .array_tracer import Arrays, TracedArray
from .functions import call, operation, to_type
from .operand import Operand, as_node, captured, fault, is_array, source_line, type_of_dtype
from .trace import SIGNATURES, graph_of
from .tracers import TracedScalar

# Primitives that change no value of a scalar.
_SAME = {"broadcast_in_dim", "squeeze", "reshape", "copy", "copy_p", "optimization_barrier"}
# Primitives whose names `call` does not have, or that mean something else there.
_PRIMITIVES: dict[str, Callable[..., Node]] = {
    "clamp": lambda low, x, high: call("clip", [x, low, high], {}),
    "not": partial(operation, "invert"),
}
# Functions of jax.numpy that are calls inside a jaxpr, read by name because their primitives hide their meaning.
_CALLS_BY_NAME = ("floor_divide", "remainder")
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def graph_of_jaxpr(closed: Any, kind: str) -> Graph:
    """Returns the graph of a closed jaxpr with the arguments of a score_mod or mask_mod, each a scalar.

    The arrays of its loads are constants of the jaxpr, or are computed here from constants alone.
    """
    reader = _Reader()
    arguments = [TracedScalar(variable(name)) for name in SIGNATURES[kind][0]]
    results = reader.run(closed.jaxpr, closed.consts, arguments)
    if len(results) != 1:
        raise fault(f"{kind} returned {len(results)} values; it must return one")
    return graph_of(reader.constant(results[0]).node, reader.arrays, kind, _name_of(closed.jaxpr))


class _Reader:
    """Reads jaxprs, and collects the arrays that they refer to."""

    def __init__(self) -> None:
        self.arrays = Arrays()
        self._traced: list[tuple[Any, TracedArray]] = []

    def constant(self, value: Any) -> Any:
        """Returns the traced value of a constant: a number of Python or NumPy, or an array, which is captured."""
        if isinstance(value, Operand | list):
            return value
        if isinstance(value, np.floating):
            return TracedScalar(as_node(value))
        if isinstance(value, np.generic):
            return TracedScalar(constant(value.item(), type_of_dtype(value.dtype)))
        if not is_array(value):
            return TracedScalar(constant(value))
        for constant_array, array in self._traced:
            if constant_array is value:
                return array
        self._traced.append((value, TracedArray(captured(value), self.arrays)))
        return self._traced[-1][1]

    def run(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr."""
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

        def read(variable: Any) -> Any:
            return _literal(variable) if hasattr(variable, "val") else values[variable]

        for equation in jaxpr.eqns:
            token = source_line.set(_line_of(equation) or source_line.get())
            try:
                results = self._equation(equation, [read(each) for each in equation.invars])
            finally:
                source_line.reset(token)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(each) for each in jaxpr.outvars]

    def _equation(self, equation: Any, arguments: list[Any]) -> list[Any]:
        name, parameters = equation.primitive.name, equation.params
        inner = next((parameters[key] for key in _INNER if key in parameters), None)
        if inner is not None and name not in ("while", "scan", "cond"):
            if not (parameters.get("name") in _CALLS_BY_NAME and _is_of_jax(getattr(inner, "jaxpr", inner))):
                return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), arguments)
            name = parameters["name"]
        elif not any(isinstance(each, Operand | list) for each in arguments):
            return self._from_constants(equation, arguments)
        return self._from_scalars(name, parameters, [self.constant(each) for each in arguments])

    def _from_constants(self, equation: Any, arguments: list[Any]) -> list[Any]:
        """Returns the results of an equation that depends on no argument of the function."""
        avals = [variable.aval for variable in (*equation.invars, *equation.outvars)]
        if not any(each.ndim for each in avals):
            with contextlib.suppress(ProblemError):  # JAX has more functions of numbers, which it computes below
                constants = [self.constant(each) for each in arguments]
                return self._from_scalars(equation.primitive.name, equation.params, constants)
        # JAX computes these arrays now, once per call, and the graph loads from them.
        result = equation.primitive.bind(*arguments, **equation.params)
        return list(result) if equation.primitive.multiple_results else [result]

    def _from_scalars(self, name: str, parameters: Any, arguments: list[Any]) -> list[Any]:
        if name == "cond":
            return self._cond(parameters["branches"], *arguments)
        if name == "concatenate":
            return [[part for each in arguments for part in (each if isinstance(each, list) else [each])]]
        if name in _SAME:
            return arguments
        if name == "convert_element_type" and not isinstance(arguments[0], list) and arguments[0].ndim > 0:
            return [arguments[0].astype(parameters["new_dtype"])]
        if name == "dynamic_slice":
            operand, *starts = arguments
            return [self._slice(operand, starts, parameters["slice_sizes"])]
        if name == "gather":
            return [self._gather(arguments[0], arguments[1], parameters)]
        if name in _CALLS_BY_NAME:
            return [TracedScalar(call(name, arguments, {}))]
        return [TracedScalar(self._scalar(name, parameters, arguments))]

    def _scalar(self, name: str, parameters: Any, arguments: list[Any]) -> Node:
        if name == "convert_element_type":
            return to_type(arguments[0], parameters["new_dtype"])
        if name == "integer_pow":
            power = operation("power", arguments[0], abs(parameters["y"]))
            return power if parameters["y"] >= 0 else operation("divide", 1.0, power)
        if name == "round" and int(parameters["rounding_method"]) != 1:
            return call(name, arguments, {}, "lax")  # it takes halves away from zero
        if name in _PRIMITIVES:
            return _PRIMITIVES[name](*arguments)
        return call(name, arguments, {}, "jax")

    def _cond(self, branches: Sequence[Any], which: Any, *arguments: Any) -> list[Any]:
        """Returns the results of branch number `which`, which is clamped to the first and the last branch."""
        last, *others = (
            [self.constant(each) for each in self.run(branch.jaxpr, branch.consts, arguments)]
            for branch in reversed(branches)
        )
        for place, results in zip(reversed(range(len(others))), others, strict=True):
            is_chosen = build("less_equal", which.node, constant(place))
            last = [TracedScalar(operation("where", is_chosen, *pair)) for pair in zip(results, last, strict=True)]
        return last

    def _slice(self, array: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Returns array[i, :, j]: an axis with a size of 1 gets an index, and all other axes are whole."""
        keys: list[Any] = []
        for start, size, extent in zip(starts, sizes, array.shape, strict=True):
            if size not in (1, extent):
                raise fault(f"a slice of {size} elements of {extent}; single elements and whole axes are known")
            # JAX has already wrapped negative indices, and clamps indices that are still negative to the first element.
            keys.append(TracedScalar(operation("maximum", start, 0)) if size == 1 else slice(None))
        return array[tuple(keys)]

    def _gather(self, array: Any, index: Any, parameters: Any) -> Any:
        if getattr(parameters["mode"], "name", "") == "FILL_OR_DROP":
            raise fault("jax.numpy.take and .at[].get() fill what is outside of an array; array[index] is known")
        numbers, sizes = parameters["dimension_numbers"], parameters["slice_sizes"]
        indices = index if isinstance(index, list) else [index]
        if len(indices) != len(numbers.start_index_map):
            raise fault(f"{len(indices)} indices of {len(numbers.start_index_map)} axes; single elements are known")
        starts: list[Any] = [0] * array.ndim
        for axis, each in zip(numbers.start_index_map, indices, strict=True):
            starts[axis] = each
        return self._slice(array, starts, sizes)


def _literal(literal: Any) -> Any:
    """Returns the value of a literal in its dtype."""
    return literal.val if np.ndim(literal.val) else np.asarray(literal.val, literal.aval.dtype)[()]


def _source_of(jaxpr: Any) -> str:
    """Returns the function behind a jaxpr, with its file and line."""
    return str(getattr(getattr(jaxpr, "debug_info", None), "func_src_info", ""))


def _name_of(jaxpr: Any) -> str:
    return _source_of(jaxpr) or "as a jaxpr"


def _is_of_jax(jaxpr: Any) -> bool:
    """True if the function behind a jaxpr belongs to JAX itself."""
    return "/jax/_src/" in _source_of(jaxpr).replace("\\", "/")


def _line_of(equation: Any) -> str | None:
    """Returns the line of the user function that an equation comes from, or None if JAX does not record it."""
    frames = getattr(getattr(getattr(equation, "source_info", None), "traceback", None), "frames", ())
    for frame in frames:
        if not any(f"/{name}/" in frame.file_name.replace("\\", "/") for name in ("jax", "jaxlib", "cuflash")):
            return f"{frame.file_name}:{frame.line_num}, in {frame.function_name}"
    return None
