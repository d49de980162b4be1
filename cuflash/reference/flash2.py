"""FlashAttention-2: o stays unnormalised, with one division at the end (Dao 2023, arXiv 2307.08691, algorithm 1).

State of a row, over the keys so far: the maximum m, the sum ℓ of exp(s - m), and o = Σ exp(s - m) v.
"""

from __future__ import annotations

import numpy as np

from .flash1 import State, start
from .tiles import Array, Tile, by_tiles, exp_below


def update(state: State, tile: Tile) -> State:
    """Returns the state with one more tile: lines 9 and 10 of algorithm 1."""
    m = np.maximum(state.m, tile.s.max(axis=1))
    p = exp_below(tile.s, m)  # p̃ = exp(s - m)
    alpha = exp_below(state.m[:, None].copy(), m)  # (rows, 1): exp(m_old - m)
    ell = alpha[:, 0] * state.ell + p.sum(axis=1)  # ℓ ← exp(m_old - m) ℓ + rowsum(p̃)
    o = alpha * state.o + tile.times_v(p)  # o ← exp(m_old - m) o + p̃ v
    return State(m, ell, o)


def finish(state: State) -> tuple[Array, Array]:
    """Returns `(out, lse)`, lines 12 and 13: out = o / ℓ, lse = m + ln ℓ."""
    return state.o / np.where(state.ell == 0, 1, state.ell)[:, None], state.m + np.log(state.ell)


forward = by_tiles(start, update, finish)
