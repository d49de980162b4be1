"""The schemes, what they cannot run, and the choice of one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from .layout import Layout
from .rectangles import Window

Scheme = Literal["auto", "ring", "ulysses", "gather"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


def ring_lacks(mods: Collection[str]) -> str | None:
    """Returns why "ring" cannot run a call with these mods, or None."""
    names = [name for name in ("score_mod", "mask_mod", "bias") if name in mods]
    return f"it has no {', '.join(names)}" if names else None


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
    """Returns the scheme for a call: one that can run it, and sends least where several can."""
    is_ring = ring_lacks(mods) is None
    is_ulysses = ulysses_lacks(heads_q, layout.ranks, has_bias_rows) is None
    if window.left is not None or not (is_ring or is_ulysses):
        return "gather"
    # Heads that a rank sends of each of its rows in forward: of q, k, v and out, and of k and v to every other rank.
    by_ulysses = 2 * (heads_q + max(heads_kv, layout.ranks)) * (layout.ranks - 1) / layout.ranks
    by_ring = 2 * heads_kv * (layout.ranks - 1)
    return "ulysses" if is_ulysses and (not is_ring or by_ulysses <= by_ring) else "ring"
