"""Arrays in host memory: judged like all others, run through the NumPy reference, handed back in their framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import ProblemError
from .interop import Exchanged, Framework, as_4d
from .problem import Arguments, Problem


def judge(framework: Framework, arrays: tuple[Any, ...], arguments: Arguments) -> Problem:
    """The problem of q, k and perhaps v, whatever their strides."""
    specs = [framework.spec(name, array) for name, array in zip("qkv", arrays, strict=False)]
    return Problem.of_call(specs, arguments)


def views(framework: Framework, *arrays: Any) -> list[np.ndarray[Any, Any]]:
    """The arrays as NumPy sees them, 4-D."""
    return [as_4d(framework.to_numpy(array)) for array in arrays]


def forward(
    run: Callable[..., Any], framework: Framework, arrays: tuple[Any, ...], out: Any, arguments: Arguments
) -> tuple[Any, Any]:
    """(out, lse) by `run`, a function of (problem, q, k, v) on 4-D NumPy arrays."""
    problem = judge(framework, arrays, arguments)
    if out is not None:
        problem.check_out(framework.spec("out", out))
        target = writable(framework, out)
        if any(np.shares_memory(target, framework.to_numpy(x)) for x in arrays):
            raise ProblemError("out shares memory with an input; give an out of its own memory")
    result, lse = run(problem, *views(framework, *arrays))
    lse = framework.from_numpy(lse.reshape(problem.lse_shape), like=arrays[0])
    if out is None:
        return framework.from_numpy(result.reshape(problem.out_shape), like=arrays[0]), lse
    target[...] = result.reshape(problem.out_shape)
    return out, lse


def writable(framework: Framework, out: Any) -> np.ndarray[Any, Any]:
    """`out` as a NumPy array that can be written to."""
    if isinstance(framework, Exchanged):
        raise ProblemError(f"out is a {framework.name} array, which cannot be written to here; leave out=None")
    target = framework.to_numpy(out)
    if not target.flags.writeable:
        raise ProblemError("out is read-only; give a writable array or leave out=None")
    return target
