"""The plan of a distributed call: work and bytes of every rank, by integers alone."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ProblemError
from ..problem.options import WindowSize, check_flag, check_integer, check_window
from ..units import kind_of, memory, work
from .choice import SCHEMES, Scheme, choose, kv_copies, ulysses_lacks
from .layout import Layout
from .rectangles import Window, num_fetched, pieces_of, rectangles, visible_pairs


class RankPlan(NamedTuple):
    """One rank's part of forward.

    rows: rows that it holds. calls: calls of attention. flops: operations of its visible pairs, 2 for each product.
    bytes_received: of keys, values, queries and results, from other ranks.
    """

    rows: int
    calls: int
    flops: int
    bytes_received: int


class Plan(NamedTuple):
    """The plan of a call. print(plan) shows all ranks. inner: ranks of the inner axis of a mesh, 1 without."""

    scheme: Scheme
    layout: Layout
    ranks: tuple[RankPlan, ...]
    inner: int = 1

    @property
    def imbalance(self) -> float:
        """The largest work of a rank over the mean, 1.0 for equal work."""
        flops = [each.flops for each in self.ranks]
        return max(flops) * len(flops) / sum(flops) if sum(flops) else 1.0

    def __str__(self) -> str:
        axes = f" of {self.layout.ranks // self.inner} x {self.inner} ranks" if self.inner > 1 else ""
        lines = [
            f"scheme {self.scheme!r}{axes} over {self.layout}: forward, "
            f"largest work {self.imbalance:.2f} times the mean"
        ]
        lines += [
            f"rank {rank}: {each.rows} rows, {each.calls} calls, {work(each.flops)}, "
            f"{memory(each.bytes_received)} received"
            for rank, each in enumerate(self.ranks)
        ]
        return "\n".join(lines)


def plan(
    layout: Layout,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    scheme: Scheme = "auto",
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    itemsize: int = 2,
    inner: int = 1,
) -> Plan:
    """Returns the work and the bytes of every rank in forward. Nothing runs, and no group is needed.

    Parameters
    ----------
    layout : Layout
        The rows of each rank.
    heads_q, heads_kv : int
        Numbers of heads.
    head_dim : int
        Columns of a head of q and k.
    head_dim_v : int, default head_dim
        Columns of a head of v.
    scheme : {"auto", "ring", "ulysses", "gather"}, default "auto"
        As in `cuflash.distributed.attention`.
    causal : bool, default False
        Hides later keys.
    window_size : (left, right), default (-1, -1)
        Numbers of visible keys on both sides; -1 or None for an open side.
    itemsize : int, default 2
        Bytes of an element.
    inner : int, default 1
        Ranks of the inner axis of a mesh of two, which exchange heads; the ring runs over the outer axis.

    Returns
    -------
    Plan
        Scheme and plans of the ranks, for a batch of 1.

    Raises
    ------
    ProblemError
        For an unknown scheme, heads that the ranks do not divide with "ulysses", or an inner axis that does not divide
        the ranks or the heads.

    Examples
    --------
    >>> from cuflash.distributed import Layout, plan
    >>> print(plan(Layout(4096, ranks=2), 8, 2, 128, causal=True, scheme="ring"))
    scheme 'ring' over Layout(zigzag, 4096 rows, 2 ranks of 2048 rows): forward, largest work 1.00 times the mean
    rank 0: 2048 rows, 2 calls, 17 GFLOP, 2 MiB received
    rank 1: 2048 rows, 2 calls, 17 GFLOP, 2 MiB received
    """
    if not isinstance(layout, Layout):
        raise ProblemError(f"layout is {kind_of(layout)}; give a Layout, such as Layout(seqlen, ranks)")
    if scheme not in SCHEMES:
        raise ProblemError(f"scheme={scheme!r} is unknown; give one of {', '.join(map(repr, SCHEMES))}")
    numbers = {"heads_q": heads_q, "heads_kv": heads_kv, "head_dim": head_dim, "itemsize": itemsize,
               "inner": inner}  # fmt: skip
    heads_q, heads_kv, head_dim, itemsize, inner = (check_integer(name, value) for name, value in numbers.items())
    if heads_kv < 1 or heads_q % heads_kv:
        raise ProblemError(f"{heads_q} query heads are no multiple of {heads_kv} kv heads; give a multiple")
    head_dim_v = head_dim if head_dim_v is None else check_integer("head_dim_v", head_dim_v)
    left, right = check_window(window_size)
    window, ranks = Window(left, 0 if check_flag("causal", causal) else right), layout.ranks
    if inner > 1:
        return _on_two_axes(layout, window, scheme, inner, (heads_q, heads_kv), (head_dim, head_dim_v), itemsize)
    if scheme == "auto":
        scheme = choose(layout, window, heads_q, heads_kv)
    if scheme == "ulysses" and (reason := ulysses_lacks(heads_q, ranks)):
        raise ProblemError(f"scheme='ulysses': {reason}; give scheme='gather', 'ring' or 'auto'")
    pairs = [visible_pairs(layout, rank, window) for rank in range(ranks)]
    plans = []
    for rank, rows in enumerate(layout.rows):
        flops, calls = 2 * pairs[rank] * heads_q * (head_dim + head_dim_v), 1
        if scheme == "ulysses":
            flops = 2 * sum(pairs) * (heads_q // ranks) * (head_dim + head_dim_v)
            elements = _exchanged(layout.seqlen, rows, ranks, (heads_q, heads_kv), (head_dim, head_dim_v))
        elif scheme == "ring":
            elements, calls = _of_ring(layout, rank, window, heads_kv * (head_dim + head_dim_v))
        else:
            elements = num_fetched(layout, rank, window) * heads_kv * (head_dim + head_dim_v)
            calls = len(pieces_of(layout, rank, window))
        plans.append(RankPlan(rows, calls, flops, elements * itemsize))
    return Plan(scheme, layout, tuple(plans))


def _on_two_axes(
    layout: Layout,
    window: Window,
    scheme: Scheme,
    inner: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    itemsize: int,
) -> Plan:
    """Returns the plan of the ring over the outer axis, whose ranks hold the rows of all of an inner axis."""
    if layout.ranks % inner:
        raise ProblemError(
            f"inner={inner} is no divisor of {layout.ranks} ranks; give the size of the mesh's last axis"
        )
    if scheme not in ("auto", "ring") or ulysses_lacks(heads[0], inner):
        raise ProblemError(
            f"a mesh of two axes runs scheme='ring' with query heads that its inner axis divides, not {scheme!r} with "
            f"{heads[0]} heads over {inner} ranks; give inner=1"
        )
    outer, plans = layout.joined(inner), []
    heads_kv = heads[1] * kv_copies(*heads, inner) // inner
    for number, rows in enumerate(outer.rows):
        flops = 2 * visible_pairs(outer, number, window) * (heads[0] // inner) * sum(dims)
        of_ring, calls = _of_ring(outer, number, window, heads_kv * sum(dims))
        for each in layout.rows[number * inner : (number + 1) * inner]:
            elements = of_ring + _exchanged(rows, each, inner, heads, dims)
            plans.append(RankPlan(each, calls, flops, elements * itemsize))
    return Plan("ring", layout, tuple(plans), inner)


def _exchanged(all_rows: int, rows: int, ranks: int, heads: tuple[int, int], dims: tuple[int, int]) -> int:
    """Returns the elements that a rank receives in an exchange of heads for rows and back."""
    heads_q, heads_kv = heads[0] // ranks, heads[1] * kv_copies(*heads, ranks) // ranks
    of_a_row = heads_q * dims[0] + heads_kv * sum(dims)
    return (all_rows - rows) * of_a_row + rows * (heads[0] - heads_q) * dims[1]


def _of_ring(layout: Layout, rank: int, window: Window, of_a_row: int) -> tuple[int, int]:
    """Returns the elements of keys that a rank receives in a ring, and its calls."""
    others = [len(rectangles(layout, rank, other, window)) for other in range(layout.ranks) if other != rank]
    return len(others) * max(layout.rows) * of_a_row, 1 + sum(others)
