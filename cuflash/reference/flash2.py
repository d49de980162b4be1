"""FlashAttention-2: o stays unnormalised, with one division at the end (Dao 2023, arXiv 2307.08691, algorithm 1).

State of a row: the maximum m and the sum ℓ of exp(s - m) so far, and o = Σ exp(s - m) v over the keys so far.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..problem import Problem
from .tiles import Array, OnTile, Tile, exp_below, forward_by_tiles


class State(NamedTuple):
    """m (rows,), ell (rows,), o (rows, head_dim_v), not divided by ell."""

    m: Array
    ell: Array
    o: Array


def start(rows: int, head_dim_v: int, dtype: np.dtype[Any]) -> State:
    """No key seen: m = -inf, ℓ = 0, o = 0."""
    return State(np.full(rows, -np.inf, dtype), np.zeros(rows, dtype), np.zeros((rows, head_dim_v), dtype))


def update(state: State, tile: Tile) -> State:
    """Lines 9 and 10 of algorithm 1."""
    m = np.maximum(state.m, tile.s.max(axis=1))
    p = exp_below(tile.s, m)  # p̃ = exp(s - m)
    alpha = exp_below(state.m[:, None].copy(), m)  # (rows, 1): exp(m_old - m)
    ell = alpha[:, 0] * state.ell + p.sum(axis=1)  # ℓ ← exp(m_old - m) ℓ + rowsum(p̃)
    o = alpha * state.o + tile.times_v(p)  # o ← exp(m_old - m) o + p̃ v
    return State(m, ell, o)


def finish(state: State) -> tuple[Array, Array]:
    """Lines 12 and 13: out = o / ℓ, lse = m + ln ℓ."""
    return state.o / np.where(state.ell == 0, 1, state.ell)[:, None], state.m + np.log(state.ell)


def forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    *,
    block_q: int | None = None,
    block_k: int | None = None,
    on_tile: OnTile | None = None,
) -> tuple[Array, Array]:
    """`(out, lse)`: out (b, sq, hq, dv) in out_dtype, lse (b, hq, sq)."""
    return forward_by_tiles(problem, q, k, v, start, update, finish, block_q=block_q, block_k=block_k, on_tile=on_tile)
