"""FLASH-D: the division is hidden in a sigmoid (Alexandridis et al. 2025, arXiv 2505.14201).

State of a row, over the keys so far: lse = ln Σ exp(s), and the attention o. There is no running maximum, and o is
never divided. Another set of keys with state (o', lse') is blended in with the weight w = σ(lse' - lse).

lse is stored as two numbers, base + rest, as in the kernels. base is one of the scores, and rest is the logarithm of a
sum of at least about 1. With scores over 10⁶, a single float32 has no digits left for the logarithm, and the weights
need them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .tiles import Array, Tile, by_tiles, exp_below


class State(NamedTuple):
    """State of rows: base and rest (rows,), whose sum is lse; o (rows, head_dim_v)."""

    base: Array
    rest: Array
    o: Array

    @property
    def lse(self) -> Array:
        """The logarithm of the sum, rounded to one number."""
        return self.base + self.rest


def blend(state: State, part: State) -> State:
    """Returns the state over two disjoint sets of keys; base and rest (…), o (…, head_dim_v).

    With x = lse' - lse:  w = σ(x),  o ← o (1 - w) + o' w,  lse ← lse + softplus(x).
    """
    # A part without keys has base = -inf and gets weight 0. A state without keys gives the part weight 1.
    x = np.where(np.isneginf(part.base), -np.inf, (part.base - state.base) + (part.rest - state.rest))
    keeps = x < 0  # False for NaN, so that the state takes the NaN of the part
    base, rest = np.where(keeps, state.base, part.base), np.where(keeps, state.rest, part.rest)
    rest = rest + softplus(-np.abs(x))  # lse + softplus(x) is the larger of both + ln(1 + exp(-|x|))
    return State(base, rest, state.o * sigmoid(-x)[..., None] + part.o * sigmoid(x)[..., None])  # 1 - σ(x) = σ(-x)


def start(rows: int, head_dim_v: int, dtype: np.dtype[Any]) -> State:
    """Returns the state before any key: lse = -inf, o = 0."""
    return State(np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((rows, head_dim_v), dtype))


def update(state: State, tile: Tile) -> State:
    """Returns the state with the tile's attention blended in. The tile's maximum is not kept."""
    m_tile = tile.s.max(axis=1)
    p = exp_below(tile.s, m_tile)
    ell_tile = p.sum(axis=1)
    ell_tile = np.where(ell_tile == 0, 1, ell_tile)  # a row that sees no key of the tile gets 0, not 0 / 0
    return blend(state, State(m_tile, np.log(ell_tile), tile.times_v(p) / ell_tile[:, None]))


def finish(state: State) -> tuple[Array, Array]:
    """Returns `(o, lse)`, which the state already holds."""
    return state.o, state.lse


forward = by_tiles(start, update, finish)


def per_key(s: Array, v: Array) -> Iterator[tuple[Any, Array]]:
    """Yields `(w_i, o_i)` key by key for one row, in the form of the paper: s (keys,), v (keys, head_dim_v).

    w_1 = 1,  w_i = σ(s_i - s_{i-1} + ln w_{i-1}),  o_i = o_{i-1} + (v_i - o_{i-1}) w_i.
    """
    ln_w, o = s.dtype.type(0), v[0]
    yield np.exp(ln_w), o
    for i in range(1, len(s)):
        x = s[i] - s[i - 1] + ln_w
        o = o + (v[i] - o) * sigmoid(x)
        ln_w = -softplus(-x)  # ln σ(x), which does not underflow where σ(x) does
        yield sigmoid(x), o


def sigmoid(x: Array) -> Array:
    """Returns `1 / (1 + exp(-x))` without overflow, and without 1 - w, which loses the digits of a small w."""
    e = np.exp(-np.abs(x))
    weight: Array = np.where(x < 0, e, 1) / (1 + e)
    return weight


def softplus(x: Array) -> Array:
    """Returns `ln(1 + exp(x))` without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
