"""The library in NumPy: the written definition of what every kernel computes, and the path for NumPy arrays.

Arrays are 4-D (batch, seqlen, heads, dim) with any strides, and `problem` has checked them. `runtime/host.py` handles
the caller's other ranks and its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..problem.problem import Problem
from . import flash1, flash2, flashd, sequences, standard
from .append import append_kv
from .backward import backward
from .merge import merge_states
from .tiles import Array

__all__ = ["RUN", "append_kv", "backward", "forward", "lse", "merge_states", "of_sequences"]

_FORWARD: dict[str, Callable[..., tuple[Array, Array]]] = {
    "standard": standard.forward,
    "flash1": flash1.forward,
    "flash2": flash2.forward,
    "flashd": flashd.forward,
}


def forward(problem: Problem, q: Array, k: Array, v: Array, **library: Any) -> tuple[Array, Array]:
    """`(out, lse)` by `problem.options.algorithm`: out (b, sq, hq, dv) in out_dtype, lse (b, hq, sq) float32.

    q (b, sq, hq, d), k (b, sk, hkv, d), v (b, sk, hkv, dv). lse is float64 if the inputs are.
    Of the algorithms, "standard" computes in any array library: `xp=cupy`.
    """
    return _FORWARD[problem.options.algorithm](problem, q, k, v, **library)


def lse(problem: Problem, q: Array, k: Array, **own: Any) -> Array:
    """lse alone, (b, hq, sq): the forward of a v without columns, so that the second product costs nothing."""
    return forward(problem, q, k, k[..., :0], **own)[1]


# Each op's function, which computes its results from views of its inputs in their order; append_kv takes them by name.
RUN: dict[str, Callable[..., Sequence[Array]]] = {
    "forward": forward,
    "lse": lambda problem, q, k, **own: (lse(problem, q, k, **own),),
    "backward": lambda problem, q, k, v, dout, *others, **own: backward(problem, dout, q, k, v, *others, **own),
    "merge": lambda states, *views: merge_states(views[: len(views) // 2], views[len(views) // 2 :]),
    "append_kv": append_kv,
}


def of_sequences(problem: Problem, named: Mapping[str, Array], out: Array | None = None, **own: Any) -> list[Array]:
    """The results of a problem of several lengths: see `sequences.run`. Arrays have all of their axes."""
    if problem.op.name == "append_kv":
        return list(RUN["append_kv"](problem, named))
    return sequences.run(problem, RUN[problem.op.name], named, out, **own)
