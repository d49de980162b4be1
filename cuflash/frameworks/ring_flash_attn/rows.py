"""The rows of each rank, as layouts, from the arguments of a call; and their exchange where a stripe is no layout."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from ...distributed.calls import links_of
from ...distributed.exchange import Link, exchange
from ...distributed.layout import Kind, Layout
from ...distributed.scheme import on_device
from ...distributed.torch import groups_of
from ...errors import ProblemError
from ..torch.varlen import check_integers


def link_of(group: Any) -> Link:
    """Returns the link of a group, of a mesh of one axis, or of None."""
    links = links_of(groups_of(group), "ring_flash_attn")
    if len(links) > 1:
        raise ProblemError(f"group={group!r} has two axes; give a mesh of one, or call cuflash.distributed.attention")
    return links[0]


def of_sequence(kind: Kind, q: torch.Tensor, group: Any) -> Layout:
    """Returns the layout of ranks with equally many rows."""
    ranks = dist.get_world_size(group)
    return _layout_of_sequence(q.shape[1] * ranks, ranks, kind)


@lru_cache(64)
def _layout_of_sequence(rows: int, ranks: int, kind: Kind) -> Layout:
    return Layout(rows, ranks, kind)


def of_documents(pieces: int, cu_seqlens: torch.Tensor, q: torch.Tensor, group: Any) -> Layout:
    """Returns the layout of ranks that hold so many pieces, 1 or 2, of each document."""
    return _layout_of_documents(_local_bounds("cu_seqlens", cu_seqlens, len(q)), pieces, dist.get_world_size(group))


@lru_cache(64)
def _layout_of_documents(bounds: tuple[int, ...], pieces: int, ranks: int) -> Layout:
    runs: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for document, (begin, end) in enumerate(pairwise(bounds)):
        size, rest = divmod(end - begin, pieces)
        if rest:
            raise ProblemError(
                f"cu_seqlens gives document {document} {end - begin} rows of this rank, but zig-zag order needs an "
                "even number; pad each document to a multiple of twice the ranks"
            )
        cuts = [ranks * begin + size * i for i in range(pieces * ranks + 1)]
        for rank, each in enumerate(runs):
            numbers = (rank, 2 * ranks - 1 - rank)[:pieces]
            each += [(cuts[i], cuts[i + 1]) for i in numbers]
    return Layout([ranks * x for x in bounds], ranks, runs=runs)


def of_packed_rows(cu_seqlens_q: torch.Tensor, local_k_slice: slice, q: torch.Tensor, group: Any) -> Layout:
    """Returns the layout of ranks that hold equally many of all packed rows.

    Where cu_seqlens_q is not of `llama3_flash_attn_prepare_cu_seqlens`, ranks gather the borders that each has.
    """
    rows, ranks, rank = len(q), dist.get_world_size(group), dist.get_rank(group)
    bounds = _local_bounds("cu_seqlens_q", cu_seqlens_q, rows)
    if (layout := _recall(_layouts_of_tensors, cu_seqlens_q)) is None or layout.ranks != ranks:
        mine = {local_k_slice.start, *(rows * rank + x for x in bounds[1:-1])}
        borders: list[Any] = [None] * ranks
        dist.all_gather_object(borders, mine, group=group)
        layout = Layout(sorted({0, rows * ranks}.union(*borders)), ranks, "contiguous")
        remember_layout(cu_seqlens_q, layout)
    result: Layout = layout
    return result


def _local_bounds(name: str, cu_seqlens: torch.Tensor, rows: int) -> tuple[int, ...]:
    """Returns bounds that end at the last of a rank's rows."""
    bounds = values_of(name, cu_seqlens)
    if bounds[-1] != rows:
        raise ProblemError(
            f"{name} ends at {bounds[-1]}, but q has {rows} rows; give the bounds of the documents among this rank's "
            "rows"
        )
    return bounds


# Host integers by tensor, with the version of its contents: all layers of a model share them.
_bounds_of_tensors, _layouts_of_tensors = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()


def _recall(values: WeakTensorKeyDictionary, tensor: torch.Tensor) -> Any:
    """Returns the value of an unchanged tensor, or None."""
    version, value = values.get(tensor, (None, None))
    return value if version is not None and version == tensor._version else None


def _remember(values: WeakTensorKeyDictionary, tensor: torch.Tensor, value: Any) -> None:
    if not tensor.is_inference():  # inference tensors count no versions
        values[tensor] = tensor._version, value


def remember_layout(cu_seqlens_q: torch.Tensor, layout: Layout) -> None:
    """Keeps the layout whose bounds for one rank these are."""
    _remember(_layouts_of_tensors, cu_seqlens_q, layout)


def values_of(name: str, cu_seqlens: Any) -> tuple[int, ...]:
    """Returns the bounds in a tensor."""
    check_integers(name, cu_seqlens, required=True)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ProblemError(f"{name} has shape {tuple(cu_seqlens.shape)}; give (documents + 1,)")
    if not cu_seqlens.is_cuda:
        return tuple(cu_seqlens.tolist())
    if (bounds := _recall(_bounds_of_tensors, cu_seqlens)) is None:
        bounds = tuple(cu_seqlens.tolist())
        _remember(_bounds_of_tensors, cu_seqlens, bounds)
    result: tuple[int, ...] = bounds
    return result


class Stripes(NamedTuple):
    """The exchange of rows between stripes and a layout.

    send, receive: numbers of rows for and from each rank, on the way to the layout. sent: the rows of a stripe, in the
    order in which they are sent. received: the places in the layout of the rows that arrive. The others are inverse.
    """

    send: list[int]
    receive: list[int]
    sent: torch.Tensor
    received: torch.Tensor
    sent_inverse: torch.Tensor
    received_inverse: torch.Tensor

    def to_layout(self, x: torch.Tensor, dim: int, link: Link) -> torch.Tensor:
        """Returns the layout's rows of this rank, from those of all stripes."""
        rows = exchange(x.movedim(dim, 0)[self.sent], self.send, self.receive, link)
        return rows[self.received_inverse].movedim(0, dim)

    def from_layout(self, x: torch.Tensor, dim: int, link: Link) -> torch.Tensor:
        """Returns the rows of this rank's stripe, from those of all ranks of the layout."""
        rows = exchange(x.movedim(dim, 0)[self.received], self.receive, self.send, link)
        return rows[self.sent_inverse].movedim(0, dim)


@lru_cache(64)
def stripes_of(layout: Layout, rank: int, device: torch.device) -> Stripes:
    """Returns the exchange between stripes and a layout with equally many rows, for a rank."""
    ranks = layout.ranks
    sent = [rows[rows % ranks == rank] // ranks for rows in map(layout.indices, range(ranks))]
    stripe_of_row: Any = layout.indices(rank) % ranks
    received = np.argsort(stripe_of_row, kind="stable")
    orders = np.concatenate(sent), received
    return Stripes(
        [*map(len, sent)],
        np.bincount(stripe_of_row, minlength=ranks).tolist(),
        *(on_device(x, device) for x in (*orders, *map(np.argsort, orders))),
    )
