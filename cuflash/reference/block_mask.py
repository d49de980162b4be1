"""Block masks: mask tiles of 64 queries x 64 keys, each empty, partial or full under a mask_mod.

Attention skips empty tiles, and evaluates the mask_mod at single scores in partial ones. A tile at the end of a
sequence holds only the sequence's queries and keys. It is full if all of these queries see all of these keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..mods.graph.graph import Graph
from ..problem.mod_arrays import MASK_TILE
from .evaluate import evaluate

EMPTY, PARTIAL, FULL = 0, 1, 2
_ROWS = 8 * MASK_TILE  # queries evaluated together: with 10^5 keys they take 50 MB


def mask_tiles_of(
    mask_mod: Graph,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    lengths: Sequence[tuple[int, int]] | None = None,
) -> NDArray[np.int8]:
    """Returns EMPTY, PARTIAL or FULL by mask tile: (batch, heads, seqlen_q / 64, seqlen_k / 64), rounded up.

    lengths: the used queries and keys of each sequence, at most seqlen_q and seqlen_k; by default all.
    """
    shape = batch, heads, -(-seqlen_q // MASK_TILE), -(-seqlen_k // MASK_TILE)
    mask_tiles = np.full(shape, EMPTY, np.int8)
    arrays = [np.asarray(each.array) for each in mask_mod.arrays]
    for b, (used_q, used_k) in enumerate(lengths or [(seqlen_q, seqlen_k)] * batch):
        if 0 in (used_q, used_k):
            continue
        for h, begin in np.ndindex(heads, -(-used_q // _ROWS)):
            q_idx = np.arange(begin * _ROWS, min((begin + 1) * _ROWS, used_q))[:, None]
            inputs: dict[str, Any] = {"b": b, "h": h, "q_idx": q_idx, "k_idx": np.arange(used_k)}
            inputs |= {"seqlen_q": used_q, "seqlen_k": used_k}
            visible = np.broadcast_to(evaluate([mask_mod.root], inputs, arrays)[0], (len(q_idx), used_k))
            some, all_visible = _by_mask_tiles(np.logical_or, visible), _by_mask_tiles(np.logical_and, visible)
            kinds = np.where(all_visible, FULL, np.where(some, PARTIAL, EMPTY))
            first = begin * (_ROWS // MASK_TILE)
            mask_tiles[b, h, first : first + kinds.shape[0], : kinds.shape[1]] = kinds
    return mask_tiles


def _by_mask_tiles(join: np.ufunc, visible: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Joins the elements of each mask tile of (queries, keys)."""
    if 0 in visible.shape:
        return np.zeros([-(-length // MASK_TILE) for length in visible.shape], bool)
    for axis, length in enumerate(visible.shape):
        visible = join.reduceat(visible, np.arange(0, length, MASK_TILE), axis=axis)
    return visible
