"""FlashAttention: every tile normalises the output again (Dao et al. 2022, arXiv 2205.14135, algorithm 1).

State of a row, over the keys so far: the maximum m, the sum ℓ of exp(s - m), and the attention o.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .tiles import Array, Tile, by_tiles, exp_below


class State(NamedTuple):
    """State of rows: m (rows,), ell (rows,), o (rows, head_dim_v)."""

    m: Array
    ell: Array
    o: Array


def start(rows: int, head_dim_v: int, dtype: np.dtype[Any]) -> State:
    """Returns the state before any key: m = -inf, ℓ = 0, o = 0."""
    return State(np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((rows, head_dim_v), dtype))


def update(state: State, tile: Tile) -> State:
    """Returns the state with one more tile: lines 10 to 13 of algorithm 1."""
    m_tile = tile.s.max(axis=1)
    p = exp_below(tile.s, m_tile)  # p̃ = exp(s - m̃)
    ell_tile = p.sum(axis=1)  # ℓ̃ = rowsum(p̃)

    m = np.maximum(state.m, m_tile)
    old, new = exp_below(np.stack([state.m, m_tile], axis=1), m).T  # exp(m_old - m) and exp(m̃ - m)
    old = old * state.ell
    ell = old + new * ell_tile
    # o ← (ℓ_old exp(m_old - m) o + exp(m̃ - m) p̃ v) / ℓ
    o = (old[:, None] * state.o + new[:, None] * tile.times_v(p)) / np.where(ell == 0, 1, ell)[:, None]
    return State(m, ell, o)


def finish(state: State) -> tuple[Array, Array]:
    """Returns `(o, lse)`: o is normalised already, and lse = m + ln ℓ."""
    return state.o, state.m + np.log(state.ell)


forward = by_tiles(start, update, finish)
