"""Scheme "gather": each rank fetches the keys that its rows see, and no others; then it computes its rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import backward
from ..frameworks.torch import attention
from .exchange import exchange
from .layout import Layout
from .rectangles import Piece, Range, Window, needed_keys, pieces_of
from .scheme import LAYOUTS, Call, bounds_of
from .selection import Selection
from .shapes import part_of_bias

_backward: Any = backward  # overloads do not take keywords of a dict


class Fetch(NamedTuple):
    """Rows that a rank sends and receives, and the place of the keys of each piece of its rows among them.

    send, receive: numbers of rows for and from each rank. sent: its local rows, in the order of ranks. order: received
    rows in the order of the sequence. starts: the first fetched row of each piece's keys. is_packable: the pieces can
    be packed sequences of one call. bounds: their keywords. copied: fetched rows of their keys, None for all in order.
    """

    send: list[int]
    receive: list[int]
    sent: Selection
    order: Selection
    pieces: list[Piece]
    starts: list[int]
    is_packable: bool
    bounds: dict[str, Any]
    copied: Selection | None


def gather(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of a rank's rows."""
    fetch = _fetch(call.layout, call.rank, call.window, q.device)
    k, v = (_fetched(call, fetch, x) for x in (k, v))
    if _is_one_call(call, fetch, q.shape[0]):
        return _packed(call, fetch, q, k, v)
    results = []
    for rows, keys, _, keywords in _parts(call, fetch, q.device):
        results.append(attention(q[:, rows], k[:, keys], v[:, keys], return_lse=True, **call.options, **keywords))
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def gather_gradients(call: Call, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
    """Returns dq, dk, dv, dbias and dsinks; the latter is this rank's part of a sum. Keys are fetched again."""
    fetch = _fetch(call.layout, call.rank, call.window, q.device)
    k, v = (_fetched(call, fetch, x) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    if _is_one_call(call, fetch, q.shape[0]):
        packed = [dout[0], q[0], *(_copied(fetch, x)[0] for x in (k, v)), out[0], lse[0]]
        *results, sums = _backward(*packed, dlse=None if dlse is None else dlse[0], window_size=tuple(call.window),
                                   captured_grads=[*call.leaves.values()], **fetch.bounds, **call.backward_options,
                                   **call.mods)  # fmt: skip
        dq, dk, dv = (x[None] for x in results)
        if fetch.copied is not None:
            dk, dv = (fetch.copied.sum(x.transpose(0, 1).to(wide)).transpose(0, 1) for x in (dk, dv))
        grads = dict(zip(call.leaves, sums, strict=True))
    else:
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        grads = {name: torch.zeros_like(x, dtype=wide) for name, x in call.leaves.items()}
        for rows, keys, columns, keywords in _parts(call, fetch, q.device):
            captured = [keywords[name] for name in grads]
            *results, sums = _backward(dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[..., rows],
                                       dlse=None if dlse is None else dlse[..., rows], captured_grads=captured,
                                       **call.backward_options, **keywords)  # fmt: skip
            dq[:, rows] = results[0]
            dk[:, keys] += results[1]
            dv[:, keys] += results[2]
            for (name, total), part in zip(grads.items(), sums, strict=True):
                (total if name == "sinks" else part_of_bias(total, rows, columns)).add_(part)
    dk, dv = (_returned(call, fetch, x).to(q.dtype) for x in (dk, dv))
    grads = {name: total.to(call.leaves[name].dtype) for name, total in grads.items()}
    return dq, dk, dv, grads.get("bias"), grads.get("sinks")


def _parts(call: Call, fetch: Fetch, device: torch.device) -> Iterator[tuple[slice, slice, slice, dict[str, Any]]]:
    """Yields the rows, the fetched keys and the keys of the sequence of each piece; and keywords of mask and mods."""
    for piece, start in zip(fetch.pieces, fetch.starts, strict=True):
        rows, columns = slice(*piece.local), slice(*piece.keys)
        keys = slice(start, start + columns.stop - columns.start)
        mods = call.mods_of(rows, columns, piece.seqlen, device)
        mask = {"window_size": tuple(call.window), "diagonal_offset": piece.q_index - piece.k_index}
        yield rows, keys, columns, mask | mods | {"index_offsets": piece.index_offsets}


def _is_one_call(call: Call, fetch: Fetch, batch: int) -> bool:
    """True if all pieces are computed in one call."""
    return batch == 1 and fetch.is_packable and not call.has_indices


def _packed(
    call: Call, fetch: Fetch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes all pieces in one call."""
    k, v = _copied(fetch, k), _copied(fetch, v)
    window = (call.window.left, call.window.right)
    out, lse = attention(q[0], k[0], v[0], window_size=window, return_lse=True, **fetch.bounds, **call.options,
                         **call.mods)  # fmt: skip
    return out[None], lse[None]


def _fetched(call: Call, fetch: Fetch, x: torch.Tensor) -> torch.Tensor:
    """Returns the needed rows of the whole sequence, in its order."""
    rows = exchange(fetch.sent.take(x.transpose(0, 1)), fetch.send, fetch.receive, call.link)
    return fetch.order.take(rows).transpose(0, 1)


def _copied(fetch: Fetch, x: torch.Tensor) -> torch.Tensor:
    """Returns the keys of all pieces of one call."""
    return x if fetch.copied is None else fetch.copied.take(x.transpose(0, 1)).transpose(0, 1)


def _returned(call: Call, fetch: Fetch, grad: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of this rank's rows, from those of the rows that all ranks fetched."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    rows = fetch.order.sum(grad.transpose(0, 1)).to(wide)
    return fetch.sent.sum(exchange(rows, fetch.receive, fetch.send, call.link)).transpose(0, 1)


@lru_cache(LAYOUTS)
def _fetch(layout: Layout, rank: int, window: Window, device: torch.device) -> Fetch:
    needed = [needed_keys(layout, each, window) for each in range(layout.ranks)]

    def held(receiver: int, sender: int) -> list[tuple[Range, int]]:
        """Returns the ranges of needed rows that a rank sends to another, and the first local row of each."""
        ranges = []
        for span in layout.spans[sender]:
            for begin, end in needed[receiver]:
                a, b = max(begin, span.begin), min(end, span.end)
                if a < b:
                    ranges.append(((a, b), a - span.begin + span.local))
        return ranges

    give = [held(each, rank) for each in range(layout.ranks)]
    take = [held(rank, each) for each in range(layout.ranks)]

    def count(ranges: list[tuple[Range, int]]) -> int:
        return sum(b - a for (a, b), _ in ranges)

    empty: Any = np.empty(0, np.int64)
    sent = np.concatenate([empty, *(np.arange(first, first + b - a) for each in give for (a, b), first in each)])
    received = np.concatenate([empty, *(np.arange(a, b) for each in take for (a, b), _ in each)])
    order = np.argsort(received)
    pieces = pieces_of(layout, rank, window) or [Piece((0, 0), (0, 0), 0, 0, True)]  # a rank without rows
    starts = np.searchsorted(received[order], [piece.keys[0] for piece in pieces]).tolist()
    # Diagonals of packed sequences end at their last keys.
    is_packable = len(pieces) > 1 and (window.is_open or all(piece.ends_with_keys for piece in pieces))
    bounds, copied = _packing(pieces, starts, len(order), device) if is_packable else ({}, None)
    selections = Selection.from_index(sent, layout.rows[rank], device), Selection.from_index(order, len(order), device)
    return Fetch([*map(count, give)], [*map(count, take)], *selections, pieces, starts, is_packable, bounds, copied)


def _packing(
    pieces: list[Piece], starts: list[int], rows: int, device: torch.device
) -> tuple[dict[str, Any], Selection | None]:
    """Returns the bounds of pieces as packed sequences; and the fetched row of each of their keys, None for all.

    rows: number of fetched rows.
    """
    lengths_q = [end - begin for begin, end in (piece.local for piece in pieces)]
    lengths_k = [end - begin for begin, end in (piece.keys for piece in pieces)]
    ends_q, ends_k = np.cumsum(lengths_q).tolist(), np.cumsum(lengths_k).tolist()
    bounds = bounds_of((0, *ends_q), device, "q") | bounds_of((0, *ends_k), device, "k")
    if starts[1:] == ends_k[:-1]:
        return bounds, None
    # Pieces of one document share keys, and packed sequences cannot: each gets a copy.
    runs = [np.arange(start, start + length) for start, length in zip(starts, lengths_k, strict=True)]
    return bounds, Selection.from_index(np.concatenate(runs), rows, device)
