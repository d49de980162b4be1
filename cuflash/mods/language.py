"""Functions that score_mod and mask_mod may call: the lengths of the sequence, and functions of scalars.

Functions of NumPy, CuPy, PyTorch, jax.numpy and `math`, Python's operators and `if` work too. The functions here suit a
score_mod or mask_mod that runs with every array library, or with none. In the examples `np` is NumPy, `mods` is
`cuflash.mods`, and q, k and v hold 6 tokens of 2 heads, (6, 2, 4).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .graph.graph import variable
from .graph.simplify import build
from .tracing.branches import is_tracing
from .tracing.functions import call
from .tracing.operand import Operand, as_node, fault
from .tracing.tracers import TracedScalar

FUNCTIONS = (
    *("where", "minimum", "maximum", "clip", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid"),
    *("sin", "cos", "erf", "floor", "ceil", "trunc", "round", "sign"),
)


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

    scalar_function.__name__ = scalar_function.__qualname__ = name
    scalar_function.__doc__ = f"""Returns {name} of traced values or of numbers.

    Parameters
    ----------
    *arguments : traced scalar or number
        The operands by position: two for minimum and maximum, (condition, x, y) for where, (x, min, max) for clip, and
        one for all others.

    Returns
    -------
    traced scalar or number
        The result: a number if no argument is traced.

    Raises
    ------
    ProblemError
        If the number or the types of the arguments do not fit.
    """
    return scalar_function
