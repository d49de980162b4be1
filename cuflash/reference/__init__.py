"""The library in NumPy: the written definition of what every kernel computes, and the path for NumPy arrays.

Arrays are 4-D (batch, seqlen, heads, dim) with any strides; `problem` has judged them. Ranks and outputs of the
caller are the launchers' business.
"""

from __future__ import annotations

from collections.abc import Callable

from ..problem import Problem
from . import flash1, flash2, flashd, standard
from .backward import backward
from .merge import merge_states
from .tiles import Array

__all__ = ["backward", "forward", "lse", "merge_states"]

_FORWARD: dict[str, Callable[[Problem, Array, Array, Array], tuple[Array, Array]]] = {
    "standard": standard.forward,
    "flash1": flash1.forward,
    "flash2": flash2.forward,
    "flashd": flashd.forward,
}


def forward(problem: Problem, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """`(out, lse)` by `problem.algorithm`: out (b, sq, hq, dv) in out_dtype, lse (b, hq, sq) float32.

    q (b, sq, hq, d), k (b, sk, hkv, d), v (b, sk, hkv, dv). lse is float64 if the inputs are.
    """
    return _FORWARD[problem.algorithm](problem, q, k, v)


def lse(problem: Problem, q: Array, k: Array) -> Array:
    """lse alone, (b, hq, sq): the same walk with a v that has no columns, hence without the second product."""
    return forward(problem, q, k, k[..., :0])[1]
