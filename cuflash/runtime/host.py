"""Arrays in host memory: judged like all others, run through the NumPy reference, handed back in their library."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import numpy as np

from .. import reference
from ..arrays.dlpack import DlpackLibrary
from ..arrays.library import GpuLibrary, Library, as_4d
from ..errors import ProblemError
from ..problem.array_spec import overlap
from ..problem.operands import LSE_AXES, Op
from ..problem.options import Options
from ..problem.problem import Problem

Array = np.ndarray[Any, Any]


def run(op: Op, library: Library, given: tuple[Any, ...], options: Options) -> tuple[Any, ...]:
    """All results of a call on arrays in host memory: its inputs, then arrays for results, None for a new one."""
    pairs = zip(op.operands, given, strict=False)
    specs = [None if x is None else library.spec(operand.called, x) for operand, x in pairs]
    problem = Problem.of(op, specs, options)
    views = [None if x is None else library.to_numpy(x) for x in given]
    inputs = len(op.inputs)
    for number in (*op.written, *range(inputs, len(given))):
        if given[number] is not None:
            name, otherwise = op.names[number], "" if number < inputs else " or None"
            views[number] = written = _writable(library, name, given[number], otherwise)
            for other, view in zip(op.names, views, strict=False):
                if view is not None and name != other and (found := overlap(written, view)) is not False:
                    raise shared(name, other, found is None)
    for number, view in enumerate(views[:inputs]):
        # why: a dtype of another byte order equals none of NumPy's own, and NumPy's results are in the machine's order
        if view is not None and not view.dtype.isnative and number not in op.written:
            views[number] = view.astype(view.dtype.newbyteorder("="))
    results = compute(problem, views[:inputs], views[inputs:])
    made = zip_longest(results, given[inputs:])
    return tuple(library.from_numpy(x, like=given[0]) if out is None else out for x, out in made)


def shared(name: str, other: str, is_unknown: bool = False) -> ProblemError:
    """The error for an array that is written to and lies where another one does, or may lie there."""
    found = "has strides for which it takes too long to tell whether it shares" if is_unknown else "shares"
    return ProblemError(f"{name}, which is written to, {found} memory with {other}; give {name} memory of its own")


def compute(problem: Problem, arrays: Sequence[Array | None], outs: Sequence[Array | None] = ()) -> list[Array]:
    """The results of a problem, in the caller's rank, of inputs in that rank, which are also written to `outs`."""
    named = views_of(problem, arrays)
    results: Sequence[Array]
    # why: what this gets keeps what it holds in rows that nobody uses.
    kept = None if problem.lengths is None or problem.lengths.clears_unused else outs[0]
    out = None if kept is None else as_4d(kept)
    if problem.op.mod_spec is not None:
        results = reference.run_with_mods(problem, named, out)
    elif problem.lengths is not None:
        results = reference.of_sequences(problem, named, out)
    else:
        results = reference.RUN[problem.op.name](problem, *named.values())
    made = [np.asarray(x).reshape(shape) for x, (shape, _) in zip(results, problem.outputs, strict=True)]
    for out, result in zip(outs, made, strict=False):
        if out is not None:
            out[...] = result
    return made


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
    if any(stride % target.itemsize for stride in target.strides):
        raise ProblemError(
            f"{name} has strides of {target.strides} bytes, no multiples of the {target.itemsize} of an element; give "
            f"an array of whole steps{otherwise}"
        )
    if isinstance(library, GpuLibrary) and target.size and library.pointers([array]) != [target.ctypes.data]:
        raise ProblemError(f"{name} is a view that is yet to be negated, which cannot be written to{otherwise}")
    return target


def refuse_to_write(name: str, library: Library, otherwise: str = "") -> NoReturn:
    """Raises ProblemError for an array of a library whose arrays do not change."""
    raise ProblemError(
        f"{name} is a {library.name} array, which cannot be written to here; give a NumPy, CuPy or PyTorch array"
        f"{otherwise}"
    )
