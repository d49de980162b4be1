"""Functions that score_mod and mask_mod may call: the lengths of the sequence, and functions of scalars.

Functions of NumPy, CuPy, PyTorch, jax.numpy and `math`, Python's operators and `if` work too. The functions here suit a
score_mod or mask_mod that runs with every array library, or with none. In the examples `np` is NumPy, `mods` is
`cuflash.mods`, and q, k and v hold 6 tokens of 2 heads, (6, 2, 4).
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any

import numpy as np

from .graph.graph import variable
from .graph.simplify import build
from .tracing.branches import is_tracing
from .tracing.functions import call
from .tracing.operand import Operand, as_node, fault
from .tracing.tracers import TracedScalar

FUNCTIONS = {  # by name: the parameters, and the result
    "where": ("condition, x, y", "x where the condition is true, else y"),
    "minimum": ("x, y", "the smaller of x and y; NaN if either is NaN"),
    "maximum": ("x, y", "the larger of x and y; NaN if either is NaN"),
    "clip": ("x, min, max", "x, but at least min and at most max"),
    "exp": ("x", "e to the power of x"),
    "exp2": ("x", "2 to the power of x"),
    "log": ("x", "the natural logarithm of x"),
    "log2": ("x", "the logarithm of x to the base 2"),
    "sqrt": ("x", "the square root of x"),
    "rsqrt": ("x", "1 / sqrt(x)"),
    "tanh": ("x", "the hyperbolic tangent of x"),
    "sigmoid": ("x", "1 / (1 + exp(-x))"),
    "sin": ("x", "the sine of x, in radians"),
    "cos": ("x", "the cosine of x, in radians"),
    "erf": ("x", "the error function of x"),
    "floor": ("x", "x rounded down to an integer"),
    "ceil": ("x", "x rounded up to an integer"),
    "trunc": ("x", "x without its fraction"),
    "round": ("x", "x rounded to an integer; halves become even"),
    "sign": ("x", "the sign of x: -1, 0 or 1; NaN for NaN"),
}


def seqlen_q() -> Any:
    """Returns the number of used queries of the sequence, inside a function that is traced.

    Returns
    -------
    traced int32 scalar
        Number of queries.

    Raises
    ------
    ProblemError
        If no function is being traced.

    Examples
    --------
    >>> out = cuflash.forward(q, k, v, score_mod=lambda score, b, h, q_idx, k_idx: score * mods.seqlen_q())
    >>> np.allclose(out, cuflash.forward(6 * q, k, v))
    True
    """
    return _length("seqlen_q")


def seqlen_k() -> Any:
    """Returns the number of used keys of the sequence, inside a function that is traced.

    Returns
    -------
    traced int32 scalar
        Number of keys.

    Raises
    ------
    ProblemError
        If no function is being traced.

    Examples
    --------
    >>> out = cuflash.forward(q, k, v, mask_mod=lambda b, h, q_idx, k_idx: k_idx < mods.seqlen_k() - 1)
    >>> np.allclose(out, cuflash.forward(q, k[:5], v[:5]))
    True
    """
    return _length("seqlen_k")


def position_of(q_idx: Any) -> Any:
    """Returns the position of a query among the keys, `q_idx + seqlen_k - seqlen_q`.

    The last query stands beside the last key.

    Parameters
    ----------
    q_idx : traced int32 scalar
        Index of the query.

    Returns
    -------
    traced int32 scalar
        Position of the query, below 0 for the first queries if there are more queries than keys.

    Raises
    ------
    ProblemError
        If no function is being traced.

    Examples
    --------
    >>> out = cuflash.forward(q[4:], k, v, mask_mod=lambda b, h, q_idx, k_idx: k_idx < mods.position_of(q_idx))
    >>> np.allclose(out[:1], cuflash.forward(q[4:5], k[:4], v[:4]))
    True
    """
    return q_idx + seqlen_k() - seqlen_q()


def equivalent(by_query: Any, by_key: Any) -> Any:
    """Returns a condition in two equivalent forms, inside a function that is traced.

    Most of the first form depends on the query alone, and most of the second form on the key. A kernel computes row
    values once per row and other values once per score. Its rows are queries in forward, and keys in most of backward.
    """
    return TracedScalar(build("alike", as_node(by_query), as_node(by_key)))


def _length(name: str) -> TracedScalar:
    if not is_tracing():
        raise fault(f"{name}() is known inside a score_mod or mask_mod alone, while cuflash traces it")
    return TracedScalar(variable(name))


def function(name: str) -> Any:
    """Returns the function of a name, for traced values and for numbers."""

    def scalar_function(*arguments: Any) -> Any:
        if any(isinstance(each, Operand) for each in arguments):
            return TracedScalar(call(name, arguments, {}, "cuflash"))
        numbers = [each.item() if isinstance(each, np.generic) else each for each in arguments]
        return call(name, numbers, {}, "cuflash").value

    names, result = FUNCTIONS[name]
    described: Any = scalar_function
    described.__name__ = described.__qualname__ = name
    described.__doc__ = f"Returns {result}."
    described.__signature__ = Signature([Parameter(each, Parameter.POSITIONAL_ONLY) for each in names.split(", ")])
    return described
