"""Functions that score_mod and mask_mod may call: the lengths of the sequence, and functions of scalars.

Functions of NumPy, CuPy, PyTorch, jax.numpy and `math`, Python's operators and `if` do the same. These serve where a
function is to run with every array library, or with none. In the examples `np` is NumPy, `mods` is `cuflash.mods`, and
q, k and v hold 6 tokens of 2 heads, (6, 2, 4).
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
    """The number of used queries of the sequence, inside a function that is traced.

    >>> out = cuflash.forward(q, k, v, score_mod=lambda score, b, h, q_idx, k_idx: score * mods.seqlen_q())
    >>> np.allclose(out, cuflash.forward(6 * q, k, v))
    True
    """
    return _length("seqlen_q")


def seqlen_k() -> Any:
    """The number of used keys of the sequence, inside a function that is traced.

    >>> out = cuflash.forward(q, k, v, mask_mod=lambda b, h, q_idx, k_idx: k_idx < mods.seqlen_k() - 1)
    >>> np.allclose(out, cuflash.forward(q, k[:5], v[:5]))
    True
    """
    return _length("seqlen_k")


def position_of(q_idx: Any) -> Any:
    """The position of a query among the keys: the last query stands beside the last key.

    >>> out = cuflash.forward(q[4:], k, v, mask_mod=lambda b, h, q_idx, k_idx: k_idx < mods.position_of(q_idx))
    >>> np.allclose(out[:1], cuflash.forward(q[4:5], k[:4], v[:4]))
    True
    """
    return q_idx + seqlen_k() - seqlen_q()


def equivalent(by_query: Any, by_key: Any) -> Any:
    """A condition in two equivalent forms, inside a function that is traced.

    Most of the first form depends on the query alone, and most of the second one on the key.
    why: a kernel computes what depends on a row alone once for each row, and all else for each score. Its rows are
    queries in forward, and keys in most of backward.
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
    scalar_function.__doc__ = f"{name} of traced values, or of numbers."
    return scalar_function
