"""Mask tiles of block masks in NumPy, compared with the mask_mod at each score."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuflash.mods import masks
from cuflash.mods.tracing.trace import trace
from cuflash.problem.mod_arrays import MASK_TILE
from cuflash.reference import block_mask
from cuflash.reference.block_mask import EMPTY, FULL, PARTIAL, mask_tiles_of
from cuflash.reference.evaluate import evaluate

OFFSETS = np.array([0, 60, 64, 200, 333], np.int32)
PER_HEAD = np.array([5, 70, 0], np.int32)


def by_head(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return (k_idx - q_idx < PER_HEAD[h]) & (k_idx >= 64 * b)


MASKS = {
    "causal": masks.causal,
    "window": masks.sliding_window(100, 30),
    "documents": masks.document(OFFSETS),
    "by head": by_head,
    "all": lambda b, h, q_idx, k_idx: k_idx >= 0,
    "none": lambda b, h, q_idx, k_idx: k_idx < 0,
}


def expected_tiles(function: Any, b: int, h: int, used_q: int, used_k: int, shape: tuple[int, int]) -> Any:
    """Returns the mask tiles of one sequence and head, computed one by one."""
    graph = trace(function, "mask_mod")
    mask_tiles = np.full(shape, EMPTY, np.int8)
    for i, j in np.ndindex(*shape):
        rows, keys = (range(MASK_TILE * n, min(MASK_TILE * (n + 1), used)) for n, used in ((i, used_q), (j, used_k)))
        if rows and keys:
            visible = [visible_to(graph, b, h, q, list(keys), used_q, used_k) for q in rows]
            mask_tiles[i, j] = FULL if np.all(visible) else PARTIAL if np.any(visible) else EMPTY
    return mask_tiles


def visible_to(graph: Any, b: int, h: int, q: int, keys: list[int], used_q: int, used_k: int) -> Any:
    inputs = {"b": b, "h": h, "q_idx": q, "k_idx": np.array(keys), "seqlen_q": used_q, "seqlen_k": used_k}
    return np.broadcast_to(evaluate([graph.root], inputs, [each.array for each in graph.arrays])[0], len(keys))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", [None, [(130, 200), (1, 64)], [(0, 200), (129, 0)], [(64, 65), (63, 1)]], ids=str)
def test_each_cell_is_what_its_scores_are(name: str, lengths: list[tuple[int, int]] | None) -> None:
    seqlen_q, seqlen_k, heads = 130, 200, 3
    mask_tiles = mask_tiles_of(trace(MASKS[name], "mask_mod"), 2, heads, seqlen_q, seqlen_k, lengths)
    assert mask_tiles.shape == (2, heads, 3, 4)
    for b, used in enumerate(lengths or [(seqlen_q, seqlen_k)] * 2):
        for h in range(heads):
            np.testing.assert_array_equal(mask_tiles[b, h], expected_tiles(MASKS[name], b, h, *used, (3, 4)))


def test_queries_are_looked_at_in_parts() -> None:
    graph = trace(masks.causal, "mask_mod")
    mask_tiles = mask_tiles_of(graph, 1, 1, 1100, 1100)[0, 0]
    i, j = np.ogrid[:18, :18]
    np.testing.assert_array_equal(mask_tiles, np.where(i > j, FULL, np.where(i == j, PARTIAL, EMPTY)))


def test_nothing_has_no_cells() -> None:
    assert mask_tiles_of(trace(masks.causal, "mask_mod"), 0, 2, 100, 100).shape == (0, 2, 2, 2)
    assert mask_tiles_of(trace(masks.causal, "mask_mod"), 1, 1, 0, 100).shape == (1, 1, 0, 2)


def test_a_million_sequences_without_queries_or_keys_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = []
    monkeypatch.setattr(block_mask, "evaluate", lambda roots, inputs, arrays: sequences.append(inputs["b"]) or [True])
    lengths = [(1, 0), (0, 1)] * (10**6 // 2)
    lengths[-1] = (1, 1)
    mask_tiles = mask_tiles_of(trace(masks.causal, "mask_mod"), len(lengths), 1, 1, 1, lengths)
    assert sequences == [len(lengths) - 1]
    assert np.flatnonzero(mask_tiles).tolist() == sequences
