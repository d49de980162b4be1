"""Ready-made changes of scores: functions that return a score_mod.

A query's position is `q_idx + seqlen_k - seqlen_q`, as in the masks. Numbers are constants of the kernel. Arrays may
change from call to call, and have gradients. In the examples `np` is NumPy, `mods` is `cuflash.mods`, and q, k and v
hold 6 tokens of 2 heads, (6, 2, 4).
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
    """Returns the distance from the query's position to the key, positive for a later key."""
    return k_idx - position_of(q_idx)


def alibi(slopes: Any) -> Mod:
    """Returns a score_mod of attention with linear biases: `score - slope · |distance|`.

    The score of row q changes by, with a slope of 1:
        0 -1 -2 -3
       -1  0 -1 -2
       -2 -1  0 -1
       -3 -2 -1  0

    Parameters
    ----------
    slopes : array (heads_q,) or (batch, heads_q), or int
        Slopes. An int, at least 1, is the number of heads and stands for the slopes of the paper. The slopes of n heads
        are the powers of 2^(-8/n) if n is a power of two. Otherwise, with m as the next lower power of two, they are
        the slopes of m heads. Every other slope of 2m heads follows, from the first on.

    Returns
    -------
    callable
        A score_mod, `score_mod(score, b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If an array has more than two axes, or a number is no integer or is below 1.

    References
    ----------
    ALiBi, arXiv 2108.12409.

    Examples
    --------
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
    """Returns a score_mod that caps scores as the keyword `softcap` does: `cap · tanh(score / cap)`.

    cap 2:   score  -6.0  -2.0  -1.0   0.0   1.0   2.0   6.0
             becomes -2.0 -1.5  -0.9   0.0   0.9   1.5   2.0

    Parameters
    ----------
    cap : float
        Bound of the scores: finite and above 0.

    Returns
    -------
    callable
        A score_mod, `score_mod(score, b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If `cap` is no finite number above 0.

    Examples
    --------
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
    """Returns a score_mod with a learned bias of each head and bucket of distances: `score + table[bucket, head]`.

    Of 8 buckets, not bidirectional, max_distance 16, by how far the key stands before the query:
        distance  0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
        bucket    0 1 2 3 4 4 5 5 6 6  6  6  7  7  7  7  7

    Parameters
    ----------
    table : array (num_buckets, heads_q) of floats
        Bias of each bucket and head. At least 2 buckets, or 4 if bidirectional.
    bidirectional : bool
        True if half of the buckets are for keys after the query. Otherwise these keys count as distance 0.
    max_distance : int, default 128
        Distance from which on all keys share a bucket. It exceeds half of a side's number of buckets.

    Returns
    -------
    callable
        A score_mod, `score_mod(score, b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If `table` has another shape or too few buckets, `bidirectional` is no bool, or `max_distance` is too small.

    Notes
    -----
    Half of a side's buckets hold one distance each. The ranges of the others grow with the distance, up to
    `max_distance`.

    References
    ----------
    T5, arXiv 1910.10683; `RelativePositionBias`.

    Examples
    --------
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
        # Comparisons replace T5's logarithm, which takes longer and whose last bit would decide the bucket.
        for begin in begins:
            bucket = bucket + (size >= begin)
        if bidirectional:
            bucket = bucket + (distance > 0) * count
        return score + table[bucket, h]

    return score_mod


def _begins(count: int, exact: int, max_distance: int) -> list[int]:
    """Returns the first distance of each bucket after bucket `exact`, by T5's float32 logarithm."""
    sizes = np.arange(exact, max_distance + 1, dtype=np.float32)
    logs = np.log(sizes / np.float32(exact)) / np.float32(math.log(max_distance / exact)) * np.float32(count - exact)
    buckets = np.minimum(exact + logs.astype(np.int64), count - 1)
    return [exact + int(np.argmax(buckets >= bucket)) for bucket in range(exact + 1, count)]
