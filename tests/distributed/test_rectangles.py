"""Rectangles and needed keys, beside a mask of all pairs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.distributed import Layout
from cuflash.distributed.layout import KINDS
from cuflash.distributed.rectangles import (
    Window,
    local_pairs,
    needed_keys,
    num_fetched,
    pieces_of,
    rectangles,
    visible_pairs,
)

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=5)
SIDES = st.one_of(st.none(), st.integers(0, 50))


def visible(layout: Layout, window: Window) -> Any:
    """Returns which key each query sees, for the whole sequence."""
    rows = np.arange(layout.seqlen)
    documents = np.searchsorted(layout.cu_seqlens, rows, "right")
    distance = rows[:, None] - rows
    mask = documents[:, None] == documents
    if window.left is not None:
        mask &= distance <= window.left
    if window.right is not None:
        mask &= -distance <= window.right
    return mask


def of_runs(lengths: list[int], ranks: int, rng: random.Random) -> Layout:
    """Returns a layout that assigns runs of one to nine rows to ranks at random."""
    runs: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    begin, total = 0, sum(lengths)
    while begin < total:
        end = min(begin + rng.randint(1, 9), total)
        rng.choice(runs).append((begin, end))
        begin = end
    return Layout([0, *np.cumsum(lengths).tolist()], ranks, runs=runs)


def layouts() -> Any:
    return st.builds(
        lambda lengths, ranks, kind: Layout([0, *np.cumsum(lengths).tolist()], ranks, kind, chunk=9),
        LENGTHS, st.integers(1, 5), st.sampled_from(KINDS),
    ) | st.builds(of_runs, LENGTHS, st.integers(1, 5), st.randoms())  # fmt: skip


@given(layouts(), st.builds(Window, SIDES, SIDES), st.booleans())
def test_rectangles_hold_every_visible_pair_once(layout: Layout, window: Window, merge: bool) -> None:
    mask = visible(layout, window)
    for rank_q in range(layout.ranks):
        for rank_k in range(layout.ranks):
            counts = np.zeros((layout.num_rows(rank_q), layout.num_rows(rank_k)), int)
            for each in rectangles(layout, rank_q, rank_k, window, merge):
                rows, keys = np.arange(*each.q), np.arange(*each.k)
                assert len(rows) * len(keys) == each.num_pairs > 0
                inside = np.ones((len(rows), len(keys)), bool)
                if each.diagonal_offset is not None:
                    distance = (rows - each.q[0])[:, None] + each.diagonal_offset - (keys - each.k[0])
                    inside &= distance <= (window.left if window.left is not None else layout.seqlen)
                    inside &= -distance <= (window.right if window.right is not None else layout.seqlen)
                counts[each.q[0] : each.q[1], each.k[0] : each.k[1]] += inside
                if not merge:
                    positions = layout.positions(rank_q)[rows], layout.positions(rank_k)[keys]
                    assert (positions[0][0], positions[1][0]) == (each.q_index, each.k_index)
            expected = mask[np.ix_(layout.indices(rank_q), layout.indices(rank_k))]
            np.testing.assert_array_equal(counts, expected)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=9), st.integers(2, 8))
def test_another_ranks_keys_are_one_full_rectangle_under_a_causal_mask(lengths: list[int], ranks: int) -> None:
    layout = Layout([0, *np.cumsum(lengths).tolist()], ranks)
    for rank_q in range(ranks):
        for rank_k in set(range(ranks)) - {rank_q}:
            parts = rectangles(layout, rank_q, rank_k, Window(None, 0))
            assert len(parts) <= 1
            assert all(part.diagonal_offset is None for part in parts)


@given(layouts(), st.builds(Window, SIDES, SIDES))
def test_needed_keys_hold_every_visible_key(layout: Layout, window: Window) -> None:
    mask = visible(layout, window)
    for rank in range(layout.ranks):
        needed = np.zeros(layout.seqlen, bool)
        for begin, end in needed_keys(layout, rank, window):
            assert begin < end
            assert not needed[begin:end].any()
            needed[begin:end] = True
        assert not (mask[layout.indices(rank)].any(0) & ~needed).any()
        for piece in pieces_of(layout, rank, window):
            rows = layout.indices(rank)[slice(*piece.local)]
            assert not mask[rows].any(0)[: piece.keys[0]].any()
            assert not mask[rows].any(0)[piece.keys[1] :].any()
            assert piece.k_index % 128 == 0


@given(layouts(), st.builds(Window, SIDES, SIDES))
def test_pairs_and_fetched_rows_are_counted(layout: Layout, window: Window) -> None:
    mask = visible(layout, window)
    for rank in range(layout.ranks):
        rows = layout.indices(rank)
        assert visible_pairs(layout, rank, window) == mask[rows].sum()
        fetched = {row for keys in needed_keys(layout, rank, window) for row in range(*keys)} - set(rows.tolist())
        assert num_fetched(layout, rank, window) == len(fetched)
        if window.left is None and window.right in (None, 0):
            assert local_pairs(layout, rank, window) == mask[np.ix_(rows, rows)].sum()


@pytest.mark.parametrize("ranks", [2, 4, 16, 64])
def test_the_keys_of_a_window_do_not_grow_with_the_ranks(ranks: int) -> None:
    layout = Layout(ranks * 1000, ranks)
    for rank in range(ranks):
        count = sum(end - begin for begin, end in needed_keys(layout, rank, Window(200, 0)))
        assert count <= layout.num_rows(rank) + 2 * (200 + 127)
