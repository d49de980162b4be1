"""Scheme "ulysses": each rank computes whole heads over the whole sequence (DeepSpeed Ulysses, arXiv 2309.14509).

On a mesh of two axes the ranks of the inner one exchange heads for rows, and the ring runs over the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import backward
from ..errors import UnsupportedError
from ..frameworks.torch import attention
from . import ring as by_ring
from .choice import bias_lacks, kv_copies, ulysses_lacks
from .exchange import Link, exchange
from .layout import Layout
from .permutation import Permutation
from .scheme import LAYOUTS, Call, bounds_of
from .shapes import heads_of_bias

_backward: Any = backward  # overloads do not take keywords of a dict
Pair = tuple[torch.Tensor, torch.Tensor]


class Heads(NamedTuple):
    """Exchange of heads for rows among the ranks of a link, which hold these numbers of rows.

    ascending: rows in ascending order, of those in the order of ranks.
    """

    link: Link
    rows: tuple[int, ...]
    ascending: Permutation

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Turns (batch, rows of this rank, heads, dim) into (batch, all rows, heads of this rank, dim)."""
        ranks, (batch, rows, heads, dim) = self.link.ranks, x.shape
        by_rank = _by_rank(batch, rows, ranks, x.device).take(x.reshape(batch * rows * ranks, heads // ranks * dim))
        by_rank = by_rank.view(ranks * rows, batch, heads // ranks, dim)
        return self.ascending.take(exchange(by_rank, [rows] * ranks, self.rows, self.link)).transpose(0, 1)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Turns (batch, all rows, heads of this rank, dim) into (batch, rows of this rank, heads, dim)."""
        ranks, rows, (batch, _, heads, dim) = self.link.ranks, self.rows[self.link.rank], x.shape
        by_rank = self.ascending.reversed.take(x.transpose(0, 1))
        sent_back = exchange(by_rank, self.rows, [rows] * ranks, self.link)
        by_head = _by_rank(batch, rows, ranks, x.device).reversed
        sent_back = sent_back.view(ranks * rows * batch, heads * dim)
        return by_head.take(sent_back).view(batch, rows, ranks * heads, dim)

    def attend(
        self, attend: Callable[..., Pair], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (out, lse) of this rank's rows; attend computes those of all rows and this rank's heads."""
        if (copies := kv_copies(q.shape[2], k.shape[2], self.link.ranks)) > 1:
            # Each kv head goes to all ranks whose query heads read it. Gradients add up.
            k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
        out, lse = attend(*map(self.enter, (q, k, v)))
        return self.leave(out), _as_lse(self.leave(_as_rows(lse)))

    def differentiate(self, differentiate: Callable[..., Any], dlse: torch.Tensor | None, *arrays: Any) -> Any:
        """Returns dq, dk, dv and further gradients; arrays: dout, q, k, v, out and lse of this rank's rows."""
        dout, q, k, v, out, lse = arrays
        copies = kv_copies(q.shape[2], k.shape[2], self.link.ranks)
        k, v = (x.repeat_interleave(copies, 2) if copies > 1 else x for x in (k, v))
        dout, q, k, v, out, lse = map(self.enter, (dout, q, k, v, out, _as_rows(lse)))
        dlse = None if dlse is None else _as_lse(self.enter(_as_rows(dlse))).contiguous()
        dq, dk, dv, *rest = differentiate(dout, dlse, q, k, v, out, _as_lse(lse).contiguous())
        dq, dk, dv = map(self.leave, (dq, dk, dv))
        if copies > 1:
            dk, dv = (x.unflatten(2, (-1, copies)).sum(3) for x in (dk, dv))
        return dq, dk, dv, *rest


def ulysses(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    """Returns (out, lse) of a rank's rows. It sends heads for rows, computes, and sends rows for heads."""
    heads, mine = _heads_of(call, q, 0)
    keywords = _keywords(call, q.device, mine)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if not call.layout.is_packed:
            return attention(q, k, v, return_lse=True, **call.options, **keywords)
        out, lse = attention(q[0], k[0], v[0], return_lse=True, **call.options, **keywords)
        return out[None], lse[None]

    return heads.attend(attend, q, k, v)


def ulysses_gradients(call: Call, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
    """Returns dq, dk, dv, dbias and dsinks; the latter two are this rank's part of a sum."""
    heads, mine = _heads_of(call, q, 0)
    keywords, leaves = _keywords(call, q.device, mine), call.leaves
    captured = [keywords[name] for name in leaves]

    def differentiate(dout: Any, dlse: Any, *arrays: Any) -> Any:
        operands = [x[0] for x in (dout, *arrays)] if call.layout.is_packed else [dout, *arrays]
        dlse = dlse[0] if call.layout.is_packed and dlse is not None else dlse
        *grads, sums = _backward(*operands, dlse=dlse, captured_grads=captured, **call.backward_options, **keywords)
        return *([x[None] for x in grads] if call.layout.is_packed else grads), sums

    dq, dk, dv, sums = heads.differentiate(differentiate, dlse, dout, q, k, v, out, lse)
    return dq, dk, dv, *_among_all(call, mine, **dict(zip(leaves, sums, strict=True)))


def ring_of_ulysses(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    """Returns (out, lse) of a rank's rows, on a mesh of two axes."""
    heads, mine = _heads_of(call, q, 1)
    return heads.attend(lambda *arrays: by_ring.ring(_outer(call, mine), *arrays), q, k, v)


def ring_of_ulysses_gradients(call: Call, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
    """Returns dq, dk, dv, dbias and dsinks; the latter two are this rank's part of a sum."""
    heads, mine = _heads_of(call, q, 1)
    outer = _outer(call, mine)
    differentiate: Any = lambda *arrays: by_ring.ring_gradients(outer, *arrays)  # noqa: E731
    dq, dk, dv, bias, sinks = heads.differentiate(differentiate, dlse, dout, q, k, v, out, lse)
    return dq, dk, dv, *_among_all(call, mine, bias, sinks)


def _outer(call: Call, mine: slice) -> Call:
    """Returns the call of the ring over the outer axis, for this rank's heads."""
    mods = {name: _of_heads(name, x, mine) for name, x in call.mods.items()}
    layout = _joined(call.layout, call.links[1].ranks)
    return Call(layout, call.links[:1], call.window, call.options, mods, call.leaf_names, mine.start)


def _heads_of(call: Call, q: torch.Tensor, axis: int) -> tuple[Heads, slice]:
    """Returns the exchange among the ranks of an axis of the mesh, and the query heads of this rank."""
    link, heads_q = call.links[axis], q.shape[2]
    of_bias = bias_lacks(call.layout, call.bias_shape, has_columns=axis > 0)
    if reason := ulysses_lacks(heads_q, link.ranks) or of_bias:
        hint = "give a mesh of one axis" if of_bias else "give another mesh"
        hint = hint if axis else "give scheme='gather', 'ring' or 'auto'"
        raise UnsupportedError(f"{link.purpose}: {reason}; {hint}")
    first = call.rank - link.rank if axis else 0
    rows = call.layout.rows[first : first + link.ranks]
    count = heads_q // link.ranks
    heads = Heads(link, rows, _ascending(call.layout, first, link.ranks, q.device))
    return heads, slice(link.rank * count, (link.rank + 1) * count)


def _keywords(call: Call, device: torch.device, mine: slice) -> dict[str, Any]:
    """Returns the keywords of mask and mods of the call for this rank's heads over all rows."""
    mods = {name: _of_heads(name, x, mine) for name, x in call.mods.items()}
    documents = _documents(call.layout, device) if call.layout.is_packed else {}
    return {"window_size": tuple(call.window), "index_offsets": (0, 0, mine.start), **documents, **mods}


def _of_heads(name: str, x: Any, mine: slice) -> Any:
    """Returns what a mod has for these heads."""
    if name == "sinks":
        return x[mine]
    return heads_of_bias(x, mine) if name == "bias" else x


def _among_all(
    call: Call, mine: slice, bias: torch.Tensor | None = None, sinks: torch.Tensor | None = None
) -> Iterator[torch.Tensor | None]:
    """Yields dbias and dsinks of all heads, from those of these heads; None for None."""
    for name, part in (("bias", bias), ("sinks", sinks)):
        total = None if part is None else torch.zeros_like(call.mods[name])
        if total is not None:
            _of_heads(name, total, mine).copy_(part)
        yield total


def _as_rows(lse: torch.Tensor) -> torch.Tensor:
    return lse.transpose(1, 2)[..., None]


def _as_lse(rows: torch.Tensor) -> torch.Tensor:
    return rows[..., 0].transpose(1, 2)


@lru_cache(LAYOUTS)
def _joined(layout: Layout, count: int) -> Layout:
    return layout.joined(count)


@lru_cache(LAYOUTS)
def _documents(layout: Layout, device: torch.device) -> dict[str, Any]:
    """Returns the keywords of the layout's documents as packed sequences."""
    return bounds_of(layout.cu_seqlens, device, "q") | bounds_of(layout.cu_seqlens, device, "k")


@lru_cache(LAYOUTS)
def _ascending(layout: Layout, first: int, ranks: int, device: torch.device) -> Permutation:
    """Returns `Heads.ascending` of some ranks."""
    rows = np.concatenate([layout.indices(rank) for rank in range(first, first + ranks)])
    return Permutation.from_index(np.argsort(rows), device)


@lru_cache(LAYOUTS)
def _by_rank(batch: int, rows: int, ranks: int, device: torch.device) -> Permutation:
    """Returns the order (rank, row, batch) of the heads for each rank, which lie by (batch, row, rank)."""
    order = np.arange(batch * rows * ranks).reshape(batch, rows, ranks).transpose(2, 1, 0)
    return Permutation.from_index(order.ravel(), device)
