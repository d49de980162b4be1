"""Arrays in host memory: judged like all others, run through the NumPy reference, handed back in their library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from .. import reference
from ..arrays.dlpack import DlpackLibrary
from ..arrays.library import GpuLibrary, Library, as_4d
from ..errors import ProblemError
from ..problem.operands import LSE_AXES, Op
from ..problem.options import Options
from ..problem.problem import Problem

Array = np.ndarray[Any, Any]


def run(op: Op, library: Library, arrays: tuple[Any, ...], out: Any, options: Options) -> tuple[Any, ...]:
    """All results of a call on arrays in host memory."""
    given = (*arrays, out)
    specs = [None if x is None else library.spec(n, x) for n, x in zip(op.names, given, strict=False)]
    problem = Problem.of(op, specs, options)
    views = [None if x is None else library.to_numpy(x) for x in arrays]
    target = None if out is None else _writable(library, "out", out, " or leave out=None")
    if target is not None and any(np.shares_memory(target, x) for x in views if x is not None):
        raise ProblemError("out shares memory with an input; give an out of its own memory")
    for number in op.written:
        written = _writable(library, op.names[number], arrays[number])
        for name, view in zip(op.names, views, strict=False):
            if view is not None and name != op.names[number] and np.shares_memory(written, view):
                raise ProblemError(f"{op.names[number]}, which is written to, shares memory with {name}; give another")
    results = compute(problem, views, target)
    made = [library.from_numpy(x, like=arrays[0]) for x in results[target is not None :]]
    return (*made,) if target is None else (out, *made)


def compute(problem: Problem, arrays: Sequence[Array | None], out: Array | None = None) -> list[Array]:
    """The results of a problem, in the caller's rank, of inputs in that rank; the first is also written to `out`."""
    named = views_of(problem, arrays)
    results: Sequence[Array]
    if problem.lengths is not None:
        results = reference.of_sequences(problem, named, None if out is None else as_4d(out))
    else:
        results = reference.RUN[problem.op.name](problem, *named.values())
        if out is not None:
            out[...] = results[0].reshape(out.shape)
    return [np.asarray(x).reshape(shape) for x, (shape, _) in zip(results, problem.outputs, strict=True)]


def views_of(problem: Problem, arrays: Sequence[Any]) -> dict[str, Any]:
    """Views of the inputs that are there, which NumPy or CuPy arrays hold, with all of their axes, by name."""
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


def _writable(library: Library, name: str, array: Any, otherwise: str = "") -> Array:
    """An array that is written to, as a NumPy array of its memory. otherwise: what the caller may do instead."""
    if isinstance(library, DlpackLibrary):
        refuse_to_write(name, library, otherwise)
    target = library.to_numpy(array)
    if not target.flags.writeable:
        raise ProblemError(f"{name} is read-only; give a writable array{otherwise}")
    if isinstance(library, GpuLibrary) and target.size and library.pointer(array) != target.ctypes.data:
        raise ProblemError(f"{name} is a view that is yet to be negated, which cannot be written to{otherwise}")
    return target


def refuse_to_write(name: str, library: Library, otherwise: str = "") -> NoReturn:
    """Raises ProblemError for an array of a library whose arrays do not change."""
    raise ProblemError(
        f"{name} is a {library.name} array, which cannot be written to here; give a NumPy, CuPy or PyTorch array"
        f"{otherwise}"
    )
