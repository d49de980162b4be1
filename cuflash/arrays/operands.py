"""Arrays of a call as operands of its op: specs, views with all axes, and the error for overlapping memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import ProblemError
from ..problem.array_spec import ArraySpec
from ..problem.operands import LSE_AXES, Op
from ..problem.problem import Problem
from .library import Library, as_4d


def specs_of(op: Op, library: Library, arrays: Sequence[Any]) -> Iterator[ArraySpec | None]:
    """Yields the specs of a call's inputs and outputs, None for an omitted one."""
    for operand, array in zip(op.operands, arrays, strict=False):
        yield None if array is None else library.spec(operand.called, array)


def views_of(problem: Problem, arrays: Sequence[Any]) -> dict[str, Any]:
    """Returns views with all axes of the inputs, NumPy or CuPy arrays, by name. Omitted inputs are left out."""
    views = {}
    for operand, array in zip(problem.op.inputs, arrays, strict=False):
        if array is None:
            continue
        if len(operand.axes) == 4:
            array = as_4d(array)
        elif operand.axes == LSE_AXES:
            array = array.reshape(problem.shape(operand))
        views[operand.name] = array
    return views


def overlap_error(name: str, other: str, is_unknown: bool = False) -> ProblemError:
    """Returns the error for an output array that overlaps another array, or may overlap it if `is_unknown`."""
    shares = "has strides for which it takes too long to tell whether it shares" if is_unknown else "shares"
    return ProblemError(f"{name}, which is written to, {shares} memory with {other}; give {name} memory of its own")
