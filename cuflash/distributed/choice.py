"""The schemes, what they cannot run, and the choice of one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Literal, get_args

from .layout import Layout
from .rectangles import Window, local_pairs, num_fetched, visible_pairs

Scheme = Literal["auto", "ring", "ulysses", "gather"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
FUNCTIONS = frozenset(("score_mod", "mask_mod", "bias"))
INDEXED = FUNCTIONS | {"dropout_p"}  # arguments that depend on indices
# Scores of one head that a GPU computes while its link carries a row of one head in 16 bits, of equal head dims: 4 dim
# operations of 721 TFLOP/s beside 2 dim bytes of 300 GB/s (H200).
SCORES_PER_ROW = 1200
# And while a ring's step after the first takes 0.3 ms more than its products, at head dim 128: small calls, and work of
# the host. On two H200 it took 0.27 to 0.55 ms with documents of 4k tokens.
SCORES_PER_STEP = 4e8


def ulysses_lacks(heads_q: int, ranks: int) -> str | None:
    """Returns why "ulysses" cannot run a call without a bias, or None."""
    return f"{heads_q} query heads are no multiple of {ranks} ranks" if heads_q % ranks else None


def bias_lacks(layout: Layout, shape: Sequence[int] | None, has_columns: bool = False) -> str | None:
    """Returns why ranks that exchange heads for rows cannot take a bias of this shape on a rank, or None.

    All ranks get one answer: a rank of one row does not show if a bias has rows. has_columns: True if packed
    documents may have a bias over keys.
    """
    if shape is None:
        return None
    if shape[-2] != 1 or (layout.ranks > 1 and min(layout.rows) <= 1):
        return "a bias with rows of its own is sharded by rows, not by heads"
    if layout.is_packed and shape[-1] != 1 and not has_columns:
        return "a call over packed documents has no bias over the keys of all of them"
    return None


def kv_copies(heads_q: int, heads_kv: int, ranks: int) -> int:
    """Returns how many times "ulysses" repeats each kv head, so that the ranks divide the heads."""
    if heads_kv % ranks == 0:
        return 1
    return ranks // heads_kv if ranks % heads_kv == 0 else heads_q // heads_kv


def choose(
    layout: Layout,
    window: Window,
    heads_q: int,
    heads_kv: int,
    mods: Collection[str] = (),
    bias_shape: Sequence[int] | None = None,
    not_by_ring: frozenset[str] = FUNCTIONS,
) -> Scheme:
    """Returns the scheme for a call: one that can run it, and sends least or takes least time where several can.

    mods: names of the call's mods, and "dropout_p". bias_shape: that of this rank. not_by_ring: names of mods for which
    a ring is not taken.
    """
    is_ulysses = not (ulysses_lacks(heads_q, layout.ranks) or bias_lacks(layout, bias_shape))
    # With indices, "ulysses" is one call; "gather" has one for each document, and a ring for each rectangle.
    has_indices = not INDEXED.isdisjoint(mods)
    if window.left is not None or not (is_ulysses or not_by_ring.isdisjoint(mods)):
        return "gather"
    # Heads that a rank sends of each of its rows in forward: of q, k, v and out, and of k and v to every other rank.
    by_ulysses = 2 * (heads_q + max(heads_kv, layout.ranks)) * (layout.ranks - 1) / layout.ranks
    by_ring = 2 * heads_kv * (layout.ranks - 1)
    scheme: Scheme = "ulysses" if is_ulysses and (has_indices or by_ulysses <= by_ring) else "ring"
    if layout.is_packed and not has_indices:
        times = _times(layout, window, heads_q, heads_kv, by_ulysses)
        return min((scheme, "gather"), key=times.__getitem__)
    return scheme


@lru_cache(64)
def _times(layout: Layout, window: Window, heads_q: int, heads_kv: int, by_ulysses: float) -> dict[Scheme, float]:
    """Returns the time of each scheme in forward, in scores of one head that a GPU computes meanwhile."""
    ranks, rows = range(layout.ranks), max(layout.rows)
    work = [heads_q * visible_pairs(layout, rank, window) for rank in ranks]
    local = [heads_q * local_pairs(layout, rank, window) for rank in ranks]
    row = 2 * heads_kv * SCORES_PER_ROW  # k and v of a row
    sent = row * rows
    return {
        "gather": max(work[rank] + row * num_fetched(layout, rank, window) for rank in ranks),
        "ulysses": sum(work) / layout.ranks + rows * by_ulysses * SCORES_PER_ROW,
        # Keys travel beside each step's kernel but the last.
        "ring": (layout.ranks - 1) * SCORES_PER_STEP
        + max(max(local[rank], sent) + max(work[rank] - local[rank], (layout.ranks - 2) * sent) for rank in ranks),
    }
