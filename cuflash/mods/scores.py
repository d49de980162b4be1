"""Ready-made changes of scores. A query's position is `q_idx + seqlen_k - seqlen_q`, as in the masks.

Numbers are constants of the kernel; arrays may change from call to call, and have gradients. In the examples `np` is
NumPy, `mods` is `cuflash.mods`, and q, k and v hold 6 tokens of 2 heads, (6, 2, 4).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ProblemError
from .language import function, position_of
from .masks import Mod, check_number
from .tracing.operand import is_real, shape_of

_EXP2, _TANH, _WHERE = (function(name) for name in ("exp2", "tanh", "where"))


def _distance(q_idx: Any, k_idx: Any) -> Any:
    """The distance of the key behind the query's position."""
    return k_idx - position_of(q_idx)


def alibi(slopes: Any) -> Mod:
    """Attention with linear biases: `score - slope · |distance|` (arXiv 2108.12409).

    slopes: an array (heads_q,) or (batch, heads_q), or the number of heads, for the slopes of the paper: the powers of
    2^(-8/n) for n heads, and for n that is no power of two those of the next lower one, then every other one of the
    next higher one.

    The score of row q changes by, with a slope of 1:
        0 -1 -2 -3
       -1  0 -1 -2
       -2 -1  0 -1
       -3 -2 -1  0

    >>> slopes, n = np.array([1, 0.5], "float32"), np.arange(6)
    >>> out = cuflash.forward(q, k, v, score_mod=mods.alibi(slopes))
    >>> np.allclose(out, cuflash.forward(q, k, v, bias=-slopes[:, None, None] * abs(n - n[:, None])))
    True
    """
    rank = len(shape_of(slopes))
    if rank == 0:
        slopes = check_number("slopes", slopes, 1, " for so many heads, or an array (heads_q,) or (batch, heads_q)")
        lower = 2 ** (slopes.bit_length() - 1)
    elif rank > 2:
        raise ProblemError(f"slopes has {rank} axes; give an array (heads_q,) or (batch, heads_q)")

    def slope_of(b: Any, h: Any) -> Any:
        if rank > 0:
            return slopes[b, h] if rank == 2 else slopes[h]
        first = _EXP2((h + 1) * (-8.0 / lower))
        return first if slopes == lower else _WHERE(h < lower, first, _EXP2((2 * (h - lower) + 1) * (-4.0 / lower)))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score - slope_of(b, h) * abs(_distance(q_idx, k_idx))

    return score_mod


def softcap(cap: float) -> Mod:
    """`cap · tanh(score / cap)`, as the keyword `softcap` does it.

    cap 2:   score  -6.0  -2.0  -1.0   0.0   1.0   2.0   6.0
             becomes -2.0 -1.5  -0.9   0.0   0.9   1.5   2.0

    >>> out = cuflash.forward(q, k, v, score_mod=mods.softcap(2.0))
    >>> np.allclose(out, cuflash.forward(q, k, v, softcap=2.0))
    True
    """
    if not is_real(cap) or not 0 < cap < math.inf:
        raise ProblemError(f"cap={cap!r}; give a finite number above 0")
    cap = float(cap)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return cap * _TANH(score / cap)

    return score_mod


def relative_position(table: Any, *, bidirectional: bool, max_distance: int = 128) -> Mod:
    """A learned bias for each head and each bucket of distances (T5, arXiv 1910.10683; `RelativePositionBias`).

    table: an array (num_buckets, heads_q) of floats. bidirectional: half of the buckets are for keys behind the query;
    otherwise these count as distance 0. Half of the buckets of a side hold one distance each, and the others grow with
    it, up to `max_distance`, from which on there is one.

    Of 8 buckets, not bidirectional, max_distance 16, by how far the key stands before the query:
        distance  0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
        bucket    0 1 2 3 4 4 5 5 6 6  6  6  7  7  7  7  7

    >>> table = np.linspace(-1, 1, 16, dtype="float32").reshape(8, 2)
    >>> score_mod = mods.relative_position(table, bidirectional=False, max_distance=16)
    >>> out = cuflash.forward(q, k, v, score_mod=score_mod)
    >>> bias = table[[4, 4, 3, 2, 1, 0]].T[:, None]  # of the last query
    >>> np.allclose(out[5:], cuflash.forward(q[5:], k, v, bias=bias))
    True
    """
    if len(shape := shape_of(table)) != 2:
        raise ProblemError(f"table has shape {tuple(shape)}; give an array (num_buckets, heads_q)")
    if not isinstance(bidirectional, bool | np.bool_):
        raise ProblemError(f"bidirectional={bidirectional!r}; give True or False")
    max_distance = check_number("max_distance", max_distance, 1)
    count = shape[0] // 2 if bidirectional else shape[0]
    exact = count // 2
    if exact < 1 or max_distance <= exact:
        raise ProblemError(
            f"table has {shape[0]} buckets and max_distance is {max_distance}; give at least "
            f"{4 if bidirectional else 2} buckets, and a max_distance above {exact}"
        )
    begins = _begins(count, exact, max_distance)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        distance = _distance(q_idx, k_idx)
        size = abs(distance) if bidirectional else max(-distance, 0)
        bucket = min(size, exact)
        # why no logarithm: it takes longer, and its last bit would decide.
        for begin in begins:
            bucket = bucket + (size >= begin)
        if bidirectional:
            bucket = bucket + (distance > 0) * count
        return score + table[bucket, h]

    return score_mod


def _begins(count: int, exact: int, max_distance: int) -> list[int]:
    """Returns the first distance of each bucket after the one of `exact`, by T5's float32 logarithm."""
    sizes = np.arange(exact, max_distance + 1, dtype=np.float32)
    logs = np.log(sizes / np.float32(exact)) / np.float32(math.log(max_distance / exact)) * np.float32(count - exact)
    buckets = np.minimum(exact + logs.astype(np.int64), count - 1)
    return [exact + int(np.argmax(buckets >= bucket)) for bucket in range(exact + 1, count)]
