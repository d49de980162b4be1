"""The schemes, what they cannot run, and the choice of one."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Literal, get_args

from .layout import Layout
from .rectangles import Window, local_pairs, num_fetched, visible_pairs

Scheme = Literal["auto", "ring", "ulysses", "gather"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
INDEXED = frozenset(("score_mod", "mask_mod", "bias", "dropout_p"))  # arguments that depend on indices
# Scores of one head that a GPU computes while its link carries a row of one head in 16 bits, of equal head dims: 4 dim
# operations of 722 TFLOP/s beside 2 dim bytes of 300 GB/s (H200).
SCORES_PER_ROW = 1200


def ulysses_lacks(heads_q: int, ranks: int, has_bias_rows: bool = False) -> str | None:
    """Returns why "ulysses" cannot run a call, or None. has_bias_rows: its bias differs from row to row."""
    if heads_q % ranks:
        return f"{heads_q} query heads are no multiple of {ranks} ranks"
    return "a bias with rows of its own is sharded by rows, not by heads" if has_bias_rows else None


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
    has_bias_rows: bool = False,
) -> Scheme:
    """Returns the scheme for a call: one that can run it, and sends least or takes least time where several can.

    has_bias_rows: as in `ulysses_lacks`.
    """
    is_ulysses, has_indices = not ulysses_lacks(heads_q, layout.ranks, has_bias_rows), not INDEXED.isdisjoint(mods)
    # A ring computes each rectangle of a call with indices by itself.
    if window.left is not None or (has_indices and not is_ulysses):
        return "gather"
    # Heads that a rank sends of each of its rows in forward: of q, k, v and out, and of k and v to every other rank.
    by_ulysses = 2 * (heads_q + max(heads_kv, layout.ranks)) * (layout.ranks - 1) / layout.ranks
    by_ring = 2 * heads_kv * (layout.ranks - 1)
    scheme: Scheme = "ulysses" if is_ulysses and (has_indices or by_ulysses <= by_ring) else "ring"
    if layout.is_packed:
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
        "ring": max(
            max(local[rank], sent) + max(work[rank] - local[rank], (layout.ranks - 2) * sent) for rank in ranks
        ),
    }
