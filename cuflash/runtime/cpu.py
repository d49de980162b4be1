"""Calls on arrays in host memory: validated like all others, run by the NumPy reference, in the caller's library.

Calls on PyTorch's device meta, which has no memory, are validated and return results of the right shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from .. import reference
from ..arrays.library import Library, as_4d
from ..arrays.operands import overlap_error, specs_of, views_of
from ..errors import ProblemError
from ..problem.array_spec import overlap
from ..problem.integers import check_integers
from ..problem.operands import Op
from ..problem.options import Options
from ..problem.problem import Problem

Array = np.ndarray[Any, Any]


def run(op: Op, library: Library, arrays: tuple[Any, ...], options: Options) -> tuple[Any, ...]:
    """Returns all results of a call on arrays in host memory, or on the device meta.

    arrays: the inputs of the call, then its outputs, None for a new one.
    """
    problem = Problem.from_specs(op, list(specs_of(op, library, arrays)), options)
    inputs = len(op.inputs)
    if problem.device == "meta":
        pairs = zip_longest(problem.outputs, arrays[inputs:])
        return tuple(library.without_values(*output) if out is None else out for output, out in pairs)
    views = [None if x is None else library.to_numpy(x) for x in arrays]
    for number in (*op.written, *range(inputs, len(arrays))):
        if arrays[number] is not None:
            name, otherwise = op.names[number], "" if number < inputs else " or None"
            views[number] = target = _writable(library, name, arrays[number], otherwise)
            for other, view in zip(op.names, views, strict=False):
                if view is not None and name != other and (overlaps := overlap(target, view)) is not False:
                    raise overlap_error(name, other, overlaps is None)
    for number, view in enumerate(views[:inputs]):
        # A dtype in another byte order equals no dtype of NumPy, whose results are in the machine's order.
        if view is not None and not view.dtype.isnative and number not in op.written:
            views[number] = view.astype(view.dtype.newbyteorder("="))
    results = zip_longest(compute(problem, views[:inputs], views[inputs:]), arrays[inputs:])
    return tuple(library.from_numpy(x, like=arrays[0]) if out is None else out for x, out in results)


def compute(problem: Problem, arrays: Sequence[Array | None], outs: Sequence[Array | None] = ()) -> list[Array]:
    """Computes a problem on inputs in the caller's rank; returns results in that rank and writes them to `outs`."""
    named = views_of(problem, arrays)
    check_integers(problem, named)
    results: Sequence[Array]
    # The output given by the caller, whose rows outside all sequences keep their values.
    keeps_rows = problem.seqlen_info is not None and not problem.seqlen_info.zero_unused_rows
    target = outs[0] if keeps_rows and not problem.op.accumulates else None
    out = None if target is None else as_4d(target)
    if problem.op.mod_spec is not None:
        results = reference.run_with_mods(problem, named, out)
    elif problem.seqlen_info is not None:
        results = reference.of_sequences(problem, named, out)
    else:
        keywords = {"delta": named.pop("delta")} if problem.op.delta == "takes" else {}
        results = reference.RUN[problem.op.name](problem, *named.values(), **keywords)
    if problem.op.accumulates:
        results = _sums(problem, results, outs)
    shaped = [np.asarray(x).reshape(shape) for x, (shape, _) in zip(results, problem.outputs, strict=True)]
    for out, result in zip(outs, shaped, strict=False):
        if out is not None:
            out[...] = result
    return shaped


def _sums(problem: Problem, results: Sequence[Array], outs: Sequence[Array | None]) -> list[Array]:
    """Returns results of `accumulate`: a state blended with the caller's, or gradients added to the caller's."""
    sums = [out.reshape(x.shape) for x, out in zip(results, outs, strict=False) if out is not None]
    if problem.op.name == "forward":
        merged = reference.merge_states((sums[0], results[0]), (sums[1], results[1]))
        unseen = np.isneginf(results[1])  # rows that keep their state
        unchanged = unseen.swapaxes(1, 2)[..., None], unseen
        return [np.where(rows, state, new) for rows, state, new in zip(unchanged, sums, merged, strict=True)]
    return [*[x + y for x, y in zip(sums, results, strict=False)], *results[len(sums) :]]


def _writable(library: Library, name: str, array: Any, otherwise: str = "") -> Array:
    """Returns a NumPy view of an array to write to. otherwise: an alternative for error texts."""
    library.check_writable(name, array, otherwise)
    target = library.to_numpy(array)
    if not target.flags.writeable:
        raise ProblemError(f"{name} is read-only; give a writable array{otherwise}")
    if any(stride % target.itemsize for stride in target.strides):
        raise ProblemError(
            f"{name} has strides of {target.strides} bytes, no multiples of the {target.itemsize} of an element; give "
            f"an array of whole steps{otherwise}"
        )
    return target
